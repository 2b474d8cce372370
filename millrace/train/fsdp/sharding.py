"""Modules sharded over ranks by FSDP2, also with several copies of the model (hybrid sharding)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.config import ModelConfig, TrainerConfig
from millrace.models.model import empty_model, fits, load_model
from millrace.train.fused_norm import fuse_norms
from millrace.train.ulysses import Division

GATHERED_BYTES = 1 << 30
"""Up to this size, the gathered weights stay from the forward to the backward pass."""
UNIT = 1 << 25
"""The parameters of a unit of sharding, at least: 134 MB in float32, or one layer if it has more."""


class Layered(Protocol):
    attention_length: float
    """`millrace.train.packing.attention_length` of the model."""

    def layers(self) -> list[nn.Module]:
        """Return the units of sharding."""
        ...


M = TypeVar("M", bound=nn.Module)


def load(
    make: Callable[[PreTrainedModel], M],
    folder: str,
    section: ModelConfig,
    trainer: TrainerConfig,
    rank: int,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    on_host: bool = False,
) -> M:
    """Apply `make` to the model in `folder`, and return the result, sharded over `mesh`.

    Only rank 0 loads or draws weights. The other ranks receive their shares from it. Rank 0 works
    on the CPU in these cases: with `on_host`, with offloading, and if the float32 model takes more
    than half of the GPU's free memory.
    """
    trust = section.trust_remote_code

    def source() -> PreTrainedModel:
        resident = not (on_host or offloads(trainer, device))
        fit = resident and fits(folder, device, trust_remote_code=trust)
        place = device if fit else torch.device("cpu")
        return load_model(
            folder, seed=trainer.seed, dtype="float32", device=place, trust_remote_code=trust
        )

    if mesh is None or mesh.size() == 1:
        return shard(make(source()), section, trainer, mesh, device)
    full = make(source()) if rank == 0 else None
    empty = empty_model(folder, trust_remote_code=trust)
    module = shard(make(empty), section, trainer, mesh, device)
    module.to_empty(device="cpu" if offloads(trainer, device) else device)
    # The state dict lacks these buffers: the tables of the rotary embedding.
    buffers = dict(full.named_buffers()) if full is not None else {}
    for name, buffer in module.named_buffers():
        if full is not None:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, 0)
    weights: dict[str, Any] = dict(full.state_dict()) if full is not None else {}
    set_model_state_dict(
        module, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for part in module.modules():  # the inputs of layers are on the device
        buffers = {k: buffer for k, buffer in part._buffers.items() if buffer is not None}
        part._buffers.update({k: buffer.to(device) for k, buffer in buffers.items()})
    return module


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile one graph for all sizes of a batch, and for first and recomputed passes.

    In a first pass, FSDP gives a layer a view of its input. When a checkpointed layer is
    recomputed, its input is no view. torch.compile would build a graph for each case. The two
    graphs could keep different tensors for the backward pass, and torch would raise an error.
    Therefore the graph always gets a view.
    """
    graph = torch.compile(forward, dynamic=True)

    def on_a_view(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return graph(hidden_states.view_as(hidden_states), *args, **kwargs)

    return on_a_view


def mesh_of(
    section: ModelConfig, trainer: TrainerConfig, world_size: int, device: torch.device
) -> DeviceMesh | None:
    """Return FSDP2's mesh: [ranks], or [copies of the model, ranks of each].

    Consecutive ranks share a copy. Return None if there is nothing to shard, cast or offload. All
    models of an engine share one mesh, because each mesh has its own process groups.
    """
    if world_size == 1 and section.dtype == "float32" and not offloads(trainer, device):
        # FSDP would add 18 % to a quickstart step (43 ms instead of 36 ms, with one thread).
        return None
    if not dist.is_initialized():
        # On one rank, FSDP casts the weights layer by layer, or moves them to the GPU. Both need a
        # process group.
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=HashStore(),
            rank=0,
            world_size=1,
        )
    size = trainer.fsdp_size or world_size
    if size == world_size:
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(
        device.type, (world_size // size, size), mesh_dim_names=("replicate", "shard")
    )


def division_of(ranks: int) -> Division:
    """Return the division of tokens among groups of consecutive ranks. All ranks call this."""
    return Division(dist.new_subgroups(ranks)[0] if ranks > 1 else None)


def shard(
    module: M,
    section: ModelConfig,
    trainer: TrainerConfig,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> M:
    """Apply FSDP2 to units of decoder layers, and to the rest of the module.

    Master weights stay in float32, and gradients are added up in float32.
    """
    layers = cast(Layered, module).layers()
    if device.type == "cuda" and section.dtype == "bfloat16":
        fuse_norms(module)
    if section.compile:
        for layer in layers:
            layer.forward = _compiled(layer.forward)  # type: ignore[method-assign]
    if mesh is None:
        return module.to(device)
    bf16 = section.dtype == "bfloat16"
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32 if bf16 else None
    )
    home = CPUOffloadPolicy() if offloads(trainer, device) else OffloadPolicy()
    gathered = sum(p.numel() for p in module.parameters()) * (2 if bf16 else 4)
    # A small model's step is bound by the host, and a second gather costs it milliseconds.
    again = gathered > GATHERED_BYTES
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": home}
    for unit in _units(layers):
        fully_shard(unit, reshard_after_forward=again, **shared)
    fully_shard(module, **shared)
    return module


def reshard(module: nn.Module) -> None:
    """Free the gathered weights of all units of `module`."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _units(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Return consecutive layers in units of at least UNIT parameters.

    The host's work for a unit does not depend on its size, and it bounds the step of a small model.
    """
    units, size = [list[nn.Module]()], 0
    for layer in layers:
        if size >= UNIT:
            units.append([])
            size = 0
        units[-1].append(layer)
        size += sum(p.numel() for p in layer.parameters())
    return units


def offloads(trainer: TrainerConfig, device: torch.device) -> bool:
    """Return whether weights stay in host memory and are copied to a GPU for use."""
    return trainer.offload_policy and device.type == "cuda"


def sent_rows(tensor: Tensor) -> tuple[int, Tensor]:
    """Return the first row and the rows that this rank sends in a weight sync.

    FSDP2 gives each rank of a copy ceil(rows / ranks) rows, until no rows remain. The ranks of all
    copies but the first send no rows.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor
    own, coordinate = tensor.to_local(), tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    if any(coordinate[:-1]):
        return 0, own[:0]
    each = -(-tensor.shape[0] // tensor.device_mesh.size(-1))
    return min(coordinate[-1] * each, tensor.shape[0]), own
