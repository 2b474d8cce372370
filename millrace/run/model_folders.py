"""Checks of the folders and hub ids of models, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config.cached import model_folder
from millrace.data import hub
from millrace.errors import bad_value
from millrace.models import checks
from millrace.run.get_model import MODELS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_model(key: str, path: str, rollout_engine: str = "") -> None:
    """Raise ConfigError if a path is neither a model's folder nor a model of the hub.

    `key` names the path. Only a policy has a rollout engine.
    """
    if not path:
        return
    folder = Path(path)
    if not folder.exists() and hub.NAME.fullmatch(path):
        if why := hub.refusal("model", path):
            fix = "a folder of a Hugging Face causal model, or a hub id"
            fix += ", or '' for a newly built model" * (key == "model.path")
            if path in MODELS:
                fix = f"'{key}=${{model:{path}}}', the folder of `millrace get-model {path}`"
            raise bad_value(key, path, f"no such folder (from {Path.cwd()}), and {why}", fix)
        if error := checks.refusal(key, path, hub.model_config(path), rollout_engine):
            raise error
        return
    if not folder.is_dir():
        rule = "is a file" if folder.exists() else f"no such folder (from {Path.cwd()})"
        fix = "the folder of a Hugging Face causal model, or a hub id (owner/name)"
        if folder == model_folder(folder.name):
            fix = f"`millrace get-model {folder.name}`"
        raise bad_value(key, path, rule, fix)
    _check_folder(key, folder, path, rollout_engine)


def _check_folder(key: str, folder: Path, path: str, rollout_engine: str) -> None:
    """Raise ConfigError if the folder has no model, or a model that millrace cannot use."""
    shape = folder / "config.json"
    if not shape.is_file():
        inside = sorted(str(p.parent) for p in folder.glob("*/config.json"))
        checkpoint = (folder / "manifest.json").is_file() or (folder / "checkpoints").is_dir()
        fix = (
            f"`millrace export {path} FOLDER`, then {key}=FOLDER"
            if checkpoint
            else "the folder of a Hugging Face causal model"
        )
        raise bad_value(
            key,
            path,
            "the folder has no config.json",
            f"{key}={inside[0]}" if inside and not checkpoint else fix,
        )
    try:
        settings = json.loads(shape.read_bytes())
        kind = settings.get("model_type")
    except (ValueError, AttributeError, OSError) as problem:
        raise bad_value(
            key,
            path,
            f"its config.json cannot be read: {problem}",
            "the model's own config.json",
        ) from None
    if error := checks.refusal(key, path, settings, rollout_engine):
        raise error
    if not any(p for pattern in ("*token*", "vocab*", "*.model") for p in folder.glob(pattern)):
        # Without these files, transformers silently makes a tokenizer without the model's tokens.
        raise bad_value(
            key,
            path,
            "the folder has no tokenizer",
            "a folder that has the model's tokenizer files too",
        )
    if not isinstance(kind, str):
        raise bad_value(
            key,
            path,
            "its config.json has no model_type",
            "the config.json of a Hugging Face causal model",
        )
    if damaged := checks.damaged(folder):
        raise bad_value(key, path, damaged, "get the file again, whole")


def load_tokenizer(key: str, path: str, *, trusts: bool) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer. Raise ConfigError if none can be loaded. `key` names the path."""
    from millrace.models import tokenizer

    try:
        return tokenizer.load_tokenizer(path, trust_remote_code=trusts)
    # transformers checks no types, so a wrong one in a file may raise the last three.
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        rule = f"no tokenizer can be loaded from it: {why}"
        raise bad_value(
            key, path, rule, "a folder that has the model's tokenizer files too"
        ) from None
