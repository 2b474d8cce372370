"""A Megatron engine's state on disk, by Hugging Face names, for any sizes of groups.

The keys and the shapes are those of the FSDP engine's states. So each engine loads the other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from millrace.errors import CheckpointError
from millrace.extras.megatron.mapping import Box, Kind, names_of
from millrace.extras.megatron.shape import Shape
from millrace.extras.megatron.trainable import ForwardRunner, MegatronTrainable
from millrace.extras.megatron.weights import is_copy, parameters
from millrace.train.chunks import Chunks
from millrace.train.optim import adamw
from millrace.train.options import StepOptions
from millrace.train.state_reader import load_state
from millrace.train.state_writer import StateWriter, expect_one_process

WEIGHT = "model.model.{}"
MOMENT = "optimizer.state.model.{}.{}"
REFERENCE = "reference.model.{}"
GROUP = "optimizer.param_groups.{}.{}"
"""The keys of the FSDP engine's states."""
TIED = {"model.embed_tokens.weight": "lm_head.weight"}
"""The second name that a tied tensor has in the FSDP engine's states."""


class Restorable(Protocol):
    """The parts of the engine that are saved and loaded."""

    kl_coef: float
    actor: MegatronTrainable
    reference: ForwardRunner | None
    options: StepOptions
    writer: StateWriter
    shape: Shape
    rank: int
    hf: Any


class Slot(NamedTuple):
    """The optimizer's shard of a parameter on this rank: a flat range of its elements."""

    start: int
    main: Tensor
    """The float32 weights."""
    state: dict[str, Tensor]
    """exp_avg, exp_avg_sq and step."""


def save(engine: Restorable, folder: str, staged: bool) -> None:
    """Save weights, moments, steps, the reference, the KL coefficient and rank 0's random state.

    All ranks call this. Each writes what it has, and nothing is gathered. If `staged`, a copy of
    the state is written after the return.
    """
    whole = names_of(engine.hf)
    state = _state(engine, saving=True)
    if engine.rank == 0:
        # The FSDP engine asks for these. They are the settings of the run, which `begin` sets.
        groups = adamw(
            [nn.Parameter(torch.empty(1, 1)), nn.Parameter(torch.empty(1))], engine.actor.optim
        ).param_groups
        for i, group in enumerate(groups):
            names = [f"model.{n}" for n, s in whole.items() if (len(s) < 2) == bool(i)]
            for key, value in {**group, "params": names}.items():
                state[GROUP.format(i, key)] = value
    if engine.hf.tie_word_embeddings:
        for pattern in (WEIGHT, REFERENCE):
            for name, other in TIED.items():
                if pattern.format(name) in state:
                    state[pattern.format(other)] = state[pattern.format(name)]
    (engine.writer.start if staged else engine.writer.write)(state, folder)


def load(engine: Restorable, folder: str) -> None:
    """Load a state that `save` or the FSDP engine wrote. All ranks call this.

    Every rank takes the same random state. The optimizer's settings and a fixed KL coefficient stay
    those of `begin`. Raises CheckpointError for a folder without a state.
    """
    if not (Path(folder) / ".metadata").is_file():
        raise CheckpointError(
            f"{folder} is not a train engine's checkpoint: it has no .metadata. "
            "Fix: a whole checkpoint"
        )
    state = _state(engine, saving=False)
    expect_one_process()
    load_state(state, folder)
    actor = engine.actor
    for slot, boxes in _slots(engine, actor, copies=True):
        for box in boxes[:1]:
            slot.state["step"] = state[MOMENT.format(box.name, "step")].clone()
    actor.weights_loaded()
    actor.steps = int(state["steps"].item())
    actor.nonfinite_in_a_row = int(state["nonfinite_in_a_row"].item())
    if engine.options.algorithm.kl_ctrl.type == "adaptive":
        engine.kl_coef = float(state["kl_coef"].item())
    torch.set_rng_state(state["random"])


def _state(engine: Restorable, *, saving: bool) -> dict[str, Any]:
    """Return the state by its keys. Its tensors are live."""
    if not engine.actor.began:
        raise CheckpointError(
            "the train engine has no optimizer to save or load. "
            "Fix: call begin(optim, horizon) first"
        )
    whole, actor = names_of(engine.hf), engine.actor
    state: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "kl_coef": torch.tensor(engine.kl_coef, dtype=torch.float64),
        "steps": torch.tensor(actor.steps),
        "nonfinite_in_a_row": torch.tensor(actor.nonfinite_in_a_row),
    }

    def put(key: str, box: Box, start: int, flat: Tensor) -> None:
        if key not in state:
            state[key] = Chunks(whole[box.name])
        for offsets, sizes, at in box.within(start, start + flat.numel()):
            count = torch.Size(sizes).numel()
            state[key].parts[offsets] = flat[at - start : at - start + count].view(sizes)

    for slot, boxes in _slots(engine, actor, copies=not saving):
        for box in _written(engine, boxes) if saving else boxes:
            put(WEIGHT.format(box.name), box, slot.start, slot.main.detach().view(-1))
            for kind in ("exp_avg", "exp_avg_sq"):
                put(MOMENT.format(box.name, kind), box, slot.start, slot.state[kind].view(-1))
            state[MOMENT.format(box.name, "step")] = slot.state["step"].clone()
    if engine.reference is not None:
        for parameter, boxes in parameters([engine.reference.policy], engine.shape, engine.hf):
            if saving and is_copy(parameter, engine.reference.policy):
                continue
            for box in _written(engine, boxes) if saving else boxes:
                put(REFERENCE.format(box.name), box, 0, parameter.detach().view(-1))
    return state


def _written(engine: Restorable, boxes: Iterable[Box]) -> Iterator[Box]:
    """Yield the boxes that this rank writes: of a tensor that all ranks have, the first writes.

    With the distributed optimizer, copies of such a tensor may be cut differently.
    """
    place = engine.shape.place(engine.rank)
    return (box for box in boxes if box.kind is not Kind.WHOLE or not place.tensor)


def _slots(
    engine: Restorable, actor: MegatronTrainable, *, copies: bool
) -> Iterator[tuple[Slot, list[Box]]]:
    """Yield what this rank's optimizers have, and of which Hugging Face tensors.

    `copies` includes the last stage's copy of tied embeddings.
    """
    owned = {p: (start, main, part) for p, start, main, part in actor.owned()}
    for parameter, boxes in parameters([actor.policy], engine.shape, engine.hf):
        if parameter in owned and (copies or not is_copy(parameter, actor.policy)):
            start, main, optimizer = owned[parameter]
            state = optimizer.state[main]
            if not state:  # torch would make the moments in the first step
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(main, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(main, requires_grad=False)
            yield Slot(start, main, state), boxes
