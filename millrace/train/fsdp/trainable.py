"""One rank's part of a model: forward passes, gradients in micro-batches, optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from millrace.config import ActorConfig, OptimConfig
from millrace.train.balance import num_sequences
from millrace.train.fsdp.routers import Routers
from millrace.train.fsdp.sharding import Layered, reshard
from millrace.train.layout import Ints
from millrace.train.learner import Learner, LossOf
from millrace.train.metrics import Meter
from millrace.train.muon import make_optimizer
from millrace.train.optim import clip_, gradient_norm, gradients_of
from millrace.train.packing import MicroBatch, Outputs, pack, split
from millrace.train.rows import Rows, rows_of_examples
from millrace.train.ulysses import Division
from millrace.types import tokens_of
from millrace.waits.registry import count, doing

WHOLE_GRADIENT_BYTES = 1 << 30
WARM_UP = tokens_of(range(3))
"""The prompt and the response of a row of the warm-up. Sizes over 1 make a graph for all sizes."""


class Trainable(Learner):
    """The policy, the critic or the reference.

    All ranks make the same calls with the same arguments. `actor` has the token limit of a
    micro-batch. `dtype` is the dtype of forward and backward passes. The ranks of `division` are
    consecutive. They read the same rows, and share their tokens.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        actor: ActorConfig,
        dtype: str,
        division: Division,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(name, actor.optim)
        self.module = module
        self.world_size = world_size
        self.device = device
        self.division = division
        self.data_rank, place = divmod(rank, division.ranks)
        self.counts = place == 0
        """Whether this rank reports the tokens of its micro-batches."""
        self.aux_coef = actor.router_aux_loss_coef
        self.limit = actor.ppo_max_token_len_per_gpu * division.ranks
        # torch's varlen attention supports only half precision on CUDA.
        self.padded = device.type == "cpu" or dtype == "float32"
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        # Small gradients stay whole on each rank, and are summed over ranks once for each
        # mini-batch. Large ones are summed for each micro-batch.
        self.keeps_whole_gradients = (
            4 * sum(p.numel() for p in self.parameters) <= WHOLE_GRADIENT_BYTES
        )
        self.optimizer: torch.optim.AdamW | None = None
        self.routers: Routers | None = getattr(module, "routers", None)

    def begin(self, optim: OptimConfig, horizon: int) -> None:
        super().begin(optim, horizon)
        layers = cast(Layered, self.module).layers()
        self.optimizer = make_optimizer(self.parameters, layers, optim)

    def warm_up(self) -> None:
        """Let torch compile both passes, on a few rows. The weights stay, and no gradient is left."""
        # A long and a short row for each rank. One without rows would compile for one token alone.
        each = self.world_size // self.division.ranks
        rows = rows_of_examples([(WARM_UP, WARM_UP), (WARM_UP, WARM_UP[1:])] * each)
        members = np.arange(2 * each)

        def loss_of(outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Tensor]:
            loss = 0.0 * outputs[0].sum()
            return loss, loss.detach().double().reshape(1)

        with doing(f"compiling the {self.name}"):
            with torch.no_grad():
                for micro, _ in self.micro_batches(rows, members):
                    self.module(micro, 1.0)
            if self.parameters:
                self.accumulate(rows, members, 1.0, loss_of, Meter(("loss",)))
                self.module.zero_grad()
            if isinstance(self.module, FSDPModule):
                reshard(self.module)
            self.router_sums()

    def micro_batches(self, rows: Rows, members: Ints) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield this rank's micro-batches of the rows `members`, and whether each is the last.

        Every rank yields the same number of micro-batches, at least one.
        """
        size = self.world_size // self.division.ranks
        costs = cast(Layered, self.module).attention_length
        shares = split(
            rows, members, max_tokens=self.limit, world_size=size, attention_length=costs
        )
        for i, share in enumerate(shares):
            own = share[self.data_rank]
            micro = pack(rows, own, self.device, padded=self.padded, division=self.division)
            yield micro, i == len(shares) - 1

    def accumulate(
        self, rows: Rows, members: Ints, temperature: float, loss_of: LossOf, meter: Meter
    ) -> None:
        """Compute the gradients of the mini-batch. Each rank reads its own share of the rows.

        The gradients are summed over ranks before the last micro-batch's backward pass ends.
        """
        if self.routers is not None:
            # FSDP averages gradients over ranks, but this loss is a sum too.
            self.routers.balance = self.aux_coef * self.world_size / num_sequences(rows, members)
        for k, (micro, last) in enumerate(self.micro_batches(rows, members), 1):
            if isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(last or not self.keeps_whole_gradients)
                # Several copies of the model need one sum over the copies.
                self.module.set_requires_all_reduce(last)
            with doing(f"forward of micro-batch {k}"):
                outputs: Outputs = self.module(micro, temperature)
                loss, sums = loss_of(outputs, micro)
            # FSDP averages gradients over ranks, but the shares of the loss must be added.
            with doing(f"backward of micro-batch {k}"):
                torch.autograd.backward(loss * self.world_size)
            count("passes")
            if self.counts:
                meter.add(sums, outputs[0].detach(), micro)

    def gradient_norm(self) -> Tensor:
        return gradient_norm(gradients_of(self.parameters))

    def apply(self, lr: float, norm: float) -> None:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        clip_(gradients_of(self.parameters), norm, self.optim.clip_grad)
        self.optimizer.step()

    def clear(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad()

    @torch.no_grad()
    def tokens(
        self,
        rows: Rows,
        members: Ints | None = None,
        *,
        temperature: float,
        record: bool = False,
        **options: bool,
    ) -> list[Tensor]:
        """Return the module's outputs for the trained tokens of `members`, or of all rows if None.

        Each output is [K] float64 on the host, and 0 for the tokens of other rows. Every rank has
        the whole output.
        """
        flats = torch.zeros(0, int(rows.trained_tokens.sum()), dtype=torch.float64)
        routers = self.routers if record else None
        routed = None if routers is None else routers.empty(len(rows.tokens))
        for k, (micro, _) in enumerate(
            self.micro_batches(rows, np.arange(len(rows.starts)) if members is None else members), 1
        ):
            count("passes")
            with doing(f"log-probs of micro-batch {k}"):
                outputs: Outputs = self.module(micro, temperature, **options)
            if not len(flats):
                flats = flats.new_zeros(len(outputs), flats.shape[1])
            if self.counts:
                flats[:, micro.source] = torch.stack([x.double() for x in outputs]).cpu()
            if routers is not None and routed is not None and micro.cells is not None:
                share, (token, position) = micro.layout.share, micro.cells
                own = token // share.own == share.rank
                routed[position[own]] = routers.chosen()[token[own] - share.first]
        if isinstance(self.module, FSDPModule):
            # After a forward pass, gathered weights may stay. They would be stale after a load,
            # and would take memory during sleep.
            reshard(self.module)
        whole = self.reduce(flats.to(self.device), dist.ReduceOp.SUM).cpu()
        if routed is not None:  # Each token is on one rank, and is 0 on the others.
            own = torch.from_numpy(routed).to(self.device)
            self.routed = self.reduce(own, dist.ReduceOp.SUM).cpu().numpy()
        return list(whole)

    def router_sums(self) -> Tensor | None:
        return None if self.routers is None or not self.routers.found else self.routers.take()

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
        self.module._apply(lambda t: copied_to(t, device))  # like nn.Module.to, with pinned memory
        for state in states:
            for key, value in state.items():
                state[key] = copied_to(value, device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`. The copy may still be running at the return.

    Host memory comes from torch's cache of pinned blocks.
    """
    if isinstance(tensor, DTensor):
        # from_local would move the shard back to its mesh's device.
        return DTensor(copied_to(tensor.to_local(), device), tensor._spec, requires_grad=False)
    if tensor.device == device:
        return tensor
    host = device.type == "cpu"
    return torch.empty_like(tensor, device=device, pin_memory=host).copy_(tensor, non_blocking=True)
