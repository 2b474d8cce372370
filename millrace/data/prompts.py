"""The prompt stream. Prompt i of a run is a pure function of the seed and i.

A resume therefore needs i alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from millrace.data.chat import Chat, Reading
from millrace.data.rows import Problem, problem
from millrace.data.sources import Rows
from millrace.errors import DataError, bad_row
from millrace.types import Prompt, Tokens

_PROBED = 64
"""Rows of a generated source that are checked before the run. Files are checked whole."""
_COUNTED = 20_000
"""Generated sources up to this size are filtered before the run, larger ones row by row."""


@dataclass(frozen=True, slots=True)
class PromptStream:
    """Endless prompts. Epoch e is `stream[e * len(stream) : (e + 1) * len(stream)]`.

    An epoch has each row once, in its own order. `PromptStream.open` checks the rows and makes the
    stream.
    """

    rows: Rows
    chat: Chat
    seed: int
    shuffle: bool
    max_prompt_length: int
    filter_overlong: bool
    prompt_key: str
    kept: Sequence[int]
    """The rows of the stream."""
    filtered: int
    """The number of rows with too long prompts, which the stream leaves out.

    Large generated sources are not counted: the next row that fits replaces a long one.
    """
    readings: Mapping[Reading, int] = field(default_factory=dict)
    """How the rows that were checked become tokens."""

    @classmethod
    def open(
        cls,
        rows: Rows,
        chat: Chat,
        *,
        seed: int,
        shuffle: bool,
        max_prompt_length: int,
        filter_overlong: bool = False,
        prompt_key: str = "prompt",
        need_ground_truth: bool = False,
    ) -> PromptStream:
        """Check every row of files and hub sources, and some generated rows. Return the stream.

        Raise DataError for the first bad row: its columns, its length, or a character that the
        tokenizer does not know.
        """
        kept: list[int] = []
        readings: Counter[Reading] = Counter()
        at = 0
        for part, end in zip(rows.parts, rows.ends, strict=True):
            checked = (
                _PROBED
                if part.generated and not (filter_overlong and part.size <= _COUNTED)
                else part.size
            )
            for i in range(at, min(end, at + checked)):
                entry = problem(rows, i, prompt_key=prompt_key, need_ground_truth=need_ground_truth)
                readings[chat.reading(entry)] += 1
                tokens = _tokens(rows, chat, i, entry)[1]
                if len(tokens) <= max_prompt_length or (
                    part.generated and part.size > _COUNTED and filter_overlong
                ):
                    kept.append(i)
                elif not filter_overlong:
                    raise _too_long(rows, i, entry, len(tokens), max_prompt_length)
            kept.extend(range(min(end, at + checked), end))
            at = end
        if not kept:
            rule = (
                f"every row is longer than rollout.max_prompt_length = {max_prompt_length} tokens"
            )
            raise bad_row(
                rows.source, f"{len(rows)} rows", rule, "a larger rollout.max_prompt_length"
            )
        used = range(len(rows)) if len(kept) == len(rows) else kept
        filtered = len(rows) - len(kept)
        return cls(
            rows,
            chat,
            seed,
            shuffle,
            max_prompt_length,
            filter_overlong,
            prompt_key,
            used,
            filtered,
            readings,
        )

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
        return len(self.kept)

    def __getitem__(self, i: int) -> Prompt:
        """Return prompt i of the run. Raise DataError if a generated prompt is too long."""
        _, entry, text, tokens = self._fitting(self._row(i))
        return Prompt(
            i, tokens, text, entry.data_source, entry.ground_truth, entry.extra_info, entry.columns
        )

    def where(self, i: int) -> str:
        """Return where prompt i of the run is from: its file and row."""
        return self.rows.describe(self._fitting(self._row(i))[0])

    def _row(self, i: int) -> int:
        if i < 0:
            raise IndexError(i)
        epoch, at = divmod(i, len(self.kept))
        place = shuffled(at, len(self.kept), f"{self.seed}|{epoch}") if self.shuffle else at
        return self.kept[place]

    def _fitting(self, row: int) -> tuple[int, Problem, str, Tokens]:
        """Return the index, problem, text and tokens of a row.

        With filter_overlong, this is the first row from `row` on that is short enough.
        """
        for tried in range(row, row + (1000 if self.filter_overlong else 1)):
            at = tried % len(self.rows)
            entry = self.chat.as_chat(problem(self.rows, at, prompt_key=self.prompt_key))
            text, tokens = _tokens(self.rows, self.chat, at, entry)
            if len(tokens) <= self.max_prompt_length:
                return at, entry, text, tokens
        raise _too_long(self.rows, at, entry, len(tokens), self.max_prompt_length)


def shuffled(i: int, n: int, key: str) -> int:
    """Return the image of i in a permutation of 0..n-1 that `key` names, in constant memory.

    This is a Feistel network over the smallest even number of bits that can represent n. It repeats
    until the result is below n (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    The result is the same on every machine and in every version of Python.
    """
    half = max(3, ((n - 1).bit_length() + 1) // 2)
    mask, secret = (1 << half) - 1, blake2b(key.encode(), digest_size=32).digest()
    while True:
        left, right = i >> half, i & mask
        for turn in range(6):
            mixed = blake2b(
                bytes([turn]) + right.to_bytes(8, "little"), digest_size=8, key=secret
            ).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        i = left << half | right
        if i < n:
            return i


def _tokens(rows: Rows, chat: Chat, i: int, entry: Problem) -> tuple[str, Tokens]:
    text, tokens = chat.render(entry, rows.describe(i))
    if chat.unk_id is not None and chat.unk_id in tokens:
        unknown = next((c for c in text if chat.unk_id in chat.encode(c)), "")
        rule = f"has a character that the tokenizer does not know: {unknown!r}"
        raise bad_row(
            rows.describe(i),
            entry.text,
            rule,
            "a row without it; for a model made on the spot, model.tokenizer=bpe",
        )
    if not tokens:
        raise bad_row(
            rows.describe(i),
            entry.text,
            "becomes no token at all",
            "another chat template or prompt",
        )
    return text, tokens


def _too_long(rows: Rows, i: int, entry: Problem, length: int, limit: int) -> DataError:
    rule = f"the prompt has {length} tokens, and rollout.max_prompt_length is {limit}"
    fix = f"rollout.max_prompt_length={length} or more, or data.filter_overlong_prompts=true"
    return bad_row(rows.describe(i), entry.text, rule, fix)
