"""`millrace.train`: one run, as the command `millrace train` runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from millrace.api.inputs import Recipe, RowsOrSources, Setup, is_coroutine, setup
from millrace.api.loops import end_if_stopped, only_run, run_to_end
from millrace.api.result import Run
from millrace.data.user_code import kept
from millrace.errors import bad_value
from millrace.observe.progress import Lines, Progress, State, make_view
from millrace.run.callbacks import Callback
from millrace.run.signals import StopRequest
from millrace.run.train import train as work


def train(
    recipe: Recipe = "quickstart",
    *,
    reward: Callable[..., Any] | str | dict[str, Any] | None = None,
    agent: Callable[..., Any] | str | None = None,
    train: RowsOrSources | None = None,
    val: RowsOrSources | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **keys: Any,
) -> Run:
    """Train with RL, and return the run.

    `recipe` is the name of a recipe, a YAML file, or a dict of keys. `keys` override it: sections
    such as `rollout={"n": 8}`, or `**{"rollout.n": 8}`. A function may be the value of each key that
    takes `path.py:name`.

    `reward` is a function in verl's or TRL's signature, and `agent` an agent program. `train` and
    `val` are rows: dicts, a datasets.Dataset, or sources as data.train_files takes them. Each of
    `callbacks` gets every LiveVersion. Without `progress`, only warnings are printed.

    Raises what the command reports, such as ConfigError, and KeyboardInterrupt after Ctrl-C, once
    the run has saved a checkpoint.
    """
    with only_run():
        _check_callbacks(callbacks)
        prepared = setup(recipe, keys, reward=reward, agent=agent, train=train, val=val)
        config, stop = prepared.config, StopRequest()
        if config.trainer.val_only:
            rule = "a validation trains nothing"
            raise bad_value("trainer.val_only", True, rule, "millrace eval, or millrace.Rollouts")
        with kept(prepared.functions), shown(prepared, config.mode_name, progress) as seen:
            outcome = run_to_end(lambda: work(config, seen, stop, callbacks), seen, stop.request)
    folder = str(outcome.run_dir)
    resume = f"resume with trainer={{'resume': 'auto', 'run_dir': {folder!r}}}"
    end_if_stopped(outcome.complete, f"millrace.Run({folder!r}) has saved; {resume}")
    return Run(outcome.run_dir, outcome)


def _check_callbacks(callbacks: Any) -> None:
    fix = "callbacks=[f], with def f(version)"
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise bad_value("callbacks", callbacks, "is no list of functions", fix)
    for function in callbacks:
        name = getattr(function, "__name__", repr(function))
        if is_coroutine(function):
            raise bad_value("callbacks", name, "is async, and nothing awaits a callback", fix)
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            raise bad_value("callbacks", name, "does not take one version", fix) from None
        except ValueError:  # written in C, and without a signature
            continue


def shown(prepared: Setup, what: str, progress: bool) -> Progress:
    """Return the progress of a run, with the notes on its functions."""
    console = Console()
    if console.is_jupyter:  # as plain lines: rich would make an output of each
        console = Console(force_jupyter=False, force_terminal=False)
    view = make_view(console) if progress else _Warnings(Console(stderr=True))
    seen = Progress(view, prepared.config.name, what)
    for note in prepared.notes:
        seen.note(note)
    return seen


class _Warnings(Lines):
    """A view of warnings and alarms alone."""

    def note(self, text: str) -> None:
        if text.startswith(("warning", "alarm")):
            super().note(text)

    def update(self, state: State, event: str) -> None:
        return None
