"""The check of rows: in blocks before a run, or ahead of their use while it goes on."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from millrace.data.chat import Chat, Reading
from millrace.data.row_store import Progress, quiet
from millrace.data.rows import Problem, RowCheck
from millrace.data.sources import Rows
from millrace.errors import DataError, bad_row
from millrace.types import Tokens

_BLOCK = 256
"""Rows that are measured at a time. A tokenizer encodes them on all cores."""


@dataclass(slots=True)
class RowMeter:
    """Checks rows and measures their prompts."""

    rows: Rows
    chat: Chat
    check: RowCheck
    limit: int
    filter_overlong: bool
    progress: Progress = quiet
    readings: Counter[tuple[int, Reading]] = field(default_factory=Counter)
    """How the rows of each source that were measured become tokens."""

    def counts(self) -> Counter[Reading]:
        """Return how the rows that were measured become tokens."""
        counts = Counter[Reading]()
        for (_, reading), count in self.readings.items():
            counts[reading] += count
        return counts

    def long_rows(self, which: Iterable[int], total: int) -> Iterator[int]:
        """Check rows, and yield those whose prompts are too long. `total` is their number.

        Raise DataError for the first bad row, or a long one unless long ones are left out.
        """
        pending, done = iter(which), 0
        while block := [*islice(pending, _BLOCK)]:
            for i, length in zip(block, self.lengths(block), strict=True):
                if length > self.limit:
                    yield i
            done += len(block)
            self.progress("checking rows", done, total)

    def lengths(self, block: Sequence[int]) -> list[int]:
        """Return the lengths of prompts in tokens. See `Chat.lengths`. Raise as `long_rows` does."""
        entries: list[tuple[Problem, str]] = []
        bad: DataError | None = None
        for i in block:
            try:
                entries.append((self.check(self.rows, i), self.rows.describe(i)))
            except DataError as error:  # rows before it come first
                bad = error
                break
        lengths = self.chat.lengths(entries, self.limit)
        for n, (i, (entry, _)) in enumerate(zip(block, entries, strict=False)):
            self.readings[self.rows.part_of(i), self.chat.reading(entry)] += 1
            lengths[n] = lengths[n] or len(tokens_of_row(self.rows, self.chat, i, entry)[1])
            if lengths[n] > self.limit and not self.filter_overlong:
                raise too_long_error(self.rows, i, entry, lengths[n], self.limit)
        if bad is not None:
            raise bad
        return lengths


class Ahead:
    """Checks the rows of files in the order of their use, while a run uses them.

    `order` gives the rows, `total` is the number of distinct ones, and `ended` is called when all
    are checked.
    """

    def __init__(
        self, meter: RowMeter, order: Iterable[int], total: int, ended: Callable[[], None]
    ) -> None:
        self._meter = meter
        self._total, self._ended = total, ended
        self._seen, self._checked = bytearray(len(meter.rows)), bytearray(len(meter.rows))
        self._order = (i for i in order if self._is_new(i))
        self._error: DataError | None = None
        self._closed = False

    def check(self, count: int) -> int:
        """Check the next `count` distinct rows now. Return the number of those that are left."""
        self._check(self._meter, islice(self._order, count), min(count, self._total))
        return self._total - self._checked.count(1)

    def start(self) -> None:
        """Check the others in a thread, with a tokenizer of its own: its settings are its state."""
        chat = replace(self._meter.chat, tokenizer=copy.deepcopy(self._meter.chat.tokenizer))
        meter = replace(self._meter, chat=chat, progress=quiet)
        threading.Thread(target=self._run, args=(meter,), name="rows", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed = True

    def require(self, row: int) -> None:
        """Raise DataError if this row is bad, or another that the thread has found."""
        if self._error is not None:
            raise self._error
        if (same := self._meter.rows.identity(row)) >= 0 and not self._checked[same]:
            replace(self._meter, readings=Counter()).lengths([row])
            self._checked[same] = 1

    def _run(self, meter: RowMeter) -> None:
        try:
            self._check(meter, self._order, self._total, share=0.5)
        except DataError as error:
            self._error = error
        else:
            if not self._closed:
                self._ended()

    def _check(self, meter: RowMeter, which: Iterable[int], total: int, share: float = 1.0) -> None:
        """Check rows. `share` is the part of the time that it may take from other threads."""
        pending, done, begun = iter(which), 0, time.monotonic()
        while not self._closed and (block := [*islice(pending, _BLOCK)]):
            meter.lengths(block)
            for row in block:
                self._checked[meter.rows.identity(row)] = 1
            meter.progress("checking rows", done := done + len(block), total)
            time.sleep((time.monotonic() - begun) * (1 - share) / share)
            begun = time.monotonic()

    def _is_new(self, row: int) -> bool:
        same = self._meter.rows.identity(row)
        if same < 0 or self._seen[same]:
            return False
        self._seen[same] = 1
        return True


def tokens_of_row(rows: Rows, chat: Chat, i: int, entry: Problem) -> tuple[str, Tokens]:
    """Return a prompt's text and tokens. Raise DataError if it has none, or an unknown one."""
    text, tokens = chat.render(entry, rows.describe(i))
    if chat.unk_id is not None and chat.unk_id in tokens:
        unknown = next((c for c in text if chat.unk_id in chat.encode(c)), "")
        rule = f"has a character that the tokenizer does not know: {unknown!r}"
        fix = "a row without it; for a model made on the spot, model.tokenizer=bpe"
        raise bad_row(rows.describe(i), entry.text, rule, fix)
    if not tokens:
        fix = "another chat template or prompt"
        raise bad_row(rows.describe(i), entry.text, "becomes no token at all", fix)
    return text, tokens


def too_long_error(rows: Rows, i: int, entry: Problem, length: int, limit: int) -> DataError:
    """Return the error of a prompt of `length` tokens."""
    rule = f"the prompt has {length} tokens, and rollout.max_prompt_length is {limit}"
    fix = f"rollout.max_prompt_length={length} or more, or data.filter_overlong_prompts=true"
    return bad_row(rows.describe(i), entry.text, rule, fix)
