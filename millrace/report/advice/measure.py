"""The figures of a steady part of a run that advice reads, from the files of the run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.config import Config
from millrace.observe.timing import GEN, IDLE, TOTALS
from millrace.persist.accounts import Line
from millrace.persist.run_reader import RunReader
from millrace.report.accounts.pace import StepCost, step_costs
from millrace.schedule.schedule import Schedule
from millrace.schedule.steady import counted

Rows = Mapping[int, Mapping[str, float]]
"""The rows of metrics.jsonl, by version."""

MOST_VERSIONS = 60
"""The newest versions show how a decode step grows."""


ALWAYS = 0.9
"""Share of the time from which on a reward worker is busy all the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The numbers of a configuration that advice reads."""

    schedule: Schedule
    n: int
    """Trajectories of each sample."""
    trainers: int
    """Devices of the trainer."""
    rollouts: int
    """Devices of the rollouts. On shared devices, the same devices as the trainer's."""
    replicas: int
    slots: int
    """Decode slots of all replicas."""
    reward_workers: int = 0
    """Processes that compute the reward. 0 means that their number is no limit."""
    test_freq: int = 0
    test_key: str = "trainer.test_freq"
    """The key that sets it."""
    save_freq: int = 0
    async_save: bool = True
    trainer_node: int = 0
    """Devices of a node of the trainer, if it has several nodes. Else 0."""
    rollout_node: int = 0
    share_cores: bool = False
    """Whether the devices are processes on the cores of one CPU: more of them compute no more."""

    def override(self, side: str, devices: int) -> str:
        """Return the override that gives a side this number of devices."""
        node = self.trainer_node if side == "trainer" else self.rollout_node
        return f"{side}.nnodes={devices // node}" if node else f"{side}.n_gpus_per_node={devices}"

    @property
    def step(self) -> int:
        """Return the least number of devices that can change sides."""
        replica = self.rollouts // self.replicas
        return max(1, self.trainer_node, self.rollout_node, replica)

    @property
    def usable_slots(self) -> int:
        """Return the decode slots that the Schedule can fill."""
        return min(self.slots, self.schedule.capacity * self.n)

    @property
    def devices(self) -> int:
        return self.trainers if self.schedule.colocated else self.trainers + self.rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Totals over the counted versions of a run."""

    setup: Setup
    versions: int
    seconds: float
    trainer: dict[str, float]
    """The trainer's seconds by part. They add up to `seconds`."""
    held: dict[str, float]
    """Sample-seconds in each state of the Ledger."""
    samples: int
    """Samples that were trained."""
    busy_slot_s: float
    """Seconds of decode slots that drew tokens."""
    drawn_tokens: float
    read_tokens: float
    """Tokens that engines read into KV caches: prompts, and interrupted responses."""
    reused_tokens: float = 0.0
    """Tokens of contexts whose KV was there already. They are not in `read_tokens`."""
    agents: bool = False
    """Whether the responses are those of agents, with several turns."""
    prompt_tokens: float
    """Tokens of the prompts, once for each response of a trained or dropped sample."""
    trained_tokens: float
    """Tokens of the responses that were trained."""
    dropped_tokens: dict[str, float] = field(default_factory=dict)
    """Tokens of dropped samples, by reason."""
    request_s: float = 0.0
    """Seconds of all requests inside an engine, the wait for a decode slot included."""
    tool_s: float = 0.0
    """Seconds in which sessions waited for tools and environments."""
    score_s: float = 0.0
    """Seconds of all calls of the reward, the wait for a worker included."""
    reward_wait_s: float = 0.0
    """Mean seconds in which a replica's devices wait for nothing but rewards."""
    scores: float = 0.0
    """Calls of the reward."""
    any_score_s: float = 0.0
    """Seconds with at least one call of the reward."""
    hold_s: float = 0.0
    """Seconds in which rollouts were paused for a sync."""
    mean_length: float = 1.0
    """Mean length of the responses, in tokens."""
    longest_of_n: float = 1.0
    """Mean length of the longest response of a sample, from the percentiles of the lengths."""
    longest: float = 0.0
    """Mean over versions of the longest response, in tokens."""
    more_ready: int = 0
    """Change of the stock of finished samples that wait for the trainer."""
    more_running: int = 0
    """Change of the number of samples that are under way."""
    step_cost: StepCost | None = None
    """The cost that explains the drawn tokens best. None if the loads were alike."""
    flat_cost: StepCost | None = None
    """The flattest cost that is likely. At few requests its steps are the longest."""

    @property
    def rate(self) -> float:
        """Return the samples that were trained per second."""
        return self.samples / self.seconds

    @property
    def version_s(self) -> float:
        return self.seconds / self.versions

    def each(self, *parts: str) -> float:
        """Return the seconds of parts of the trainer's time in each version."""
        return sum(self.trainer.get(part, 0.0) for part in parts) / self.versions

    @property
    def trainer_idle(self) -> float:
        return self.each(*IDLE) / self.version_s

    @property
    def starved(self) -> float:
        """Return the share of the time in which the trainer waits for samples."""
        return self.each(*GEN) / self.version_s

    @property
    def rewards_bind(self) -> bool:
        """Whether every reward worker is busy all the time.

        Many calls that wait for a moment are a burst: the worker has nothing to do between bursts.
        """
        workers = self.setup.reward_workers
        always = self.any_score_s >= ALWAYS * self.seconds
        return always and 0 < workers <= self.score_s / self.seconds

    @property
    def busy_slots(self) -> float:
        """Return the mean number of decode slots that draw."""
        return self.busy_slot_s / self.seconds

    @property
    def rollouts_idle(self) -> float:
        return max(0.0, 1 - self.busy_slots / self.setup.usable_slots)

    def mean(self, *states: str) -> float:
        """Return the mean number of samples in these states."""
        return sum(self.held.get(state, 0.0) for state in states) / self.seconds

    @property
    def stock_share(self) -> float:
        """Return the change of the stock of finished samples, as a share of the trained ones."""
        return self.more_ready / max(1, self.samples)

    @property
    def read_again(self) -> float:
        """Return the tokens that engines read once more, for each drawn token.

        A token is read or found in a cache once for each response that needs it. Of the contexts beyond
        the prompts, the same share was read as of all contexts. This is too little, because a response
        is never in a cache. Prompts of validations count too, and nothing shows how many they are. Turns
        of agents read long contexts without a sync, so the result for agents is 0.
        """
        if self.agents:
            return 0.0
        contexts = self.read_tokens + self.reused_tokens
        further = max(0.0, contexts - self.prompt_tokens)
        return further * self.read_tokens / max(1.0, contexts) / max(1.0, self.drawn_tokens)

    @property
    def drop_share(self) -> float:
        """Return the share of dropped tokens among those of finished samples."""
        dropped = sum(self.dropped_tokens.values())
        return dropped / max(1.0, dropped + self.trained_tokens)


