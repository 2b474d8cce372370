"""The keys of the Schedule."""

from __future__ import annotations

from pydantic import Field

from millrace.config.section import Section
from millrace.errors import bad_value
from millrace.schedule.schedule import OnSync, Placement


class AsyncConfig(Section):
    require_batches: int = Field(1, ge=1)
    """Mini-batches in one local step: what the trainer takes at once. Each is an optimizer step
    (times ppo_epochs)."""
    trigger_parameter_sync_step: int = Field(1, ge=1)
    """Local steps between two weight syncs."""
    staleness_threshold: float = Field(0.0, ge=0, le=1000)
    """Samples under way beyond one window, as a share of it: capacity = (1 + this) x window. 0 is
    on-policy by window."""
    partial_rollout: bool = False
    """true means on_sync: interrupt."""
    on_sync: OnSync = OnSync.DRAIN
    """What happens to running trajectories at a sync: drain, interrupt or swap."""
    placement: Placement = Placement.SEPARATE
    """Whether both sides have devices of their own (separate) or take turns on the same ones
    (colocated)."""
    overlap_sync: bool = False
    """Go on training while a version is on its way to the rollouts: each trainer rank keeps a copy
    of its share of the weights until they are sent. Needs devices of the trainer's own and a
    staleness_threshold over 0. Versions that are checkpointed are awaited."""
    lookahead: int = Field(0, ge=0)
    """How far past the oldest sample the trainer may look for a ready one. 1 is strict order of
    admission; 0 is one window where there is staleness, and 1 elsewhere and in deterministic
    runs."""
    use_rollout_log_probs: bool = True
    """true (bypass): the old log-probs of PPO are those of the rollout; false (decoupled): the
    trainer's own, by algorithm.rollout_correction.proximal.
    algorithm.rollout_correction.bypass_mode says the same."""

    @property
    def colocated(self) -> bool:
        return self.placement is Placement.COLOCATED

    def check(self) -> None:
        if self.partial_rollout and self.on_sync is not OnSync.INTERRUPT:
            raise bad_value(
                "async_training.on_sync",
                self.on_sync.value,
                "partial_rollout=true means on_sync=interrupt",
                "leave one of the two keys out",
            )
        if self.overlap_sync and (self.colocated or not self.staleness_threshold):
            raise bad_value(
                "async_training.overlap_sync",
                True,
                "the trainer trains other samples, on other devices, while it sends a version to "
                "the rollouts",
                "async_training.placement=separate and async_training.staleness_threshold=0.5, say",
            )
