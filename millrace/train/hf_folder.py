"""A Hugging Face model folder, written from the weights of a train engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

SKIPPED_FILES = ("config.json", "generation_config.json")
"""Files of a model folder that save_pretrained writes itself."""
SKIPPED_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Suffixes of weight files in the source folder. An export replaces these weights."""


def write_model(model: Any, weights: Mapping[str, Tensor], source: str, folder: str) -> None:
    """Write a folder with `weights`, config and generation config of `model`.

    The weights have the names of the model's own. The tokenizer's files come from the folder
    `source` of the start model.
    """
    model.save_pretrained(folder, state_dict=dict(weights))
    copy_tokenizer(source, folder)


def copy_tokenizer(source: str, folder: str) -> None:
    """Copy the tokenizer's files of a model folder: all files but weights and configs.

    Files that already exist in `folder` are not replaced.
    """
    if not Path(source).is_dir():
        return
    for file in Path(source).iterdir():
        target = Path(folder) / file.name
        skipped = file.name in SKIPPED_FILES or file.name.endswith(SKIPPED_SUFFIXES)
        if file.is_file() and not skipped and not target.exists():
            shutil.copy(file, target)
