"""The FSDP2 train engine: one object for each rank.

All ranks call every method with the same arguments. The coroutines compute in the calling thread
and block it, so an engine needs its own process or thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.algorithms.kl import adapt
from millrace.config import Config, OptimConfig
from millrace.models.device import pick
from millrace.models.model import DTYPES
from millrace.observe.stopwatch import Stopwatch
from millrace.ports import Phase, StepReport, TrainBatch
from millrace.train.experience import Experience, Models, make_experience
from millrace.train.fsdp import lora
from millrace.train.fsdp import state as train_state
from millrace.train.fsdp.critic import PackedCritic, copy_weights
from millrace.train.fsdp.lora import StartPolicy
from millrace.train.fsdp.policy import PackedPolicy
from millrace.train.fsdp.sharding import load, mesh_of, sent_rows
from millrace.train.fsdp.trainable import Trainable, moved
from millrace.train.metrics import Meter, batch_metrics, left_out, pad_share
from millrace.train.mini_batch import mini_batches, settle
from millrace.train.options import optim_of, step_options
from millrace.train.packing import MicroBatch, Outputs
from millrace.train.policy_loss import CRITIC_SUMS, POLICY_SUMS, CriticLoss, PolicyLoss
from millrace.train.rows import arrays_of, rows_of_examples, rows_of_samples
from millrace.train.state_writer import StateWriter
from millrace.train.timed import timed
from millrace.types import Sample, Tokens


class FsdpTrainEngine:
    """A policy under training, with the critic and the reference that its algorithm needs.

    Satisfies ports.TrainRank.
    """

    def __init__(
        self,
        policy: PackedPolicy,
        config: Config,
        *,
        model_folder: str,
        rank: int,
        world_size: int,
        device: torch.device,
        critic: PackedCritic | None = None,
        reference: PackedPolicy | None = None,
    ) -> None:
        def trainable(name: str, module: nn.Module) -> Trainable:
            sections = (config.actor, config.model.dtype)
            return Trainable(
                name, module, *sections, rank=rank, world_size=world_size, device=device
            )

        self.policy = policy
        self.actor = trainable("actor", policy)
        self._critic = critic
        self.critic = None if critic is None else trainable("critic", critic)
        self.adapted = config.model.lora_rank > 0
        self.scale = config.model.lora_scale if self.adapted else 0.0
        self.reference: Trainable | StartPolicy | None = (
            None if reference is None else trainable("reference", reference)
        )
        if self.adapted and config.needs_reference:
            self.reference = StartPolicy(self.actor)
        self.config = config
        self.options = step_options(config)
        self.model_folder = model_folder
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.kl_coef = config.algorithm.kl_ctrl.kl_coef
        self.base_sum: int | None = None
        """Sum over the bits of a frozen base. A checkpoint identifies the base by this sum."""
        if self.adapted:
            self.base_sum = lora.base_sum(policy.model)
        self.writer = StateWriter(timeout_s=config.trainer.wait_deadline_s)
        self.owns_group = False
        self._seen_version: int | None = None

    async def begin(self, phase: Phase, horizon: int) -> None:
        self.restart(optim_of(self.config, phase), horizon)

    def restart(self, optim: OptimConfig, horizon: int) -> None:
        """Begin a phase of `horizon` optimizer steps, with optimizer settings `optim`."""
        self.actor.begin(optim, horizon)
        self.kl_coef = self.options.algorithm.kl_ctrl.kl_coef
        if self.critic is not None and self._critic is not None:
            self._critic.start_from(
                dict(lora.merged_weights(self.policy.model.base_model, self.scale))
            )
            self.critic.begin(self.config.critic.optim, horizon)
        if isinstance(self.reference, StartPolicy):
            self.reference.start()
        elif self.reference is not None:
            copy_weights(dict(self.policy.named_parameters()), self.reference.module)

    @property
    def steps(self) -> int:
        """Optimizer steps since `begin`, skipped ones included."""
        return self.actor.steps

    async def step(self, batch: TrainBatch) -> StepReport:
        """Take one optimizer step for each mini-batch of `ppo_mini_batch_size` samples.

        This is repeated `ppo_epochs` times. The last mini-batch may be short. metrics.py documents
        the metrics, which are the same on every rank. The totals are those of left_out, and:

        actor/nonfinite_steps  steps skipped because the loss or the gradient was not finite
        actor/rejected_steps   steps skipped because all tokens of the mini-batch were rejected
        train/tokens           prompt and response tokens of the batch, times `ppo_epochs`

        A nonfinite step counts in no other metric.
        """
        watch, options = Stopwatch(time.perf_counter), self.options
        models = timed(Models(self.actor, self.critic, self.reference), watch.part)
        arrays = arrays_of(batch, options.algorithm)
        with watch.part("adv"):
            data = make_experience(arrays, models, options, self.kl_coef)
        meter, critic_meter = Meter(POLICY_SUMS), Meter(CRITIC_SUMS)
        learners: list[tuple[Trainable, type[CriticLoss | PolicyLoss], Meter]] = [
            (self.actor, PolicyLoss, meter)
        ]
        if self.critic is not None:
            learners.insert(0, (self.critic, CriticLoss, critic_meter))
        corrections: list[dict[str, float]] = []
        first_tokens, rejected, kept = torch.zeros_like(data.include), 0, 0
        size, temperature = options.actor.ppo_mini_batch_size, options.temperature
        for k, members in enumerate(mini_batches(data, size) * options.actor.ppo_epochs):
            with watch.part("update_actor"):
                mini = settle(data, members, models.policy, options, untouched=k == 0)
            corrections.append(mini.metrics)
            rejected += not mini.tokens
            if k == 0:
                first_tokens = mini.mask
            first_pass = k * size < data.num_samples
            kept += mini.tokens * first_pass
            for model, loss, sums in learners:
                warm = model is not self.actor or model.steps >= options.critic_warmup
                loss_of = loss(data, mini, options) if mini.tokens and warm else None
                with watch.part(f"update_{model.name}"):
                    model.train_on(
                        data.rows, members, temperature, loss_of, sums, first_pass=first_pass
                    )
        fresh, self._seen_version = batch.version != self._seen_version, batch.version
        metrics = batch_metrics(
            data,
            meter,
            critic_meter if self.critic is not None else None,
            corrections,
            options,
            same_weights=first_tokens if fresh else None,
            sum_ranks=self._sum_ranks,
        )
        self._adapt_kl(data)
        totals = left_out(arrays.unfiltered, kept) | {
            "train/tokens": float(data.rows.lengths.sum() * options.actor.ppo_epochs),
            "actor/nonfinite_steps": float(meter.nonfinite + critic_meter.nonfinite),
            "actor/rejected_steps": float(rejected),
        }
        skipped = meter.nonfinite + meter.empty
        return StepReport(meter.steps, metrics, totals, skipped, _named(watch.flush()))

    def _adapt_kl(self, data: Experience) -> None:
        """Change the coefficient of the KL in the rewards, if it is adaptive."""
        algorithm = self.options.algorithm
        ctrl = algorithm.kl_ctrl
        if algorithm.use_kl_in_reward and ctrl.type == "adaptive":
            target, horizon, count = ctrl.target_kl, ctrl.horizon, len(data.lengths)
            self.kl_coef = adapt(self.kl_coef, data.kl_to_reference, target, horizon, count)

    async def sft_step(self, examples: list[tuple[Tokens, ...]]) -> StepReport:
        """Take one optimizer step on (prompt, response, context, response, ...).

        The loss, sft/loss, is the mean of -log p over all response tokens, at temperature 1. The
        response should end with the end-of-sequence token. sft/grad_norm, sft/lr,
        sft/nonfinite_steps, sft/tokens and sft/pad_share are defined as in `step`.
        """
        rows = rows_of_examples(examples)
        members = np.arange(len(rows.starts))
        tokens = max(int(rows.trained_tokens.sum()), 1)

        def loss_of(outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Tensor]:
            loss = -outputs[0].sum() / tokens
            return loss, loss.detach().double().reshape(1)

        meter = Meter(("loss",))
        self.actor.accumulate(rows, members, 1.0, loss_of, meter)
        self.actor.optimizer_step(meter, first_pass=False)
        cells = self._sum_ranks(meter.cells()).cpu()
        metrics = meter.step_means("sft/") | {
            "sft/loss": meter.sums["loss"],
            "sft/pad_share": pad_share(cells),
        }
        totals = {
            "sft/tokens": float(rows.lengths.sum()),
            "sft/nonfinite_steps": float(meter.nonfinite),
        }
        return StepReport(1, metrics, totals, meter.nonfinite)

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        """Return log p of each trained token at the training temperature, for each trajectory."""
        rows = rows_of_samples(samples)
        flat = self.actor.tokens(rows, temperature=self.options.temperature)[0]
        return [part.tolist() for part in flat.split(rows.trained_of_trajectories.tolist())]

    async def save(self, folder: str, staged: bool = False) -> None:
        """Write the train state to `folder`. If `staged`, write a copy of it after the return."""
        await self.saved()
        train_state.save(self, folder, staged=staged)

    async def saved(self) -> None:
        """Wait until no state is being written."""
        await self.writer.done()

    async def load(self, folder: str) -> None:
        """Load a state that `save` wrote with any number of ranks.

        Call `begin` first, with the settings of the run that saved the state.
        """
        train_state.load(self, folder)

    async def export(self, folder: str) -> None:
        """Write a Hugging Face folder, in the serving dtype."""
        train_state.export(self, folder)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor in the serving dtype), with the adapters merged.

        Names and order are the model's own. Tied tensors come once. This is a collective: all ranks
        iterate to the end. Only one tensor is whole at a time. Without sharding and casts, that
        tensor is the live weight, so copy it before the next step.
        """
        dtype = DTYPES[self.config.model.dtype]
        for name, own in lora.merged_weights(self.policy.model, self.scale):
            # Ranks gather on the device, over fast links. The cast comes first and halves the
            # bytes.
            weight = moved(own, self.device).to(dtype)
            yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, Tensor]]:
        """Yield (name, whole shape, serving dtype, first row, rows of the live weight to send).

        Names and order are those of `full_weights`. Without adapters, the rows are float32. With
        adapters, the tensors are those of the frozen base, in the serving dtype.
        """
        dtype = DTYPES[self.config.model.dtype]
        for name, weight in lora.base_weights(self.policy.model):
            yield name, tuple(weight.shape), dtype, *sent_rows(weight)

    def adapters(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, Tensor]]:
        """Yield the values of `shards` for every adapter A [rank, in] and B [out, rank], float32.

        The adapters of a weight W have the names W.lora_A and W.lora_B. `full_weights` yields
        W + model.lora_scale x B A.
        """
        for name, weight in lora.adapters(self.policy.model):
            yield name, tuple(weight.shape), torch.float32, *sent_rows(weight)

    async def sleep(self) -> None:
        """Move weights and optimizer state from the GPU to the host, if trainer.offload is set."""
        self._move(torch.device("cpu"))

    async def wake(self) -> None:
        self._move(self.device)

    async def close(self) -> None:
        """Wait for a save, and destroy the process group if `build` made it."""
        await self.saved()
        self.actor.optimizer = None
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _sum_ranks(self, value: Tensor) -> Tensor:
        return self.actor.reduce(value.to(self.device), dist.ReduceOp.SUM)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or not self.config.trainer.offload:
            return
        for model in (self.actor, self.critic, self.reference):
            if isinstance(model, Trainable) and not self.config.trainer.offload_policy:
                model.move(device)
        torch.cuda.empty_cache()


