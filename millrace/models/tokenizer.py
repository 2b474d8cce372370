"""The tokenizer of a model folder. torch is imported late, so bad data is refused quickly."""

from __future__ import annotations

import json
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
