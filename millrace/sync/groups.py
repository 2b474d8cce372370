"""Process groups of the weight sync, separate from the default one: gloo on CPUs, NCCL on GPUs.

Any end can close a group at any time. Operations under way then raise BrokenTransfer within a
second, whatever the other ends do. A dead peer alone is not enough: gloo waits for its timeout
if the peer dies in the middle of a message, and so does NCCL.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.errors import BrokenTransfer
from millrace.types import PolicyVersion
from millrace.waits.registry import Wait, count, waiting

LAST = 99_999
"""The number of a sender's checksums, after all of its buckets."""

_POLL = timedelta(seconds=0.2)
_CLEAN_UP_ONLY = "2"
"""The value of TORCH_NCCL_ASYNC_ERROR_HANDLING that aborts a broken group, not the process."""

Address = tuple[str, int]
_opening = threading.Lock()
_abandoned: list[Group] = []
"""Closed groups with operations under way. gloo would wait for them on deletion."""


class Group:
    """One process group. `sockets` are the addresses at which its gloo ends listen."""

    def __init__(self, ends: Any, sockets: Iterable[Address] = ()) -> None:
        self.ends = ends
        self.closed = False
        self._sockets = frozenset(sockets)
        self._works: list[Any] = []

    def start(self, work: Any) -> Operation:
        """Return the operation of a work that was just started."""
        if isinstance(self.ends, dist.ProcessGroupGloo):  # NCCL would ask the GPU about each one.
            self._works = [w for w in self._works if not w.is_completed()] + [work]
        return Operation(self, work)

    def close(self) -> None:
        """Leave the group. Operations under way raise BrokenTransfer."""
        if self.closed:
            return
        self.closed = True
        if isinstance(self.ends, dist.ProcessGroupGloo):
            _shut_down(self._sockets)
            _abandoned[:] = [group for group in _abandoned if group.busy()]
            if self.busy():
                _abandoned.append(self)
        else:
            self.ends.abort()

    def busy(self) -> bool:
        """Return whether an operation of gloo is under way."""
        return not all(work.is_completed() for work in self._works)

    def check(self) -> None:
        """Raise BrokenTransfer if the group is closed.

        An aborted NCCL operation ends like one that succeeded.
        """
        if self.closed:
            raise BrokenTransfer("a weight transfer broke off: this end left the group")


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a group that was started."""

    group: Group
    work: Any


@dataclass(slots=True)
class Listener:
    """The place at which an end of gloo groups listens."""

    devices: list[Any] = field(default_factory=list)
    sockets: list[Address] = field(default_factory=list)

    @classmethod
    def open(cls, wire: torch.device) -> Listener:
        """Listen on the interfaces in GLOO_SOCKET_IFNAME. NCCL needs no door."""
        if wire.type == "cuda":
            return cls()
        make, names = dist.ProcessGroupGloo.create_device, os.environ.get("GLOO_SOCKET_IFNAME")
        with _opening:
            before = set(_listeners())
            devices = (
                [make(interface=name) for name in names.split(",")]
                if names
                else [dist.ProcessGroupGloo.create_default_device()]
            )
            return cls(devices, sorted(set(_listeners()) - before))


def make_group(
    store: Any,
    name: str,
    wire: torch.device,
    rank: int,
    size: int,
    timeout_s: float,
    door: Listener | None = None,
    sockets: Iterable[Address] = (),
) -> Group:
    """Create the group `name` for tensors on `wire`. Blocks until all ranks have joined.

    `sockets` are those of all doors.
    """
    own, timeout = dist.PrefixStore(f"millrace/sync/{name}", store), timedelta(seconds=timeout_s)
    if wire.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # Engines decode and verify during a transfer. It must not wait for their kernels to end.
        options.is_high_priority_stream = True
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", _CLEAN_UP_ONLY):
            return Group(dist.ProcessGroupNCCL(own, rank, size, options))
    door = door or Listener.open(wire)
    kind: Any = dist.ProcessGroupGloo
    gloo = kind._Options()
    gloo._timeout, gloo._devices = timeout, door.devices
    try:
        return Group(kind(own, rank, size, gloo), {*sockets, *door.sockets})
    except RuntimeError as error:
        raise BrokenTransfer(f"a group of the weight sync did not come about: {error}") from error


def member(whom: str, rank: int, version: PolicyVersion, bucket: int) -> Wait:
    """Register the wait for a broadcast of trainer rank `rank`, in which all take part."""
    count("buckets")
    what = "checksums" if bucket == LAST else f"bucket {bucket + 1}"
    name, number = f"{what} of version {version}", version * 10 * LAST + bucket
    return waiting(whom, name, f"the weight sync of trainer rank {rank}", number)


def start_broadcast(group: Group, tensor: Tensor) -> Operation:
    """Start a broadcast from the group's first rank. Call `finish` before using the tensor."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.check()
    try:
        return group.start(group.ends.broadcast([tensor], options))
    except RuntimeError as error:
        raise _broken_off(error) from error


