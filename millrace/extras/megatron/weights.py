"""A Megatron policy's weights as those of a Hugging Face model: loaded, sent, whole, exported."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig

from millrace.errors import ConfigError, bad_value
from millrace.extras.megatron.mapping import Box, Kind, Sizes, boxes, in_files, names_of
from millrace.extras.megatron.shape import RankCoordinates, Shape
from millrace.models.model import empty_model
from millrace.train.hf_folder import write_model

Shards = Iterator[tuple[str, Sizes, torch.dtype, int, Tensor]]


def parameters(
    chunks: Iterable[nn.Module], shape: Shape, hf: Any
) -> Iterator[tuple[nn.Parameter, list[Box]]]:
    """Yield each parameter of this rank, and the parts of Hugging Face tensors that it has."""
    place = shape.place(dist.get_rank())
    for chunk in chunks:
        layers = getattr(_bare(chunk).decoder, "layers", [])
        first = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in _bare(chunk).named_parameters():
            yield parameter, boxes(name, parameter.shape[-1], hf, shape, place, first)


def is_copy(parameter: nn.Parameter, policy: nn.Module) -> bool:
    """Return whether this is the last stage's copy of tied embeddings. The first stage has them."""
    return getattr(parameter, "shared_embedding", False) and not _bare(policy).pre_process


def _bare(chunk: Any) -> Any:
    """Return a chunk without its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


Mains = Mapping[nn.Parameter, tuple[int, Tensor]]
"""The first element and the float32 weights that an optimizer has of each parameter."""


@torch.no_grad()
def load(
    chunks: Iterable[nn.Module], folder: str, shape: Shape, hf: Any, mains: Mains | None = None
) -> None:
    """Load this rank's parts of the safetensors in a model folder (or of a hub id).

    The float32 weights of `mains` get the values of the folder too, before a cast to half
    precision. Padded rows of the vocabulary become 0. Raises ConfigError if a tensor is missing or
    has another shape than the configuration says.
    """
    whole = names_of(hf)
    with Folder(folder, whole) as files:
        for parameter, parts in parameters(chunks, shape, hf):
            found = torch.zeros_like(parameter, dtype=torch.float32)
            for box in parts:
                rows = found[box.row : box.row + box.rows]
                rows.copy_(files.read(box, hf).view(rows.shape))
            parameter.copy_(found)
            if mains is not None and parameter in mains:
                start, main = mains[parameter]
                main.view(-1).copy_(found.view(-1)[start : start + main.numel()])


def shards(policy: nn.Module, shape: Shape, hf: Any) -> Shards:
    """Yield (name, whole shape, dtype, first row, rows) of what this rank sends, in model order.

    Ranks of one tensor group exchange columns for rows. Apart from that, nothing moves. Of several
    copies of a tensor, the first sends. The ranks of a tensor group iterate together.
    """
    place, own = shape.place(dist.get_rank()), dict[str, list[tuple[Box, Tensor]]]()
    some = next(policy.parameters())
    for parameter, parts in parameters([policy], shape, hf):
        if is_copy(parameter, policy):
            continue
        for box in parts:
            rows = parameter.detach()[box.row : box.row + box.rows]
            own.setdefault(box.name, []).append((box, rows))
    for name, whole in names_of(hf).items():
        first, sent = _sent(own.get(name, []), whole, place)
        none = some.new_empty((0, *whole[1:]), requires_grad=False)
        yield name, whole, some.dtype, first, none if sent is None else sent


def _sent(
    parts: list[tuple[Box, Tensor]], whole: Sizes, place: RankCoordinates
) -> tuple[int, Tensor | None]:
    """Return the first row and the rows of a tensor that this rank sends, or None."""
    expert = len(whole) > 2
    if not parts or (place.expert_data if expert else place.data + place.context):
        return 0, None
    box, rows = parts[0]
    if expert:
        return _experts(parts, whole)
    if box.kind is Kind.COLUMNS:
        return _exchanged(rows, 1, parallel_state.get_tensor_model_parallel_group())
    if box.kind is Kind.WHOLE and place.tensor:
        return 0, None
    return box.offsets[0], rows if len(parts) == 1 else torch.cat([rows for _, rows in parts])


def _experts(parts: list[tuple[Box, Tensor]], whole: Sizes) -> tuple[int, Tensor]:
    """Return the first expert and the experts [n, rows, columns] that this rank sends.

    Ranks of one expert-tensor group exchange parts of experts for whole ones.
    """
    group = parallel_state.get_expert_tensor_parallel_group()
    by_expert: dict[int, list[Tensor]] = {}
    for box, rows in parts:
        by_expert.setdefault(box.offsets[0], []).append(rows)
    numbers = sorted(by_expert)
    # [experts, parts (gate and up, or 1), rows, columns]
    stack = torch.stack([torch.stack(by_expert[e]) for e in numbers])
    first, rows = _exchanged(stack, 3 if parts[0][0].kind is Kind.COLUMNS else 2, group)
    return numbers[0] + first, rows.reshape(-1, *whole[1:])


def _exchanged(own: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[int, Tensor]:
    """Return the first row, and rows that are whole in `dim`. Each rank of `group` gets a share."""
    ranks, rank = group.size(), group.rank()
    if ranks == 1:
        return 0, own
    each = -(-len(own) // ranks)
    starts = [min(r * each, len(own)) for r in range(ranks + 1)]
    sizes = [b - a for a, b in itertools.pairwise(starts)]
    found = own.new_empty(ranks * sizes[rank], *own.shape[1:])
    dist.all_to_all_single(found, own.contiguous(), [sizes[rank]] * ranks, sizes, group=group)
    return starts[rank], torch.cat(found.chunk(ranks), dim) if len(found) else own.new_empty(
        0, *(n * ranks if d == dim else n for d, n in enumerate(own.shape) if d)
    )


def full_weights(policy: nn.Module, shape: Shape, hf: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) in model order. All ranks iterate to the end."""
    device = next(policy.parameters()).device
    for name, whole, dtype, first, rows in shards(policy, shape, hf):
        if shape.world_size == 1:
            yield name, rows
            continue
        tensor = torch.zeros(whole, dtype=dtype, device=device)
        tensor[first : first + len(rows)] = rows
        # A sum of bits: each element has one sender, and the others add 0. A sum of floats would
        # change -0.0.
        flat = tensor.view(-1).view(torch.uint8)
        dist.all_reduce(flat.view(torch.int32) if len(flat) % 4 == 0 else flat)
        yield name, tensor


