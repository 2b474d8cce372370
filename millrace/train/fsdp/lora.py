"""Low-rank adapters (LoRA): peft injects them into the model, and the model's weights are frozen.

An adapted weight W [out, in] acts as W + scale x B A, with A [rank, in] and B [out, rank]. B starts
at 0, so the start policy is the base. `merged_weights` and `base_weights` use the model's own
names. `adapters` derives its names from the adapted weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel

from millrace.config import ModelConfig
from millrace.errors import INSTALL, MissingDependency, bad_value
from millrace.models.model import DTYPES, empty_model
from millrace.train.fsdp.policy import layers_of
from millrace.train.layout import Ints
from millrace.train.rows import Rows

if TYPE_CHECKING:
    from millrace.train.fsdp.trainable import Trainable

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def inject(model: PreTrainedModel, section: ModelConfig, seed: int) -> PreTrainedModel:
    """Inject float32 adapters, drawn from `seed`, into model.target_modules, in place.

    All other weights are frozen, in the serving dtype. On the meta device, nothing is drawn. Raises
    MissingDependency without peft. Raises ConfigError for a name that no linear module of the
    decoder layers has.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise MissingDependency(f"model.lora_rank needs peft. Fix: {INSTALL['peft']}.") from error
    settings = LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha,  # type: ignore[arg-type]  # fractions work too
        target_modules=_targets(model, section.target_modules),
    )
    with torch.random.fork_rng(devices=[]):
        # seed + 1, because a folder without weights draws its model from the seed itself.
        torch.manual_seed(seed + 1)
        inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
        if not _is_adapter(name) and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(DTYPES[section.dtype])
    return model


def num_trained(model_folder: str | Path, section: ModelConfig) -> int:
    """Return the number of weights in all adapters."""
    empty = empty_model(model_folder, trust_remote_code=section.trust_remote_code)
    model = inject(empty, section, seed=0)  # nothing is drawn
    return sum(weight.numel() for _, weight in adapters(model))


def _targets(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Return the full names of the modules to adapt."""
    layers = {
        id(m) for layer in layers_of(model) for m in layer.modules() if isinstance(m, nn.Linear)
    }
    linear = [name for name, module in model.named_modules() if id(module) in layers]
    if wanted == ("all-linear",):
        return linear
    for name in wanted:
        if not any(f".{one}".endswith(f".{name}") for one in linear):
            known = sorted({one.rsplit(".", 1)[-1] for one in linear})
            rule = f"no linear module of the decoder layers is called {name!r}; "
            rule += f"there are {', '.join(known)}"
            raise bad_value(
                "model.target_modules",
                list(wanted),
                rule,
                "model.target_modules=all-linear, or some of these",
            )
    return [one for one in linear if any(f".{one}".endswith(f".{name}") for name in wanted)]


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (own name, weight) of all weights but adapters, in order. Tied weights come once."""
    for name, parameter in model.named_parameters():
        if not _is_adapter(name):
            yield name.replace(".base_layer.", "."), parameter.detach()


def adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, A [rank, in] or B [out, rank]), float32, each A before its B.

    The name is the adapted weight's name + ".lora_A" or ".lora_B".
    """
    for name, parameter in model.named_parameters():
        if _is_adapter(name):
            module, which = name.split(".lora_")
            yield f"{module}.weight.lora_{which[0]}", parameter.detach()


def merged_weights(model: nn.Module, scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield `base_weights` with the adapters merged, in the sharding and dtype of the base.

    With adapters, this is a collective, because every rank needs all of A for its rows. Without
    adapters, these are the live weights.
    """
    pairs = dict(adapters(model))
    for name, weight in base_weights(model):
        if (a := pairs.get(f"{name}.lora_A")) is not None:
            b, own = pairs[f"{name}.lora_B"], own_rows(weight)
            whole = a.full_tensor() if isinstance(a, DTensor) else a
            rows = torch.addmm(own.to(b.dtype), own_rows(b), whole, alpha=scale).to(own.dtype)
            spec = getattr(weight, "_spec", None)
            weight = rows if spec is None else DTensor(rows, spec, requires_grad=False)
        yield name, weight


def own_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def base_sum(model: nn.Module) -> int:
    """Return a sum over the bits of the base, modulo 2^64. This is a collective.

    The sum is the same for any number of ranks and for any number of copies of the model.
    """
    weights = [weight for _, weight in base_weights(model)]
    sums = [own_rows(w).view(_INTEGERS[w.element_size()]).sum(dtype=torch.int64) for w in weights]
    own = (torch.stack(sums) * torch.arange(1, len(sums) + 1, device=sums[0].device)).sum()
    first = weights[0]
    if not isinstance(first, DTensor):
        return int(own.item())
    # The sums of shards are added up. The copies of the model have the same sum.
    placements = [Partial() if p.is_shard() else p for p in first.placements]
    return int(DTensor.from_local(own, first.device_mesh, placements).full_tensor().item())


class StartPolicy:
    """The reference of a policy with adapters: the same model with the adapters of `start`."""

    def __init__(self, actor: Trainable) -> None:
        self._actor = actor
        self.kept = {name: tensor.clone() for name, tensor in adapters(actor.module)}
        """Adapters of the reference, sharded as the live ones."""

    @torch.no_grad()
    def start(self) -> None:
        """Make the current policy the reference."""
        for name, tensor in adapters(self._actor.module):
            self.kept[name].copy_(tensor)

    @torch.no_grad()
    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float
    ) -> list[Tensor]:
        """Return `Trainable.tokens` of the reference, whose routers choose for themselves.

        The reference's adapters replace the live ones during the call. The copies are small.
        """
        rows = replace(rows, experts=None)
        live = dict(adapters(self._actor.module))
        trained = {name: tensor.clone() for name, tensor in live.items()}
        for name, tensor in live.items():
            tensor.copy_(self.kept[name])
        try:
            return self._actor.tokens(rows, members, temperature=temperature)
        finally:
            for name, tensor in live.items():
                tensor.copy_(trained[name])
