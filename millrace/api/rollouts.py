"""`millrace.Rollouts`: draws and scores responses without training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from millrace.api.inputs import Recipe, rows_of, setup
from millrace.api.loops import in_thread, only_run, unwrapped, wait_for
from millrace.api.result import Run
from millrace.api.training import shown
from millrace.config.packaged import named
from millrace.data.prompts import PromptStream
from millrace.data.row_store import RowCache
from millrace.data.rows import RowCheck
from millrace.data.sources import Part, Rows
from millrace.data.user_code import kept
from millrace.errors import MillraceError, bad_value
from millrace.pipeline.validation import Played
from millrace.rewards.sources import refusal
from millrace.run.callbacks import DrawnResponse, drawn
from millrace.run.evaluate import revived, validator_of
from millrace.run.session import Session, open_session
from millrace.run.start import start_state
from millrace.types import PolicyVersion

Prompts = Sequence[str | Mapping[str, Any] | Sequence[Mapping[str, Any]]]

_BELOW = {"data.val_files": [], "report.enable": False}
_ANY_MODEL = {"data.train_files": ["task:sort_digits?size=1"], "name": "rollouts"}
"""The keys of a folder of a model. A configuration needs some rows, and nobody draws for these."""


class Rollouts:
    """The engines of a policy, which draw and score. A context manager: engines end with its body.

    with millrace.Rollouts("quickstart", n=4) as policy:
        for responses in policy.draw(["3512", "9041"]):
            print(responses[0].text, responses[0].score)
    """

    def __init__(
        self,
        model: Recipe | Run = "quickstart",
        *,
        reward: Callable[..., Any] | str | dict[str, Any] | None = None,
        agent: Callable[..., Any] | str | None = None,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        progress: bool = False,
        **keys: Any,
    ) -> None:
        """`model` is a recipe, a folder or a hub id of a model, a Run, or a checkpoint's folder.

        Raises ConfigError for wrong keys, as the command does.
        """
        _check_count(n)
        base, below = _base(model)
        given = {"rollout.val_kwargs.temperature": temperature, **keys}
        if max_tokens is not None:
            given["rollout.max_response_length"] = max_tokens
        self._setup = setup(base, given, reward=reward, agent=agent, below=below)
        self._n, self._own_reward, self._progress = n, reward is not None, progress
        self._bare = "name" in below
        self._drawn = 0
        self._stack = ExitStack()
        self._session: Session | None = None
        self._version: PolicyVersion = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._ended: Future[None] | None = None

    def __enter__(self) -> Rollouts:
        """Start the engines. Raises what a run raises at its start."""
        with self._stack:
            self._stack.enter_context(only_run())
            self._stack.enter_context(kept(self._setup.functions))
            seen = self._stack.enter_context(shown(self._setup, "rollouts", self._progress))
            ready: Future[None] = Future()
            self._ended = in_thread(lambda: asyncio.run(self._serve(ready, seen)), "rollouts")
            try:
                unwrapped(lambda: wait_for(ready, self._interrupt))
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            self._call(lambda: self._end.set() if self._end is not None else None)
            if (ended := self._ended) is not None and error is None:
                unwrapped(lambda: wait_for(ended, self._interrupt))
            elif ended is not None:  # the error of the body counts
                wait([ended])
            self._session = None

    def draw(self, prompts: Prompts, n: int | None = None) -> list[list[DrawnResponse]]:
        """Return `n` responses to each prompt, in order.

        A prompt is a text, a list of messages, or a row. Your reward scores all of them. Without
        one, the recipe's scores if all are rows: texts and messages have no truth. A response whose
        reward fails has an error, and is never scored 0. Raises DataError for a bad prompt.
        """
        if self._session is None or self._loop is None:
            raise MillraceError(
                "Rollouts are closed. Fix: `with millrace.Rollouts(...) as policy:`"
            )
        if isinstance(prompts, str | Mapping):
            raise bad_value("prompts", prompts, "is one prompt", "a list: draw([prompt])")
        if not isinstance(prompts, Iterable):
            raise bad_value("prompts", prompts, "is no list", "a list: draw([prompt])")
        prompts = list(prompts)
        n = self._n if n is None else _check_count(n)
        rows = [p if isinstance(p, Mapping) else {"prompt": _text(p)} for p in prompts]
        scored = self._own_reward or (
            not self._bare and all(isinstance(p, Mapping) for p in prompts)
        )
        work = self._draw(self._session, rows_of("prompts", rows), n, scored)
        drawing = asyncio.run_coroutine_threadsafe(work, self._loop)
        stopped = False

        def interrupt() -> None:
            nonlocal stopped
            stopped = True
            drawing.cancel()

        try:
            return wait_for(drawing, interrupt)
        except (asyncio.CancelledError, CancelledError):
            if not stopped and (ended := self._ended) is not None:
                unwrapped(lambda: wait_for(ended, self._interrupt))
            raise KeyboardInterrupt from None

    async def _draw(
        self, s: Session, rows: list[dict[str, Any]], n: int, scored: bool
    ) -> list[list[DrawnResponse]]:
        c = s.config
        stored = RowCache().of_rows("", lambda: enumerate(rows, 1), "prompts")
        part = Part("prompts", "prompts", len(stored), stored.get, stored=stored)
        built_in = scored and any(
            p.kind == "function" and not p.function for p in c.reward.parts.values()
        )
        stream = PromptStream.open(
            Rows((part,), (len(stored),)),
            s.problems.chat,
            seed=c.trainer.seed,
            shuffle=False,
            max_prompt_length=c.rollout.max_prompt_length,
            check=RowCheck(c.data.prompt_key, refusal=refusal if built_in else None),
        )
        first, self._drawn = self._drawn, self._drawn + len(stream)
        asked = [replace(stream[i], index=first + i) for i in range(len(stream))]
        validator = validator_of(s, s.engines.pool, asked, waits=True)
        validator = replace(validator, n=n, greedy=False, max_error_share=1.0)
        if not scored:
            validator = replace(validator, reward=None)
        played: dict[int, Played] = {}
        await validator.run(self._version, None, played)
        decode = s.problems.chat.decode
        return [
            [_response(played[i * n + k], decode, scored) for k in range(n)]
            for i in range(len(asked))
        ]

    async def _serve(self, ready: Future[None], progress: Any) -> None:
        """Keep the engines open until the end of the body."""
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        config = self._setup.config
        try:
            async with open_session(config, progress, work="eval", scored=False) as s:
                self._version = (await start_state(s)).version
                await s.engines.publish(self._version)
                async with revived(s.engines, self._version):
                    self._session = s
                    ready.set_result(None)
                    await self._end.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def _interrupt(self) -> None:
        """End the engines at once."""
        self._call(lambda: [task.cancel() for task in asyncio.all_tasks()])

    def _call(self, work: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)


def _base(model: Recipe | Run) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe of a model, and the keys that it needs."""
    below: dict[str, Any] = dict(_BELOW)
    if isinstance(model, Run):
        if model.checkpoint is None:
            raise bad_value("model", str(model.folder), "has no checkpoint", "trainer.save_freq=20")
        model = model.checkpoint
    if not isinstance(model, str | Path):
        return model, below
    path = Path(model)
    if (path / "manifest.json").is_file() and (path / "config.yaml").is_file():
        return path / "config.yaml", below | {"trainer.resume": str(path), "trainer.run_dir": ""}
    if path.suffix == ".yaml" or (not path.exists() and named(str(model)) is not None):
        return model, below
    return {}, below | _ANY_MODEL | {"model.path": str(model)}


def _check_count(n: int) -> int:
    """Return a number of responses. Raises ConfigError if it is none."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise bad_value("n", n, "is no number of responses", "n=1, or more")
    return n


def _text(prompt: Any) -> Any:
    return list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, str) else prompt


def _response(played: Played, decode: Callable[[Any], str], scored: bool) -> DrawnResponse:
    error = played.response.error
    if not scored and error.startswith("no_reward: "):
        error = ""
    return drawn(played.prompt, played.trajectory, decode, error)
