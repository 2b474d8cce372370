"""A train engine's state on disk: checkpoints for any number of ranks, and Hugging Face folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from millrace.errors import CheckpointError
from millrace.train.fsdp.lora import StartPolicy
from millrace.train.fsdp.trainable import Trainable
from millrace.train.hf_folder import write_model
from millrace.train.muon import empty_state
from millrace.train.optim import apply_settings
from millrace.train.options import StepOptions
from millrace.train.state_reader import load_state
from millrace.train.state_writer import StateWriter, expect_one_process


class Restorable(Protocol):
    """The parts of a train engine that are saved, loaded and exported."""

    kl_coef: float
    actor: Trainable
    critic: Trainable | None
    reference: Trainable | StartPolicy | None
    adapted: bool
    """Whether adapters are trained and the base is frozen."""
    base_sum: int | None
    """Sum over the bits of a frozen base."""
    options: StepOptions
    model_folder: str
    policy: Any
    rank: int
    world_size: int
    writer: StateWriter

    def full_weights(self) -> Iterator[tuple[str, Tensor]]: ...


def save(engine: Restorable, folder: str, *, staged: bool) -> None:
    """Save a train state by torch.distributed.checkpoint. All ranks call this.

    The state has:

    - weights, optimizer and step count of the policy, and of the critic if there is one
    - the reference's weights
    - the KL coefficient
    - rank 0's random state

    For a policy with adapters, its weights are only the adapters, and the state has a sum over the
    base's bits. If `staged`, a copy of the state is written after the return.
    """
    (engine.writer.start if staged else engine.writer.write)(_state(engine), folder)


def load(engine: Restorable, folder: str) -> None:
    """Load a state that `save` wrote, resharded to the current ranks. All ranks call this.

    Every rank takes the same random state. The optimizer's settings and a fixed KL coefficient stay
    those of `begin`. Raises CheckpointError for a folder without a state, and for adapters that
    were trained on another base.
    """
    if not (Path(folder) / ".metadata").is_file():
        raise CheckpointError(
            f"{folder} is not a train engine's checkpoint: it has no .metadata. "
            "Fix: a whole checkpoint"
        )
    state = _state(engine)
    expect_one_process()
    load_state(state, folder, no_dist=not dist.is_initialized())
    if engine.base_sum is not None and state["base"].item() != engine.base_sum:
        raise CheckpointError(
            f"{folder} has adapters of another base than the weights in {engine.model_folder}. "
            "Fix: the model.path, model.dtype and trainer.seed of the run that saved it"
        )
    for model, name in _under_training(engine):
        part = state[name] if name else state
        set_state_dict(
            model.module,
            _optimizer(model),
            model_state_dict=part["model"],
            optim_state_dict=part["optimizer"],
            options=StateDictOptions(strict=not engine.adapted),  # the base is not in the state
        )
        apply_settings(_optimizer(model), model.optim)
        model.steps = int(part["steps"].item())
        model.nonfinite_in_a_row = int(part["nonfinite_in_a_row"].item())
    # The adapters of a StartPolicy were loaded in place.
    if isinstance(engine.reference, Trainable):
        set_model_state_dict(engine.reference.module, state["reference"])
    if engine.options.algorithm.kl_ctrl.type == "adaptive":  # a fixed one comes from the keys
        engine.kl_coef = float(state["kl_coef"].item())
    torch.set_rng_state(state["random"])


def _under_training(engine: Restorable) -> list[tuple[Trainable, str]]:
    """Return the trained models and their keys in a state. "" is the top level."""
    return [(engine.actor, "")] + ([(engine.critic, "critic")] if engine.critic is not None else [])


def _state(engine: Restorable) -> dict[str, Any]:
    state: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "kl_coef": torch.tensor(engine.kl_coef, dtype=torch.float64),
    }
    for model, name in _under_training(engine):
        weights, optimizer = get_state_dict(model.module, _with_moments(model))
        if model is engine.actor and engine.adapted:
            trained = {name for name, p in model.module.named_parameters() if p.requires_grad}
            weights = {name: tensor for name, tensor in weights.items() if name in trained}
        part = {
            "model": weights,
            "optimizer": optimizer,
            "steps": torch.tensor(model.steps),
            "nonfinite_in_a_row": torch.tensor(model.nonfinite_in_a_row),
        }
        state |= {name: part} if name else part
    if isinstance(engine.reference, StartPolicy):
        state["reference"] = engine.reference.kept
    elif engine.reference is not None:
        state["reference"] = get_model_state_dict(engine.reference.module)
    if engine.base_sum is not None:
        state["base"] = torch.tensor(engine.base_sum)
    return state


def _optimizer(model: Trainable) -> torch.optim.AdamW:
    if model.optimizer is None:
        raise CheckpointError(
            "the train engine has no optimizer to save or load. "
            "Fix: call begin(optim, horizon) first"
        )
    return model.optimizer


def _with_moments(model: Trainable) -> torch.optim.AdamW:
    """Return the model's optimizer, with moments of 0 if it has not stepped yet.

    Otherwise, torch would create the moments by a step at learning rate 0. AdamW's bias correction
    would count that step, so a save would change the later steps.
    """
    optimizer = _optimizer(model)
    if not optimizer.state:
        for p in model.parameters:
            optimizer.state[p] = empty_state(optimizer, p)
    return optimizer


def export(engine: Restorable, folder: str) -> None:
    """Write a Hugging Face folder: weights in the serving dtype, config and generation config.

    The tokenizer's files come from the folder of the start model.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in engine.full_weights():
        # Every rank takes part in the gather; only rank 0 keeps the result.
        if engine.rank == 0:
            weights[name] = tensor.cpu()
    if engine.rank == 0:
        write_model(engine.policy.model, weights, engine.model_folder, folder)
    if engine.world_size > 1:
        dist.barrier()
