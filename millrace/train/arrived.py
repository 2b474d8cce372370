"""The samples of a batch as arrays. A step makes them first and reads nothing else of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.ragged import sequence_ids
from millrace.config import AlgorithmConfig
from millrace.errors import MillraceError
from millrace.ports import TrainBatch
from millrace.train.packing import Rows, rows_of_samples
from millrace.types import PolicyVersion, Sample, Score, Stop, Trajectory


@dataclass(frozen=True, slots=True)
class Arrived:
    """N trajectories with K trained tokens, on the host, the same on every rank."""

    version: PolicyVersion
    """The live one."""
    rows: Rows
    lengths: Tensor
    """[N] int64 trained tokens of each trajectory."""
    ids: Tensor
    """[K] int64 trajectory of each token."""
    ages: Tensor
    """[K] int64 versions between the one that drew the token and the live one."""
    rollout: Tensor
    """[K] float64 log-probs of the policy that drew each token."""
    scores: Tensor
    """[N] float64 rewards."""
    groups: Tensor
    """[N] int64 number of each trajectory's sample."""
    truncated: Tensor
    """[N] bool: cut by the length limit."""
    components: dict[str, Tensor] | None
    """[N] each: the reward's named components, for gdpo."""
    greedy_scores: Tensor | None
    """[N] the score of the greedy response to each trajectory's prompt, for remax."""


def arrived(batch: TrainBatch, algorithm: AlgorithmConfig) -> Arrived:
    """Return the arrays of `batch`. Raises MillraceError for a score that `algorithm` needs and lacks."""
    rows = rows_of_samples(batch.samples)
    pairs = [(trajectory, sample) for sample in batch.samples for trajectory in sample.trajectories]
    lengths = torch.from_numpy(rows.trained_tokens)
    scores = [_score(trajectory, sample) for trajectory, sample in pairs]
    greedy = algorithm.adv_estimator == "remax"
    return Arrived(
        version=batch.version,
        rows=rows,
        lengths=lengths,
        ids=sequence_ids(lengths),
        ages=(batch.version - torch.from_numpy(rows.versions)).clamp(min=0),
        rollout=torch.from_numpy(rows.rollout_log_probs).double(),
        scores=_floats([score.value for score in scores]),
        groups=torch.from_numpy(rows.sample),
        truncated=torch.tensor([t.stop is Stop.LENGTH for t, _ in pairs], dtype=torch.bool),
        components=_components([score.extra for score in scores], algorithm.gdpo_reward_keys)
        if algorithm.adv_estimator == "gdpo"
        else None,
        greedy_scores=_floats([_score(sample.greedy, sample).value for _, sample in pairs])
        if greedy
        else None,
    )


def _floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _score(trajectory: Trajectory | None, sample: Sample) -> Score:
    if trajectory is None or trajectory.score is None:
        what = "greedy response" if trajectory is sample.greedy else "trajectory"
        raise MillraceError(
            f"a {what} of sample {sample.prompt.index} has no score: it cannot be trained"
        )
    return trajectory.score


def _components(extras: list[dict[str, float]], wanted: Sequence[str]) -> dict[str, Tensor]:
    """[N] each: the reward's named components; all of them where none is `wanted`."""
    names = wanted or sorted({name for extra in extras for name in extra})
    for name in names:
        if any(name not in extra for extra in extras):
            known = sorted({known for extra in extras for known in extra})
            raise MillraceError(
                f"algorithm.gdpo_reward_keys: a reward has no component {name!r} (it has {', '.join(known) or 'none'}). "
                "Fix: a reward function that returns a dict with score and every component, each time"
            )
    if not names and extras:
        raise MillraceError(
            "algorithm.adv_estimator=gdpo: the reward function returns no components. Fix: return a dict of score and components"
        )
    return {name: _floats([extra[name] for extra in extras]) for name in names}