def setup_of(config: Config) -> Setup:
    """Return the numbers of a configuration that advice reads."""
    parts = config.reward.parts.values()
    trainer, rollout = config.trainer, config.rollout
    limited = [part for part in parts if part.kind == "function"]
    return Setup(
        schedule=config.schedule,
        n=rollout.n,
        trainers=trainer.ranks,
        rollouts=rollout.devices,
        replicas=rollout.replicas,
        slots=rollout.replicas * rollout.max_num_seqs,
        reward_workers=limited[0].num_workers if len(limited) == len(parts) == 1 else 0,
        test_freq=config.test_freq,
        test_key="trainer.test_freq" if trainer.test_freq else "rollout.test_freq",
        save_freq=trainer.save_freq,
        async_save=trainer.async_save,
        trainer_node=trainer.n_gpus_per_node if trainer.nnodes > 1 else 0,
        rollout_node=rollout.n_gpus_per_node if rollout.nnodes > 1 else 0,
    )


def measure(run: RunReader) -> Measured | None:
    """Return the figures of a run so far, or None if it has too few versions."""
    if run.config is None or not run.accounts:
        return None
    setup = setup_of(run.config)
    # Advice divides by these.
    positive = ("perf/time_per_version", "train/samples")
    rows = {
        version: row
        for version, row in run.rows.items()
        if "rollouter/idle_ratio" in row and all(0 < row.get(name, 0) < 1e15 for name in positive)
    }
    return measured_of(setup, rows, run.attempt, steady_versions(setup.schedule, rows, run.attempt))


def steady_versions(schedule: Schedule, rows: Rows, attempt: Sequence[Line]) -> range:
    """Return the versions of an attempt in which the pipeline neither fills nor drains.

    They count from 0, at the start of the attempt. An attempt that runs does not drain yet.
    """
    start = attempt[0].version
    samples = sum(int(row["train/samples"]) for v, row in rows.items() if v > start)
    drained = attempt[-1].samples and not sum(attempt[-1].samples.values())
    ahead = 0 if drained else schedule.capacity
    steps = counted(samples + ahead, 1, schedule)
    have = sum(v > start for v in rows)
    return range(steps.start, min(steps.stop, have))


def measured_of(
    setup: Setup, rows: Rows, attempt: Sequence[Line], versions: range
) -> Measured | None:
    """Return the figures of these versions, which count from 0 at the start of the attempt.

    Return None if a row or a line of accounts of one of them is missing.
    """
    start = attempt[0].version if attempt else 0
    lines = {line.version: line for line in attempt}
    chosen = [rows.get(start + k + 1) for k in versions]
    used = [row for row in chosen if row is not None]
    ends = start + versions.start, start + versions.stop
    if not used or len(used) < len(chosen) or not all(end in lines for end in ends):
        return None
    setup = replace(setup, share_cores=lines[ends[1]].share_cores)
    return _totals(setup, used, lines[ends[0]], lines[ends[1]], _step_costs(rows, attempt))


