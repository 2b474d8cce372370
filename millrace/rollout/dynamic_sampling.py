"""Dynamic sampling (DAPO): a group whose outcomes are all equal teaches nothing; another prompt takes its slot.

Decides and counts, by the version that is live when a sample is finished; the Rollouter does the dropping.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.algorithms.filters import equal_outcomes
from millrace.errors import MillraceError, bad_value
from millrace.types import PolicyVersion, Sample, Score

EQUAL_OUTCOMES = "equal_outcomes"
"""Why such a sample is dropped, as the ledger counts it."""

_KEY = "algorithm.filter_groups"


class DynamicSamplingError(MillraceError):
    """Too many samples had equal outcomes: the problems are too easy or too hard to learn from."""


@dataclass(slots=True)
class _Tally:
    """Samples finished while one version was live."""

    kept: int = 0
    dropped: int = 0
    outcomes: float = 0.0  # of the dropped ones, added up

    @property
    def drop_share(self) -> float:
        return self.dropped / max(1, self.dropped + self.kept)

    @property
    def mean_outcome(self) -> float:
        return self.outcomes / max(1, self.dropped)


class DynamicSampling:
    """Which finished samples are worth training on.

    `metric` is what is compared: "score" before shaping, "reward" after it, or a component of the reward. More than
    `max_num_gen_batches` windows of drops for one version are an error; 0 sets no limit.
    """

    def __init__(self, metric: str, *, max_num_gen_batches: int, window: int) -> None:
        self.metric = metric
        self.max_num_gen_batches = max_num_gen_batches
        self.window = window
        self._tallies: dict[PolicyVersion, _Tally] = {}

    def keeps(self, sample: Sample, version: PolicyVersion) -> bool:
        """Whether to train a sample that is finished while `version` is live.

        Raises ConfigError if the reward function has no component of the metric's name, DynamicSamplingError past the limit.
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
        """Figures of the samples finished while `version` was live, to be asked for once."""
        tally = self._tallies.pop(version, _Tally())
        row = {
            # Samples dropped for equal outcomes, and their share of all samples that were finished and scored.
            "filter_groups/dropped": float(tally.dropped),
            "filter_groups/drop_share": tally.drop_share,
        }
        # Mean outcome of the dropped ones: of rewards 0 and 1, the share that was all right; the rest was all wrong.
        return row | ({"filter_groups/mean_outcome": tally.mean_outcome} if tally.dropped else {})

    def _too_many(self, tally: _Tally, version: PolicyVersion) -> str:
        return (
            f"{tally.dropped} of the {tally.dropped + tally.kept} samples ({tally.drop_share:.0%}) finished while version {version} "
            f"was live had trajectories of equal {self.metric}, more than {_KEY}.max_num_gen_batches = {self.max_num_gen_batches} "
            f"windows of {self.window}. The mean {self.metric} of those is {tally.mean_outcome:g}. Fix: harder problems if that is "
            f"near the best, easier ones if it is near the worst; a larger rollout.n; or a higher {_KEY}.max_num_gen_batches, 0 "
            "for no limit."
        )


def _outcome(score: Score, metric: str) -> float:
    if metric == "score":
        return score.unshaped
    if metric == "reward":
        return score.value
    if metric not in score.extra:
        known = ", ".join(["score", "reward", *sorted(score.extra)])
        raise bad_value(
            f"{_KEY}.metric",
            metric,
            "the reward function returns no component of this name",
            f"one of {known}",
        )
    return score.extra[metric]
