"""A train engine's state on disk: checkpoints that load at any number of ranks, and Hugging Face folders."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from millrace.errors import CheckpointError

if TYPE_CHECKING:
    from millrace.engines.fsdp_train import FsdpTrainEngine

SKIPPED_FILES = ("config.json", "generation_config.json")
"""Files of a model folder that save_pretrained writes itself."""
SKIPPED_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Weights, which are not those of the export."""


def save(engine: FsdpTrainEngine, folder: str) -> None:
    """Weights, optimizer, the LR schedule's step and rank 0's random state, by torch.distributed.checkpoint. All ranks call."""
    with _one_process_is_meant():
        save_checkpoint(_state(engine), checkpoint_id=folder, no_dist=not dist.is_initialized())


def load(engine: FsdpTrainEngine, folder: str) -> None:
    """What `save` wrote, resharded to the ranks there are. All ranks call; every rank takes the one random state."""
    if not (Path(folder) / ".metadata").is_file():
        raise CheckpointError(f"{folder} is not a train engine's checkpoint: it has no .metadata. Fix: a whole checkpoint")
    state = _state(engine)
    with _one_process_is_meant():
        load_checkpoint(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(
        engine.policy,
        _optimizer(engine),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    engine.steps = int(state["steps"].item())
    engine.nonfinite_in_a_row = int(state["nonfinite_in_a_row"].item())
    torch.set_rng_state(state["random"])


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """torch warns of a missing process group on every save and load; one rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _state(engine: FsdpTrainEngine) -> dict[str, Any]:
    # Also makes the moments of an optimizer that has not stepped yet, with a step at learning rate 0.
    model, optimizer = get_state_dict(engine.policy, _optimizer(engine))
    return {
        "model": model,
        "optimizer": optimizer,
        "steps": torch.tensor(engine.steps),
        "nonfinite_in_a_row": torch.tensor(engine.nonfinite_in_a_row),
        "random": torch.get_rng_state(),
    }


def _optimizer(engine: FsdpTrainEngine) -> torch.optim.AdamW:
    if engine.optimizer is None:
        raise CheckpointError("the train engine has no optimizer to save or load. Fix: call begin(optim, horizon) first")
    return engine.optimizer


def export(engine: FsdpTrainEngine, folder: str) -> None:
    """Weights in the serving dtype, config, generation config, and the tokenizer's files of the folder it started from."""
    weights: dict[str, Tensor] = {}
    for name, tensor in engine.full_weights():
        # Every rank takes part in the gather; only rank 0 keeps what it gives.
        if engine.rank == 0:
            weights[name] = tensor.cpu()
    if engine.rank == 0:
        model: Any = engine.policy.model
        model.save_pretrained(folder, state_dict=weights)
        copy_tokenizer(engine.model_folder, folder)
    if engine.world_size > 1:
        dist.barrier()


def copy_tokenizer(source: str, folder: str) -> None:
    """Every small file beside the weights of a model folder: the tokenizer's, whatever it calls them. Keeps what is there."""
    if not Path(source).is_dir():
        return
    for file in Path(source).iterdir():
        target = Path(folder) / file.name
        ours = file.name in SKIPPED_FILES or file.name.endswith(SKIPPED_SUFFIXES)
        if file.is_file() and not ours and not target.exists():
            shutil.copy(file, target)
