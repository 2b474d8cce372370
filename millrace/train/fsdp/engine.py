"""The FSDP2 train engine: one object for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.config import Config, OptimConfig
from millrace.models.device import pick
from millrace.models.model import DTYPES
from millrace.ports import Phase
from millrace.train.fsdp import lora
from millrace.train.fsdp import state as train_state
from millrace.train.fsdp.critic import PackedCritic, copy_weights
from millrace.train.fsdp.lora import StartPolicy
from millrace.train.fsdp.policy import PackedPolicy
from millrace.train.fsdp.sharding import division_of, load, mesh_of, reshard, sent_rows
from millrace.train.fsdp.trainable import Trainable, copied_to
from millrace.train.options import StepOptions, step_options
from millrace.train.step import TrainSteps

NO_TEACHERS: Mapping[str, PackedPolicy] = {}


class FsdpTrainEngine(TrainSteps):
    """A policy under training, with the critic and the reference that its algorithm needs.

    Satisfies ports.TrainRank.
    """

    def __init__(
        self,
        policy: PackedPolicy,
        options: StepOptions,
        *,
        model_folder: str,
        rank: int,
        world_size: int,
        device: torch.device,
        critic: PackedCritic | None = None,
        reference: PackedPolicy | None = None,
        teachers: Mapping[str, PackedPolicy] = NO_TEACHERS,
    ) -> None:
        division = division_of(options.actor.ulysses_sequence_parallel_size)

        def trainable(name: str, module: nn.Module) -> Trainable:
            return Trainable(
                *(name, module, options.actor, options.model.dtype, division),
                rank=rank,
                world_size=world_size,
                device=device,
            )

        super().__init__(options, model_folder, device)
        self.policy = policy
        self.actor: Trainable = trainable("actor", policy)
        self._critic = critic
        self.critic: Trainable | None = None if critic is None else trainable("critic", critic)
        self.adapted = options.model.lora_rank > 0
        self.scale = options.model.lora_scale if self.adapted else 0.0
        self.reference: Trainable | StartPolicy | None = (
            None if reference is None else trainable("reference", reference)
        )
        if self.adapted and options.needs_reference:
            self.reference = StartPolicy(self.actor)
        self._teachers = teachers
        self.teachers: dict[str, Trainable] = {
            name: trainable(name, module) for name, module in teachers.items()
        }
        self.rank = rank
        self.world_size = world_size
        self.base_sum: int | None = None
        """Sum over the bits of a frozen base. A checkpoint identifies the base by this sum."""
        if self.adapted:
            self.base_sum = lora.base_sum(policy.model)

    def restart(self, optim: OptimConfig, horizon: int) -> None:
        self.actor.begin(optim, horizon)
        self.kl_coef = self.options.algorithm.kl_ctrl.kl_coef
        if self.critic is not None and self._critic is not None:
            self._critic.start_from(
                dict(lora.merged_weights(self.policy.model.base_model, self.scale))
            )
            self.critic.begin(self.options.critic.optim, horizon)
        if isinstance(self.reference, StartPolicy):
            self.reference.start()
        elif self.reference is not None:
            copy_weights(dict(self.policy.named_parameters()), self.reference.module)

    async def begin(self, phase: Phase, horizon: int) -> None:
        sft, rl = self.options.sft, self.options.distillation.candidates
        for name, module in self._teachers.items():
            module.topk = sft.teacher_topk * (name == sft.teacher) if phase == "sft" else rl
            module.vocabulary = self.policy.model.config.get_text_config().vocab_size
        await super().begin(phase, horizon)

    async def save(self, folder: str, staged: bool = False) -> None:
        """Write the train state to `folder`. If `staged`, write a copy of it after the return."""
        await self.saved()
        train_state.save(self, folder, staged=staged)

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
        dtype = DTYPES[self.options.model.dtype]
        for name, own in lora.merged_weights(self.policy.model, self.scale):
            # Ranks gather on the device, over fast links. The cast comes first and halves the
            # bytes.
            weight = copied_to(own, self.device).to(dtype)
            yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, Tensor]]:
        """Yield (name, whole shape, serving dtype, first row, rows of the live weight to send).

        Names and order are those of `full_weights`. Without adapters, the rows are float32. With
        adapters, the tensors are those of the frozen base, in the serving dtype.
        """
        dtype = DTYPES[self.options.model.dtype]
        for name, weight in lora.base_weights(self.policy.model):
            yield name, tuple(weight.shape), dtype, *sent_rows(weight)

    def adapters(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, Tensor]]:
        """Yield the values of `shards` for every adapter A [rank, in] and B [out, rank], float32.

        The adapters of a weight W have the names W.lora_A and W.lora_B. `full_weights` yields
        W + model.lora_scale x B A.
        """
        for name, weight in lora.adapters(self.policy.model):
            yield name, tuple(weight.shape), torch.float32, *sent_rows(weight)

    def sent_weights(self) -> Iterator[Tensor]:
        """Yield this rank's rows of every trained weight. Frozen ones are sent only once."""
        if isinstance(self.policy, FSDPModule):
            reshard(self.policy)
        for parameter in self.actor.parameters:
            yield lora.own_rows(parameter.detach())

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

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or not self.options.trainer.offload:
            return
        for model in (self.actor, self.critic, self.reference, *self.teachers.values()):
            if isinstance(model, Trainable) and not self.options.trainer.offload_policy:
                model.move(device)
        torch.cuda.empty_cache()


