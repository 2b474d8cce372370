"""The writer of train states to disk: at once, or from a copy while training continues."""

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

from millrace.errors import CheckpointError, DiskError
from millrace.sync.background import Background
from millrace.train.chunks import Chunks


class StateWriter:
    """The writer of one rank.

    All ranks make the same calls in the same order. At most one state is written at a time. The
    ranks agree on their shares over a separate process group, not over that of a step.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._writing = Background("state-writer")

    def write(self, state: dict[str, Any], folder: str) -> None:
        """Write `state` to `folder`. The state must not change before this returns.

        Raises CheckpointError, with the causes, if a rank fails: DiskError if a disk refused.
        """
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
        """Wait until nothing is being written. Raises CheckpointError if a write failed."""
        await self._writing.wait()

    def _prepare(self) -> None:
        """Create the process group and filter a warning, before a thread writes.

        All ranks must create groups in one order, and warning filters are global.
        """
        expect_one_process()
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def _write(self, state: dict[str, Any], folder: str) -> None:
        try:
            save_checkpoint(
                state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None
            )
        except CheckpointException as error:
            # CheckpointException is a BaseException. It would end a worker without a message to the
            # driver.
            causes = "; ".join(
                f"rank {rank}: {_text_of(e)}" for rank, (e, _) in sorted(error.failures.items())
            )
            refused = all(_is_of_disk(e) for e, _ in error.failures.values())
            kind = DiskError if refused else CheckpointError
            fix = ". Fix: a disk with free space that works, then trainer.resume=auto"
            text = f"{folder} was not written: {causes}{fix if refused else ''}"
            raise kind(text) from error


def _is_of_disk(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, OSError) or _is_of_disk(error.__context__))


def _text_of(error: BaseException) -> str:
    """Return the text of an error, followed by the text of its context.

    The context is needed: on a full disk, torch's own error reports only an unexpected position.
    """
    text = f"{type(error).__name__}: {error}"
    if error.__context__ is None:
        return text
    return f"{text}, after {_text_of(error.__context__)}"


def expect_one_process() -> None:
    """Silence torch's warning about a missing process group. A single rank needs none."""
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
    )


def on_host(value: Any) -> Any:
    """Return a copy of a state in host memory.

    Copies from a GPU go into pinned memory, at the speed of the link. They may still be running at
    the return.
    """
    if isinstance(value, dict):
        return {key: on_host(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_host(part) for part in value)
    if isinstance(value, Chunks):
        return Chunks(tuple(value.shape), on_host(value.parts))
    if isinstance(value, DTensor):
        # from_local would move the copy back to its mesh's device.
        return DTensor(on_host(value.to_local()), value._spec, requires_grad=False)
    if isinstance(value, Tensor):
        return torch.empty_like(
            value, device="cpu", pin_memory=value.is_cuda, requires_grad=False
        ).copy_(value.detach(), non_blocking=True)
    return value
