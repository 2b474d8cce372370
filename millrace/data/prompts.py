"""The prompt stream. Prompt i of a run is a pure function of the seed and i.

A resume therefore needs i alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, cast

from millrace.data.ahead import Ahead, RowMeter, tokens_of_row, too_long_error
from millrace.data.chat import Chat, Reading
from millrace.data.row_store import Progress, quiet
from millrace.data.rows import Problem, RowCheck, problem
from millrace.data.sources import Part, Rows
from millrace.errors import bad_row
from millrace.types import Prompt, Tokens

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
            kept.append(_fitting_rows(stored.index[: part.size], long, begin))
        count = sum(map(len, kept))
        if not count:
            rule = (
                f"every row is longer than rollout.max_prompt_length = {max_prompt_length} tokens"
            )
            raise bad_row(
                rows.source, f"{len(rows)} rows", rule, "a larger rollout.max_prompt_length"
            )
        stream = cls(
            rows,
            chat,
            seed,
            shuffle,
            max_prompt_length,
            filter_overlong,
            check.prompt_key,
            range(len(rows)) if count == len(rows) else _joined(kept),
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


def _fitting_rows(index: Any, long: Sequence[int], begin: int) -> Sequence[int]:
    import numpy

    if not long:
        return range(begin, begin + len(index))
    return cast(Sequence[int], begin + numpy.flatnonzero(~numpy.isin(index, long)))


def _joined(kept: Sequence[Sequence[int]]) -> Sequence[int]:
    import numpy

    parts = [numpy.asarray(part, "i8") for part in kept]
    return cast(Sequence[int], numpy.concatenate(parts))


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
