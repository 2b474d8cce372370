"""The Megatron train engine: one object for each rank."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from millrace.config import Config, OptimConfig
from millrace.extras.megatron import shape as sizes
from millrace.extras.megatron import state, weights
from millrace.extras.megatron.checks import check_model
from millrace.extras.megatron.modules import Policy
from millrace.extras.megatron.shape import Shape
from millrace.extras.megatron.trainable import ForwardRunner, MegatronTrainable
from millrace.models.checks import has_weights
from millrace.models.device import pick
from millrace.models.model import load_model
from millrace.train.options import StepOptions, step_options
from millrace.train.step import TrainSteps


class MegatronTrainEngine(TrainSteps):
    """A policy under training, with the reference that its algorithm needs.

    Satisfies ports.TrainRank.
    """

    def __init__(
        self,
        policy: Policy,
        options: StepOptions,
        *,
        hf: Any,
        shape: Shape,
        model_folder: str,
        rank: int,
        device: torch.device,
        reference: Policy | None = None,
    ) -> None:
        super().__init__(options, model_folder, device)
        self.hf, self.shape, self.rank = hf, shape, rank
        self.policy = policy
        place = (shape, rank, device)
        self.actor: MegatronTrainable = MegatronTrainable(
            policy, options.actor, options.trainer.megatron, *place
        )
        self.critic = None
        self.owns_sizes = False
        self.reference: ForwardRunner | None = reference and ForwardRunner(
            reference, options.actor, *place
        )

    def restart(self, optim: OptimConfig, horizon: int) -> None:
        self.actor.begin(optim, horizon)
        self.kl_coef = self.options.algorithm.kl_ctrl.kl_coef
        if self.reference is not None:
            self.actor.gather()
            self.reference.start_from(self.policy)

    async def save(self, folder: str, staged: bool = False) -> None:
        """Write the train state to `folder`. If `staged`, write a copy of it after the return."""
        await self.saved()
        self.actor.gather()
        state.save(self, folder, staged)

    async def load(self, folder: str) -> None:
        """Load a state that `save` wrote with any sizes of groups.

        Call `begin` first, with the settings of the run that saved the state.
        """
        state.load(self, folder)

    async def export(self, folder: str) -> None:
        """Write a Hugging Face folder, in the serving dtype."""
        self.actor.gather()
        weights.export(self.policy, self.shape, self.hf, self.model_folder, folder)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor in the serving dtype). All ranks iterate to the end."""
        self.actor.gather()
        yield from weights.full_weights(self.policy, self.shape, self.hf)

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, Tensor]]:
        """Yield (name, whole shape, serving dtype, first row, rows of the live weight to send)."""
        self.actor.gather()
        yield from weights.shards(self.policy, self.shape, self.hf)

    def adapters(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, Tensor]]:
        """Yield nothing: model.lora_rank is refused."""
        yield from ()

    def sent_weights(self) -> Iterator[Tensor]:
        """Yield this rank's weights. Ranks with copies of one weight change them alike."""
        self.actor.gather()
        yield from (parameter.detach() for parameter in self.policy.parameters())

    async def sleep(self) -> None:
        """Free the memory of optimizer state and gradients on a GPU, if trainer.offload is set."""
        self.actor.gather()
        if self.device.type == "cuda" and self.options.trainer.offload:
            self.actor.park()
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        self.actor.unpark()

    async def close(self) -> None:
        """Wait for a save, and destroy the process groups that `build` made."""
        await self.saved()
        if self.owns_sizes:
            sizes.destroy_parallel()
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def build(config: Config, model_folder: str, *, rank: int, world_size: int) -> MegatronTrainEngine:
    """Build the engine of one rank.

    With world_size > 1, the default process group must exist and have a CPU backend. Weights come
    from `model_folder`. If it has none, they are drawn from `trainer.seed`, the same on every rank.
    """
    device = pick(config.trainer.device)
    own, model = config.trainer.megatron, config.model
    trust = model.trust_remote_code
    hf = AutoConfig.from_pretrained(model_folder, trust_remote_code=trust)
    shape = sizes.shape_of(own, world_size)
    check_model(hf, config.trainer)
    deadline, seed = config.trainer.wait_deadline_s, config.trainer.seed
    made = sizes.init_parallel(shape, seed=seed, deadline_s=deadline)

    def policy() -> Policy:
        settings = sizes.transformer_config(hf, shape, model, own, device)
        return Policy(settings, hf, shape).to(device)

    reference = policy().requires_grad_(False) if config.needs_reference else None
    engine = MegatronTrainEngine(
        policy(),
        step_options(config),
        hf=hf,
        shape=shape,
        model_folder=model_folder,
        rank=rank,
        device=device,
        reference=reference,
    )
    with _with_weights(model_folder, seed, trust) as folder:
        mains = {p: (start, main) for p, start, main, _ in engine.actor.owned()}
        weights.load([engine.policy], folder, shape, hf, mains)
    engine.owns_sizes, engine.owns_group = made
    return engine


@contextlib.contextmanager
def _with_weights(folder: str, seed: int, trust: bool) -> Iterator[str]:
    """Yield a folder of the model with weights. They are drawn from the seed if it has none."""
    if not Path(folder).is_dir() or has_weights(Path(folder)):
        yield folder
        return
    drawn = load_model(folder, seed=seed, dtype="float32", trust_remote_code=trust)
    with tempfile.TemporaryDirectory() as own:
        # save_pretrained would write on the first rank alone. Tied tensors come once here.
        tensors = {name: p.detach().contiguous() for name, p in drawn.named_parameters()}
        save_file(tensors, f"{own}/model.safetensors")
        yield own
