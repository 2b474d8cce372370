"""Modules over ranks: FSDP2, hybrid with several copies of the model. Rank 0 loads for all."""

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
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from millrace.config import ModelConfig, TrainerConfig
from millrace.models.model import empty_model, fits, load_model


class Layered(Protocol):
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
    """Return `make` of the model in `folder`, sharded over `mesh`.

    Only the first rank loads or draws weights; the other ranks receive their shares from it.
    `on_host`: the model is loaded or drawn, and made, on the CPU. The same happens if the GPU
    cannot fit both the whole model and the rank's share.
    """
    trust = section.trust_remote_code

    def source() -> PreTrainedModel:
        host = (
            on_host
            or offloads(trainer, device)
            or not fits(folder, device, trust_remote_code=trust)
        )
        place = torch.device("cpu") if host else device
        return load_model(
            folder, seed=trainer.seed, dtype="float32", device=place, trust_remote_code=trust
        )

    if mesh is None or mesh.size() == 1:
        return shard(make(source()), section, trainer, mesh, device)
    full = make(source()) if rank == 0 else None
    empty = empty_model(folder, trust_remote_code=trust)
    module = shard(make(empty), section, trainer, mesh, device)
    module.to_empty(device="cpu" if offloads(trainer, device) else device)
    # No state dict has these buffers: tables of the rotary embedding.
    buffers = dict(full.named_buffers()) if full is not None else {}
    for name, buffer in module.named_buffers():
        if full is not None:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, 0)
    weights: dict[str, Any] = dict(full.state_dict()) if full is not None else {}
    set_model_state_dict(
        module, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for part in module.modules():  # inputs of layers are on the device
        part._buffers.update(
            {
                name: buffer.to(device)
                for name, buffer in part._buffers.items()
                if buffer is not None
            }
        )
    return module


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile one graph for all sizes, which change with each batch, and for every pass.

    FSDP passes a view of its input to a layer, but not when a checkpointed layer is recomputed.
    Compiled code distinguishes the two. Two graphs could keep different tensors for the backward
    pass, and torch would reject the second.
    """
    graph = torch.compile(forward, dynamic=True)

    def on_a_view(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return graph(hidden_states.view_as(hidden_states), *args, **kwargs)

    return on_a_view


def mesh_of(
    section: ModelConfig, trainer: TrainerConfig, world_size: int, device: torch.device
) -> DeviceMesh | None:
    """Return FSDP2's mesh: [ranks], or [copies of the model, ranks of each].

    Consecutive ranks share a copy. Return None if there is nothing to shard and nothing to cast.
    All models of an engine share one mesh: every further mesh would have its own process groups.
    """
    if world_size == 1 and section.dtype == "float32" and not offloads(trainer, device):
        # Wrapping would add 18 % to a quickstart step (43 ms against 36, one thread).
        return None
    if not dist.is_initialized():
        # On one rank, FSDP casts the weights layer by layer, or moves them to the GPU. Both need a
        # group.
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


def shard(
    module: M,
    section: ModelConfig,
    trainer: TrainerConfig,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> M:
    """Apply FSDP2 to each decoder layer and to the rest.

    Master weights stay float32, and gradients are added up in float32.
    """
    layers = cast(Layered, module).layers()
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
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=home)
    fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=home)
    return module


def offloads(trainer: TrainerConfig, device: torch.device) -> bool:
    """Return whether weights live in host memory and are moved to a GPU for use."""
    return trainer.offload_policy and device.type == "cuda"
