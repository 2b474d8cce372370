"""The folder of compiled code, which later runs use again. Libraries read it from variables."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}


def cache_folder() -> Path:
    """Return millrace's folder in the user's cache folder. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "millrace"


def keep_compiled_code() -> None:
    """Let vLLM, Inductor and Triton keep compiled code in `cache_folder`.

    A user's own variables stay, and without a home directory the libraries' defaults do.
    """
    if (folder := cache_folder()).is_absolute():
        for name, part in VARIABLES.items():
            os.environ.setdefault(name, str(folder / part))
