"""Callbacks of users: each sees every version, and may stop the run or set the learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from millrace.data.user_code import failure
from millrace.errors import MillraceError, bad_value
from millrace.observe.metrics import RunCounts
from millrace.pipeline.validation import Result
from millrace.rollout.scoring import completion_of, conversation_of
from millrace.run.session import Session
from millrace.run.signals import StopRequest
from millrace.types import Author, PolicyVersion, Prompt, Sample, Stop, Tokens, Trajectory
from millrace.waits.registry import Event


@dataclass(frozen=True, slots=True)
class DrawnResponse:
    """One response to a prompt, with its score."""

    prompt: str
    """The text of the prompt, as the policy reads it."""
    text: str
    """The policy's last message."""
    score: float | None
    """None if the response was not scored, or if the reward or the episode failed."""
    components: dict[str, float] = field(default_factory=dict)
    """The named parts of the score."""
    tokens: tuple[int, ...] = ()
    """All tokens after the prompt, also those of tools and users."""
    log_probs: tuple[float, ...] = ()
    """The log-prob of each token. NaN for tokens that the policy did not draw."""
    data_source: str = ""
    ground_truth: Any = None
    conversation: str = ""
    """All messages by author, if there are any besides the prompt and the text."""
    truncated: bool = False
    """Whether a limit cut it."""
    versions: tuple[PolicyVersion, ...] = ()
    """The policy versions that drew it."""
    error: str = ""
    """Why there is no score."""


def drawn(
    prompt: Prompt, trajectory: Trajectory | None, decode: Callable[[Tokens], str], error: str = ""
) -> DrawnResponse:
    """Return a trajectory in plain values. None is an episode that failed."""
    about = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    if trajectory is None:
        return DrawnResponse(prompt.text, "", None, **about, error=error)
    log_probs = [
        value
        for s in trajectory.segments
        for value in (s.log_probs if s.author is Author.POLICY else [math.nan] * len(s.tokens))
    ]
    score = trajectory.score
    return DrawnResponse(
        prompt.text,
        completion_of(trajectory, decode).text,
        None if score is None or error else score.value,
        {} if score is None else dict(score.extra),
        tuple(trajectory.tokens),
        tuple(log_probs),
        **about,
        conversation=conversation_of(trajectory, decode),
        truncated=trajectory.stop is Stop.LENGTH,
        versions=tuple(sorted(set(trajectory.versions))),
        error=error,
    )


SLOW_S = 1.0
"""Seconds after which a callback is named: rollouts and syncs wait for it."""


class CallbackError(MillraceError):
    """A callback raised. The run has saved a checkpoint."""


class LiveVersion:
    """A version that is live, as a callback sees it."""

    def __init__(
        self,
        number: PolicyVersion,
        row: dict[str, float],
        trained: Sequence[Sample],
        validation: Result | None,
        run: Callbacks,
    ) -> None:
        self.number = number
        self.row = row
        """The metrics of the version, by name, as in metrics.jsonl."""
        self.validation = {} if validation is None else dict(validation.values)
        """The values of the last validation that has ended."""
        self._trained, self._run = trained, run

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self._run.folder

    @property
    def samples(self) -> list[DrawnResponse]:
        """The responses that trained the version."""
        decode = self._run.decode
        return [drawn(s.prompt, t, decode) for s in self._trained for t in s.trajectories]

    @property
    def lr(self) -> float:
        """The learning rate from which the schedule of actor.optim starts."""
        return self._run.base_lr * self._run.counts.lr_scale

    def set_lr(self, lr: float) -> None:
        """Let the next steps of the policy take `lr` in place of actor.optim.lr.

        Warm-up and decay of actor.optim still apply. Checkpoints keep it.
        """
        base = self._run.base_lr
        given: Any = lr  # numpy has floats of its own
        if isinstance(lr, bool) or not isinstance(given, Real) or not 0 <= lr < float("inf"):
            raise bad_value("set_lr", given, "is no finite number of at least 0", "set_lr(1e-6)")
        if not base:
            rule = "the run has actor.optim.lr = 0, which no factor changes"
            raise bad_value("set_lr", lr, rule, "a larger actor.optim.lr from the start")
        self._run.counts.lr_scale = float(lr) / base

    def stop(self, reason: str = "") -> None:
        """Let the run save a checkpoint and end after this version's window."""
        self._run.stop(self.number, reason)


Callback = Callable[[LiveVersion], object]


class Callbacks:
    """The callbacks of one run. It also gathers the samples that they may ask for."""

    names = frozenset({"stepped"})

    def __init__(
        self, functions: Sequence[Callback], s: Session, counts: RunCounts, stop: StopRequest
    ) -> None:
        self.functions = functions
        self.counts = counts
        self.folder, self.decode = s.run.path, s.problems.chat.decode
        self.base_lr = s.config.actor.optim.lr
        self._note, self._stop = s.progress.note, stop
        self._trained: dict[PolicyVersion, list[Sample]] = {}
        self._slow = False
        if counts.lr_scale != 1:
            self._note(
                f"the learning rate is {counts.lr_scale:g} times actor.optim.lr, as a callback of an "
                "earlier attempt has set it"
            )

    def __call__(self, event: Event) -> None:
        """Gather the samples of a local step."""
        if self.functions:
            trained = self._trained.setdefault(event.facts["version"] + 1, [])
            trained.extend(event.facts["samples"])

    def see(self, version: PolicyVersion, row: dict[str, float], validation: Result | None) -> None:
        """Call each callback. One that raises stops the run, which then fails with its error."""
        if not self.functions:
            return
        live = LiveVersion(version, row, self._trained.pop(version, ()), validation, self)
        for function in self.functions:
            name, began = getattr(function, "__name__", repr(function)), time.monotonic()
            try:
                function(live)
            except Exception as error:  # noqa: BLE001 - the boundary to user code
                if self._stop.error is None:
                    text = f"the callback {name} raised at version {version}: {failure(error)}"
                    self._stop.error = CallbackError(text)
                    self._stop.error.__cause__ = error
                self._stop.request()
            if (took := time.monotonic() - began) > SLOW_S and not self._slow:
                self._slow = True
                rule = "rollouts, syncs and rewards wait for a callback"
                self._note(f"warning: the callback {name} took {took:.1f} s, and {rule}")

    def stop(self, version: PolicyVersion, reason: str) -> None:
        """Stop the run, and say why."""
        why = f": {reason}" if reason else ""
        self._note(f"a callback stops the run at version {version}{why}. It saves a checkpoint")
        self._stop.request()
