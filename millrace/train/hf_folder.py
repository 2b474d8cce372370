"""A Hugging Face model folder, written from the weights of a train engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from millrace.models.tokenizer import copy_tokenizer


def write_model(model: Any, weights: Mapping[str, Tensor], source: str, folder: str) -> None:
    """Write a folder with `weights`, config and generation config of `model`.

    The weights have the names of the model's own. The tokenizer's files come from the folder
    `source` of the start model.
    """
    model.save_pretrained(folder, state_dict=dict(weights))
    # transformers writes the dtype of the master weights, by which engines choose theirs.
    file = Path(folder) / "config.json"
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": dtype}, indent=2) + "\n")
    copy_tokenizer(source, folder)
