"""A run and its faults, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from millrace.config import Config, RewardConfig, recipe
from millrace.config.packaged import packaged
from millrace.schedule.modes import MODES
from millrace.simulate.cost import CostModel

DEADLINE_S = 60.0
"""trainer.wait_deadline_s of every simulated run."""
SYNC_TIMEOUT_S = 20.0
"""sync.timeout_s of every simulated run."""
HEARTBEAT_S = 1.0
"""rollout.heartbeat_s of every simulated run."""
SHORT_S = 5.0
"""A disturbance of at most this time must not end an attempt."""
GONE_S = 12.0
"""How long a node is away. The last replica waits for it."""
LONG_S = 500.0
"""After a disturbance of this time, a worker is lost."""

_SAMPLER = "millrace.extras.faults.checks:pick"
_REPLICA = (
    *("engine.generate", "engine.interrupt", "engine.stats", "engine.sleep", "engine.wake"),
    *("receiver.transfer", "receiver.activate"),
)
_RANK = (
    *("engine.begin", "engine.step", "engine.save", "engine.saved", "engine.load"),
    *("engine.sleep", "engine.wake", "sender.transfer", "sender.keep", "sender.sent"),
)


class Trigger(NamedTuple):
    """The moment of a fault within its attempt."""

    on: str
    """"time", "disk", "event", or a method of the fault's worker."""
    at: float
    """Seconds, or which of the changes, events or calls."""

    def __str__(self) -> str:
        return f"at {self.at:.2f} s" if self.on == "time" else f"at {self.on} {self.at:g}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It fires at most once."""

    kind: str
    attempt: int
    """The attempt at the run in which it fires, from 0."""
    trigger: Trigger
    target: str = ""
    """A worker's name, if the fault is about one."""
    seconds: float = 0.0

    @property
    def survivable(self) -> bool:
        """Whether the attempt must not end by it, if lost ranks are recovered."""
        return KINDS[self.kind].survivable

    @property
    def takes_ranks(self) -> bool:
        """Whether the trainer may be lost by it."""
        long = self.kind in ("rank_dies", "sender_hangs") or self.seconds > SHORT_S
        return long and self.target.startswith("trainer")

    @property
    def loses(self) -> bool:
        """Whether a replica may be lost by it."""
        silent = self.kind.startswith(("replica_", "partition", "node_"))
        return silent and self.target.startswith("rollout")

    def __str__(self) -> str:
        whose = f" of {self.target}" if self.target else ""
        length = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.kind}{whose}{length}, attempt {self.attempt + 1} {self.trigger}"


class Kind(NamedTuple):
    """The targets that a kind of fault may have."""

    target: str = ""
    """"replica", "rank", "worker", or "" for none."""
    lengths: tuple[float, ...] = ()
    survivable: bool = False
    triggers: tuple[str, ...] = ()
    """Besides times and calls of the target."""


_LENGTHS = (1.0, SHORT_S, LONG_S)
_SHORT = (1.0, SHORT_S)

KINDS: dict[str, Kind] = {
    "replica_dies": Kind("replica", survivable=True),
    "replica_freezes": Kind("replica", _LENGTHS, True),
    "replica_stands_still": Kind("replica", _LENGTHS, True),
    "rank_dies": Kind("rank", survivable=True),
    "rank_freezes": Kind("rank", _LENGTHS, True),
    "link_delays": Kind("worker", _SHORT, True),
    "link_duplicates": Kind("worker", _SHORT, True),
    "link_reorders": Kind("worker", _SHORT, True),
    "partition": Kind("worker", _LENGTHS, True),
    "partition_up": Kind("worker", _LENGTHS, True),
    "partition_down": Kind("worker", _LENGTHS, True),
    "sync_breaks": Kind("worker", survivable=True),
    "weights_damaged": Kind(),
    "swap_lost": Kind("replica"),
    "reward_fails": Kind(survivable=True),
    "reward_hangs": Kind(lengths=_SHORT, survivable=True),
    "disk_full": Kind(lengths=_SHORT, triggers=("disk",)),
    "disk_errors": Kind(lengths=_SHORT, triggers=("disk",)),
    "disk_slow": Kind(lengths=_SHORT, survivable=True),
    "checkpoint_rots": Kind(triggers=("event",)),
    "journal_rots": Kind(triggers=("event",)),
    "driver_dies": Kind(triggers=("disk", "event", "event")),
    "power_cut": Kind(triggers=("disk", "disk", "event")),
    "stop": Kind(triggers=("event",)),
    "scale_up": Kind(survivable=True),
    "scale_down": Kind(survivable=True),
    "node_leaves": Kind("replica", (3.0, 3.0, GONE_S), True),
    "rank_stands_still": Kind("rank", _LENGTHS, True),
    "sender_hangs": Kind("rank", survivable=True),
}
"""Every kind of fault, and the wishes of a user for more or fewer replicas."""
_SCALES = ("scale_up", "scale_down")
_MORE = ("node_leaves", "rank_stands_still")
_NEWEST = ("sender_hangs",)
"""Like _MORE, kinds with dice of their own. So the other faults of a seed stay as they are."""
_DRAWN = tuple(kind for kind in KINDS if kind not in (*_SCALES, *_MORE, *_NEWEST))

