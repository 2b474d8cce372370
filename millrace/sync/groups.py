"""Process groups of the weight sync, apart from the default one: gloo on CPUs, NCCL on GPUs.

What breaks off is a SyncError with gloo. With NCCL a peer that is gone shows at the timeout (`sync.timeout_s`), when NCCL's watchdog ends
this process: a lost worker, whose log says so.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.errors import SyncError


def make_group(
    store: Any, name: str, device: torch.device, rank: int, size: int, timeout_s: float
) -> Any:
    """The group `name`, for tensors on `device`. Blocks until all are there."""
    own, timeout = dist.PrefixStore(f"millrace/sync/{name}", store), timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(own, rank, size, options)
    return dist.ProcessGroupGloo(own, rank, size, timeout)


def start_broadcast(group: Any, tensor: Tensor) -> Any:
    """From the group's first rank. `finish` it before the tensor is read or written."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        return group.broadcast([tensor], options)
    except RuntimeError as error:
        raise _broken_off(error) from error


def finish(work: Any) -> None:
    """Until it is done: with NCCL, for what is queued on the device from here on."""
    try:
        work.wait()
    except RuntimeError as error:
        raise _broken_off(error) from error


def broadcast(group: Any, tensor: Tensor) -> None:
    finish(start_broadcast(group, tensor))


def start_send(group: Any, tensor: Tensor, to: int) -> Any:
    """`finish` it, sometime: it ends when the other side receives. The tensor must stay until then."""
    try:
        return group.send([tensor], to, 0)
    except RuntimeError as error:
        raise _broken_off(error) from error


def receive(group: Any, tensor: Tensor, of: int) -> Tensor:
    """Fills `tensor`."""
    try:
        group.recv([tensor], of, 0).wait()
    except RuntimeError as error:
        raise _broken_off(error) from error
    return tensor


def wait_for_device(device: torch.device) -> None:
    """Until all that was queued on the current stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _broken_off(error: RuntimeError) -> SyncError:
    return SyncError(f"a weight transfer broke off: {error}")
