"""The reader of train states from disk. Nothing in a state can run code.

torch.distributed.checkpoint reads its index, and all values that are no tensors, with an unpickler
that runs whatever a file tells it to. Here both may name only the classes that a state has.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from millrace.errors import CheckpointError

INDEX = ".metadata"
_CLASSES = {
    index.__name__: frozenset(
        {
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "WindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),  # Python 3.13
}
"""The classes and functions that an index may name, by their modules. It may name dtypes too."""
_FIX = "Fix: a checkpoint that this run made, or millrace export of it by those who made it"


class _IndexUnpickler(pickle.Unpickler):
    """Builds the objects of an index, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no state has")


class StateReader(FileSystemReader):
    """Reads the files of one state. Without the index there is no state."""

    def read_metadata(self) -> index.Metadata:
        """Return the index. Raises CheckpointError if it has anything that a state has not."""
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                found = _IndexUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is refused: {error}. {_FIX}") from error
        if not isinstance(found, index.Metadata) or not found.storage_data:
            raise CheckpointError(f"{path} is refused: it is no index of a state. {_FIX}")
        for info in found.storage_data.values():
            inside = PurePath(info.relative_path)
            if inside.name != str(inside) or inside.name == "..":
                raise CheckpointError(f"{path} is refused: it names {inside}. {_FIX}")
        if found.storage_meta is None:
            found.storage_meta = index.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class StatePlanner(DefaultLoadPlanner):
    """Reads values that are no tensors without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"the state's {name} is refused: {error}. {_FIX}") from error
        if self.flatten_state_dict:
            _nested_dict.set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found


def load_state(state: dict[str, Any], folder: str, *, no_dist: bool = False) -> None:
    """Read a state into the tensors and values of `state`, as all ranks call this at once.

    Raises CheckpointError for files that name other classes than those of a state.
    """
    reader = StateReader(folder)
    reader.read_metadata()
    try:
        load(state, storage_reader=reader, planner=StatePlanner(), no_dist=no_dist)
    except CheckpointException as error:
        # CheckpointException is a BaseException. It would end a worker without a message.
        causes = "; ".join(f"rank {rank}: {e}" for rank, (e, _) in sorted(error.failures.items()))
        raise CheckpointError(f"{folder} was not read: {causes}") from error