_OF_RANKS = ("rank_dies", "rank_dies", "rank_freezes", "partition_up", "stop", "replica_dies")
"""The kinds of faults in every fourth world, where the trainer is lost in the middle of its work."""
_IN_WORK = ("engine.step", "engine.step", "engine.save", "sender.transfer", "sender.keep")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run and its faults."""

    seed: int
    mode: str
    config: Config
    cost: CostModel
    ranks: int
    replicas: int
    slots: int
    write_s: float
    """Seconds in which a rank writes its part of a checkpoint."""
    start_s: float
    """Seconds in which a lost replica's new worker starts."""
    faults: tuple[Fault, ...]

    @property
    def samples(self) -> int:
        return int(self.config.rollout.total_rollout_steps or 0)


@cache
def _base() -> Config:
    return recipe.load(
        packaged()["quickstart"],
        [
            *("sft.steps=0", "guard.enable=false", "trainer.logger=[]", "trainer.save_last=true"),
            f"trainer.wait_deadline_s={DEADLINE_S}",
            f"sync.timeout_s={SYNC_TIMEOUT_S}",
            f"rollout.heartbeat_s={HEARTBEAT_S}",
            "rollout.val_kwargs.greedy=false",
        ],
    )


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    dice = random.Random(seed)
    loses_ranks = seed % 4 == 3
    mode, overlap = dice.choice(tuple(MODES)), dice.random() < (0.9 if loses_ranks else 0.3)
    config = _config(dice, mode, overlap)
    config = config.model_copy(update={"reward": _policy(random.Random(f"reward {seed}"))})
    if random.Random(f"sampler {seed}").random() < 0.3:
        data = config.data.model_copy(update={"sampler": _SAMPLER})
        config = config.model_copy(update={"data": data})
    window, algorithm = random.Random(f"window {seed}"), config.algorithm
    plain = not (config.data.sampler or algorithm.filter_groups.enable)
    if plain and window.random() < 0.3:
        tppo = algorithm.tppo.model_copy(update={"window": window.choice((5, 16, 30))})
        algorithm = algorithm.model_copy(update={"tppo": tppo})
        alone = config.rollout.model_copy(update={"n": 1})
        config = config.model_copy(update={"algorithm": algorithm, "rollout": alone})
    ranks, replicas = dice.choice((1, 1, 2)), dice.choice((1, 2, 2, 3))
    cost = CostModel(
        token_s=dice.choice((0.005, 0.01, 0.03)),
        train_token_s=dice.choice((0.0002, 0.001)),
        transfer_s=dice.choice((0.05, 0.3, 1.0)),
        pause_s=dice.choice((0.01, 0.1)),
        switch_s=0.1,
        reward_s=dice.choice((0.0, 0.2)),
    )
    count = dice.choice((0, 1, 1, 2, 2, 3, 4)) + loses_ranks
    kinds = _OF_RANKS if loses_ranks else _DRAWN
    faults = tuple(_fault(dice, k, ranks, replicas, kinds) for k in range(count))
    separate = not config.schedule.colocated
    if separate:
        faults += _scales(random.Random(f"scale {seed}"))
    more = random.Random(f"more {seed}")
    if more.random() < 0.2 and (separate or more.random() < 0.5):
        kinds = _MORE if separate else ("rank_stands_still",)
        faults += (_fault(more, 0, ranks, replicas, kinds),)
    newest = random.Random(f"newest {seed}")
    if newest.random() < 0.1:
        faults += (_fault(newest, 0, ranks, replicas, _NEWEST),)
    slots, write_s = dice.choice((3, 8, 64)), dice.choice((0.0, 0.1, 1.0))
    start_s = dice.choice((0.2, 2.0, 8.0))
    seconds = write_s, start_s
    return Scenario(seed, mode, config, cost, ranks, replicas, slots, *seconds, faults)


