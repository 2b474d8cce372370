"""The folder of what millrace downloads, and `${model:NAME}`: a model in that folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from omegaconf import OmegaConf

VARIABLE = "MILLRACE_CACHE"
"""The environment variable that names another folder than the user's cache."""


def cache_folder() -> Path:
    """Return $MILLRACE_CACHE, or millrace's folder in the user's cache."""
    if named := os.environ.get(VARIABLE, "").strip():
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(cache or "~/.cache").expanduser().absolute() / "millrace"


def model_folder(name: str) -> Path:
    """Return the folder of a model that `millrace get-model NAME` gets."""
    return cache_folder() / name


def resolved(override: str) -> str:
    """Return the value of an override with the folders that `${model:NAME}` means."""
    return re.sub(r"\$\{model:([\w.-]+)\}", lambda found: str(model_folder(found[1])), override)


OmegaConf.register_resolver("model", lambda name: str(model_folder(name)), replace=True)
