"""A curriculum: the prompts of a run in an order that a user's function decides.

    def f(i: int, rows: Sequence[Problem], outcomes: Outcomes) -> int

The function returns the row of prompt i. `outcomes` are those of the prompts 0 .. i - lag - 1, and
prompt i waits for the last of them. So which outcomes it sees depends on i alone, in every mode and
at every speed. The rows and the outcomes are in each checkpoint, and a resume continues from them.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload

import msgspec

from millrace.data.rows import Problem
from millrace.data.user_code import failure, load
from millrace.errors import CheckpointError, ConfigError, bad_value
from millrace.types import Prompt, Sample
from millrace.waits.registry import doing

if TYPE_CHECKING:
    import numpy

KEY = "data.sampler"
FILE = "picks.msgpack"
"""The rows and outcomes of all admitted prompts, in each checkpoint of a run with a sampler."""
_TRIED = 8
"""The prompts whose rows are tried before a run."""
_PURE = "the row must depend on its arguments alone"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The rows and the scores of the first prompts of a run, in their order. Nobody may change them."""

    rows: numpy.ndarray[Any, numpy.dtype[numpy.int64]]
    scores: numpy.ndarray[Any, numpy.dtype[numpy.float64]]
    """The mean score of each prompt's responses, before any shaping. NaN if it has none."""

    def __len__(self) -> int:
        return len(self.rows)


Sampler = Callable[[int, Sequence[Problem], Outcomes], int]


class Stream(Protocol):
    """The rows of a run, as `PromptStream` has them."""

    def rows_at(self, index: int, /) -> int:
        """Return the number of rows that prompt `index` may have."""
        ...

    def problem_of(self, row: int, /) -> Problem: ...

    def prompt_of(self, index: int, row: int, /) -> Prompt: ...

    def where_of(self, row: int, /) -> str: ...


