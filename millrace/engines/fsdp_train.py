"""The FSDP2 train engine: one object for each rank, every method called on all ranks with the same arguments.

Calls compute where they are called: the coroutines return without having suspended, so an engine wants a process or thread
of its own.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from millrace.algorithms.advantages import equal_groups, grpo
from millrace.config import Config, OptimConfig
from millrace.engines import train_state
from millrace.engines.attention import Ints
from millrace.engines.device import pick
from millrace.engines.meter import Meter
from millrace.engines.model import DTYPES, load_model
from millrace.engines.optim import adamw, clip_, gradient_norm, gradients_of, lr_at
from millrace.engines.packing import MicroBatch, Rows, pack, rows_of_examples, rows_of_samples, split
from millrace.engines.policy import PackedPolicy
from millrace.engines.policy_loss import SUMS, PolicyData, Totals, policy_loss, sampler_metrics, token_metrics
from millrace.errors import MillraceError
from millrace.ports import StepReport, TrainBatch
from millrace.types import Sample, Tokens

MAX_NONFINITE_STEPS = 3
"""Optimizer steps in a row without a finite loss and gradient before the run fails: it will not recover."""

ESTIMATORS = {"grpo": grpo}
"""Advantage estimators by algorithm.adv_estimator."""

LossOf = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Tensor, Tensor]]
"""(log_probs [M], entropy [M], micro-batch) -> loss, SUMS [9], largest probability difference."""


class FsdpTrainEngine:
    """A policy under training. Satisfies ports.TrainEngine; call `begin` before the first step."""

    def __init__(
        self, policy: PackedPolicy, config: Config, *, model_folder: str, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.policy = policy
        self.config = config
        self.model_folder = model_folder
        self.rank = rank
        self.world_size = world_size
        self.device = device
        # torch's varlen attention is for half precision on CUDA alone.
        self.padded = device.type == "cpu" or config.model.dtype == "float32"
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self.optim = config.actor.optim
        self.horizon = 1
        self.optimizer: torch.optim.AdamW | None = None
        self.steps = 0
        """Optimizer steps since `begin`, skipped ones included: the LR schedule's clock."""
        self.nonfinite_in_a_row = 0
        self.owns_group = False

    def begin(self, optim: OptimConfig, horizon: int) -> None:
        """A fresh AdamW and LR schedule for `horizon` optimizer steps; the weights stay."""
        self.optim, self.horizon, self.steps, self.nonfinite_in_a_row = optim, horizon, 0, 0
        self.optimizer = adamw(self.parameters, optim)

    async def step(self, batch: TrainBatch) -> StepReport:
        """One optimizer step for each mini-batch of `ppo_mini_batch_size` samples (the last may be short), `ppo_epochs` times.

        Metrics of the batch, the same on every rank; besides those of `token_metrics` and `sampler_metrics`:
        actor/pg_loss               aggregated PPO loss, without the entropy bonus; mean over optimizer steps
        actor/grad_norm             2-norm of the gradient before clipping; mean over optimizer steps
        actor/lr                    learning rate; mean over optimizer steps
        actor/nonfinite_steps       optimizer steps skipped for a loss or gradient that is not finite; a count. They are in no
                                    other metric
        train/tokens                prompt and response tokens of the trajectories that were trained, each epoch; a count
        train/pad_share             padding in the attention's batches, as a share of them
        train/zero_advantage_share  share of samples whose rewards are all equal
        """
        actor = self.config.actor
        data, zero_share = self._policy_data(batch.samples)
        edges = [*range(0, len(batch.samples), actor.ppo_mini_batch_size), len(batch.samples)]
        meter = Meter()
        for epoch in range(actor.ppo_epochs):
            for first, last in itertools.pairwise(edges):
                members = np.arange(data.rows.first_row[first], data.rows.first_row[last])
                self._mini_batch(data, members, meter, first_pass=epoch == 0)
        largest, pad_share = self._reduce_own(meter)
        metrics = {
            **token_metrics(meter.sums),
            **sampler_metrics(meter.first_sums, largest),
            **meter.step_means("actor/"),
            "actor/pg_loss": meter.sums["loss"] / max(meter.finite, 1),
            "train/pad_share": pad_share,
            "train/zero_advantage_share": zero_share,
        }
        tokens = float(data.rows.lengths.sum() * actor.ppo_epochs)
        return StepReport(meter.steps, metrics, {"train/tokens": tokens, "actor/nonfinite_steps": meter.nonfinite})

    async def sft_step(self, examples: list[tuple[Tokens, Tokens]]) -> StepReport:
        """One optimizer step on (prompt, response): mean of -log p over all response tokens, at temperature 1.

        The response should end with the end-of-sequence token. Metrics: sft/loss, and sft/grad_norm, sft/lr,
        sft/nonfinite_steps, sft/tokens, sft/pad_share as their namesakes of `step`.
        """
        rows = rows_of_examples(examples)
        totals = _totals(rows, np.arange(len(rows.starts)))
        meter = Meter()

        def loss_of(log_probs: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
            loss = -log_probs.sum() / max(totals.tokens, 1)
            sums = torch.zeros(len(SUMS), dtype=torch.float64, device=loss.device)
            sums[0] = loss.detach()
            return loss, sums, sums.new_zeros(())

        self._accumulate(rows, np.arange(len(rows.starts)), loss_of, 1.0, meter)
        self._optimizer_step(meter, first_pass=True)
        metrics = meter.step_means("sft/") | {
            "sft/loss": meter.sums["loss"],
            "sft/pad_share": self._reduce_own(meter)[1],
        }
        return StepReport(1, metrics, {"sft/tokens": float(rows.lengths.sum()), "sft/nonfinite_steps": meter.nonfinite})

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        """log p(token) at the training temperature, for each trajectory of each sample, in order."""
        rows = rows_of_samples(samples)
        flat = self._log_probs(rows).numpy()
        ends = (rows.starts + rows.lengths).tolist()
        return [flat[a:b][rows.trained[a:b]].tolist() for a, b in zip(rows.starts.tolist(), ends, strict=True)]

    async def save(self, folder: str) -> None:
        train_state.save(self, folder)

    async def load(self, folder: str) -> None:
        """What `save` wrote, at any number of ranks. Call `begin` first, with the settings of the run that saved."""
        train_state.load(self, folder)

    async def export(self, folder: str) -> None:
        """Write a Hugging Face folder, in the dtype that is served."""
        train_state.export(self, folder)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor in the serving dtype), in the model's order, tied ones once, under the model's own names.

        A collective: all ranks iterate to the end. One tensor is whole at a time; where nothing is sharded or cast it is the
        live weight, so copy it before the next step.
        """
        dtype = DTYPES[self.config.model.dtype]
        for name, parameter in self.policy.model.named_parameters():
            weight = parameter.detach()
            yield name, (weight.full_tensor() if isinstance(weight, DTensor) else weight).to(dtype)

    async def sleep(self) -> None:
        """On a GPU: weights and optimizer state to the host. On a CPU there is nothing to give back."""
        self._move(torch.device("cpu"))

    async def wake(self) -> None:
        self._move(self.device)

    async def close(self) -> None:
        """Let go of the process group, if it was made here; a group of several ranks is its maker's."""
        self.optimizer = None
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    # One mini-batch ---------------------------------------------------------------------------------------------------

    def _policy_data(self, samples: tuple[Sample, ...]) -> tuple[PolicyData, float]:
        """Advantages and old log-probs of a batch, and the share of samples whose rewards are all equal."""
        rows = rows_of_samples(samples)
        rewards, groups = _rewards(samples)
        estimate = ESTIMATORS[self.config.algorithm.adv_estimator]
        advantages = estimate(rewards, groups, norm_by_std=self.config.algorithm.norm_adv_by_std_in_grpo)
        rollout = torch.from_numpy(rows.rollout_log_probs)
        old: Tensor | None = rollout
        if not self.config.async_training.use_rollout_log_probs:
            one_step = self.config.actor.ppo_epochs == 1 and len(samples) <= self.config.actor.ppo_mini_batch_size
            old = None if one_step else self._log_probs(rows)
        equal = equal_groups(rewards, groups)
        data = PolicyData(rows, advantages, rollout, old, torch.from_numpy(rows.trained_tokens))
        return data, equal.double().mean().item() if len(equal) else 0.0

    def _mini_batch(self, data: PolicyData, members: Ints, meter: Meter, *, first_pass: bool) -> None:
        totals = _totals(data.rows, members)

        def loss_of(log_probs: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
            return policy_loss(log_probs, entropy, micro, data, totals, self.config)

        self._accumulate(data.rows, members, loss_of, self.config.rollout.temperature, meter)
        self._optimizer_step(meter, first_pass=first_pass)

    def _accumulate(self, rows: Rows, members: Ints, loss_of: LossOf, temperature: float, meter: Meter) -> None:
        """Gradients of this rank's share of the mini-batch; summed over ranks in the last micro-batch's backward pass."""
        limit = self.config.actor.ppo_max_token_len_per_gpu
        shares = split(rows, members, max_tokens=limit, world_size=self.world_size)
        for i, share in enumerate(shares):
            micro = pack(rows, share[self.rank], self.device, padded=self.padded)
            if isinstance(self.policy, FSDPModule):
                self.policy.set_requires_gradient_sync(i == len(shares) - 1)
            log_probs, entropy = self.policy(micro, temperature)
            loss, sums, largest = loss_of(log_probs, entropy, micro)
            # FSDP averages gradients over ranks, and the shares of the loss are to be added.
            torch.autograd.backward(loss * self.world_size)
            meter.add(sums, largest, micro)

    def _optimizer_step(self, meter: Meter, *, first_pass: bool) -> None:
        """Clip and step, on all ranks or on none: the loss and the norm that decide are global."""
        if self.optimizer is None:
            raise MillraceError("the train engine has no optimizer. Fix: call begin(optim, horizon) before the first step")
        lr = lr_at(self.optim, self.horizon, self.steps)
        gradients = gradients_of(self.parameters)
        sums, largest = meter.take()
        sums = self._reduce(sums, dist.ReduceOp.SUM)
        # The one place in a step where the host waits for the device.
        *values, own_largest, norm = torch.cat([sums, largest, gradient_norm(gradients).double().reshape(1)]).tolist()
        self.steps += 1
        if math.isfinite(norm) and math.isfinite(values[0]):
            self.nonfinite_in_a_row = 0
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            clip_(gradients, norm, self.optim.clip_grad)
            self.optimizer.step()
            meter.finish(dict(zip(SUMS, values, strict=True)), own_largest, norm, lr, first_pass=first_pass)
        else:
            self.nonfinite_in_a_row += 1
            meter.skip()
        self.optimizer.zero_grad()
        if self.nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
            raise MillraceError(
                f"{MAX_NONFINITE_STEPS} optimizer steps in a row had a loss or gradient that is not finite "
                f"(the last: loss {values[0]}, norm {norm}). Fix: a lower actor.optim.lr, or model.dtype=float32"
            )

    @torch.no_grad()
    def _log_probs(self, rows: Rows) -> Tensor:
        """[T] float32 on the host, whole on every rank; 0 where a token is not trained."""
        flat = torch.zeros(len(rows.tokens))
        limit = self.config.actor.ppo_max_token_len_per_gpu
        for share in split(rows, np.arange(len(rows.starts)), max_tokens=limit, world_size=self.world_size):
            micro = pack(rows, share[self.rank], self.device, padded=self.padded)
            log_probs, _ = self.policy(micro, self.config.rollout.temperature)
            flat[micro.source] = log_probs.float().cpu()
        if isinstance(self.policy, FSDPModule):
            # A forward pass leaves the root's weights whole; they would outlive a load, and take memory in sleep.
            self.policy.reshard()
        return self._reduce(flat.to(self.device), dist.ReduceOp.SUM).cpu()

    def _reduce_own(self, meter: Meter) -> tuple[float, float]:
        """Global maximum of the probability difference, and global padding share."""
        own = meter.ranks_own().to(self.device)
        self._reduce(own[:1], dist.ReduceOp.MAX)
        self._reduce(own[1:], dist.ReduceOp.SUM)
        largest, cells, padded_cells = own.tolist()
        return largest, (padded_cells - cells) / max(padded_cells, 1.0)

    def _reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(value, op)
        return value

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        nn.Module.to(self.policy, device)
        for state in (self.optimizer.state if self.optimizer else {}).values():
            for key, value in state.items():
                state[key] = value.to(device)
        torch.cuda.empty_cache()


def _rewards(samples: tuple[Sample, ...]) -> tuple[Tensor, Tensor]:
    """Rewards [N] float64 and sample numbers [N] of all trajectories."""
    rewards, groups = array("d"), array("q")
    for i, sample in enumerate(samples):
        for trajectory in sample.trajectories:
            if trajectory.score is None:
                raise MillraceError(f"a trajectory of sample {sample.prompt.index} has no score: it cannot be trained")
            rewards.append(trajectory.score.value)
            groups.append(i)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64)


