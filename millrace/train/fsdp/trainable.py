"""One rank's part of a model: forward passes, gradients in micro-batches, optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from millrace.config import ActorConfig, OptimConfig
from millrace.errors import MillraceError
from millrace.train.layout import Ints
from millrace.train.metrics import Meter
from millrace.train.optim import adamw, clip_, gradient_norm, gradients_of, lr_at
from millrace.train.packing import MicroBatch, Outputs, pack, split
from millrace.train.rows import Rows

MAX_NONFINITE_STEPS = 3
"""The run fails after this number of steps in a row without a finite loss and gradient."""

WHOLE_GRADIENT_BYTES = 1 << 30

LossOf = Callable[[Outputs, MicroBatch], tuple[Tensor, Tensor]]
"""(outputs, micro-batch) -> its share of the loss, and the meter's sums [S] float64."""


class Trainable:
    """The policy, the critic or the reference.

    All ranks make the same calls with the same arguments. `actor` has the token limit of a
    micro-batch. `dtype` is the dtype of forward and backward passes.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        actor: ActorConfig,
        dtype: str,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.name = name
        self.module = module
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.limit = actor.ppo_max_token_len_per_gpu
        # torch's varlen attention supports only half precision on CUDA.
        self.padded = device.type == "cpu" or dtype == "float32"
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        # Small gradients stay whole on each rank, and are summed over ranks once for each
        # mini-batch. Large ones are summed for each micro-batch.
        self.keeps_whole_gradients = (
            4 * sum(p.numel() for p in self.parameters) <= WHOLE_GRADIENT_BYTES
        )
        self.optim = actor.optim
        self.horizon = 1
        self.optimizer: torch.optim.AdamW | None = None
        self.steps = 0
        """Optimizer steps since `begin`, skipped ones included. The LR schedule uses this count."""
        self.nonfinite_in_a_row = 0

    def begin(self, optim: OptimConfig, horizon: int) -> None:
        """Start a new AdamW and LR schedule for `horizon` optimizer steps. Keep the weights."""
        self.optim, self.horizon, self.steps, self.nonfinite_in_a_row = optim, horizon, 0, 0
        self.optimizer = adamw(self.parameters, optim)

    def micro_batches(self, rows: Rows, members: Ints) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield this rank's micro-batches of the rows `members`, and whether each is the last.

        Every rank yields the same number of micro-batches, at least one.
        """
        shares = split(rows, members, max_tokens=self.limit, world_size=self.world_size)
        for i, share in enumerate(shares):
            yield (
                pack(rows, share[self.rank], self.device, padded=self.padded),
                i == len(shares) - 1,
            )

    def accumulate(
        self, rows: Rows, members: Ints, temperature: float, loss_of: LossOf, meter: Meter
    ) -> None:
        """Compute the gradients of the mini-batch. Each rank reads its own share of the rows.

        The gradients are summed over ranks before the last micro-batch's backward pass ends.
        """
        for micro, last in self.micro_batches(rows, members):
            if isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(last or not self.keeps_whole_gradients)
                # Several copies of the model need one sum over the copies.
                self.module.set_requires_all_reduce(last)
            outputs: Outputs = self.module(micro, temperature)
            loss, sums = loss_of(outputs, micro)
            # FSDP averages gradients over ranks, but the shares of the loss must be added.
            torch.autograd.backward(loss * self.world_size)
            meter.add(sums, outputs[0].detach(), micro)

    def train_on(
        self,
        rows: Rows,
        members: Ints,
        temperature: float,
        loss_of: LossOf | None,
        meter: Meter,
        *,
        first_pass: bool,
    ) -> None:
        """Take one optimizer step on the rows `members`.

        A step without a loss counts for the LR schedule, and does not change weights and moments.
        """
        if loss_of is None:
            self.steps += 1
            meter.empty += 1
            return
        self.accumulate(rows, members, temperature, loss_of, meter)
        self.optimizer_step(meter, first_pass=first_pass)

    def optimizer_step(self, meter: Meter, *, first_pass: bool) -> None:
        """Clip the gradients and step, or skip the step if the loss or the norm is not finite.

        The loss and the norm are global, so all ranks decide alike. Raises MillraceError before
        `begin`, and after MAX_NONFINITE_STEPS steps in a row without a finite loss and gradient.
        """
        if self.optimizer is None:
            raise MillraceError(
                "the train engine has no optimizer. "
                "Fix: call begin(optim, horizon) before the first step"
            )
        lr = lr_at(self.optim, self.horizon, self.steps)
        gradients = gradients_of(self.parameters)
        sums = self.reduce(meter.take(), dist.ReduceOp.SUM)
        # This is the only place in an optimizer step where the host waits for the device.
        *values, norm = torch.cat([sums, gradient_norm(gradients).to(sums).reshape(1)]).tolist()
        self.steps += 1
        if math.isfinite(norm) and math.isfinite(values[0]):
            self.nonfinite_in_a_row = 0
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            clip_(gradients, norm, self.optim.clip_grad)
            self.optimizer.step()
            meter.finish(values, norm, lr, first_pass=first_pass)
        else:
            self.nonfinite_in_a_row += 1
            meter.skip_nonfinite()
        self.optimizer.zero_grad()
        if self.nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
            raise MillraceError(
                f"{MAX_NONFINITE_STEPS} optimizer steps in a row had a loss of the {self.name} "
                f"or a gradient that is not finite (the last: loss {values[0]}, norm {norm}). "
                f"Fix: a lower {self.name}.optim.lr, or model.dtype=float32"
            )

    @torch.no_grad()
    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float, **options: bool
    ) -> list[Tensor]:
        """Return the module's outputs for the trained tokens of `members`, or of all rows if None.

        Each output is [K] float64 on the host, and 0 for the tokens of other rows. Every rank has
        the whole output.
        """
        flats: list[Tensor] = []
        for micro, _ in self.micro_batches(
            rows, np.arange(len(rows.starts)) if members is None else members
        ):
            outputs: Outputs = self.module(micro, temperature, **options)
            flats = flats or [torch.zeros(len(rows.versions), dtype=torch.float64) for _ in outputs]
            for flat, output in zip(flats, outputs, strict=True):
                flat[micro.source] = output.double().cpu()
        if isinstance(self.module, FSDPModule):
            # After a forward pass, the root's weights stay gathered. They would be stale after a
            # load, and would take memory during sleep.
            self.module.reshard()
        whole = self.reduce(torch.stack(flats).to(self.device), dist.ReduceOp.SUM).cpu()
        return list(whole)

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Combine `value` over all ranks, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(value, op)
        return value

    def move(self, device: torch.device) -> None:
        """Move weights and moments to the host, or back to the device.

        Host memory is pinned, so copies run at the speed of the link.
        """
        states = list((self.optimizer.state if self.optimizer else {}).values())
        self.module._apply(lambda t: moved(t, device))  # like nn.Module.to, with pinned memory
        for state in states:
            for key, value in state.items():
                state[key] = moved(value, device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`. The copy may still be running at the return.

    Host memory comes from torch's cache of pinned blocks.
    """
    if isinstance(tensor, DTensor):
        # from_local would move the shard back to its mesh's device.
        return DTensor(moved(tensor.to_local(), device), tensor._spec, requires_grad=False)
    if tensor.device == device:
        return tensor
    host = device.type == "cpu"
    return torch.empty_like(tensor, device=device, pin_memory=host).copy_(tensor, non_blocking=True)
