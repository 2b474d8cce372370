"""The prompt stream. Prompt i of a run is a pure function of the seed and i.

A resume therefore needs i alone.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice, pairwise
from typing import Any

from millrace.data.chat import Chat, Reading
from millrace.data.row_store import Progress, quiet
from millrace.data.rows import Problem, RowCheck, problem
from millrace.data.sources import Part, Rows
from millrace.errors import DataError, bad_row
from millrace.types import Prompt, Tokens

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


_PROBED = 64
"""Rows of a generated source that are checked before the run. Files are checked whole."""
_COUNTED = 20_000
"""Generated sources up to this size are filtered before the run, larger ones row by row."""
_FIRST = 20_000
"""Distinct rows that are checked before the first step of a run."""
_NO_CHECK = RowCheck()


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
    """How the distinct rows that were checked become tokens."""
    growth: Sequence[tuple[int, int]] = ()
    """Pairs of a prompt's index and the number of rows from it on. Empty if no resume added rows.

    `open` takes 0 as all rows.
    """
    ahead: Ahead | None = None
    """Checks rows that nobody has checked yet."""

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
        check: RowCheck = _NO_CHECK,
        growth: Sequence[tuple[int, int]] = (),
        use_from: int | None = None,
        progress: Progress = quiet,
        note: Callable[[str], None] = lambda text: None,
    ) -> PromptStream:
        """Check every row of files and hub sources, and some generated rows. Return the stream.

        If `use_from` is a prompt's index, of many rows only the first from there are checked now,
        and the others ahead of their use, unless long prompts are left out.
        Raise DataError for the first bad row: its columns, its length, or a character that the
        tokenizer does not know.
        """
        import numpy

        meter = RowMeter(rows, chat, check, max_prompt_length, filter_overlong, progress)
        kept: list[Sequence[int]] = []
        later: list[tuple[int, str]] = []
        for p, (part, end) in enumerate(zip(rows.parts, rows.ends, strict=True)):
            stored, begin = part.stored, end - part.size
            if stored is None:
                kept.append(_generated(meter, part, begin, end))
                continue
            key, firsts = _key(meter, part), stored.firsts(part.size)
            if (outcome := stored.outcome(key)) is not None:
                meter.readings.update({(p, Reading(k)): n for k, n in outcome["readings"].items()})
                long = outcome["long"]
            elif use_from is not None and not filter_overlong and len(firsts) > _FIRST:
                later.append((p, key))
                long = []
            else:
                found = meter.long_rows((begin + int(at) for at in firsts), len(firsts))
                long = [int(stored.index[i - begin]) for i in found]
                _keep(meter, p, key, long)
            some: Any = range(begin, end)
            if long:
                some = begin + numpy.flatnonzero(~numpy.isin(stored.index[: part.size], long))
            kept.append(some)
        count = sum(map(len, kept))
        if not count:
            rule = (
                f"every row is longer than rollout.max_prompt_length = {max_prompt_length} tokens"
            )
            raise bad_row(
                rows.source, f"{len(rows)} rows", rule, "a larger rollout.max_prompt_length"
            )
        whole: Any = range(len(rows))
        if count < len(rows):  # a range takes no memory, however many rows there are
            whole = numpy.concatenate([numpy.asarray(part, "i8") for part in kept])
        stream = cls(
            rows,
            chat,
            seed,
            shuffle,
            max_prompt_length,
            filter_overlong,
            check.prompt_key,
            whole,
            len(rows) - count,
            meter.counts(),
            tuple((begin, n or count) for begin, n in growth),
        )
        if not later:
            return stream
        return stream._checked_ahead(meter, later, use_from or 0, note)

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
        return len(self.kept)

    def __getitem__(self, i: int) -> Prompt:
        """Return prompt i of the run. Raise DataError if a generated prompt is too long."""
        return self._prompt(i, self._row(i))

    def where(self, i: int) -> str:
        """Return where prompt i of the run is from: its file and row."""
        return self.rows.describe(self._fitting(self._row(i))[0])

    # -- for a sampler, which names rows by their place in the files

    def rows_at(self, i: int) -> int:
        """Return the number of rows that prompt i may have."""
        return next((n for begin, n in reversed(self.growth) if begin <= i), len(self.kept))

    def problem_of(self, row: int) -> Problem:
        return problem(self.rows, int(self.kept[row]), prompt_key=self.prompt_key)

    def prompt_of(self, i: int, row: int) -> Prompt:
        return self._prompt(i, int(self.kept[row]))

    def where_of(self, row: int) -> str:
        return self.rows.describe(self._fitting(int(self.kept[row]))[0])

    def _prompt(self, i: int, row: int) -> Prompt:
        _, entry, text, tokens = self._fitting(row)
        return Prompt(
            i, tokens, text, entry.data_source, entry.ground_truth, entry.extra_info, entry.columns
        )

    def _checked_ahead(
        self,
        meter: RowMeter,
        later: Sequence[tuple[int, str]],
        use_from: int,
        note: Callable[[str], None],
    ) -> PromptStream:
        """Check the first rows that the run uses, and begin to check the others."""
        total = sum(1 for _ in self.rows.distinct(generated=0))

        def ended() -> None:
            for p, key in later:
                _keep(meter, p, key, ())
            note(f"all {total:,} distinct rows are checked")

        order = (self._row(use_from + n) for n in range(2 * len(self)))
        ahead = Ahead(meter, order, total, ended)
        left = ahead.check(_FIRST)
        checked = replace(self, ahead=ahead, readings=meter.counts())
        if left:
            note(
                f"{left:,} of {total:,} distinct rows are not checked yet: each is checked before "
                "its use, and a bad one ends the run then. `--dry-run` checks all of them first"
            )
            ahead.start()
        return checked

    def _row(self, i: int) -> int:
        if i < 0:
            raise IndexError(i)
        begin, n, epochs = 0, len(self.kept), 0
        for (begin, n), (end, _) in pairwise((*self.growth, (i + 1, 0))):
            if i < end:
                break
            epochs += (end - begin) // n
        epoch, at = divmod(i - begin, n)
        place = shuffled(at, n, f"{self.seed}|{epochs + epoch}") if self.shuffle else at
        return int(self.kept[place])

    def _fitting(self, row: int) -> tuple[int, Problem, str, Tokens]:
        """Return the index, problem, text and tokens of a row.

        With filter_overlong, this is the first row from `row` on that is short enough.
        """
        if self.ahead is not None:
            self.ahead.require(row)
        for tried in range(row, row + (1000 if self.filter_overlong else 1)):
            at = tried % len(self.rows)
            entry = self.chat.as_chat(problem(self.rows, at, prompt_key=self.prompt_key))
            text, tokens = tokens_of_row(self.rows, self.chat, at, entry)
            if len(tokens) <= self.max_prompt_length:
                return at, entry, text, tokens
        raise too_long_error(self.rows, at, entry, len(tokens), self.max_prompt_length)


def _generated(meter: RowMeter, part: Part, begin: int, end: int) -> Sequence[int]:
    """Return the rows of a generated source that a stream has, after a check of some."""
    counted = meter.filter_overlong and part.size <= _COUNTED
    checked = range(begin, end if counted else min(end, begin + _PROBED))
    long = {*meter.long_rows(checked, len(checked))}
    return (
        [i for i in range(begin, end) if i not in long] if counted and long else range(begin, end)
    )


def _keep(meter: RowMeter, p: int, key: str, long: Sequence[int]) -> None:
    """Keep the outcome of a check of part p for the next start."""
    if key and (stored := meter.rows.parts[p].stored) is not None:
        readings = {kind.value: n for (at, kind), n in meter.readings.items() if at == p}
        stored.keep_outcome(key, {"readings": readings, "long": list(long)})


def _key(meter: RowMeter, part: Part) -> str:
    """Return the name of all that decides the outcome of a check of a file's rows."""
    if part.stored is None or part.stored.folder is None or not meter.check.key:
        return ""
    if not (tokens := meter.chat.digest):
        return ""
    parts = (meter.check.key, tokens, meter.limit, meter.filter_overlong, part.size, part.name)
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


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
