"""The metrics of one policy version. This file computes, names and documents each of them.

Row v describes the training of version v: its samples and its steps. The steps start from version
`v - 1`. The row is flushed after the last step.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from millrace.observe.timing import ActorClock, Integral, live_row, seconds_of, share, timing_row
from millrace.ports import RolloutStats, StepReport, TransferReport
from millrace.types import Author, PolicyVersion, Sample, Stop
from millrace.waits.registry import Event

_OF_EPISODES = ("turns", "threads", "context_tokens")
"""The counts of an episode that a row shows as mean and largest value."""

GAP = "actor/log_prob_gap_same_version"
"""The gap of rollout engines and trainer on the same weights (train/metrics.py)."""
GAP_TOKENS = "actor/log_prob_gap_tokens"
GAP_LIMIT = "actor/log_prob_gap_limit"

PERCENTILES = (50, 90, 99)
"""The percentiles of the response lengths in a row."""


@dataclass(slots=True)
class Synced:
    """The figures of one sync."""

    transfer: TransferReport = field(default_factory=lambda: TransferReport(0, 0.0))
    pause_s: float = 0.0
    """Seconds in which the slowest replica changed its weights."""
    hold_s: float | None = None
    """Seconds of the rollouts' pause: the wait for them, the change, and the record of the version.

    None if they do not pause, or pause for the trainer's whole turn.
    """
    live: dict[str, float] = field(default_factory=dict)
    """The rollout side's time with the version before this one, as metrics."""