def build(
    config: Config,
    model_folder: str,
    *,
    rank: int,
    world_size: int,
    kind: type[FsdpTrainEngine] = FsdpTrainEngine,
) -> FsdpTrainEngine:
    """Build the engine of one rank.

    With world_size > 1, the default process group must exist and have a CPU backend. Weights come
    from `model_folder`. If it has none, they are drawn from `trainer.seed`, the same on every rank.
    With model.lora_rank, the policy's weights are frozen and adapters are trained. A critic has no
    adapters: all its weights are trained.
    """
    section, trainer = sections = config.model, config.trainer
    device, alone = pick(trainer.device), not dist.is_initialized()
    share = section.gradient_checkpointing_share if section.gradient_checkpointing else 0.0
    adapted = section.lora_rank > 0

    def policy_of(model: PreTrainedModel) -> PackedPolicy:
        model = lora.inject(model, section, trainer.seed) if adapted else model
        return PackedPolicy(model, checkpoint_share=share, fused=section.compile)

    def frozen(model: PreTrainedModel) -> PackedPolicy:
        own = PackedPolicy(model, fused=section.compile, replays=False)
        return own.requires_grad_(False)

    source = (model_folder, *sections, rank, mesh_of(*sections, world_size, device), device)
    # A checkpoint has only the adapters, so every machine must draw the same base, with or without
    # a GPU. The base is therefore drawn on the host.
    policy = load(policy_of, *source, on_host=adapted)
    critic = load(PackedCritic, *source) if config.algorithm.needs_critic else None
    reference = load(frozen, *source) if config.needs_reference and not adapted else None
    teachers = {}
    for name, teacher in config.teachers.items():
        if teacher.outside:
            continue
        trusted = section.model_copy(update={"trust_remote_code": teacher.trust_remote_code})
        teachers[name] = load(frozen, teacher.path, trusted, *source[2:])
    engine = kind(
        policy,
        step_options(config),
        model_folder=model_folder,
        rank=rank,
        world_size=world_size,
        device=device,
        critic=critic,
        reference=reference,
        teachers=teachers,
    )
    engine.owns_group = alone and dist.is_initialized()
    if section.compile:  # while the rollout engines start
        for model in (engine.actor, engine.critic, engine.reference, *engine.teachers.values()):
            if isinstance(model, Trainable):
                model.warm_up()
    return engine
