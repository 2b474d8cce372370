"""The factory of train engines: the only module that names them."""

from __future__ import annotations

from millrace.config import Config
from millrace.ports import TrainRank


def train_engine(config: Config, model_folder: str, *, rank: int, world_size: int) -> TrainRank:
    """Build one rank of the train engine.

    With several ranks, the default process group must exist and have a CPU backend. The engine is
    imported here, at first use.
    """
    from millrace.train.fsdp import engine as fsdp_train

    return fsdp_train.build(config, model_folder, rank=rank, world_size=world_size)