class _View(Sequence[Problem]):
    """The first rows of a stream. Two calls with as many rows get the same object."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream, self._size = stream, size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> Problem: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Problem]: ...
    def __getitem__(self, at: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(at, slice):
            return [self._stream.problem_of(row) for row in range(self._size)[at]]
        return self._stream.problem_of(range(self._size)[at])


class _Picks(msgspec.Struct, array_like=True):
    """The content of the file, as little-endian bytes."""

    rows: bytes
    scores: bytes


class Curriculum:
    """The prompts of a run in a sampler's order, and the outcomes that decide it."""

    def __init__(self, stream: Stream, spec: str, lag: int) -> None:
        """Raise ConfigError if `spec` names no function."""
        import numpy

        self.spec, self.lag = spec, lag
        self.seconds = 0.0
        """Seconds in the user's function since the last row of metrics."""
        self._stream, self._choose = stream, load(KEY, spec, kind="sampler")
        self._view = _View(stream, stream.rows_at(0))
        self._rows = numpy.zeros(1024, "<i8")
        self._scores = numpy.zeros(1024, "<f8")
        self._open: set[int] = set()
        """The prompts without an outcome."""
        self._count = 0
        """The prompts that have a row."""
        self._ended = 0
        """All prompts before this one have an outcome."""

    def __getitem__(self, i: int) -> Prompt:
        """Return prompt i. The next one gets its row now, which `ready` must allow."""
        if i == self._count:
            self._add(i, self._pick(i, self._outcomes(max(0, i - self.lag))))
        return self._stream.prompt_of(i, self._row(i))

    def where(self, i: int) -> str:
        """Return where prompt i is from: its file and row."""
        return self._stream.where_of(self._row(i))

    def ready(self, i: int) -> bool:
        """Whether every outcome that decides the row of prompt i is known."""
        return self._ended >= i - self.lag

    def ended(self, i: int, sample: Sample | None) -> None:
        """Note the outcome of a prompt. None is a sample that was dropped without a score."""
        scores = [t.score.unshaped for t in sample.trajectories if t.score] if sample else []
        self._scores[i] = sum(scores) / len(scores) if scores else float("nan")
        self._open.discard(i)
        while self._ended < self._count and self._ended not in self._open:
            self._ended += 1

    def take_figures(self) -> dict[str, float]:
        """Return what to add to a row of metrics."""
        seconds, self.seconds = self.seconds, 0.0
        return {"data/sampler_s": seconds}

    def dump(self, admitted: int) -> bytes:
        """Return the rows and outcomes of the first prompts. Those of open slots do not count."""
        rows, scores = self._rows[:admitted].tobytes(), self._scores[:admitted].tobytes()
        return msgspec.msgpack.encode(_Picks(rows, scores))

    def restore(
        self, checkpoint: Path, admitted: int, slots: Iterable[tuple[int, Sample | None]]
    ) -> None:
        """Continue from a checkpoint. `slots` has its samples in flight, and None for unfinished ones."""
        import numpy

        path = checkpoint / FILE
        try:
            picks = msgspec.msgpack.decode(path.read_bytes(), type=_Picks)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{path}: not readable: {error}") from error
        self._rows = numpy.frombuffer(picks.rows, "<i8").copy()
        self._scores = numpy.frombuffer(picks.scores, "<f8").copy()
        if not len(self._rows) == len(self._scores) == admitted:
            raise CheckpointError(f"{path}: has {len(self._rows)} rows of {admitted} prompts")
        known = dict(slots)
        self._count, self._open = admitted, {i for i, sample in known.items() if sample is None}
        self._ended = min(self._open, default=admitted)
        for i, sample in known.items():
            if sample is not None:
                self.ended(i, sample)

    def try_out(self) -> None:
        """Raise ConfigError if the sampler fails on the first prompts, or is not pure.

        A call with an invented past follows: 8 prompts, the last without a score.
        """
        import numpy

        none = self._outcomes(0)
        rows = numpy.arange(_TRIED) % len(self._view)
        scores = numpy.array([0.0, 1.0] * (_TRIED // 2))
        scores[-1] = float("nan")
        tries = [(i, none) for i in range(min(self.lag + 1, _TRIED))]
        for i, outcomes in [*tries, (self.lag + _TRIED, Outcomes(_frozen(rows), _frozen(scores)))]:
            first, second = self._pick(i, outcomes), self._pick(i, outcomes)
            if first != second:
                rule = f"two calls for prompt {i} returned rows {first} and {second}: {_PURE}"
                fix = "random.Random(i) in place of random, and no state of its own"
                raise bad_value(KEY, self.spec, rule, fix)

    def _row(self, i: int) -> int:
        if not 0 <= i < self._count:
            raise IndexError(i)
        return int(self._rows[i])

    def _outcomes(self, count: int) -> Outcomes:
        return Outcomes(_frozen(self._rows[:count]), _frozen(self._scores[:count]))

    def _pick(self, i: int, outcomes: Outcomes) -> int:
        """Return the row of a prompt. Raise ConfigError, which names it."""
        size = self._stream.rows_at(i)
        if size != len(self._view):
            self._view = _View(self._stream, size)
        began = time.perf_counter()
        try:
            with doing(f"{KEY}={self.spec}", by="your sampler"):
                found = self._choose(i, self._view, outcomes)
        except Exception as error:
            raise self._refused(i, f"it raised {failure(error)}", "correct it") from error
        self.seconds += time.perf_counter() - began
        if (row := _whole(found)) is None or not 0 <= row < size:
            what = f"{found!r}, which is no whole number" if row is None else f"row {row}"
            rule = f"it returned {what}, and there are {size:,} rows"
            raise self._refused(i, rule, f"a row from 0 to {size - 1}")
        return row

    def _refused(self, i: int, rule: str, fix: str) -> ConfigError:
        return bad_value(KEY, self.spec, f"for prompt {i} {rule}", fix)

    def _add(self, i: int, row: int) -> None:
        import numpy

        if i == len(self._rows):  # a new array: the outcomes that a sampler keeps do not change
            self._rows = numpy.concatenate([self._rows, numpy.zeros(i + 1024, "<i8")])
            self._scores = numpy.concatenate([self._scores, numpy.zeros(i + 1024, "<f8")])
        self._rows[i] = row
        self._open.add(i)
        self._count += 1


def _whole(found: Any) -> int | None:
    """Return a whole number of any type, and None for anything else."""
    try:
        return None if isinstance(found, bool) else operator.index(found)
    except TypeError:
        return None


def _frozen(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view