def export(policy: nn.Module, shape: Shape, hf: Any, source: str, folder: str) -> None:
    """Write a Hugging Face folder. The tokenizer's files come from the folder `source`."""
    first = dist.get_rank() == 0
    # Every rank takes part in the gather; only rank 0 keeps the result.
    found = {
        name: torch.empty_like(tensor, device="cpu").copy_(tensor)
        for name, tensor in full_weights(policy, shape, hf)
        if first
    }
    if first:
        model = empty_model(source)
        if (Path(source) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(source)
        write_model(model, found, source, folder)
    dist.barrier()


class Folder(contextlib.ExitStack):
    """The safetensors of a model folder, from which slices are read."""

    def __init__(self, folder: str, whole: dict[str, Sizes]) -> None:
        super().__init__()
        self.folder, self._whole = folder, whole
        path = Path(folder)
        if not path.is_dir():
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(folder, allow_patterns=["*.safetensors", "*.json"]))
        self._files = {
            name: file
            for file in (
                self.enter_context(safe_open(file, "pt"))
                for file in sorted(path.glob("*.safetensors"))
            )
            for name in file.keys()  # noqa: SIM118 - a handle is no mapping
        }
        if not self._files:
            raise self._error("it has no *.safetensors", "save the model as safetensors")

    def read(self, box: Box, hf: Any) -> Tensor:
        """Return the values of a box."""
        name, offsets = in_files(box, hf)
        if name not in self._files and box.name in self._files:
            name, offsets = box.name, box.offsets
        if name not in self._files:
            raise self._error(f"it lacks {name}", "a folder that transformers can load")
        part = self._files[name].get_slice(name)
        sizes = box.sizes[len(box.sizes) - len(offsets) :]
        found, whole = tuple(part.get_shape()), self._whole[box.name]
        if len(found) == len(whole) and found != whole:
            raise self._error(
                f"{name} has the shape {list(found)}, and config.json says {list(whole)}",
                "the config.json of these weights",
            )
        return part[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]

    def _error(self, rule: str, fix: str) -> ConfigError:
        return bad_value("model.path", self.folder, rule, fix)
