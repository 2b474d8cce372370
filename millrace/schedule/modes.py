"""The table of modes: the numbers of the Schedule for each name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from millrace.schedule.schedule import OnSync, Placement, Schedule

ModeName = Literal[
    "colocate_sync",
    "on_policy_pipeline",
    "one_step_off",
    "stream_off_policy",
    "async_staleness",
    "async_partial",
    "async_swap",
    "colocate_partial",
]

RELATED = ("partial_rollout", "lookahead")
"""Keys that a mode resets, because their old values belong to the old mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One row of the table. A field of None leaves its key as the layers below set it."""

    placement: Placement
    on_sync: OnSync
    staleness_threshold: float | None = None
    trigger_parameter_sync_step: int | None = None
    overlap_sync: bool | None = None
    lookahead: int | None = None
    default_staleness: float | None = None
    """The staleness_threshold if no layer sets one over 0."""
    default_trigger: int | None = None
    """The trigger_parameter_sync_step if no layer sets one over 1."""
    batch_is_window: bool = False
    """Whether data.train_batch_size sets the size of the window."""

    @property
    def colocated(self) -> bool:
        return self.placement is Placement.COLOCATED

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the keys that the mode sets, regardless of the layers below it."""
        values = {
            "placement": self.placement,
            "on_sync": self.on_sync,
            "staleness_threshold": self.staleness_threshold,
            "trigger_parameter_sync_step": self.trigger_parameter_sync_step,
            "overlap_sync": self.overlap_sync,
            "lookahead": self.lookahead,
        }
        return {key: value for key, value in values.items() if value is not None}

    def over(self, below: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of the Schedule after this mode is applied to the layers below."""
        keys = {key: value for key, value in below.items() if key not in RELATED} | self.fixed
        if self.default_staleness is not None and not keys.get("staleness_threshold"):
            keys["staleness_threshold"] = self.default_staleness
        if self.default_trigger is not None and keys.get("trigger_parameter_sync_step", 1) == 1:
            keys["trigger_parameter_sync_step"] = self.default_trigger
        return keys


_TABLE: dict[ModeName, Mode] = {
    "colocate_sync": Mode(
        placement=Placement.COLOCATED,
        on_sync=OnSync.DRAIN,
        staleness_threshold=0.0,
        overlap_sync=False,
        batch_is_window=True,
    ),
    "on_policy_pipeline": Mode(
        placement=Placement.SEPARATE,
        on_sync=OnSync.DRAIN,
        staleness_threshold=0.0,
        trigger_parameter_sync_step=1,
        overlap_sync=False,
    ),
    "one_step_off": Mode(
        placement=Placement.SEPARATE,
        on_sync=OnSync.DRAIN,
        staleness_threshold=1.0,
        trigger_parameter_sync_step=1,
        lookahead=1,
        batch_is_window=True,
    ),
    "stream_off_policy": Mode(
        placement=Placement.SEPARATE,
        on_sync=OnSync.DRAIN,
        staleness_threshold=0.0,
        overlap_sync=False,
        default_trigger=4,
    ),
    "async_staleness": Mode(
        placement=Placement.SEPARATE, on_sync=OnSync.DRAIN, default_staleness=0.5
    ),
    "async_partial": Mode(
        placement=Placement.SEPARATE, on_sync=OnSync.INTERRUPT, default_staleness=0.5
    ),
    "async_swap": Mode(placement=Placement.SEPARATE, on_sync=OnSync.SWAP, default_staleness=0.5),
    "colocate_partial": Mode(
        placement=Placement.COLOCATED,
        on_sync=OnSync.INTERRUPT,
        overlap_sync=False,
        default_staleness=0.5,
    ),
}

MODES: Mapping[str, Mode] = MappingProxyType({name: _TABLE[name] for name in get_args(ModeName)})
"""Every mode by its name."""


def name_of(schedule: Schedule, asked: str | None = None) -> str:
    """Return the name of the mode that `schedule` matches, or "custom".

    `asked` is the mode that the run started from. A mode with a default staleness fits only a
    staleness_threshold over 0. If several modes fit, the result is `asked`, or else the mode that
    sets the most keys. If none fits, the result names `asked`: "custom (from async_partial)".
    """
    fitting = [name for name, mode in MODES.items() if _fits(schedule, mode)]
    if asked in fitting:
        return str(asked)
    if not fitting:
        return f"custom (from {asked})" if asked else "custom"
    return max(fitting, key=lambda name: len(MODES[name].fixed))


def overridden(schedule: Schedule, asked: str) -> dict[str, Any]:
    """Return the numbers of the mode `asked` that `schedule` does not keep."""
    fixed = MODES[asked].fixed
    return {key: value for key, value in fixed.items() if getattr(schedule, key) != value}


def _fits(schedule: Schedule, mode: Mode) -> bool:
    stale = mode.default_staleness is None or schedule.staleness_threshold > 0
    return stale and all(getattr(schedule, key) == value for key, value in mode.fixed.items())


def update_steps(mode: str | None, trigger: int, require_batches: int, ppo_epochs: int) -> int:
    """Return the optimizer steps of one training step, which verl counts as one update.

    In modes with a train batch, it is a window. In the other modes, it is a local step.
    """
    batches = trigger if mode and MODES[mode].batch_is_window else 1
    return batches * require_batches * ppo_epochs