class VersionMetrics:
    """The figures of one version. `row` turns them into one flat dict of floats."""

    def __init__(self) -> None:
        self._samples: list[tuple[Sample, PolicyVersion]] = []
        self._steps: list[StepReport] = []
        self._drawn: tuple[float, float] | None = None

    def drawn(self, start: float, end: float) -> None:
        """Add samples whose first rollout began at `start` and whose last score came at `end`."""
        first, last = self._drawn or (start, end)
        self._drawn = min(first, start), max(last, end)

    def stepped(
        self, samples: Iterable[Sample], version: PolicyVersion, report: StepReport
    ) -> None:
        """Add a step on these samples, trained at `version`."""
        self._samples += [(s, version) for s in samples]
        self._steps.append(report)

    def row(
        self,
        *,
        timing: dict[str, float],
        before: RolloutStats,
        after: RolloutStats,
        usable_slots: int,
        synced: Synced,
    ) -> dict[str, float]:
        """Return every metric of this version.

        `timing` has the trainer's seconds by part. `before` and `after` are the rollout side's
        totals.
        """
        wall = sum(timing.values())
        row = self._training() | self._rewards() | self._staleness() | self._agents()
        row |= timing_row(seconds_of(timing, [report.seconds for report in self._steps]))
        row |= synced.live
        if self._drawn is not None:
            # Seconds from the first rollout of the trained samples to the last score of one.
            row["rollouter/generate_sequences_s"] = self._drawn[1] - self._drawn[0]
        drawn, read = after.tokens - before.tokens, after.prefill_tokens - before.prefill_tokens
        busy, slots = after.busy_slot_s - before.busy_slot_s, min(after.slots, usable_slots)
        trained = sum(t.num_tokens for s, _ in self._samples for t in s.trajectories)
        if synced.hold_s is not None:
            row["sync/hold_s"] = synced.hold_s
        return row | {
            # Weight sync: bytes to each replica, seconds of the transfer, and the pause of Synced.
            "sync/bytes": float(synced.transfer.bytes),
            "sync/transfer_s": synced.transfer.seconds,
            "sync/pause_s": synced.pause_s,
            # 1 - (integral of occupied decode slots) / (slots that the schedule can fill), which
            # are min(slots, capacity x n).
            "rollouter/idle_ratio": min(1.0, max(0.0, 1 - share(busy, slots * wall))),
            # Tokens drawn, read into KV caches and trained, per second of this version.
            "rollouter/tokens_per_s": share(drawn, wall),
            "rollouter/prefill_tokens_per_s": share(read, wall),
            # Tokens whose KV was there already, and of idle sessions whose KV had to make room.
            **{
                f"rollouter/{name}_per_s": share(getattr(after, name) - getattr(before, name), wall)
                for name in ("reused_tokens", "evicted_tokens")
                if getattr(after, name)
            },
            "perf/throughput": share(trained, wall),
            "perf/samples_per_s": share(len(self._samples), wall),
        }

    def _training(self) -> dict[str, float]:
        """Return the train engine's metrics by `joined`, and the step count."""
        row: dict[str, float] = {}
        for name in sorted({name for r in self._steps for name in r.metrics}):
            # If all steps of a batch were skipped, its remaining metrics count as one step.
            weighted = [
                (r.metrics[name], max(r.optimizer_steps - r.skipped_steps, 1))
                for r in self._steps
                if name in r.metrics
            ]
            row[name] = joined(name, weighted)
        for name in sorted({name for r in self._steps for name in r.totals}):
            row[name] = sum(r.totals.get(name, 0.0) for r in self._steps)
        return row | {
            "train/optimizer_steps": float(sum(r.optimizer_steps for r in self._steps)),
            "train/samples": float(len(self._samples)),
        }

    def _rewards(self) -> dict[str, float]:
        trajectories = [t for s, _ in self._samples for t in s.trajectories]
        scores = [t.score for t in trajectories if t.score is not None]
        values = [score.value for score in scores]
        lengths = sorted(t.num_tokens for t in trajectories)
        row = {
            # Reward of the trajectories trained in this version, after any shaping.
            "reward/mean": _mean(values),
            "reward/std": statistics.pstdev(values) if values else 0.0,
            # Tokens of a response. clip_ratio is the share that the length limit cut.
            "response_length/mean": _mean(lengths),
            "response_length/max": float(max(lengths, default=0)),
            "response_length/min": float(min(lengths, default=0)),
            **{f"response_length/p{p}": percentile(lengths, p) for p in PERCENTILES},
            "response_length/clip_ratio": share(
                sum(t.stop is Stop.LENGTH for t in trajectories), len(trajectories)
            ),
            "prompt_length/mean": _mean([len(s.prompt.tokens) for s, _ in self._samples]),
        }
        if any(s.prompt.continues is not None or s.goes_on for s, _ in self._samples):
            # Responses are trained in windows: the other figures are of windows.
            ended = [s for s, _ in self._samples if not s.goes_on]
            row["windows/ended_share"] = share(len(ended), len(self._samples))
            if ended:
                of = [len(s.prompt.response_before) + s.trajectories[0].num_tokens for s in ended]
                before = [c.number if (c := s.prompt.continues) else 0 for s in ended]
                row |= {
                    "windows/mean": 1 + _mean(before),
                    "windows/response_length/mean": _mean(of),
                    "windows/response_length/max": float(max(of)),
                }
            else:  # No reward is known. A 0 would be one.
                del row["reward/mean"], row["reward/std"]
        # The named components of the reward.
        for name in sorted({name for score in scores for name in score.extra}):
            parts = [score.extra[name] for score in scores if name in score.extra]
            row[f"reward/{name}/mean"] = _mean(parts)
        # The reward before shaping.
        if any(score.raw is not None for score in scores):
            row["reward/score/mean"] = _mean([score.unshaped for score in scores])
        baselines = [s.greedy.score for s, _ in self._samples if s.greedy is not None]
        # The greedy baseline responses, which no other figure includes.
        if greedy := [score.value for score in baselines if score is not None]:
            row["reward/greedy/mean"] = _mean(greedy)
        return row

    def _agents(self) -> dict[str, float]:
        """Return the figures of agents, from the counts of their sessions. None without agents.

        agents/turns/{mean,max}           turns that are trained, of each episode
        agents/threads/{mean,max}         threads of each episode
        agents/context_tokens/{mean,max}  tokens of others in an episode, its openings included
        agents/ended/REASON               share of the episodes that ended so
        agents/NAME                       any other count: the sum over the episodes

        An episode is a trained trajectory. Names that agents count are in docs/metrics.md.
        """
        counted = [t.counts for s, _ in self._samples for t in s.trajectories if t.counts]
        row: dict[str, float] = {}
        for name in sorted({name for counts in counted for name in counts}):
            values = [counts.get(name, 0.0) for counts in counted]
            if name in _OF_EPISODES:
                row[f"agents/{name}/mean"] = _mean(values)
                row[f"agents/{name}/max"] = max(values)
            elif name.startswith("ended/"):
                row[f"agents/{name}"] = _mean(values)
            else:
                row[f"agents/{name}"] = sum(values)
        return row

    def _staleness(self) -> dict[str, float]:
        """Return the figures of staleness.

        The age of a trajectory is the trained version minus its oldest version. The span is its
        newest minus its oldest version.
        """
        stale, ages, spans = 0, list[int](), list[int]()
        tokens: Counter[tuple[int, int]] = Counter()  # by their age, and by the lag of their KV
        for sample, trained in self._samples:
            oldest = []
            for trajectory in sample.trajectories:
                drawn = [s for s in trajectory.segments if s.author is Author.POLICY and s.tokens]
                versions = [s.version for s in drawn]
                first, last = (min(versions), max(versions)) if versions else (trained, trained)
                oldest += [first] if versions else []
                ages.append(trained - first)
                spans.append(last - first)
                for s in drawn:
                    lag = 0 if s.kv_version is None else s.version - s.kv_version
                    tokens[trained - s.version, lag] += len(s.tokens)
            stale += min(oldest, default=sample.admitted_version) < trained
        partial = sum(span > 0 for span in spans)
        row = {
            # Samples and trajectories with a token older than the trained version.
            "fully_async/count/stale_samples_processed": float(stale),
            "fully_async/count/stale_trajectory_processed": float(sum(age > 0 for age in ages)),
            # Trajectories drawn by more than one version: their number, share and largest span.
            "fully_async/partial/total_partial_num": float(partial),
            "fully_async/partial/partial_ratio": share(partial, len(ages)),
            "fully_async/partial/max_partial_span": float(max(spans, default=0)),
            "staleness/mean": _mean(ages),
            "staleness/max": float(max(ages, default=0)),
        }
        for age, count in sorted(Counter(ages).items()):  # Trajectories of each age.
            row[f"staleness/hist/{age}"] = float(count)
        # The policy's tokens of each age.
        for age in sorted({age for age, _ in tokens}):
            counts = (count for (one, _), count in tokens.items() if one == age)
            row[f"staleness/token_hist/{age}"] = float(sum(counts))
        # Versions between a token and the oldest KV of its context, if any KV was older.
        if any(lag for _, lag in tokens):
            lagging = sum(lag * count for (_, lag), count in tokens.items())
            row["staleness/kv_mean"] = share(lagging, tokens.total())
            row["staleness/kv_max"] = float(max(lag for _, lag in tokens))
        return row


