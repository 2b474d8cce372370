"""Forward passes that count for a part of a step's time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millrace.train.experience import Forward, Models, Policy
from millrace.train.layout import Ints
from millrace.train.routing import Routed
from millrace.train.rows import Rows
from millrace.waits.registry import part


@dataclass(frozen=True, slots=True)
class TimedForward:
    """A critic, a reference or a teacher whose forward passes count for the part `name`.

    The outputs of a pass are on the host, so the pass is complete at its return, also on a GPU.
    """

    model: Forward
    name: str

    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float
    ) -> list[Tensor]:
        with part(self.name):
            return self.model.tokens(rows, members, temperature=temperature)


@dataclass(frozen=True, slots=True)
class TimedPolicy:
    """The policy under training. Its forward passes count for the part `old_log_prob`."""

    model: Policy

    @property
    def steps(self) -> int:
        return self.model.steps

    @property
    def routed(self) -> Routed | None:
        return self.model.routed

    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float, **options: bool
    ) -> list[Tensor]:
        with part("old_log_prob"):
            return self.model.tokens(rows, members, temperature=temperature, **options)


def timed(models: Models) -> Models:
    """Return the models with their passes timed: old_log_prob, values, ref and teacher."""
    critic, reference = models.critic, models.reference
    return Models(
        TimedPolicy(models.policy),
        critic and TimedForward(critic, "values"),
        reference and TimedForward(reference, "ref"),
        {name: TimedForward(model, "teacher") for name, model in models.teachers.items()},
    )
