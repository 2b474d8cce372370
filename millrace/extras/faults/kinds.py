"""The kinds of faults and their effects on an attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from millrace.extras.faults.attempt import Attempt
from millrace.extras.faults.disk import Died
from millrace.extras.faults.network import Link
from millrace.extras.faults.scenario import Fault


def _later(seconds: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _dies(attempt: Attempt, fault: Fault) -> None:
    attempt.workers[fault.target].kill()


def _freezes(*ways: int) -> Callable[[Attempt, Fault], None]:
    def act(attempt: Attempt, fault: Fault) -> None:
        attempt.workers[fault.target].link.stall(_now() + fault.seconds, *ways)

    return act


def _stands_still(attempt: Attempt, fault: Fault) -> None:
    attempt.workers[fault.target].root.engine.stand_still(fault.seconds)


def _link(change: Callable[[Link, bool], None]) -> Callable[[Attempt, Fault], None]:
    def act(attempt: Attempt, fault: Fault) -> None:
        link = attempt.workers[fault.target].link
        change(link, True)
        _later(fault.seconds, lambda: change(link, False))

    return act


def _delays(link: Link, begin: bool) -> None:
    link.delay_s = 0.5 if begin else 0.0


def _duplicates(link: Link, begin: bool) -> None:
    link.duplicates = 0.5 if begin else 0.0


def _reorders(link: Link, begin: bool) -> None:
    link.delay_s, link.ordered = (0.2, False) if begin else (0.0, True)


def _breaks(attempt: Attempt, fault: Fault) -> None:
    attempt.wires[-1].break_off(fault.target)


def _hangs(attempt: Attempt, fault: Fault) -> None:
    attempt.workers[fault.target].root.sender.hangs = True


def _damages(attempt: Attempt, fault: Fault) -> None:
    attempt.wires[-1].damage = True


def _loses_swap(attempt: Attempt, fault: Fault) -> None:
    attempt.workers[fault.target].root.receiver.skips = True


def _reward_fails(attempt: Attempt, fault: Fault) -> None:
    attempt.world.fails(2)
    attempt.reward.failures = 2


def _reward_hangs(attempt: Attempt, fault: Fault) -> None:
    attempt.world.fails(1)
    attempt.reward.hangs_s = fault.seconds


def _disk(name: str) -> Callable[[Attempt, Fault], None]:
    def act(attempt: Attempt, fault: Fault) -> None:
        disk = attempt.world.disk
        attempt.world.rough = True
        setattr(disk, name, True)
        _later(fault.seconds, lambda: setattr(disk, name, False))

    return act


def _slow_disk(attempt: Attempt, fault: Fault) -> None:
    end, loop = _now() + fault.seconds, asyncio.get_running_loop()
    loop.thread_s = lambda: max(0.001, end - _now())  # type: ignore[attr-defined]


def _rots(attempt: Attempt, fault: Fault) -> None:
    attempt.world.rots = True
    _kills(attempt, fault)


def _rots_journal(attempt: Attempt, fault: Fault) -> None:
    attempt.world.journal_rots = True
    _kills(attempt, fault)


def _kills(attempt: Attempt, fault: Fault) -> None:
    attempt.kill()
    if fault.trigger.on == "event":
        raise Died


def _cuts_power(attempt: Attempt, fault: Fault) -> None:
    attempt.world.cut = True
    _kills(attempt, fault)


def _stops(attempt: Attempt, fault: Fault) -> None:
    attempt.stopped = True
    attempt.expect_no_recovery()
    attempt.stop.request()


def _scales(more: int) -> Callable[[Attempt, Fault], None]:
    def act(attempt: Attempt, fault: Fault) -> None:
        attempt.scale(more)

    return act


def _node_leaves(attempt: Attempt, fault: Fault) -> None:
    attempt.node_leaves(fault.target, fault.seconds)


ACTS: Mapping[str, Callable[[Attempt, Fault], None]] = {
    "replica_dies": _dies,
    "replica_freezes": _freezes(),
    "replica_stands_still": _stands_still,
    "rank_dies": _dies,
    "rank_freezes": _freezes(),
    "link_delays": _link(_delays),
    "link_duplicates": _link(_duplicates),
    "link_reorders": _link(_reorders),
    "partition": _freezes(),
    "partition_up": _freezes(1),
    "partition_down": _freezes(0),
    "sync_breaks": _breaks,
    "weights_damaged": _damages,
    "swap_lost": _loses_swap,
    "reward_fails": _reward_fails,
    "reward_hangs": _reward_hangs,
    "disk_full": _disk("full"),
    "disk_errors": _disk("broken"),
    "disk_slow": _slow_disk,
    "checkpoint_rots": _rots,
    "journal_rots": _rots_journal,
    "driver_dies": _kills,
    "power_cut": _cuts_power,
    "stop": _stops,
    "scale_up": _scales(1),
    "scale_down": _scales(-1),
    "node_leaves": _node_leaves,
    "rank_stands_still": _stands_still,
    "sender_hangs": _hangs,
}
