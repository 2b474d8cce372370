"""Which replicas take part in the weight sync: the groups of one end, generation by generation.

The driver numbers the generations. At each new one, every end leaves its old groups and meets the
others in the store. A member that arrives after its generation was formed is left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from millrace.errors import SyncError
from millrace.sync.groups import Group, Listener, make_group
from millrace.sync.options import SyncOptions
from millrace.waits.registry import Wait, doing, waiting

_POLL_S = 0.005
_LEAVE_S = 10.0
"""How long a thread may need to end its work on a group that is closed."""


class MemberInfo(msgspec.Struct):
    """The data that a member publishes at the rendezvous."""

    sockets: list[tuple[str, int]]
    lacks_base: bool


class Membership:
    """The groups of one end: one with each trainer rank that sends."""

    def __init__(
        self, store: Any, agreed: SyncOptions, wire: torch.device, senders: Sequence[int], me: str
    ) -> None:
        """`senders` are the ranks with which this end shares a group. `me` is its name."""
        self.using = threading.RLock()
        """Held by the thread that works on the groups."""
        self.groups: dict[int, Group] = {}
        """The groups by the rank that sends."""
        # A client of its own: a wait of one thread blocks all other threads on the same client.
        self._store, self._agreed, self._wire = store.clone(), agreed, wire
        self._senders, self.me = senders, me
        self._generation = -1

    def leave(self) -> None:
        """Close the groups, and wait until no thread works on them."""
        for group in self.groups.values():
            group.close()
        with doing("the end of a transfer that broke off"):
            ended = self.using.acquire(timeout=_LEAVE_S)
        if not ended:
            raise SyncError(f"{self.me}: a transfer goes on though its group is closed")
        self.groups = {}
        self.using.release()

    def join(self, generation: int, members: Sequence[int], *, lacks_base: bool = False) -> bool:
        """Leave the old groups, and join those of `generation` with the replicas `members`.

        Blocks until all ends are there. Returns whether one of them lacks the base of a policy with
        adapters. Raises SyncError, with the names of those who did not come, at sync.timeout_s.
        """
        devices = self._agreed.devices
        receivers = [replica_name(i, s, devices) for i in members for s in range(devices)]
        groups = {r: [rank_name(r), *receivers] for r in self._senders} if members else {}
        return self.exchange(generation, groups, lacks_base=lacks_base)

    def exchange(
        self, generation: int, groups: Mapping[int, Sequence[str]], *, lacks_base: bool = False
    ) -> bool:
        """Leave the old groups, and join `groups`: the names of their ends, the sender first."""
        if generation < self._generation:
            raise self._superseded(generation)
        self._generation = generation
        self.leave()
        if not groups:
            return False
        door = Listener.open(self._wire)
        everyone = list(dict.fromkeys(name for names in groups.values() for name in names))
        here = self._meet(generation, everyone, MemberInfo(door.sockets, lacks_base))
        sockets = [address for one in here for address in one.sockets]
        made = {
            r: make_group(
                self._store.clone(),
                f"{generation}/{r}",
                self._wire,
                names.index(self.me),
                len(names),
                self._agreed.timeout_s,
                door,
                sockets,
            )
            for r, names in groups.items()
        }
        if self._generation != generation:
            for group in made.values():
                group.close()
            raise self._superseded(generation)
        self.groups = made
        return any(one.lacks_base for one in here)

    def _meet(self, generation: int, names: Sequence[str], own: MemberInfo) -> list[MemberInfo]:
        """Tell the others that this end is here, and return what all of them tell."""
        store, where = self._store, f"millrace/sync/{generation}/here"
        store.set(f"{where}/{self.me}", msgspec.json.encode(own))
        limit_s = self._agreed.timeout_s
        end = time.monotonic() + limit_s
        for name in names:
            with _comes(name, generation):
                while not store.check([f"{where}/{name}"]):
                    if self._generation != generation:
                        raise self._superseded(generation)
                    if time.monotonic() > end:
                        absent = [n for n in names if not store.check([f"{where}/{n}"])]
                        raise SyncError(
                            f"{self.me} met the other ends of the weight sync, but "
                            f"{', '.join(absent)} did not come within sync.timeout_s = {limit_s:g}"
                        )
                    time.sleep(_POLL_S)
        return [msgspec.json.decode(store.get(f"{where}/{n}"), type=MemberInfo) for n in names]

    def _superseded(self, generation: int) -> SyncError:
        return SyncError(
            f"{self.me}: the groups of generation {generation} were given up for "
            f"generation {self._generation}"
        )


def _comes(name: str, generation: int) -> Wait:
    """Register the wait for another end to come to its meeting."""
    *_, number = name.partition(" (")[0].split()
    process = f"trainer-{number}" if name == rank_name(int(number)) else f"rollout-{number}"
    return waiting(process, "meeting", "the weight sync", generation)


def rank_name(rank: int) -> str:
    """Return the name of a trainer rank at a meeting."""
    return f"trainer rank {rank}"


def replica_name(replica: int, shard: int, devices: int) -> str:
    """Return the name of one device of a replica at a meeting."""
    return f"replica {replica}" + (f" (device {shard})" if devices > 1 else "")
