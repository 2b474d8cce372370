"""The tokenizer of a model folder; without torch, for bad data is to be refused before torch is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.types import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERIC = {"TokenizersBackend", "PreTrainedTokenizerFast"}


def load_tokenizer(
    folder: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder` (or of a hub id).

    Where the folder names the generic class, its tokenizer.json is the whole truth: AutoTokenizer would take Qwen2's own class
    beside a Qwen2 config.json, and with it Qwen2's rules of splitting words instead of the file's.
    """
    named = Path(folder) / "tokenizer_config.json"
    found: PreTrainedTokenizerBase
    if named.is_file() and json.loads(named.read_bytes()).get("tokenizer_class") in _GENERIC:
        from transformers import PreTrainedTokenizerFast

        found = PreTrainedTokenizerFast.from_pretrained(str(folder))
    else:
        from transformers import AutoTokenizer  # with torch, and seconds of its own

        found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    return found


def text_of(folder: str | Path, trust_remote_code: bool) -> Callable[[Tokens], str]:
    """Tokens to text, by the tokenizer in `folder`."""
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)

    def decode(tokens: Tokens) -> str:
        return str(tokenizer.decode(tokens.tolist()))

    return decode
