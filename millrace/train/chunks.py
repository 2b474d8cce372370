"""Rectangles of a tensor in a checkpoint: what a rank has that no DTensor describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Sizes = tuple[int, ...]


class Chunks(Tensor):
    """This rank's rectangles of one tensor. torch.distributed.checkpoint saves and loads them.

    A rectangle is a view: a load writes through it. Two ranks may have the same rectangle, but
    other rectangles must not overlap. It has the shape of the whole tensor, and no operations.
    """

    parts: dict[Sizes, Tensor]
    """The rectangles, by their first indices."""

    @staticmethod
    def __new__(cls, shape: Sizes, parts: dict[Sizes, Tensor] | None = None) -> Chunks:
        chunks: Chunks = Tensor._make_wrapper_subclass(cls, shape)
        chunks.parts = {} if parts is None else parts
        return chunks

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self, *_: Any) -> str:  # type: ignore[override]
        return f"Chunks({tuple(self.shape)}, {list(self.parts)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"rectangles of a tensor have no {func}")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), values.shape)
            for offsets, values in self.parts.items()
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.parts[chunk.offsets]),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]
