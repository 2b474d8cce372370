"""The states of a device, with the words and colours that all charts share.

| in a chart | means |
|---|---|
| a plain area | the device computes |
| a hatched area | the device waits |
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.report.page.figures import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, YELLOW


@dataclass(frozen=True, slots=True)
class StateStyle:
    """How charts show a state."""

    words: str
    colour: str
    pattern: str = ""
    lifts: str = ""
    """What shortens it, with the keys."""

    @property
    def hatch(self) -> dict[str, object]:
        """Return the pattern of a wait for Plotly."""
        if not self.pattern:
            return {}
        return {"shape": self.pattern, "size": 6, "solidity": 0.3, "fillmode": "overlay", "fgcolor": "#ffffff"}  # fmt: skip

    @property
    def waits(self) -> bool:
        return bool(self.pattern)


STATES = {
    "train": StateStyle("trains", BLUE, "", "`actor.ppo_max_token_len_per_gpu`, or more trainer devices"),
    "generate": StateStyle("draws responses", GREEN, "", "more rollout devices"),
    "validate": StateStyle("validates", SKY, "", "`trainer.test_freq`, `rollout.test_freq`"),
    "sync": StateStyle("syncs weights", PINK, "", "`async_training.trigger_parameter_sync_step`, `async_training.overlap_sync`"),
    "save": StateStyle("saves a checkpoint", "#666666", "", "`trainer.save_freq`, `trainer.async_save`"),
    "switch": StateStyle("changes hands", YELLOW, "", "`async_training.trigger_parameter_sync_step`"),
    "wait_trajectories": StateStyle("waits for responses", ORANGE, "/", "`async_training.staleness_threshold`, or more rollout devices"),
    "wait_rewards": StateStyle("waits for rewards", YELLOW, "/", "`reward.num_workers`"),
    "wait_teachers": StateStyle("waits for teachers", YELLOW, ".", "`teachers.NAME.max_concurrency`, or a faster server"),
    "wait_tools": StateStyle("waits for tools", YELLOW, "x", "`async_training.staleness_threshold`: more sessions at once"),
    "wait_trainer": StateStyle("waits for the trainer", RED, "/", "more trainer devices, or `async_training.staleness_threshold`"),
    "wait_sync": StateStyle("waits for a sync", PINK, "/", "`async_training.trigger_parameter_sync_step`, `async_training.on_sync`"),
    "wait_validation": StateStyle("waits for a validation", SKY, "/", "`trainer.test_freq`, `rollout.test_freq`"),
    "tail": StateStyle("waits: the run ends", GREY, "/", "nothing: no more samples are needed"),
    "other": StateStyle("other", "#BBBBBB", "", ""),
}  # fmt: skip
"""The states of charts."""

_OF: dict[str, str] = {
    **dict.fromkeys(
        ("train", "old_log_prob", "ref", "values", "teacher", "adv", "update_critic", "update_actor", "train_other"),
        "train",
    ),
    **dict.fromkeys(("sync_keep", "sync_transfer", "sync_activate"), "sync"),
    **dict.fromkeys(("wait_samples", "wait_prev_gen"), "wait_trajectories"),
    **dict.fromkeys(("wait_rollouts", "wait_publish"), "wait_sync"),
    "save_checkpoint": "save",
    "user_metrics": "other",
}  # fmt: skip


PARTS = {*_OF, "train", "switch", "wait_validation", "other"}
"""The parts of the trainer's time. Its track has other spans too."""


def state_of(part: str) -> str:
    """Return the state of charts for a part of the trainer's time or a state of the accounts."""
    return _OF.get(part, part if part in STATES else "other")