def _totals(
    setup: Setup,
    rows: Sequence[Mapping[str, float]],
    before: Line,
    after: Line,
    costs: tuple[StepCost, StepCost] | None,
) -> Measured:
    """Return the figures of these rows. The lines are the accounts at both ends."""

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows)

    def over_time(name: str) -> float:
        return sum((row.get(name) or 0.0) * row["perf/time_per_version"] for row in rows)

    seconds = total("perf/time_per_version")
    # A row ends a moment after its line.
    scale = seconds / max(1e-9, after.seconds - before.seconds)
    timings = {name for row in rows for name in row if name.startswith("timing_s/")}
    timing = {name.removeprefix("timing_s/"): total(name) for name in timings}
    tokens = {
        name: max(0, count - before.tokens.get(name, 0)) for name, count in after.tokens.items()
    }
    trained = sum(tokens.get(name, 0) for name in ("trained", "rejected", "filtered"))
    start = "dropped/"
    dropped = {k.removeprefix(start): float(v) for k, v in tokens.items() if k.startswith(start)}
    states = {state: after.slots[state] - before.slots.get(state, 0.0) for state in after.slots}

    return Measured(
        setup=setup,
        versions=len(rows),
        seconds=seconds,
        trainer={name: value for name, value in timing.items() if name not in TOTALS},
        held={state: value * scale for state, value in states.items()},
        samples=int(total("train/samples")),
        busy_slot_s=setup.usable_slots * (seconds - over_time("rollouter/idle_ratio")),
        drawn_tokens=over_time("rollouter/tokens_per_s"),
        read_tokens=over_time("rollouter/prefill_tokens_per_s"),
        reused_tokens=over_time("rollouter/reused_tokens_per_s"),
        agents=any("agents/turns/mean" in row for row in rows),
        prompt_tokens=setup.n
        * sum((row.get("prompt_length/mean") or 0.0) * row["train/samples"] for row in rows)
        * (1 + sum(dropped.values()) / max(1, trained)),
        trained_tokens=trained,
        dropped_tokens=dropped,
        request_s=(after.requests.seconds - before.requests.seconds) * scale,
        tool_s=over_time("agents/waiting"),
        score_s=(after.scores.seconds - before.scores.seconds) * scale,
        reward_wait_s=_seconds_of(after, "wait_rewards") - _seconds_of(before, "wait_rewards"),
        scores=after.scores.count - before.scores.count,
        any_score_s=(after.scores.busy - before.scores.busy) * scale,
        hold_s=total("sync/hold_s"),
        mean_length=total("response_length/mean") / len(rows),
        longest_of_n=sum(_longest(row, setup.n) for row in rows) / len(rows),
        longest=total("response_length/max") / len(rows),
        more_ready=_more(before, after, "ready"),
        more_running=_more(before, after, "waiting", "running"),
        step_cost=costs[0] if costs else None,
        flat_cost=costs[1] if costs else None,
    )


def _more(before: Line, after: Line, *states: str) -> int:
    """Return how many more samples are in these states than before."""
    return sum(after.samples.get(s, 0) - before.samples.get(s, 0) for s in states)


def _seconds_of(line: Line, state: str) -> float:
    """Return the mean seconds of this state over the tracks that draw."""
    found = [d.seconds.get(state, 0.0) for track, d in line.devices.items() if track != "trainer"]
    return sum(found) / len(found) if found else 0.0


def _longest(row: Mapping[str, float], n: int) -> float:
    """Return the mean length of the longest of n responses, from the percentiles of a row.

    For a tail that falls exponentially, it is the quantile 1 - 0.56 / n.
    """
    names = ("mean", "p50", "p90", "p99", "max")
    mean, *lengths = (row.get(f"response_length/{name}") or 0.0 for name in names)
    return mean if n == 1 else float(np.interp(1 - 0.56 / n, (0.5, 0.9, 0.99, 1.0), lengths))


def _step_costs(rows: Rows, attempt: Sequence[Line]) -> tuple[StepCost, StepCost] | None:
    """Return what a decode step costs. All versions of the attempt count: their loads differ."""
    versions = []
    for before, after in itertools.pairwise(attempt):
        row = rows.get(after.version)
        if row is None or after.version != before.version + 1:
            continue
        loads = {
            name: [new - old for new, old in zip(bin_, before.loads.get(name, (0, 0)), strict=True)]
            for name, bin_ in after.loads.items()
        }
        tokens = (row.get("rollouter/tokens_per_s") or 0.0) * row["perf/time_per_version"]
        versions.append((loads, tokens))
    return step_costs(versions[-MOST_VERSIONS:])