MakeRow = Callable[..., dict[str, float]]
"""VersionMetrics.row without some of its arguments."""


class RunMetrics:
    """A watcher that gathers the figures of each version and of its sync."""

    def __init__(self, now: float, *, shared: bool, sessions: bool) -> None:
        """`shared` says whether both sides share devices. With `sessions`, their states count."""
        names = {"running", "ready", "dropped", "recalled", "published", "transfer", "activate"}
        names |= {"pause", "trainer", "relabelled", "stepped", *(["sessions"] if sessions else [])}
        self.names = frozenset(names)
        self.version = VersionMetrics()
        self._synced = Synced()
        self._sessions = Sessions(now) if sessions else None
        self._time, self._shared = ActorClock(now, "trainer"), shared
        self._started: dict[str, float | None] = {}
        """When the rollouts of each running sample began. None if an earlier attempt drew it."""
        self._drawn: dict[str, tuple[float, float]] = {}
        """Start and end of the rollouts of each finished sample, until it is trained."""
        self._live_since = now
        self._paused_at: float | None = None
        """When the pause of the rollouts began that lasts now."""
        self._idle_since: float | None = now
        """The time since which no sample runs, or the trainer has shared devices. Else None."""

    def begin(self, now: float) -> None:
        """Begin the first version. What was before counts for none."""
        self._time.flush(now)
        self._live_since = now

    def close(self, now: float) -> MakeRow:
        """End the steps and seconds of a version. Return its `row`, and begin the next version."""
        closed, self.version = self.version, VersionMetrics()
        return partial(closed.row, timing=self._time.flush(now))

    def synced_row(self, now: float, row: MakeRow) -> dict[str, float]:
        """Return a row with the figures of the sync that has just ended."""
        synced, self._synced = self._synced, Synced()
        sessions = {} if self._sessions is None else self._sessions.row(now)
        return row(synced=synced) | sessions

    def __call__(self, event: Event) -> None:
        time, track, name, phase, key, facts = event
        if name == "running":
            self._started[key] = time
            self._idle_since = None
        elif name in ("ready", "dropped"):
            start = self._started.pop(key, None)
            if not self._started and self._idle_since is None:
                self._idle_since = time
            if start is not None and name == "ready":
                self._drawn[key] = start, time
        elif name == "recalled":
            if facts["finished"]:
                self._started[key] = None
        elif name == "sessions" and self._sessions is not None:
            self._sessions.change(time, **facts)
        elif track == "trainer" and name != "stepped":
            self._time(event)
            paused = self._paused_at is not None and name not in ("wait_rollouts", "wait_prev_gen")
            if self._shared and paused and self._idle_since is None:
                self._idle_since = time  # The trainer has the devices now.
        elif name == "stepped":
            samples: Sequence[Sample] = facts["samples"]
            self.version.stepped(samples, facts["version"], facts["report"])
            spans = [self._drawn.pop(str(sample.prompt.index), None) for sample in samples]
            for span in spans:
                if span is not None:
                    self.version.drawn(*span)
        elif name == "published":  # it ends the time of the version that was live
            since, self._live_since = self._live_since, time
            idle = time if self._idle_since is None else max(self._idle_since, since)
            self._synced.live = live_row(time - since, idle - since)
        elif name == "pause" and phase == "begin":
            self._paused_at = time
        elif name == "pause" and self._paused_at is not None:
            self._synced.hold_s = None if self._shared else time - self._paused_at
            self._paused_at = None
            if self._started:
                self._idle_since = None
        elif "bytes" in facts:
            self._synced.transfer = TransferReport(facts["bytes"], facts["seconds"])
        elif "pause_s" in facts:
            self._synced.pause_s = facts["pause_s"]


