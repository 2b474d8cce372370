"""Process groups of the weight sync, separate from the default one: gloo on CPUs, NCCL on GPUs.

With gloo, an interrupted transfer raises SyncError. With NCCL, a missing peer is detected at the
timeout (`sync.timeout_s`). NCCL's watchdog then ends this process. The run reports a dead worker,
and the worker's log has the cause.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.errors import SyncError
from millrace.types import PolicyVersion
from millrace.waits.registry import Wait, count, waiting

LAST = 99_999
"""The number of a sender's checksums, after all of its buckets."""


def make_group(
    store: Any, name: str, device: torch.device, rank: int, size: int, timeout_s: float
) -> Any:
    """Create the group `name` for tensors on `device`. Blocks until all ranks have joined."""
    own, timeout = dist.PrefixStore(f"millrace/sync/{name}", store), timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(own, rank, size, options)
    return dist.ProcessGroupGloo(own, rank, size, timeout)


def member(whom: str, rank: int, version: PolicyVersion, bucket: int) -> Wait:
    """Register the wait for a broadcast of trainer rank `rank`, in which all take part."""
    count("buckets")
    what = "checksums" if bucket == LAST else f"bucket {bucket + 1}"
    name, number = f"{what} of version {version}", version * 10 * LAST + bucket
    return waiting(whom, name, f"the weight sync of trainer rank {rank}", number)


def start_broadcast(group: Any, tensor: Tensor) -> Any:
    """Start a broadcast from the group's first rank. Call `finish` before using the tensor."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        return group.broadcast([tensor], options)
    except RuntimeError as error:
        raise _broken_off(error) from error


def finish(work: Any) -> None:
    """Wait for the end of `work`. With NCCL, only later work on the device's stream waits."""
    try:
        work.wait()
    except RuntimeError as error:
        raise _broken_off(error) from error


def broadcast(group: Any, tensor: Tensor) -> None:
    finish(start_broadcast(group, tensor))


def start_send(group: Any, tensor: Tensor, to: int) -> Any:
    """Start a send, and return the work to `finish`. It ends when the other side receives.

    The tensor must not change until then.
    """
    try:
        return group.send([tensor], to, 0)
    except RuntimeError as error:
        raise _broken_off(error) from error


def receive(group: Any, tensor: Tensor, of: int) -> Tensor:
    """Fill `tensor` with a message from rank `of`, and return it."""
    try:
        group.recv([tensor], of, 0).wait()
    except RuntimeError as error:
        raise _broken_off(error) from error
    return tensor


def wait_for_device(device: torch.device) -> None:
    """Wait for all work that is queued on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _broken_off(error: RuntimeError) -> SyncError:
    return SyncError(f"a weight transfer broke off: {error}")
