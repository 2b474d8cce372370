"""The factory of train engines: each has a folder here, with the name of its trainer.engine."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import cast

from millrace.config import Config
from millrace.ports import TrainRank


def train_engine(config: Config, model_folder: str, *, rank: int, world_size: int) -> TrainRank:
    """Build one rank of the train engine.

    With several ranks, the default process group must exist and have a CPU backend. The engine is
    imported here, at first use.
    """
    engine = imported(config.trainer.engine)
    return cast(TrainRank, engine.build(config, model_folder, rank=rank, world_size=world_size))


def imported(engine: str) -> ModuleType:
    """Import the module of a train engine, with torch and transformers."""
    return importlib.import_module(f"millrace.train.{engine}.engine")
