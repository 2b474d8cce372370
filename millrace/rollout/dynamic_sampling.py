"""Dynamic sampling (DAPO): another prompt replaces a group with equal outcomes.

Such a group teaches nothing. This module decides and counts, by the version that is live when a
sample finishes. The Rollouter drops the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import MillraceError, bad_value
from millrace.types import TURN_REWARDS, PolicyVersion, Sample, Score

EQUAL_OUTCOMES = "equal_outcomes"
"""The reason for such a drop in the ledger's counts."""

_KEY = "algorithm.filter_groups"


class DynamicSamplingError(MillraceError):
    """Too many samples had equal outcomes. The problems are too easy or too hard."""


@dataclass(slots=True)
class _Tally:
    """Samples finished while one version was live."""

    kept: int = 0
    dropped: int = 0
    outcomes: float = 0.0  # The sum over the dropped samples.

    @property
    def drop_share(self) -> float:
        return self.dropped / max(1, self.dropped + self.kept)

    @property
    def mean_outcome(self) -> float:
        return self.outcomes / max(1, self.dropped)


class DynamicSampling:
    """The filter of finished samples.

    `metric` names the outcome to compare: "score" before shaping, "reward" after it, or a component
    of the reward. More than `max_num_gen_batches` windows of drops for one version are an error. 0
    sets no limit.
    """

    def __init__(self, metric: str, *, max_num_gen_batches: int, window: int) -> None:
        self.metric = metric
        self.max_num_gen_batches = max_num_gen_batches
        self.window = window
        self._tallies: dict[PolicyVersion, _Tally] = {}

    def keeps(self, sample: Sample, version: PolicyVersion) -> bool:
        """Whether to train a sample that finished while `version` is live.

        Raises ConfigError if the reward function has no component of the metric's name, and
        DynamicSamplingError past the limit.
        """
        outcomes = [
            _outcome(t.score, self.metric) for t in sample.trajectories if t.score is not None
        ]
        tally = self._tallies.setdefault(version, _Tally())
        if not equal_outcomes(outcomes):
            tally.kept += 1
            return True
        tally.dropped += 1
        tally.outcomes += sum(outcomes) / max(1, len(outcomes))
        if self.max_num_gen_batches and tally.dropped > self.max_num_gen_batches * self.window:
            raise DynamicSamplingError(self._too_many(tally, version))
        return False

    def row(self, version: PolicyVersion) -> dict[str, float]:
        """Return the figures of the samples that finished while `version` was live.

        Call this once for each version.
        """
        tally = self._tallies.pop(version, _Tally())
        row = {
            # Samples dropped for equal outcomes, and their share of all scored samples.
            "filter_groups/dropped": float(tally.dropped),
            "filter_groups/drop_share": tally.drop_share,
        }
        # Mean outcome of the dropped samples. With rewards 0 and 1 it is the share of samples whose
        # trajectories were all right; the others were all wrong.
        return row | ({"filter_groups/mean_outcome": tally.mean_outcome} if tally.dropped else {})

    def _too_many(self, tally: _Tally, version: PolicyVersion) -> str:
        return (
            f"{tally.dropped} of the {tally.dropped + tally.kept} samples "
            f"({tally.drop_share:.0%}) finished while version {version} was live "
            f"had trajectories of equal {self.metric}, more than {_KEY}.max_num_gen_batches = "
            f"{self.max_num_gen_batches} windows of {self.window}. Their mean {self.metric} is "
            f"{tally.mean_outcome:g}. Fix: harder problems if it is near the best, easier ones if "
            f"it is near the worst; a larger rollout.n; or a higher {_KEY}.max_num_gen_batches, "
            "0 for no limit."
        )


def _outcome(score: Score, metric: str) -> float:
    if metric == "score":
        return score.unshaped
    if metric == "reward":
        return score.value
    if metric not in score.extra and metric != TURN_REWARDS:
        known = ", ".join(["score", "reward", *sorted(score.extra)])
        raise bad_value(
            f"{_KEY}.metric",
            metric,
            "the reward function returns no component of this name",
            f"one of {known}",
        )
    return score.extra.get(metric, 0.0)


def equal_outcomes(values: Sequence[float]) -> bool:
    """Return whether the outcomes of a group are all equal.

    Dynamic sampling (DAPO, arXiv 2503.14476) drops such a group. `values` are the rewards, or
    another outcome, of the group's trajectories. They are compared exactly, without a tolerance. A
    standard deviation would not do: for seven times 0.3 it is not 0. A group of one or of none
    counts as equal, because there is nothing to compare. A NaN in a larger group makes it unequal.
    """
    return all(value == values[0] for value in values[1:])