def _totals(rows: Rows, members: Ints) -> Totals:
    return Totals(tokens=int(rows.trained_tokens[members].sum()), sequences=len(members))


def build(config: Config, model_folder: str, *, rank: int, world_size: int) -> FsdpTrainEngine:
    """The engine of one rank. With world_size > 1 the default process group exists already and has a CPU backend.

    Weights come from `model_folder`, or from `trainer.seed` if it has none, the same on every rank.
    """
    device = pick(config)
    model = load_model(model_folder, seed=config.trainer.seed, dtype="float32", trust_remote_code=config.model.trust_remote_code)
    policy = PackedPolicy(model, gradient_checkpointing=config.model.gradient_checkpointing)
    alone = not dist.is_initialized()
    policy = shard(policy, config, world_size, device)
    engine = FsdpTrainEngine(policy, config, model_folder=model_folder, rank=rank, world_size=world_size, device=device)
    engine.owns_group = alone and dist.is_initialized()
    return engine


def shard(policy: PackedPolicy, config: Config, world_size: int, device: torch.device) -> PackedPolicy:
    """FSDP2 over each decoder layer and the rest. Master weights stay float32; gradients are added up in float32."""
    if world_size == 1 and config.model.dtype == "float32":
        # Nothing to shard and nothing to cast: wrapping would add 18 % to a quickstart step (43 ms against 36, one thread).
        return policy.to(device)
    if not dist.is_initialized():
        # One rank in bfloat16: FSDP casts the weights layer by layer, and wants a group to do so.
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (world_size,))
    bf16 = config.model.dtype == "bfloat16"
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32 if bf16 else None)
    for layer in policy.layers():
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy
