"""The factory of train engines."""

from __future__ import annotations

from typing import cast

from millrace.config import Config, plugins
from millrace.ports import TrainRank


def train_engine(config: Config, model_folder: str, *, rank: int, world_size: int) -> TrainRank:
    """Build one rank of the train engine.

    With several ranks, the default process group must exist and have a CPU backend. The engine is
    imported here, at first use.
    """
    build = plugins.load("trainer.engine", config.trainer.engine, "train_engines")
    return cast(TrainRank, build(config, model_folder, rank=rank, world_size=world_size))
