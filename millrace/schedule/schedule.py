"""The Schedule: the numbers that make one pipeline behave as any training mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class OnSync(StrEnum):
    """The fate of running trajectories when new weights arrive."""

    DRAIN = "drain"
    """The sync waits for them, and none starts. Every trajectory has one version."""
    INTERRUPT = "interrupt"
    """They stop, keep their tokens, and continue with the new weights."""
    SWAP = "swap"
    """They keep running. The weights change between two decode steps."""


class Placement(StrEnum):
    """Whether rollouts and training have separate devices."""

    SEPARATE = "separate"
    COLOCATED = "colocated"
    """Both use the same devices in turns: the whole window is generated, then trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The numbers of one run, in samples. README.md has the table of modes."""

    ppo_mini_batch_size: int
    """Samples in one optimizer step."""
    require_batches: int = 1
    """Mini-batches in one local step. The trainer takes these samples at once."""
    trigger_parameter_sync_step: int = 1
    """Local steps between two weight syncs."""
    staleness_threshold: float = 0.0
    """Extra samples that may be under way beyond one window, as a share of the window."""
    on_sync: OnSync = OnSync.DRAIN
    placement: Placement = Placement.SEPARATE
    overlap_sync: bool = False
    """Whether the trainer continues while a version is on its way to the rollouts."""
    lookahead: int = 1
    """How far ahead of the oldest sample the trainer may look for a ready one.

    1 is strict order of admission.
    """

    def __post_init__(self) -> None:
        for name in (
            "ppo_mini_batch_size",
            "require_batches",
            "trigger_parameter_sync_step",
            "lookahead",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.staleness_threshold >= 0 or math.isinf(self.staleness_threshold):
            raise ValueError(
                "staleness_threshold must be a finite number of at least 0, "
                f"got {self.staleness_threshold}"
            )
        if self.overlap_sync and (self.colocated or not self.staleness_threshold):
            raise ValueError("overlap_sync needs separate devices and a staleness_threshold over 0")

    @property
    def step_size(self) -> int:
        """Return the number of samples in one local step."""
        return self.ppo_mini_batch_size * self.require_batches

    @property
    def window(self) -> int:
        """Return W, the number of samples trained for each policy version."""
        return self.step_size * self.trigger_parameter_sync_step

    @property
    def capacity(self) -> int:
        """Return the number of slots."""
        # 1e-9 guards against rounding errors: 1.3 * 10 must be 13, not 12.
        return math.floor((1 + self.staleness_threshold) * self.window + 1e-9)

    @property
    def lag_bound(self) -> int:
        """Return the largest possible (version at training) - (version at admission).

        At most capacity - 1 older samples and lookahead - 1 younger ones are trained before a given
        sample. The version moves once for each window. The bound also applies with overlap_sync:
        versions are those of the trainer's weights, and the older samples include the window that
        is on its way.
        """
        return (self.capacity + self.lookahead - 2) // self.window

    @property
    def colocated(self) -> bool:
        return self.placement is Placement.COLOCATED

    def versions(self, samples: int) -> int:
        """Return the number of weight syncs in a run of `samples`. The last window may be short."""
        return math.ceil(samples / self.window)

    def optimizer_steps(self, samples: int, ppo_epochs: int = 1) -> int:
        """Return the number of optimizer steps in a run of `samples`. Short mini-batches count."""
        whole, rest = divmod(samples, self.step_size)
        return ppo_epochs * (
            whole * self.require_batches + math.ceil(rest / self.ppo_mini_batch_size)
        )
