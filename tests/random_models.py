"""Random models whose log-probs depend on the context, as those of real models do.

With the usual range of initial weights, attention hardly matters: a permuted context moved
log-probs by 0.2 nat, and an engine that read the wrong context passed. tests/models/test_random_models.py
holds that it moves them by over `MOVES`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace.config import ModelShape
from millrace.models.model import write_shape

MOVES = 0.5
"""Nats, the mean over tokens."""


def sharp(hidden_size: int) -> float:
    """Return the initializer_range. Twice as much would move log-probs by 3 nats.

    But float32 would then compute them to 1e-5 alone, which is what tests allow.
    """
    return 1.4 / float(hidden_size**0.5)


def write_random(folder: str | Path, shape: ModelShape, **keys: Any) -> None:
    """Write a folder as `write_shape` does, with sharp weights. `keys` are its."""
    write_shape(folder, shape, **keys)
    path = Path(folder) / "config.json"
    sharpened = {"initializer_range": sharp(shape.hidden_size)}
    path.write_text(json.dumps(json.loads(path.read_text()) | sharpened))
