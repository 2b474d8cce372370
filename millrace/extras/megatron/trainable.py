"""One rank's part of a Megatron policy: passes over micro-batches, and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from millrace.config import ActorConfig, MegatronConfig, OptimConfig
from millrace.extras.megatron.modules import Policy
from millrace.extras.megatron.shape import Shape
from millrace.train.balance import num_sequences
from millrace.train.layout import Ints
from millrace.train.learner import Learner, LossOf
from millrace.train.metrics import Meter
from millrace.train.optim import clip_, gradients_of
from millrace.train.packing import MicroBatch, Outputs, pack, split
from millrace.train.routing import Routed
from millrace.train.rows import Rows
from millrace.train.ulysses import Division
from millrace.waits.registry import count, doing

NO_TOKENS = torch.zeros((), dtype=torch.int)
"""Megatron asks for the tokens of a loss, and divides by none: our losses are shares."""


class ForwardRunner:
    """Forward passes of a policy over micro-batches, with and without gradients.

    Ranks of tensor, context and pipeline parallelism read the same rows, and ranks of data
    parallelism read different ones. Each token counts on one rank of the last stage.
    """

    def __init__(
        self, policy: Policy, actor: ActorConfig, shape: Shape, rank: int, device: torch.device
    ) -> None:
        self.policy = policy
        self.routed: Routed | None = None
        self.chunk: Any = Float16Module(policy.config, policy) if policy.config.bf16 else policy
        """What Megatron runs: the policy in its wrappers."""
        self.shape, self.device = shape, device
        self.place = place = shape.place(rank)
        self.limit = actor.ppo_max_token_len_per_gpu * shape.context
        group = parallel_state.get_context_parallel_group() if shape.context > 1 else None
        self.division = Division(group, shape.multiple)
        self.padded = device.type == "cpu" or not policy.config.bf16
        self.counts = policy.post_process and place.tensor == 0 and place.context == 0
        """Whether this rank reports the tokens of its micro-batches."""

    def micro_batches(self, rows: Rows, members: Ints) -> list[MicroBatch]:
        """Return this rank's micro-batches of the rows `members`, equally many on every rank."""
        place, costs = self.place, self.policy.attention_length
        shares = split(
            *(rows, members),
            max_tokens=self.limit,
            world_size=self.shape.data,
            attention_length=costs,
        )
        return [
            pack(rows, s[place.data], self.device, padded=self.padded, division=self.division)
            for s in shares
        ]

    def run(
        self,
        micros: list[MicroBatch],
        temperature: float,
        loss_of: Callable[[Outputs, MicroBatch], Tensor],
        *,
        forward_only: bool,
        **options: bool,
    ) -> None:
        """Run all micro-batches through all stages. `loss_of` is called on the last stage."""

        self.policy.routers.counts = not forward_only

        def forward(batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
            micro = next(batches)
            count("passes")

            def loss(outputs: Outputs) -> tuple[Tensor, Tensor, None]:
                return loss_of(outputs, micro), NO_TOKENS, None

            return model(micro, temperature, **options), loss

        with doing(f"the passes of {len(micros)} micro-batches"):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micros),
                model=[self.chunk],
                num_microbatches=len(micros),
                seq_length=1,  # micro-batches have sizes of their own
                micro_batch_size=1,
                forward_only=forward_only,
            )

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
        routers = self.policy.routers
        routers.record = routers.empty(len(rows.tokens)) if record else None
        number = 3 if options.get("squares") else 2
        flat = torch.zeros(number, len(rows.versions), dtype=torch.float64)

        def keep(outputs: Outputs, micro: MicroBatch) -> Tensor:
            if self.counts:
                flat[:, micro.source] = torch.stack(outputs).double().cpu()
            return torch.zeros((), device=self.device)

        every = np.arange(len(rows.starts)) if members is None else members
        self.run(
            self.micro_batches(rows, every), temperature, keep, forward_only=True, **options
        )  # fmt: skip
        if routers.record is not None:  # Each token and layer is on one rank, and else 0.
            own = torch.from_numpy(routers.record).to(self.device)
            self.routed = self.reduce(own, dist.ReduceOp.SUM).cpu().numpy()
            routers.record = None
        return list(self.reduce(flat.to(self.device), dist.ReduceOp.SUM).cpu())

    def router_sums(self) -> Tensor | None:
        return self.policy.routers.take()

    @torch.no_grad()
    def start_from(self, policy: Policy) -> None:
        """Become the reference of a policy with the same place: copy its weights."""
        self.policy.routers.replays = False
        pairs = zip(self.policy.parameters(), policy.parameters(), strict=True)
        for own, other in pairs:
            own.copy_(other)

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.shape.world_size > 1:
            dist.all_reduce(value, op)
        return value


