"""Searches modes, splits and numbers by simulation, under the memory estimate."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from millrace.config import Config, recipe
from millrace.config.layers import expand, settings_of
from millrace.errors import ConfigError, bad_value
from millrace.extras.plan.costs import Costs
from millrace.extras.plan.fit import identity
from millrace.extras.plan.simulation import Case, Outcome, measured_lengths, simulate
from millrace.observe.files import flat
from millrace.run.memory import estimate, size_of
from millrace.run.train import drawn_lengths
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import OnSync, Schedule

EVALUATIONS = 80
"""Simulations of a search."""
SPLITS = 4
"""Splits that every mode begins with. More of them are neighbours of these."""
BEST = 3
IDLE = 0.1
"""A side that idles less does not wait."""
STALENESS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0)
SAME = 0.01
"""Plans whose seconds differ less are the same. The one with less staleness is first."""

MODE, SLOTS = "mode", "rollout.max_num_seqs"
STALE = "async_training.staleness_threshold"
BATCHES, TRIGGER = (
    f"async_training.{name}" for name in ("require_batches", "trigger_parameter_sync_step")
)
LOOKAHEAD = "async_training.lookahead"
DEVICES = tuple(f"{s}.{k}" for s in ("trainer", "rollout") for k in ("nnodes", "n_gpus_per_node"))


@dataclass(frozen=True, order=True, slots=True)
class Choice:
    """The numbers that a search chooses."""

    mode: str
    trainers: int
    rollouts: int
    slots: int
    staleness: float
    batches: int
    trigger: int
    lookahead: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice, with what its simulation predicts."""

    choice: Choice
    overrides: tuple[str, ...]
    schedule: Schedule
    outcome: Outcome
    memory: dict[str, int]
    """Bytes on a device of each side, by the estimate. Empty if the model's size is unknown."""
    low: float = 0.0
    high: float = 0.0
    """The interval of its seconds."""

    @property
    def gpus(self) -> int:
        both = self.choice.trainers + self.choice.rollouts
        return self.choice.trainers if self.schedule.colocated else both

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of a sample."""
        return self.gpus * self.outcome.seconds / self.schedule.window

    @property
    def constraint(self) -> str:
        """Name the constraint that binds it, in words."""
        o, s = self.outcome, self.schedule
        if s.colocated:
            part = o.wait_s / o.seconds
            return f"turns: rollouts draw {part:.0%} of the time, and the trainer has the rest"
        waits = f"the trainer waits {o.trainer_idle:.0%} of the time"
        idles = f"engines idle {o.rollouts_idle:.0%} of it"
        if o.trainer_idle <= IDLE:
            return f"the trainer: it is busy, and {idles}"
        if not s.staleness_threshold:
            return f"a staleness of 0: each side waits for the other; {waits}, {idles}"
        if s.on_sync is OnSync.DRAIN and o.rollouts_idle > IDLE:
            return f"the drain: each sync waits for the longest response; {waits}, {idles}"
        if o.rollouts_idle > IDLE:
            return f"the slots of the Ledger and the longest responses: {waits}, {idles}"
        return f"the rollouts: engines are busy, and {waits}"


@dataclass
class Search:
    """The search for the best plans of a recipe on a number of GPUs."""

    path: str
    overrides: Sequence[str]
    costs: Costs
    gpus: int
    nodes: int = 1
    max_lag: int | None = None
    """The largest allowed lag_bound. None is no limit."""
    base: Config = field(init=False)
    pinned: dict[str, object] = field(init=False)
    own: tuple[str, ...] = ()
    """The lines of a run's own setting, which no plan repeats."""
    turns: Plan | None = None
    """The best synchronous turns that the search has seen."""
    refused: list[ConfigError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base = recipe.load(self.path, self.overrides)
        layers, *_ = expand([settings_of(self.overrides)])
        self.pinned = dict(flat(layers[0]))
        model, engines = identity(self.base.model, self.base.rollout, self.base.trainer)
        _same("model", self.costs.model, model)
        _same("engines", self.costs.engine, engines)
        if self.gpus % self.nodes:
            rule = f"must divide evenly over {self.nodes} nodes"
            raise bad_value("--gpus", self.gpus, rule, f"a multiple of {self.nodes}")
        if self.base.agents.agent_kind:
            rule = "plays episodes of several turns, which the simulation does not know"
            raise bad_value("RECIPE", self.path, rule, "millrace bench agents")
        if window := self.base.algorithm.tppo.window:
            rule = "cuts responses, which the simulation does not know"
            raise bad_value("algorithm.tppo.window", window, rule, "algorithm.tppo.window=0")
        self._size = size_of(self.base.model)
        self._cases: dict[Choice, tuple[Case, tuple[str, ...], dict[str, int]] | None] = {}

    # -- choices

    def modes(self) -> list[str]:
        return [str(self.pinned[MODE])] if MODE in self.pinned else list(MODES)

    def splits(self, mode: str) -> list[tuple[int, int]]:
        """Return the devices of trainer and rollouts: all splits that nodes and engines allow."""
        found = [(self.gpus, self.gpus)]
        if not MODES[mode].colocated:
            tensor = self.base.rollout.tensor_model_parallel_size
            found = [(t, r) for t in range(1, self.gpus) if (r := self.gpus - t) % tensor == 0]
        return [
            (t, r)
            for t, r in found
            if (devices := self._devices(mode, t))
            and all(self.pinned.get(key, n) == n for key, n in devices.items())
        ]

    def _devices(self, mode: str, trainers: int) -> dict[str, int]:
        """Return the nodes of both sides and their GPUs. It is empty if nodes do not allow it."""
        each, rollouts = self.gpus // self.nodes, self.gpus - trainers
        if MODES[mode].colocated:
            sides = self.nodes, each, self.nodes, each
        elif trainers % self.nodes == 0:
            sides = self.nodes, trainers // self.nodes, self.nodes, rollouts // self.nodes
        elif trainers % each == 0:
            sides = trainers // each, each, rollouts // each, each
        else:
            return {}
        return dict(zip(DEVICES, sides, strict=True))

    def first(self) -> list[Choice]:
        """Return the choices that the search begins with: each mode on a few splits."""
        a, slots = self.base.async_training, self.base.rollout.max_num_seqs
        found = []
        for mode in self.modes():
            fixed, splits = MODES[mode], self.splits(mode)
            some = {round(k * (len(splits) - 1) / (SPLITS - 1)) for k in range(SPLITS)}
            stale = fixed.staleness_threshold
            if stale is None:
                stale = a.staleness_threshold
                if not stale and STALE not in self.pinned:
                    stale = fixed.default_staleness or 0.0
            one = fixed.trigger_parameter_sync_step
            window = a.require_batches * a.trigger_parameter_sync_step
            batches = window if one else a.require_batches
            numbers = {BATCHES: batches, TRIGGER: one or a.trigger_parameter_sync_step}
            if any(self.pinned.get(key, n) != n for key, n in numbers.items()):
                continue  # The mode has no place for a number that the user has set.
            for t, r in [splits[k] for k in sorted(some) if splits]:
                trigger = one or a.trigger_parameter_sync_step
                found.append(Choice(mode, t, r, slots, stale, batches, trigger, a.lookahead))
        return found

    def near(self, c: Choice) -> list[Choice]:
        """Return the choices that differ in one number, which the user has not set."""
        fixed, stale = MODES[c.mode], sorted({*STALENESS, c.staleness})
        found = []
        if SLOTS not in self.pinned:
            found += [replace(c, slots=n) for n in (c.slots * 2, c.slots // 2) if n]
        if fixed.staleness_threshold is None and STALE not in self.pinned:
            at = stale.index(c.staleness)
            found += [replace(c, staleness=s) for s in stale[max(0, at - 1) : at + 2]]
        window = c.batches * c.trigger
        if fixed.trigger_parameter_sync_step is None and not {BATCHES, TRIGGER} & {*self.pinned}:
            found += [
                replace(c, batches=k, trigger=window // k)
                for k in range(1, window + 1)
                if window % k == 0 and k in (1, c.batches * 2, c.batches // 2, window)
            ]
        if fixed.lookahead is None and LOOKAHEAD not in self.pinned and c.staleness:
            wide = math.ceil((1 + c.staleness) * window * self.base.actor.ppo_mini_batch_size)
            found += [replace(c, lookahead=n) for n in (0, wide)]
        splits, at = self.splits(c.mode), 0
        if (c.trainers, c.rollouts) in splits:
            at = splits.index((c.trainers, c.rollouts))
        found += [replace(c, trainers=t, rollouts=r) for t, r in splits[max(0, at - 1) : at + 2]]
        return [one for one in dict.fromkeys(found) if one != c]

    def lines(self, c: Choice) -> tuple[str, ...]:
        """Return the overrides of a choice."""
        devices = self._devices(c.mode, c.trainers)
        numbers = {MODE: c.mode, **devices, SLOTS: c.slots, BATCHES: c.batches, TRIGGER: c.trigger}
        fixed = MODES[c.mode]
        if fixed.staleness_threshold is None:
            numbers[STALE] = f"{c.staleness:g}"
        if fixed.lookahead is None and c.lookahead and c.staleness:
            numbers[LOOKAHEAD] = c.lookahead
        lines = tuple(f"{key}={value}" for key, value in numbers.items())
        if self.own and lines[0] not in self.own:  # another mode resets the lookahead
            return tuple(k for k in lines if k not in self.own or k.startswith(LOOKAHEAD))
        return tuple(line for line in lines if line not in self.own)

    # -- cases

    def case(self, c: Choice) -> tuple[Case, tuple[str, ...], dict[str, int]] | None:
        """Return what to simulate, or None if the configuration, memory or the lag refuse it."""
        if c not in self._cases:
            try:
                self._cases[c] = self.case_of(self.lines(c))
            except ConfigError as error:
                self.refused.append(error)
                self._cases[c] = None
        return self._cases[c]

    def case_of(
        self, lines: tuple[str, ...] = (), end: int = 0
    ) -> tuple[Case, tuple[str, ...], dict[str, int]]:
        """Return what to simulate, the overrides, and the memory. Without overrides, it is the recipe.

        `end` is -1 or 1 for an end of the intervals. Raises ConfigError for what is refused.
        """
        config = recipe.load(self.path, self.overrides, lines)
        schedule, rollout = config.schedule, config.rollout
        if self.max_lag is not None and schedule.lag_bound > self.max_lag:
            rule = f"its lag_bound is {schedule.lag_bound}"
            raise bad_value("--max-lag", self.max_lag, rule, f"--max-lag {schedule.lag_bound}")
        drawn = drawn_lengths(rollout)
        lengths = drawn or measured_lengths(self.costs.lengths, rollout.max_response_length)
        limit = self.costs.device_bytes
        memory = self._memory(config, lengths.median / rollout.max_response_length)
        if limit and (most := max(memory.values(), default=0)) > limit:
            rule = f"needs {most / 2**30:.1f} GiB on a device with {limit / 2**30:.1f}"
            raise bad_value("plan", " ".join(lines), rule, "more GPUs, or fewer slots")
        shared = rollout.serves and rollout.enable_prefix_caching
        read = max(1, round(self.costs.prompt / (rollout.n if shared else 1)))
        cost = self.costs.model_of(
            schedule,
            n=rollout.n,
            trainers=config.trainer.ranks,
            read=read,
            epochs=config.actor.ppo_epochs,
            end=end,
        )
        case = Case(
            schedule=schedule,
            n=rollout.n,
            replicas=rollout.replicas,
            slots=rollout.max_num_seqs,
            cost=cost,
            lengths=lengths,
            prompt=read,
            versions=4,
        )
        return case, lines, memory

    def _memory(self, config: Config, filled: float) -> dict[str, int]:
        """Return the bytes on a device of each side.

        A serving engine's KV cache holds what requests have drawn so far, and not their limit.
        """
        if self._size is None:
            return {}
        parts = estimate(config, self._size, **config.largest_batch)
        rollout = dict(parts["rollout"])
        if config.rollout.serves:
            kv = "KV cache of all sequences"
            rollout[kv] = round(rollout[kv] * min(1.0, 2 * filled))
        trainer, drawn = sum(parts["trainer"].values()), sum(rollout.values())
        if config.schedule.colocated:
            both = max(trainer, drawn) if config.trainer.offload else trainer + drawn
            return {"both": both}
        return {"trainer": trainer, "rollout": drawn}

    # -- the search

    def run(self, jobs: int, progress: Callable[[int, int], None]) -> list[Plan]:
        """Return the best plans, with their intervals. Raises ConfigError if nothing is allowed."""
        found: dict[Choice, Plan] = {}
        if not self.first():
            rule = "leaves no device for one of the sides in the modes and splits that are allowed"
            raise bad_value("--gpus", self.gpus, rule, "more GPUs, or mode=colocate_sync")
        with _Pool(jobs) as simulated:
            wave = self.first()
            while wave and len(found) < EVALUATIONS:
                allowed = [(c, one) for c in wave if (one := self.case(c)) is not None]
                allowed = allowed[: EVALUATIONS - len(found)]
                outcomes = simulated([one[0] for _, one in allowed])
                for (c, (case, lines, memory)), outcome in zip(allowed, outcomes, strict=False):
                    found[c] = Plan(c, lines, case.schedule, outcome, memory)
                    progress(len(found), EVALUATIONS + 2 * BEST)
                if not found:
                    raise self.refused[-1]
                around = [
                    n for p in self.ranked(found.values())[:BEST] for n in self.near(p.choice)
                ]
                wave = [c for c in dict.fromkeys(around) if c not in self._cases]
            kinds: dict[tuple[str, int], Plan] = {}
            for plan in self.ranked(found.values()):
                kinds.setdefault((plan.choice.mode, plan.choice.trainers), plan)
            best = list(kinds.values())[:BEST]
            ends = [self.case_of(p.overrides, end)[0] for p, end in product(best, (-1, 1))]
            seconds = []
            for outcome in simulated(ends):
                seconds.append(outcome.seconds)
                progress(EVALUATIONS + len(seconds), EVALUATIONS + 2 * BEST)
        self.turns = min(
            (p for p in found.values() if p.schedule.colocated and not p.choice.staleness),
            key=lambda p: p.outcome.seconds,
            default=None,
        )
        pairs = zip(best, seconds[::2], seconds[1::2], strict=True)
        return [replace(p, low=min(low, high), high=max(low, high)) for p, low, high in pairs]

    def ranked(self, plans: Iterable[Plan]) -> list[Plan]:
        """Return plans, the least GPU-seconds of a sample first. Equal ones come by their lag."""
        return sorted(
            plans,
            key=lambda p: (
                round(math.log(p.gpu_s) / SAME),
                p.schedule.lag_bound,
                p.choice.slots,
                p.gpu_s,
            ),
        )


class _Pool:
    """Simulates cases in order, in several processes, or in this one."""

    def __init__(self, jobs: int) -> None:
        self._pool = multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else None

    def __enter__(self) -> Callable[[Sequence[Case]], Iterator[Outcome]]:
        return self._pool_map if self._pool is not None else lambda cases: map(simulate, cases)

    def _pool_map(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        assert self._pool is not None
        return self._pool.imap(simulate, cases)

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.terminate()


def _same(what: str, costs: str, wanted: str) -> None:
    if costs != wanted:
        rule = f"has costs of the {what} {costs}, and the recipe has {wanted}"
        raise bad_value("--costs", costs, rule, "millrace calibrate on runs of this recipe")
