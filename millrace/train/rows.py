"""The samples of a batch as arrays. A step builds them first and then reads only the arrays.

A **row** is one thread of a trajectory: its opening and its segments as one sequence of tokens. The
model reads a row up to the token before its last trained token. Later tokens predict no trained
token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.algorithms.ragged import positions_to_end, sequence_ids
from millrace.config import AlgorithmConfig, TeacherConfig, TppoConfig
from millrace.config.teacher_keys import weights_of
from millrace.errors import MillraceError
from millrace.ports import TrainBatch
from millrace.train.layout import Ints
from millrace.train.routing import Routed, experts_of
from millrace.types import (
    TURN_REWARDS,
    Author,
    Floats,
    PolicyVersion,
    Sample,
    Score,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)

NO_TEACHERS: Mapping[str, TeacherConfig] = {}


@dataclass(frozen=True, slots=True)
class Rows:
    """The threads of trajectories, one after the other, as one sequence of tokens.

    T is the number of all tokens, K that of the trained tokens, and N that of the rows.
    """

    tokens: Ints
    """[T] token ids."""
    trained: NDArray[np.bool_]
    """[T] true for tokens of the policy."""
    order: Ints
    """[T] index of each trained token among the trained tokens. Undefined for other tokens."""
    rollout_log_probs: NDArray[np.float32]
    """[K] log-probs at the rollout."""
    versions: Ints
    """[K] policy version that drew each trained token."""
    starts: Ints
    """[N] position of each row's first token."""
    lengths: Ints
    """[N] tokens of each row, its opening included."""
    inputs: Ints
    """[N] tokens of each row that the model reads: all before the last trained token.

    It is 0 for a row without trained tokens.
    """
    trained_tokens: Ints
    """[N] trained tokens of each row."""
    opening: Ints
    """[N] number of each row's opening. Rows of equal number have equal openings."""
    opening_lengths: Ints
    """[N] tokens of each row's opening."""
    trajectory: Ints
    """[N] number of each row's trajectory. It never decreases."""
    num_trajectories: int
    sample: Ints
    """[N] number of each row's sample."""
    first_row: Ints
    """[samples + 1] first row of each sample: sample i has rows first_row[i]:first_row[i + 1]."""
    turn_rewards: NDArray[np.float64] | None = None
    """[K] rewards of single turns, at the last token of each. None if there are none."""
    old_kv: NDArray[np.bool_] | None = None
    """[K] whether older versions may have computed KV that drew the token. None if none did."""
    experts: Routed | None = None
    """The experts of each token, for router replay. None lets routers choose."""
    candidates: Ints | None = None
    """[K, C] further tokens whose log-probs a pass of the policy returns. None for no token."""

    @property
    def trained_of_trajectories(self) -> Ints:
        """Return the number of trained tokens of each trajectory, thread after thread."""
        if self.num_trajectories == len(self.trajectory):  # each has one row
            return self.trained_tokens
        total = np.zeros(self.num_trajectories, dtype=np.int64)
        np.add.at(total, self.trajectory, self.trained_tokens)
        return total


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """N trajectories with K trained tokens, on the host, the same on every rank."""

    version: PolicyVersion
    """The live policy version."""
    rows: Rows
    lengths: Tensor
    """[N] int64 trained tokens of each trajectory."""
    ids: Tensor
    """[K] int64 trajectory of each token."""
    ages: Tensor
    """[K] int64 number of versions between the token's own and the live one."""
    rollout: Tensor
    """[K] float64 log-probs of the policy that drew each token."""
    scores: Tensor
    """[N] float64 rewards, those of single turns included."""
    turn_rewards: Tensor | None
    """[K] float64 rewards of single turns, at the last token of each."""
    groups: Tensor
    """[N] int64 number of each trajectory's sample."""
    truncated: Tensor
    """[N] bool: cut by the length limit."""
    unfiltered: Tensor
    """[K] bool: false if overlong_filtering or ignore_last_k leaves the token out.

    That is not a rejection.
    """
    components: dict[str, Tensor] | None
    """Components of the reward by name, each [N] float64, for gdpo."""
    equal_share: float
    """Share of samples whose rewards are all equal."""
    greedy_scores: Tensor | None
    """[N] float64 score of the greedy response to each trajectory's prompt, for remax."""
    goes_on: Tensor | None = None
    """[N] bool: another sample continues the response. None if responses are trained whole."""
    response_lengths: Tensor | None = None
    """[N] int64 tokens of the response so far, with half a window for one that goes on."""
    taught: Mapping[str, Tensor] = field(default_factory=dict)
    """The weight of each teacher in each trajectory, by its name, [N] float64."""
    given: Mapping[str, Tensor] = field(default_factory=dict)
    """The log-probs of each teacher outside of the trainer, [K] float64, and 0 for other tokens."""

    def sequences_of(self, tokens: Tensor) -> Tensor:
        """Return the trajectories with at least one of the tokens [K] bool, [N] bool."""
        return torch.bincount(self.ids[tokens], minlength=len(self.lengths)) > 0


