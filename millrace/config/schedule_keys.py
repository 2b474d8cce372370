"""The keys of the Schedule."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from millrace.config.section import Rule, Section
from millrace.schedule.schedule import OnSync, Placement


class AsyncConfig(Section):
    require_batches: int = Field(1, ge=1)
    """Mini-batches in one local step.

    The trainer takes them at once and makes one optimizer step for each of them in each of
    actor.ppo_epochs.
    """
    trigger_parameter_sync_step: int = Field(1, ge=1)
    """Local steps between two weight syncs."""
    staleness_threshold: float = Field(0.0, ge=0, le=1000)
    """How many samples may be in flight beyond one window, as a share of the window.

    The capacity is (1 + staleness_threshold) x window. 0 is on-policy within each window.
    """
    partial_rollout: bool = False
    """true means on_sync=interrupt."""
    on_sync: OnSync = OnSync.DRAIN
    """The fate of running trajectories at a weight sync.

    drain waits for them. interrupt stops them and continues them with the new version. swap changes
    the weights while they run.
    """
    placement: Placement = Placement.SEPARATE
    """separate gives each side its own devices.

    colocated puts both sides on the same devices, which they use in turns.
    """
    overlap_sync: bool = False
    """Train the next samples while a version is sent to the rollouts.

    Each trainer rank keeps a copy of its share of the weights until they are sent. Needs
    placement=separate and a staleness_threshold over 0. The trainer still waits for a version that
    is checkpointed.
    """
    lookahead: int = Field(0, ge=0)
    """How many samples the trainer searches for a ready one, counted from the oldest.

    1 trains in strict order of admission. 0 means one window if there is staleness, and 1 otherwise
    and in deterministic runs.
    """
    use_rollout_log_probs: bool = True
    """Which old log-probs PPO uses.

    true (bypass) takes the rollout's. false (decoupled) takes the trainer's, by
    algorithm.rollout_correction.proximal. algorithm.rollout_correction.bypass_mode is another name
    of this key.
    """

    @property
    def colocated(self) -> bool:
        return self.placement is Placement.COLOCATED

    def rules(self, here: str) -> Iterator[Rule]:
        yield (
            self.partial_rollout and self.on_sync is not OnSync.INTERRUPT,
            "on_sync",
            "partial_rollout=true means on_sync=interrupt",
            "remove one of the two keys",
        )
        yield (
            self.overlap_sync and (self.colocated or not self.staleness_threshold),
            "overlap_sync",
            "while a version is sent, the trainer needs other samples to train and devices of its "
            "own",
            "async_training.placement=separate async_training.staleness_threshold=0.5",
        )
