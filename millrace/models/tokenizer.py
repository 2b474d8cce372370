"""The tokenizer of a model folder. torch is imported late, so bad data is refused quickly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.types import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERIC = {"TokenizersBackend", "PreTrainedTokenizerFast"}


def load_tokenizer(
    folder: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder` (or of a hub id).

    If the folder names the generic class, only its tokenizer.json is used. With a Qwen2 config.json
    in the folder, AutoTokenizer would choose Qwen2's own class. That class splits words by Qwen2's
    rules, not by those of tokenizer.json.
    """
    config = Path(folder) / "tokenizer_config.json"
    tokenizer: PreTrainedTokenizerBase
    if config.is_file() and json.loads(config.read_bytes()).get("tokenizer_class") in _GENERIC:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    else:
        from transformers import AutoTokenizer  # imports torch and takes seconds

        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    return tokenizer


def text_of(folder: str | Path, trust_remote_code: bool) -> Callable[[Tokens], str]:
    """Return a function from tokens to text. Its first call loads the tokenizer in `folder`."""
    tokenizer = cache(partial(load_tokenizer, folder, trust_remote_code=trust_remote_code))

    def decode(tokens: Tokens) -> str:
        return str(tokenizer().decode(tokens.tolist()))

    return decode


SKIPPED_FILES = ("config.json", "generation_config.json")
"""Files of a model folder that save_pretrained writes itself."""
SKIPPED_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Suffixes of weight files in the source folder. An export replaces these weights."""


def copy_tokenizer(source: str, folder: str) -> None:
    """Copy the tokenizer's files of a model folder: all files but weights and configs.

    The folder of further chat templates is copied too.

    Files that already exist in `folder` are not replaced.
    """
    if not Path(source).is_dir():
        return
    for file in Path(source).iterdir():
        target = Path(folder) / file.name
        skipped = file.name in SKIPPED_FILES or file.name.endswith(SKIPPED_SUFFIXES)
        if file.is_file() and not skipped and not target.exists():
            shutil.copy(file, target)
        elif file.name == "additional_chat_templates" and file.is_dir():
            shutil.copytree(file, target, dirs_exist_ok=True)
