"""A checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from millrace.config import Config
from millrace.errors import CheckpointError, bad_value
from millrace.pipeline.checkpoint import Checkpoints, verify
from millrace.problems import weights_folder


def export(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Load the train engine's state in this process, whatever the number of ranks that wrote it, and write it out."""
    if (checkpoint / "checkpoints").is_dir():
        newest, passed = Checkpoints(checkpoint, keep=1).newest()
        if newest is None:
            raise bad_value(
                "CHECKPOINT",
                str(checkpoint),
                "; ".join(passed) or "the run has no checkpoint",
                "another run folder",
            )
        checkpoint = newest
    try:
        manifest = verify(checkpoint)
    except CheckpointError as error:
        raise bad_value(
            "CHECKPOINT",
            str(checkpoint),
            str(error),
            "a folder such as RUN/checkpoints/version-000020",
        ) from None
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        rule = "exists and is not empty" if folder.is_dir() else "is a file"
        raise bad_value("FOLDER", str(folder), rule, "a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise bad_value(
            "FOLDER",
            str(folder),
            f"cannot be written: {error.strerror}",
            "a folder that can be made",
        ) from None
    import asyncio

    import yaml
    from transformers.utils import logging

    from millrace.engines import fsdp_train

    logging.disable_progress_bar()

    config = Config.model_validate(yaml.safe_load((checkpoint / "config.yaml").read_text()))
    config = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"device": "cpu", "fsdp_size": 0})}
    )

    async def write() -> int:
        # A checkpoint has all weights, but of a policy with adapters not the base.
        source = (
            weights_folder(config.model.path, checkpoint / "model")
            if config.model.lora_rank
            else str(checkpoint / "model")
        )
        engine = fsdp_train.build(config, source, rank=0, world_size=1)
        try:
            engine.begin(config.actor.optim, 1)
            await engine.load(str(checkpoint / "engine"))
            await engine.export(str(folder))
            return sum(math.prod(shape) for _, shape, *_ in engine.shards())
        finally:
            await engine.close()

    parameters = asyncio.run(write())
    for file in (checkpoint / "model").iterdir():
        if file.is_file() and not (folder / file.name).exists():
            shutil.copy(file, folder / file.name)
    return {
        "model": str(folder),
        "version": manifest.version,
        "parameters": parameters,
        "complete": True,
    }
