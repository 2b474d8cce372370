"""A checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from millrace.config import Config, ModelConfig, plugins
from millrace.config.algorithm_keys import without_own_algorithm
from millrace.errors import CheckpointError, bad_value
from millrace.models.model import DTYPES
from millrace.models.tokenizer import copy_tokenizer
from millrace.pipeline.checkpoint import Checkpoints, verify
from millrace.ports import TrainRank
from millrace.run.problems import copy_config, weights_folder
from millrace.types import PolicyVersion


def export(checkpoint: Path, folder: Path, dtype: str = "") -> dict[str, Any]:
    """Write a checkpoint's policy as a model folder.

    The checkpoint may come from any number of ranks. `dtype` is float32 or bfloat16. Without it,
    the weights have the dtype of the user's start model, or that of training if there is none or it
    is neither. Raises ConfigError if `checkpoint` is not whole or `folder` is not empty.
    """
    if dtype and dtype not in DTYPES:
        raise bad_value("--dtype", dtype, f"must be one of {', '.join(DTYPES)}", "bfloat16")
    checkpoint, version = _whole(checkpoint)
    _make_empty(folder)
    import yaml
    from transformers.utils import logging

    logging.disable_progress_bar()
    tree = yaml.safe_load((checkpoint / "config.yaml").read_text())
    config = Config.model_validate(without_own_algorithm(tree)).for_work("eval")
    # One process without a GPU. The FSDP engine loads the states of every engine.
    alone = {"device": "cpu", "fsdp_size": 0, "engine": "fsdp"}
    on_cpu = config.trainer.model_copy(update=alone)
    start = json.loads((checkpoint / "model" / "config.json").read_text())
    own = (start.get("dtype") or start.get("torch_dtype")) if config.model.path else None
    known = dtype or own
    dtype = known if known in DTYPES else config.model.dtype
    weights = config.model.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"trainer": on_cpu, "model": weights})
    build = plugins.load("trainer.engine", on_cpu.engine, "train_engines")
    engine_of = partial(build, config, rank=0, world_size=1)
    parameters = asyncio.run(_write(weights, engine_of, checkpoint, folder))
    copy_tokenizer(str(checkpoint / "model"), str(folder))
    return {
        "model": str(folder),
        "version": version,
        "dtype": dtype,
        "parameters": parameters,
        "complete": True,
        "notes": _copy_start_folder(config.model.path, folder) if config.model.path else [],
    }


def _copy_start_folder(path: str, folder: Path) -> list[str]:
    """Copy a license and all else but weights from the start model. Return what is not copied."""
    source = Path(path)
    if not source.is_dir():  # a hub id, or a folder that is elsewhere now
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            source = Path(snapshot_download(path, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            rule = "is no folder from here, so its license and further files are not in the export"
            return [f"model.path = {path!r} of the run {rule}. Copy them, or export where it is"]
    copy_tokenizer(str(source), str(folder))
    left = [p.name for p in source.iterdir() if p.is_dir() and not (folder / p.name).exists()]
    named = ", ".join(sorted(name for name in left if name[0] != "."))
    return [f"folders of {path} are not in the export: {named}"] if named else []


def _whole(checkpoint: Path) -> tuple[Path, PolicyVersion]:
    """Return the checkpoint and its version. For a run's folder, take its newest checkpoint."""
    if (checkpoint / "checkpoints").is_dir():
        newest, damaged = Checkpoints(checkpoint, keep=1).newest()
        if newest is None:
            rule = "; ".join(damaged) or "the run has no checkpoint"
            raise bad_value("CHECKPOINT", str(checkpoint), rule, "another run folder")
        checkpoint = newest
    try:
        return checkpoint, verify(checkpoint).version
    except CheckpointError as error:
        fix = "a folder such as RUN/checkpoints/version-000020"
        raise bad_value("CHECKPOINT", str(checkpoint), str(error), fix) from None


def _make_empty(folder: Path) -> None:
    """Make the folder if it is missing.

    Raises ConfigError if it is not empty or cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        rule = "exists and is not empty" if folder.is_dir() else "is a file"
        raise bad_value("FOLDER", str(folder), rule, "a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise bad_value("FOLDER", str(folder), rule, "a folder that can be made") from None


async def _write(
    section: ModelConfig, engine_of: Callable[[str], TrainRank], checkpoint: Path, folder: Path
) -> int:
    """Load the train engine's state in this process and export it.

    Returns the number of parameters.
    """
    model = checkpoint / "model"
    # A checkpoint has all weights, except the base weights of a policy with adapters.
    adapted = section.lora_rank > 0
    with tempfile.TemporaryDirectory(prefix="millrace-export-") as scratch:
        source = str(model)
        if adapted and section.override_config:
            shutil.copytree(model, scratch, dirs_exist_ok=True)
            copy_config(section, Path(scratch))
            source = scratch
        elif adapted:
            source = weights_folder(section, model)
        engine = engine_of(source)
        try:
            await engine.begin("rl", 1)
            await engine.load(str(checkpoint / "engine"))
            await engine.export(str(folder))
            return sum(math.prod(shape) for _, shape, *_ in engine.shards())
        finally:
            await engine.close()
