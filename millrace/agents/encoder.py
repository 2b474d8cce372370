"""Text to tokens and back. What a message says never becomes a control token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace.agents.memo import Memo
from millrace.types import Tokens, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoder:
    """A tokenizer. `source` is the text of its chat template.

    Marks replace the text of control tokens in messages. They become plain tokens again, so the
    template's own control tokens are the only ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {i: t.content for i, t in added.items() if t.special}
        self._id: dict[str, int] = {t.content: i for i, t in added.items()}
        written = {t.content for t in added.values() if len(t.content) > 1 and t.content in source}
        self._controls = sorted({*self.special.values(), *written, "\ue000"}, key=len)[::-1]
        self._number = {text: n for n, text in enumerate(self._controls)}
        self.any = _either(self._controls)
        """Finds the text of each control token."""
        self._specials = _either(["\ue000", *self.special.values()])
        self._encoded = Memo(self._encode)
        self._decoded = Memo(self._decode)

    def protect(self, value: Any, ours: bool = False) -> Any:
        """Return a value in which marks replace the text of control tokens.

        In `ours`, what the policy wrote, these are the special tokens alone.
        """
        if isinstance(value, str):
            safe = value
            if not value.isascii():
                safe = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            pattern = self._specials if ours else self.any
            return pattern.sub(lambda m: f"\ue000{self._number[m[0]]}\ue001", safe)
        if isinstance(value, Mapping):
            return {self.protect(k, ours): self.protect(v, ours) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(v, ours) for v in value]
        return value

    def tokens(self, text: str, after: str | None = None) -> Tokens:
        """Return the tokens of a text with marks, as they are behind the control token `after`."""
        return self._encoded(text, after)[:]

    def decode(self, tokens: Tokens, marks: Sequence[str] = ()) -> str:
        """Return the text of drawn tokens. Of the special ones, only `marks` are in it."""
        return self._decoded(tuple(tokens), tuple(marks))

    def _decode(self, tokens: Sequence[int], marks: Sequence[str]) -> str:
        kept = [t for t in tokens if t not in self.special or self.special[t] in marks]
        return str(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False))

    def _encode(self, text: str, after: str | None) -> Tokens:
        tokens = tokens_of()
        for n, piece in enumerate(re.split("\ue000(\\d+)\ue001", text)):
            if n % 2 == 0:
                tokens.extend(self._behind(after, piece))
                after = self._tokenizer.eos_token
                continue
            control = self._controls[int(piece)]
            for part in (control[:1], control[1:]):
                tokens.extend(self._behind(after, part, split_special_tokens=True))
        return tokens

    def _behind(self, mark: str | None, text: str, **options: Any) -> list[int]:
        """Return the tokens of `text` behind a mark, without those of the mark.

        Some tokenizers write a blank at the start of a text. A mark before the text avoids it.
        """
        if not text:
            return []
        encode = self._tokenizer.encode
        if mark in self._id and not options:
            ids = encode(f"{mark}{text}", add_special_tokens=False)
            if ids[:1] == [self._id[str(mark)]]:
                return list(ids[1:])
        return list(encode(text, add_special_tokens=False, **options))


def _either(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len)[::-1]))