def _scales(dice: random.Random) -> tuple[Fault, ...]:
    """Return the moments at which a user asks for another number of replicas, in some worlds."""
    count = dice.choice((0, 0, 0, 0, 1, 2, 3))
    moments = [(dice.choice((0, 0, 1)), dice.uniform(0.0, 10.0)) for _ in range(count)]
    return tuple(Fault(dice.choice(_SCALES), k, Trigger("time", at)) for k, at in moments)


def _policy(dice: random.Random) -> RewardConfig:
    """Return what happens to a score that fails: its sample is dropped, or the run, or neither."""
    policy = {"retries": dice.choice((0, 0, 4)), "max_error_share": dice.choice((0.2, 0.2, 0.0))}
    return _base().reward.model_copy(update=policy)


def _config(dice: random.Random, mode: str, overlap: bool) -> Config:
    base = _base()
    below: dict[str, Any] = {
        "staleness_threshold": dice.choice((0.5, 1.0, 2.0)),
        "trigger_parameter_sync_step": dice.choice((1, 2)),
        "require_batches": dice.choice((1, 1, 2)),
        "lookahead": dice.choice((0, 1)),
    }
    keys = MODES[mode].over(below) | {"lookahead": below["lookahead"]}
    free = keys["placement"] == "separate" and keys["staleness_threshold"] > 0
    keys["overlap_sync"] = overlap and free
    mini = dice.choice((1, 2, 2))
    window = mini * keys["require_batches"] * keys["trigger_parameter_sync_step"]
    samples = window * dice.choice((2, 3, 4)) + dice.choice((0, 0, 1, mini))
    groups = base.algorithm.filter_groups.model_copy(
        update={"enable": dice.random() < 0.3, "metric": "score", "max_num_gen_batches": 0}
    )
    sections = {
        "async_training": base.async_training.model_copy(update=keys),
        "actor": base.actor.model_copy(update={"ppo_mini_batch_size": mini}),
        "algorithm": base.algorithm.model_copy(update={"filter_groups": groups}),
        "rollout": base.rollout.model_copy(
            update={
                "n": 2,
                "total_rollout_steps": samples,
                "max_response_length": 80,
                "test_freq": dice.choice((0, 1, 2)),
            }
        ),
        "trainer": base.trainer.model_copy(
            update={
                "save_freq": dice.choice((0, 1, 1, 2, 3)),
                "async_save": dice.random() < 0.5,
                "stop_grace_s": dice.choice((0.0, 1.0, 20.0)),
                "max_ckpt_to_keep": dice.choice((1, 2)),
                "val_before_train": dice.random() < 0.3,
            }
        ),
    }
    return base.model_copy(update=sections)


def _fault(
    dice: random.Random, number: int, ranks: int, replicas: int, kinds: tuple[str, ...]
) -> Fault:
    kind = dice.choice(kinds)
    can = KINDS[kind]
    role = dice.choice(("replica", "rank")) if can.target == "worker" else can.target
    target = ""
    ways: list[Callable[[], Trigger]] = [lambda: Trigger("time", round(dice.uniform(0.0, 6.0), 3))]
    if role:
        some = ranks if role == "rank" else replicas
        target = f"{'trainer' if role == 'rank' else 'rollout'}-{dice.randrange(some)}"
        calls = _REPLICA if role == "replica" else _IN_WORK if kinds is _OF_RANKS else _RANK
        ways.append(lambda: Trigger(dice.choice(calls), dice.choice((1, 1, 2, 3, 5))))
    for on in can.triggers:
        most = 60 if on == "disk" else 150
        ways.append(lambda on=on, most=most: Trigger(on, dice.randint(1, most)))  # type: ignore[misc]
    trigger = dice.choice(ways)()
    seconds = dice.choice(can.lengths) if can.lengths else 0.0
    attempt = 0 if kind.startswith("rank_") else dice.randint(0, number)
    return Fault(kind, attempt, trigger, target, seconds)