def finish(operation: Operation) -> None:
    """Wait for an operation's end. With NCCL, only later work on the device's stream waits."""
    group, work = operation.group, operation.work
    limits = (_POLL,) if isinstance(group.ends, dist.ProcessGroupGloo) else ()
    while True:
        ended = work.is_completed() or not limits
        try:
            work.wait(*limits)
            return
        except RuntimeError as error:
            group.check()
            # An operation may end well just after its wait timed out. The next wait tells.
            if ended:
                raise _broken_off(error) from error


def broadcast(group: Group, tensor: Tensor) -> None:
    finish(start_broadcast(group, tensor))


def all_agree(group: Group, yes: bool, wire: torch.device) -> bool:
    """Return whether all ranks of the group said yes."""
    no, options = torch.tensor([not yes], dtype=torch.int64, device=wire), dist.AllreduceOptions()
    group.check()
    try:
        finish(group.start(group.ends.allreduce([no], options)))
    except RuntimeError as error:
        raise _broken_off(error) from error
    noes = int(no)
    group.check()
    return not noes


def start_send(group: Group, tensor: Tensor, to: int) -> Any:
    """Start a send, and return the work to `finish_send`. It ends when the other side receives.

    The tensor must not change until then.
    """
    group.check()
    try:
        return group.ends.send([tensor], to, 0)
    except RuntimeError as error:
        raise _broken_off(error) from error


def finish_send(work: Any) -> None:
    """Wait for the end of a send."""
    try:
        work.wait()
    except RuntimeError as error:
        raise _broken_off(error) from error


def receive(group: Group, tensor: Tensor, of: int) -> Tensor:
    """Fill `tensor` with a message from rank `of`, and return it."""
    group.check()
    try:
        group.ends.recv([tensor], of, 0).wait()
    except RuntimeError as error:
        raise _broken_off(error) from error
    return tensor


def wait_for_device(device: torch.device) -> None:
    """Wait for all work that is queued on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _listeners() -> Iterator[Address]:
    for found in psutil.Process().net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN:
            yield found.laddr.ip, found.laddr.port


def _shut_down(sockets: frozenset[Address]) -> None:
    """End every connection of this process from or to one of `sockets`.

    gloo has no abort. A thread that waits for data on such a connection raises at once.
    """
    for found in psutil.Process().net_connections("tcp"):
        if found.raddr and {(*found.laddr,), (*found.raddr,)} & sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as one:
                # gloo may have closed it, and another file may have its number now.
                if one.getsockname()[:2] == found.laddr and one.getpeername()[:2] == found.raddr:
                    one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a block, unless the user has set it."""
    own = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if own:
            del os.environ[name]


def _broken_off(error: RuntimeError) -> BrokenTransfer:
    return BrokenTransfer(f"a weight transfer broke off: {error}")