def arrays_of(
    batch: TrainBatch,
    algorithm: AlgorithmConfig,
    teachers: Mapping[str, TeacherConfig] = NO_TEACHERS,
) -> BatchArrays:
    """Return the arrays of `batch`.

    Raises MillraceError if a score that `algorithm` needs is missing, or a teacher that a row names.
    """
    rows = rows_of_samples(batch.samples)
    pairs = [(trajectory, sample) for sample in batch.samples for trajectory in sample.trajectories]
    taught = _taught(batch.samples, teachers)
    lengths = torch.from_numpy(rows.trained_of_trajectories)
    sizes = torch.tensor([len(sample.trajectories) for sample in batch.samples], dtype=torch.int64)
    ids = sequence_ids(lengths)
    cut = torch.tensor([t.stop is Stop.LENGTH for t, _ in pairs], dtype=torch.bool)
    goes_on, so_far = _windows(pairs, algorithm.tppo)
    unfiltered = torch.ones_like(ids, dtype=torch.bool)
    if algorithm.overlong_filtering:
        unfiltered = ~cut[ids]
    if goes_on is not None and algorithm.tppo.ignore_last_k:
        unfiltered &= ~goes_on[ids] | (positions_to_end(lengths) >= algorithm.tppo.ignore_last_k)
    scores = [_score(trajectory, sample) for trajectory, sample in pairs]
    greedy = algorithm.needs_greedy
    return BatchArrays(
        version=batch.version,
        rows=rows,
        lengths=lengths,
        ids=ids,
        ages=(batch.version - torch.from_numpy(rows.versions)).clamp(min=0),
        rollout=torch.from_numpy(rows.rollout_log_probs).double(),
        scores=_floats([score.value for score in scores]),
        turn_rewards=None if rows.turn_rewards is None else torch.from_numpy(rows.turn_rewards),
        groups=sequence_ids(sizes),
        truncated=cut,
        unfiltered=unfiltered,
        equal_share=_equal_share(batch.samples, [score.value for score in scores]),
        components=_components([score.extra for score in scores], algorithm.gdpo_reward_keys)
        if algorithm.needs_components
        else None,
        greedy_scores=_floats([_score(sample.greedy, sample).value for _, sample in pairs])
        if greedy
        else None,
        goes_on=goes_on,
        response_lengths=so_far,
        taught=taught,
        given={
            name: _given(name, pairs, taught[name]) for name in taught if teachers[name].outside
        },
    )