class MegatronTrainable(ForwardRunner, Learner):
    """The policy under training, with Megatron's gradient buffers and optimizer."""

    def __init__(
        self,
        policy: Policy,
        actor: ActorConfig,
        section: MegatronConfig,
        shape: Shape,
        rank: int,
        device: torch.device,
    ) -> None:
        Learner.__init__(self, "actor", actor.optim)
        self.aux_coef = actor.router_aux_loss_coef
        self._parked: list[tuple[torch.UntypedStorage, Tensor | int]] = []
        ForwardRunner.__init__(self, policy, actor, shape, rank, device)
        settings = DistributedDataParallelConfig(
            # Else Megatron adds up the gradients of bfloat16 weights in bfloat16.
            grad_reduce_in_fp32=policy.config.bf16,
            use_distributed_optimizer=section.use_distributed_optimizer,
            overlap_grad_reduce=section.overlap_grad_reduce,
            overlap_param_gather=section.overlap_param_gather,
        )
        self.chunk = DistributedDataParallel(policy.config, settings, self.chunk)
        self.gathers_late = section.overlap_param_gather
        # Our shares of a loss add up over all ranks and micro-batches: nothing is divided.
        policy.config.finalize_model_grads_func = lambda chunks, _=None, **keys: (
            finalize_model_grads(chunks, None, **keys)
        )
        if section.overlap_grad_reduce:
            policy.config.no_sync_func = self.chunk.no_sync
        self.optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=actor.optim.lr,
                weight_decay=actor.optim.weight_decay,
                bf16=policy.config.bf16,
                params_dtype=policy.config.params_dtype,
                use_distributed_optimizer=section.use_distributed_optimizer,
                overlap_param_gather=section.overlap_param_gather,
                clip_grad=0.0,
            ),
            [self.chunk],
            use_gloo_process_groups=False,
        )

    def begin(self, optim: OptimConfig, horizon: int) -> None:
        super().begin(optim, horizon)
        for part in self.parts():
            part.optimizer.state.clear()
        self.apply_settings()
        self.clear()

    def parts(self) -> Iterator[Any]:
        """Yield Megatron's optimizers that have weights: dense ones and experts have one each."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if part.optimizer is not None:
                yield part

    def apply_settings(self) -> None:
        """Set weight decay, betas and epsilon. Weight decay acts on matrices alone."""
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.optim.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = self.optim.betas, self.optim.eps

    def owned(self) -> Iterator[tuple[nn.Parameter, int, Tensor, torch.optim.Optimizer]]:
        """Yield (parameter, first element, float32 weights from it on, torch's optimizer).

        The distributed optimizer has a flat range of each parameter. Others have all of it.
        """
        for part in self.parts():
            if (places := getattr(part, "model_param_group_index_map", None)) is not None:
                for parameter, (group, number) in places.items():
                    main = part.optimizer.param_groups[group]["params"][number]
                    start = part._get_model_param_range_map(parameter)["param"].start
                    yield parameter, start, main, part.optimizer
                continue
            mains = {p for group in part.optimizer.param_groups for p in group["params"]}
            for parameter in self.policy.parameters():
                main = getattr(parameter, "main_param", parameter)
                if main in mains:
                    yield parameter, 0, main, part.optimizer

    def weights_loaded(self) -> None:
        """Take over the optimizer's float32 weights, after they were loaded."""
        for part in self.parts():
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        if self.chunk.ddp_config.use_distributed_optimizer:
            self.chunk.start_param_sync(force_sync=True)

    def gather(self) -> None:
        """Make the weights whole, if the last step left their gathering to the next pass."""
        if self.gathers_late:
            self.chunk.start_param_sync(force_sync=True)

    def accumulate(
        self, rows: Rows, members: Ints, temperature: float, loss_of: LossOf, meter: Meter
    ) -> None:
        def loss(outputs: Outputs, micro: MicroBatch) -> Tensor:
            share, sums = loss_of(outputs, micro)
            if self.counts:
                meter.add(sums, outputs[0].detach(), micro)
            return share

        self.policy.routers.balance = self.aux_coef / num_sequences(rows, members)
        self.run(self.micro_batches(rows, members), temperature, loss, forward_only=False)

    def gradient_norm(self) -> Tensor:
        self.optimizer.prepare_grads()
        return torch.tensor(self.optimizer.get_grad_norm(), dtype=torch.float64)

    def apply(self, lr: float, norm: float) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        clip_(gradients_of(parameters), norm, self.optim.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step_with_ready_grads()

    def clear(self) -> None:
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def park(self) -> None:
        """Move the optimizer's weights and moments to the host, and free the gradients' memory.

        The model's own weights stay, because a weight sync reads them. Storages shrink in place, so
        every view into them stays a view.
        """
        if not self._parked:
            self._parked = [(own, _on_host(own)) for own in self._storages()]
            buffers = (*self.chunk.buffers, *self.chunk.expert_parallel_buffers)
            gradients = (buffer.grad_data.untyped_storage() for buffer in buffers)
            self._parked += [(storage, storage.nbytes()) for storage in gradients]
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            for own, _ in self._parked:
                own.resize_(0)

    def unpark(self) -> None:
        """Undo `park`. The gradients are 0."""
        for own, copy in self._parked:
            own.resize_(copy if isinstance(copy, int) else len(copy))
            whole = torch.empty(0, dtype=torch.uint8, device=own.device).set_(own)
            if isinstance(copy, int):
                whole.zero_()
            else:
                whole.copy_(copy, non_blocking=True)
        self._parked = []

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the memory of main weights and moments that are not in the model's memory."""
        own = [p.untyped_storage() for p in self.policy.parameters()]
        found = {storage.data_ptr(): storage for storage in own}
        kept = set(found)
        for part in self.parts():
            inner = part.optimizer
            main = [p for group in inner.param_groups for p in group["params"]]
            moments = [x for state in inner.state.values() for x in state.values()]
            for tensor in (*main, *moments):
                if (
                    isinstance(tensor, Tensor)
                    and tensor.device == self.device
                    and tensor.numel() > 1
                ):
                    found[tensor.data_ptr()] = tensor.untyped_storage()
        by_place = {storage.data_ptr(): storage for storage in found.values()}
        return [storage for place, storage in by_place.items() if place not in kept]


def _on_host(storage: torch.UntypedStorage) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    copy = torch.empty_like(whole, device="cpu", pin_memory=whole.is_cuda)
    return copy.copy_(whole, non_blocking=True)