class Sessions:
    """The number of sessions in each state, on average since the last row."""

    def __init__(self, now: float) -> None:
        self._begin = now
        self._numbers = {name: Integral(now) for name in ("drawing", "at_gate", "waiting")}
        """Of those at an engine, at the closed gate, and elsewhere: a tool or the environment."""

    def change(self, now: float, live: int, drawing: int, gate: int) -> None:
        """Count the sessions that live, of these the draws at an engine and those at the gate."""
        # Threads of one session may draw at the same time.
        levels = drawing, gate, max(0, live - drawing - gate)
        for number, level in zip(self._numbers.values(), levels, strict=True):
            number.change(now, level - number.level)

    def row(self, now: float) -> dict[str, float]:
        """Return the averages since the last call."""
        seconds, self._begin = now - self._begin, now
        numbers = self._numbers.items()
        return {f"agents/{name}": share(number.flush(now), seconds) for name, number in numbers}


def joined(name: str, batches: Sequence[tuple[float, float]]) -> float:
    """Return one figure from (value, weight) of several batches: their mean.

    It is the largest value if the name ends in `max` or `max_deviation`, and the smallest if it
    ends in `min`.
    """
    values = [value for value, _ in batches]
    if name.endswith(("_max", "_max_deviation")):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    weight = sum(weight for _, weight in batches)
    return share(sum(value * weight for value, weight in batches), weight)


def percentile(ordered: Sequence[float], p: float) -> float:
    """Return the p-th percentile of ascending values by linear interpolation, 0 if there are none.

    The values are at ranks 0 to n - 1, and the percentile is at rank p / 100 (n - 1). This is the
    default of numpy.percentile.
    """
    if not ordered:
        return 0.0
    rank = p / 100 * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


class RunCounts:
    """The counts of a run so far, over all its attempts. They travel with its checkpoints."""

    _STALE = ("stale_samples_processed", "stale_trajectory_processed")

    def __init__(self, counts: Mapping[str, float] | None = None) -> None:
        """Continue the counts of a checkpoint. Names without a row's figure stay as they are."""
        self._counts = dict.fromkeys(("optimizer_steps", *self._STALE), 0.0) | dict(counts or {})

    @property
    def counts(self) -> dict[str, float]:
        """Return a copy, for a checkpoint."""
        return dict(self._counts)

    @property
    def lr_scale(self) -> float:
        """The factor on the learning rate that a callback has set."""
        return self._counts.get("lr_scale", 1.0)

    @lr_scale.setter
    def lr_scale(self, scale: float) -> None:
        self._counts["lr_scale"] = scale

    def add(self, row: Mapping[str, float]) -> dict[str, float]:
        """Add the counts of a version's row. Return the stale counts of the run by metric."""
        self._counts["optimizer_steps"] += row.get("train/optimizer_steps", 0.0)
        for name in self._STALE:
            self._counts[name] += row.get(f"fully_async/count/{name}", 0.0)
        return {f"fully_async/count/total_{name}": self._counts[name] for name in self._STALE}


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
