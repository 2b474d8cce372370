"""Writes train states to disk: at once, or from a copy while training goes on."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor

from millrace.errors import CheckpointError
from millrace.sync.background import Background


class StateWriter:
    """One rank's. All ranks make the same calls in the same order; at most one state is on its way.

    Ranks agree on who writes what over a group of their own, so that what they say there never meets the collectives of a step.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._writing = Background("state-writer")

    def write(self, state: dict[str, Any], folder: str) -> None:
        """Return once `state` is in `folder`; nothing may change it until then. Raises CheckpointError, saying why it is not."""
        self._prepare()
        self._write(state, folder)

    def start(self, state: dict[str, Any], folder: str) -> None:
        """Copy `state` to the host, and write the copy in a thread."""
        self._prepare()
        copy = on_host(state)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._writing.start(self._write, copy, folder)

    async def done(self) -> None:
        """Until nothing is being written. Raises CheckpointError if what was started failed."""
        await self._writing.wait()

    def _prepare(self) -> None:
        """What must not happen in the thread: groups are made by all ranks in one order, and warnings' filters are global."""
        expect_one_process()
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def _write(self, state: dict[str, Any], folder: str) -> None:
        try:
            save_checkpoint(
                state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None
            )
        except (
            CheckpointException
        ) as error:  # no Exception: it would end a worker without a word to the driver
            causes = "; ".join(
                f"rank {rank}: {_told(e)}" for rank, (e, _) in sorted(error.failures.items())
            )
            raise CheckpointError(f"{folder} was not written: {causes}") from error


def _told(error: BaseException) -> str:
    """With what came before it: of a full disk torch says that it found an unexpected position."""
    told = f"{type(error).__name__}: {error}"
    return f"{told}, after {_told(error.__context__)}" if error.__context__ is not None else told


def expect_one_process() -> None:
    """torch warns of a missing process group on every save and load; one rank needs none."""
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
    )


def on_host(value: Any) -> Any:
    """A copy of a state in host memory. What comes from a GPU may still be on its way: into pinned memory, at the link's speed."""
    if isinstance(value, dict):
        return {key: on_host(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_host(part) for part in value)
    if isinstance(value, DTensor):
        # Not from_local: it would take the copy back to its mesh's device.
        return DTensor(on_host(value.to_local()), value._spec, requires_grad=False)
    if isinstance(value, Tensor):
        return torch.empty_like(
            value, device="cpu", pin_memory=value.is_cuda, requires_grad=False
        ).copy_(value.detach(), non_blocking=True)
    return value