def _windows(
    pairs: Sequence[tuple[Trajectory, Sample]], tppo: TppoConfig
) -> tuple[Tensor | None, Tensor | None]:
    """Return BatchArrays.goes_on and its response_lengths."""
    if not tppo.window:
        return None, None
    goes_on = torch.tensor([t.goes_on for t, _ in pairs], dtype=torch.bool)
    so_far = [len(s.prompt.response_before) + t.num_policy_tokens for t, s in pairs]
    return goes_on, torch.tensor(so_far, dtype=torch.int64) + goes_on * (tppo.window // 2)


def _floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _taught(samples: Sequence[Sample], teachers: Mapping[str, TeacherConfig]) -> dict[str, Tensor]:
    if not teachers:
        return {}
    weights: list[dict[str, float]] = []
    for sample in samples:
        prompt = sample.prompt
        try:
            one = weights_of(teachers, prompt.data_source, prompt.extra_info)
        except ValueError as error:
            raise MillraceError(f"the row of sample {prompt.index}: {error}") from None
        weights += [one] * len(sample.trajectories)
    return {name: _floats([one.get(name, 0.0) for one in weights]) for name in teachers}


def _given(name: str, pairs: Sequence[tuple[Trajectory, Sample]], weights: Tensor) -> Tensor:
    """Return the log-probs that a teacher outside of the trainer gave, [K] float64."""
    whole = floats_of()
    for (trajectory, sample), weight in zip(pairs, weights.tolist(), strict=True):
        tokens = trajectory.num_policy_tokens
        own = trajectory.teachers.get(name, floats_of()) if weight else floats_of([0.0] * tokens)
        if len(own) != tokens:
            raise MillraceError(
                f"a trajectory of sample {sample.prompt.index} has {tokens} tokens of the policy, "
                f"and {len(own)} log-probs of the teacher {name}: it cannot be trained"
            )
        whole += own
    return torch.from_numpy(np.array(whole, dtype=np.float64))


def _score(trajectory: Trajectory | None, sample: Sample) -> Score:
    """Return the score of a response, 0 if it goes on. Raises MillraceError if it has none."""
    if trajectory is not None and trajectory.goes_on:
        return Score(0.0)
    if trajectory is None or trajectory.score is None:
        kind = "greedy response" if trajectory is sample.greedy else "trajectory"
        raise MillraceError(
            f"a {kind} of sample {sample.prompt.index} has no score: it cannot be trained"
        )
    return trajectory.score


def _equal_share(samples: Sequence[Sample], values: list[float]) -> float:
    """Return the share of samples whose rewards are all equal.

    Samples without trajectories are left out. Rewards are compared exactly, without a tolerance.
    """
    ends = itertools.accumulate(len(sample.trajectories) for sample in samples)
    groups = [values[a:b] for a, b in itertools.pairwise([0, *ends]) if b > a]
    return sum(min(group) == max(group) for group in groups) / max(len(groups), 1)


def _components(extras: list[dict[str, float]], wanted: Sequence[str]) -> dict[str, Tensor]:
    """Return the `wanted` components of the rewards by name, each [N] float64.

    If `wanted` is empty, return all components. Raises MillraceError if a reward lacks a component,
    and if there are no components at all. Rewards of single turns are 0 where no turn has one.
    """
    if any(TURN_REWARDS in names for names in (wanted, *extras)):
        extras = [{TURN_REWARDS: 0.0} | extra for extra in extras]
    names = wanted or sorted({name for extra in extras for name in extra})
    for name in names:
        if any(name not in extra for extra in extras):
            known = sorted({known for extra in extras for known in extra})
            raise MillraceError(
                f"algorithm.gdpo_reward_keys: a reward has no component {name!r} "
                f"(it has {', '.join(known) or 'none'}). Fix: let the reward function return a "
                "dict of the score and every component in each call"
            )
    if not names and extras:
        raise MillraceError(
            "algorithm.adv_estimator: the reward function returns no components. "
            "Fix: return a dict of score and components"
        )
    return {name: _floats([extra[name] for extra in extras]) for name in names}


def rows_of_samples(samples: Sequence[Sample], *, experts: bool = True) -> Rows:
    """Return one row for each thread of each trajectory, samples in order.

    Without `experts`, the rows have none, and routers choose. Raises ValueError if an opening has
    no tokens: nothing predicts the first token after it.
    """
    tokens, log_probs = tokens_of(), floats_of()
    versions: list[tuple[int, int]] = []  # version and length of each policy segment
    old_kv: list[bool] = []  # of each policy segment
    runs: list[int] = []  # length of each opening and segment, in order
    authored: list[bool] = []
    rewards: list[tuple[int, float]] = []  # trained tokens up to the turn's end, and its reward
    threads: list[int] = []  # of each trajectory
    row_runs: list[int] = []
    counts = [0]
    own: dict[int, Tokens] = {}  # openings of rows that do not begin with their prompt
    for sample in samples:
        if not sample.prompt.tokens:
            raise ValueError(
                f"the prompt of sample {sample.prompt.index} has no tokens: "
                "nothing predicts its first token"
            )
        for trajectory in sample.trajectories:
            threads.append(len(trajectory.threads))
            for thread in trajectory.threads:
                opening = sample.prompt.tokens
                if thread.opening is not None:
                    opening = own[len(row_runs)] = _opening(sample, thread.opening)
                tokens += opening
                runs.append(len(opening))
                authored.append(False)
                for segment in thread.segments:
                    tokens += segment.tokens
                    runs.append(len(segment.tokens))
                    authored.append(segment.author is Author.POLICY)
                    if segment.author is Author.POLICY:
                        log_probs += segment.log_probs
                        versions.append((segment.version, len(segment.tokens)))
                        old_kv.append(segment.kv_version is not None)
                        if segment.reward is not None:
                            rewards.append((len(log_probs), segment.reward))
                row_runs.append(1 + len(thread.segments))
        counts.append(len(row_runs))
    drawn = np.asarray(versions, dtype=np.int64).reshape(-1, 2)
    rows = _rows(
        tokens, log_probs, np.repeat(drawn[:, 0], drawn[:, 1]), runs, authored, row_runs, counts
    )
    return replace(
        rows,
        opening=_openings(rows.sample, own),
        trajectory=np.repeat(np.arange(len(threads)), np.asarray(threads, dtype=np.int64)),
        num_trajectories=len(threads),
        turn_rewards=_turn_rewards(rewards, len(log_probs)),
        old_kv=np.repeat(np.asarray(old_kv, dtype=bool), drawn[:, 1]) if any(old_kv) else None,
        experts=experts_of(samples, rows.starts, len(rows.tokens)) if experts else None,
    )


def _opening(sample: Sample, opening: Tokens) -> Tokens:
    if not opening:
        raise ValueError(
            f"the opening of a thread of sample {sample.prompt.index} has no tokens: nothing "
            "predicts its first token"
        )
    return opening


def _openings(sample: Ints, own: dict[int, Tokens]) -> Ints:
    """Return the number of each row's opening, [N]. That of a prompt is its sample's number."""
    if not own:
        return sample
    numbers: dict[tuple[int, bytes], int] = {}
    opening = sample.copy()
    for row, tokens in own.items():
        key = int(sample[row]), tokens.tobytes()
        opening[row] = numbers.setdefault(key, int(sample[-1]) + 1 + len(numbers))
    return opening


def _turn_rewards(rewards: list[tuple[int, float]], num_tokens: int) -> NDArray[np.float64] | None:
    if not rewards:
        return None
    flat = np.zeros(num_tokens, dtype=np.float64)
    for end, reward in rewards:
        flat[end - 1] += reward
    return flat


def rows_of_examples(examples: Iterable[tuple[Tokens, ...]]) -> Rows:
    """Return one row for each (prompt, response, context, response, ...).

    The tokens of the responses are trained. Raises ValueError if a prompt has no tokens.
    """
    tokens, runs, row_runs = tokens_of(), list[int](), list[int]()
    for example in examples:
        if not example[0]:
            raise ValueError(
                "a demonstration's prompt has no tokens: nothing predicts its first token"
            )
        for part in example:
            tokens += part
        runs += map(len, example)
        row_runs.append(len(example))
    authored = [bool(part % 2) for count in row_runs for part in range(count)]
    none = np.zeros(0, dtype=np.int64)
    counts = list(range(len(row_runs) + 1))
    return _rows(tokens, floats_of(), none, runs, authored, row_runs, counts)


def _rows(
    tokens: Tokens,
    log_probs: Floats,
    versions: Ints,
    runs: list[int],
    authored: list[bool],
    row_runs: list[int],
    counts: list[int],
) -> Rows:
    flat = _int64(tokens)
    trained = np.repeat(np.asarray(authored, dtype=bool), np.asarray(runs, dtype=np.int64))
    run_ends = np.concatenate([[0], np.cumsum(np.asarray(runs, dtype=np.int64))])
    edges = run_ends[np.concatenate([[0], np.cumsum(np.asarray(row_runs, dtype=np.int64))])]
    starts, lengths = edges[:-1], np.diff(edges)
    before = np.concatenate([[0], np.cumsum(trained)])
    trained_tokens = before[edges[1:]] - before[edges[:-1]]
    # Counted over all rows from 1, the last trained token of a row is number before[row end].
    inputs = np.zeros(len(starts), dtype=np.int64)
    has = trained_tokens > 0
    inputs[has] = np.flatnonzero(trained)[before[edges[1:]][has] - 1] - starts[has]
    first_run = np.cumsum(row_runs) - row_runs
    first_row = np.asarray(counts, dtype=np.int64)
    sample = np.repeat(np.arange(len(counts) - 1), np.diff(first_row))
    return Rows(
        tokens=flat,
        trained=trained,
        order=before[1:] - 1,
        rollout_log_probs=np.array(log_probs, dtype=np.float32),
        versions=versions,
        starts=starts,
        lengths=lengths,
        inputs=inputs,
        trained_tokens=trained_tokens,
        opening=sample,
        opening_lengths=np.asarray(runs, dtype=np.int64)[first_run.astype(np.int64)],
        trajectory=np.arange(len(starts)),
        num_trajectories=len(starts),
        sample=sample,
        first_row=first_row,
    )


def _int64(tokens: Tokens) -> Ints:
    if not tokens:
        return np.zeros(0, dtype=np.int64)
    return torch.frombuffer(tokens, dtype=torch.int32).to(torch.int64).numpy()