def _named(seconds: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the parts that have a name.

    A GPU runs the update of an optimizer step after the host continues. Its last seconds therefore
    count for the next part.
    """
    return {name: value for name, value in seconds.items() if name != "other"}


def build(config: Config, model_folder: str, *, rank: int, world_size: int) -> FsdpTrainEngine:
    """Build the engine of one rank.

    With world_size > 1, the default process group must exist and have a CPU backend. Weights come
    from `model_folder`. If it has none, they are drawn from `trainer.seed`, the same on every rank.
    With model.lora_rank, the policy's weights are frozen and adapters are trained. A critic has no
    adapters: all its weights are trained.
    """
    device = pick(config.trainer.device)
    alone = not dist.is_initialized()

    share = (
        config.model.gradient_checkpointing_share if config.model.gradient_checkpointing else 0.0
    )

    adapted = config.model.lora_rank > 0

    def policy_of(model: PreTrainedModel) -> PackedPolicy:
        return PackedPolicy(
            lora.inject(model, config.model, config.trainer.seed) if adapted else model,
            checkpoint_share=share,
            fused=config.model.compile,
        )

    def frozen(model: PreTrainedModel) -> PackedPolicy:
        return PackedPolicy(model, fused=config.model.compile).requires_grad_(False)

    sections = (config.model, config.trainer)
    source = (model_folder, *sections, rank, mesh_of(*sections, world_size, device), device)
    # A checkpoint has only the adapters, so every machine must draw the same base, with or without
    # a GPU. The base is therefore drawn on the host.
    policy = load(policy_of, *source, on_host=adapted)
    critic = load(PackedCritic, *source) if config.needs_critic else None
    reference = load(frozen, *source) if config.needs_reference and not adapted else None
    engine = FsdpTrainEngine(
        policy,
        config,
        model_folder=model_folder,
        rank=rank,
        world_size=world_size,
        device=device,
        critic=critic,
        reference=reference,
    )
    engine.owns_group = alone and dist.is_initialized()
    return engine
