"""Caches that make later starts faster: compiled code, and the names by which it is found.

vLLM finds compiled code by its settings, and the path of the model is one of them. A new model and
one with other settings lie in the folder of their run, so their config.json gets a lasting path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.config import ModelConfig
from millrace.process.files import replace_file

_SIZES = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}


def lasting_folder(model: ModelConfig, folder: str) -> str:
    """Return a folder with the same config.json, whose path is the same in the next run.

    vLLM gets all weights from the trainer, and needs no tokenizer.
    """
    own = model.path and not model.override_config
    if own or model.trust_remote_code or not (root := os.environ.get("VLLM_CACHE_ROOT")):
        return folder
    shape = (Path(folder) / "config.json").read_text()
    lasting = Path(root) / "models" / hashlib.sha256(shape.encode()).hexdigest()[:16]
    lasting.mkdir(parents=True, exist_ok=True)
    # Other replicas write the same file now.
    replace_file(lasting / "config.json", shape, by=str(os.getpid()))
    return str(lasting)


def graph_options(engine_kwargs: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """Return vLLM's compilation_config with `graph_sizes`, unless its user chose sizes."""
    own = engine_kwargs.get("compilation_config", {})
    if not isinstance(own, dict) or _SIZES & (engine_kwargs.keys() | own.keys()):
        return {}
    return {"compilation_config": own | {"cudagraph_capture_sizes": graph_sizes(slots)}}


def graph_sizes(slots: int) -> list[int]:
    """Return the batch sizes with CUDA graphs of their own: 23 for 512 slots, where vLLM has 51.

    A batch is padded to the next size. Steps are an eighth to a quarter of the size, and the
    largest size is vLLM's.
    """
    most = min(2 * slots, 512)
    sizes = [size for size in (1, 2, 4, 8) if size < most]
    while (size := sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 3)) if sizes else most) < most:
        sizes.append(size)
    return sorted({*sizes, *({slots} if slots <= most else ()), most})
