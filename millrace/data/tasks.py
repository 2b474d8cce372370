"""Generated tasks: endless problems with checkable answers, for first runs and tests.

Row i is a pure function of (task and its parameters, seed, split, i): random access and no state.
Training and validation share no problem, unless a task has so few problems that one split is empty.
The hash of a problem alone decides its split, for any seed: one in eight belongs to validation, or
every other one of a task with few problems.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any, ClassVar, Protocol
from zlib import crc32

UNLIMITED = 1_000_000
"""The number of rows of a task whose size is 0: more than a run needs."""

_TRIES = 256


@dataclass(frozen=True, slots=True)
class Stream:
    """The choice of a task's rows: the parameters that every task has."""

    size: int = 0
    """The number of rows. 0 is unlimited and counts as a million."""
    seed: int = 0
    """The seed of the stream. The default is trainer.seed."""
    split: str = "train"
    """train or val. No problem is in both, except as `task_row` says."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size} must be 0 (unlimited) or more")
        if self.split not in ("train", "val"):
            raise ValueError(f"split={self.split!r} must be train or val")


class Task(Protocol):
    """A frozen dataclass whose fields are the task's parameters."""

    def row(self, rng: Random) -> dict[str, Any]:
        """Return `prompt`, the right `answer`, and other columns. Messages need `extra_info`."""
        ...

    def corrupt(self, rng: Random, prompt: str, answer: str) -> str:
        """Return a wrong answer of the right form. A model learns only the form from it."""
        ...

    def alphabet(self) -> str:
        """Return every character that can occur in prompts and answers."""
        ...


@dataclass(frozen=True, slots=True)
class _Digits:
    min_digits: int = field(default=4, metadata={"doc": "fewest digits"})
    max_digits: int = field(default=6, metadata={"doc": "most digits, but for the tail"})
    tail: float = field(
        default=0.0, metadata={"doc": "share of problems whose length is log-normal: a long tail"}
    )
    tail_digits: int = field(default=64, metadata={"doc": "most digits in the tail"})

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.max_digits:
            raise ValueError(
                f"1 <= min_digits={self.min_digits} <= max_digits={self.max_digits} must hold"
            )
        if not 0 <= self.tail <= 1:
            raise ValueError(f"tail={self.tail} must lie between 0 and 1")
        if self.tail and self.tail_digits < self.max_digits:
            raise ValueError(
                f"tail_digits={self.tail_digits} must be max_digits={self.max_digits} or more"
            )

    def _digits(self, rng: Random) -> str:
        count = rng.randint(self.min_digits, self.max_digits)
        if self.tail and rng.random() < self.tail:
            drawn = round(rng.lognormvariate(math.log(2 * self.max_digits), 0.75))
            count = min(max(drawn, self.min_digits), self.tail_digits)
        return "".join(rng.choices("0123456789", k=count))

    def alphabet(self) -> str:
        return "0123456789>"


@dataclass(frozen=True, slots=True)
class SortDigits(_Digits):
    """`83521>` asks for `12358`."""

    def row(self, rng: Random) -> dict[str, Any]:
        digits = self._digits(rng)
        return {"prompt": digits + ">", "answer": "".join(sorted(digits))}

    def corrupt(self, rng: Random, prompt: str, answer: str) -> str:
        """Return the digits in reverse order, or a copy of them."""
        wrong = [text for text in (answer[::-1], prompt.removesuffix(">")) if text != answer]
        return rng.choice(wrong) if wrong else corrupt_answer(rng, answer)


@dataclass(frozen=True, slots=True)
class Copy(_Digits):
    """`83521>` asks for `83521`."""

    def row(self, rng: Random) -> dict[str, Any]:
        digits = self._digits(rng)
        return {"prompt": digits + ">", "answer": digits}

    def corrupt(self, rng: Random, prompt: str, answer: str) -> str:
        return corrupt_answer(rng, answer)


@dataclass(frozen=True, slots=True)
class Chase:
    """`c3:7>` asks for three steps from 7 through a table that only a tool `lookup` knows.

    A demonstration has one line for each turn: `?7.` is a call of the tool, `=1` the answer.
    """

    min_hops: int = field(default=1, metadata={"doc": "fewest steps"})
    max_hops: int = field(default=4, metadata={"doc": "most steps, at most 9"})

    def __post_init__(self) -> None:
        if not 1 <= self.min_hops <= self.max_hops <= 9:
            raise ValueError(
                f"1 <= min_hops={self.min_hops} <= max_hops={self.max_hops} <= 9 must hold"
            )

    def row(self, rng: Random) -> dict[str, Any]:
        table = rng.choices("0123456789", k=10)
        hops, at = rng.randint(self.min_hops, self.max_hops), rng.choice("0123456789")
        prompt, turns = f"c{hops}:{at}>", list[str]()
        for _ in range(hops):
            turns.append(f"?{at}.")
            at = table[int(at)]
        return {
            "prompt": [{"role": "user", "content": prompt}],
            "answer": "\n".join([*turns, f"={at}"]),
            "ground_truth": at,
            "extra_info": {"table": "".join(table)},
        }

    def corrupt(self, rng: Random, prompt: str, answer: str) -> str:
        """Return turns that stop one step short, or that end in a wrong digit."""
        *calls, last = answer.split("\n")
        if rng.random() < 0.8 and calls[-1][1] != last[1]:
            return "\n".join([*calls[:-1], f"={calls[-1][1]}"])
        wrong = rng.choice([d for d in "0123456789" if d != last[1]])
        return "\n".join([*calls, f"={wrong}"])

    def alphabet(self) -> str:
        return "0123456789c:>?.="


@dataclass(frozen=True, slots=True)
class FillIn:
    """`f(3)=7 f(5)=9 x` asks for the expression `x+4`, which tests on other numbers judge."""

    most: int = field(default=9, metadata={"doc": "the largest constant, at most 9"})

    def __post_init__(self) -> None:
        if not 1 <= self.most <= 9:
            raise ValueError(f"most={self.most} must lie between 1 and 9")

    def row(self, rng: Random) -> dict[str, Any]:
        operator, constant = rng.choice("+-*"), rng.randint(1, self.most)
        inputs = rng.sample(range(10), k=4)
        shown, hidden = inputs[:2], inputs[2:]
        values = {
            x: {"+": x + constant, "-": x - constant, "*": x * constant}[operator] for x in inputs
        }
        prompt = " ".join(f"f({x})={values[x]}" for x in shown) + ">"
        return {
            "prompt": [{"role": "user", "content": prompt}],
            "answer": f"x{operator}{constant}",
            "extra_info": {
                "prefix": "f = lambda x: ",
                "tests": [[f"f({x})", repr(values[x])] for x in hidden],
            },
        }

    def corrupt(self, rng: Random, prompt: str, answer: str) -> str:
        """Return the right operator with a wrong constant, or the reverse."""
        if rng.random() < 0.5:
            return f"x{rng.choice([o for o in '+-*' if o != answer[1]])}{answer[2:]}"
        return answer[:2] + rng.choice([d for d in "123456789" if d != answer[2:]])

    def alphabet(self) -> str:
        return "0123456789f()= >x+-*"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A question about two numbers, as chat for models that can talk.

    7 times 12 and 12 times 7 are one problem. An epoch has each problem of its split once.
    """

    sign: ClassVar[str]
    least: ClassVar[int] = 1
    """The smallest number: an answer that repeats the question must not end with the result."""
    larger: int = field(default=99, metadata={"doc": "the larger number is at most this"})
    smaller: int = field(default=12, metadata={"doc": "the smaller number is at most this"})

    def __post_init__(self) -> None:
        if not self.least <= self.smaller <= self.larger <= 999:
            raise ValueError(
                f"{self.least} <= smaller={self.smaller} <= larger={self.larger} <= 999 must hold"
            )

    def result(self, a: int, b: int) -> int:
        raise NotImplementedError

    def problems(self) -> list[tuple[int, int]]:
        """Return all problems, of both splits."""
        return [
            (a, b) for a in range(self.least, self.smaller + 1) for b in range(a, self.larger + 1)
        ]

    def row(self, rng: Random, numbers: Sequence[int] = ()) -> dict[str, Any]:
        """Return the row of a problem, with its numbers in some order."""
        a, b = rng.sample(numbers or rng.choice(self.problems()), 2)
        question = f"What is {a} {self.sign} {b}?"
        return {
            "prompt": [{"role": "user", "content": question}],
            "answer": str(self.result(a, b)),
        }

    def corrupt(self, rng: Random, prompt: str, answer: str) -> str:
        return corrupt_answer(rng, answer)

    def alphabet(self) -> str:
        return f"What is 0123456789{self.sign}?"


class Products(Arithmetic):
    """`What is 7 * 12?`, as a message of the user."""

    __slots__ = ()
    sign = "*"
    least = 2

    def result(self, a: int, b: int) -> int:
        return a * b


class Sums(Arithmetic):
    """`What is 7 + 12?`, as a message of the user."""

    __slots__ = ()
    sign = "+"

    def result(self, a: int, b: int) -> int:
        return a + b


TASKS: dict[str, type[Task]] = {
    "sort_digits": SortDigits,
    "copy": Copy,
    "chase": Chase,
    "fill_in": FillIn,
    "products": Products,
    "sums": Sums,
}


def task_row(name: str, task: Task, stream: Stream, i: int) -> dict[str, Any]:
    """Return row i of a task, in the columns of any other source.

    A task with few problems may have none in a split. If `_TRIES` draws give no problem of the
    split, the row is the last draw.
    """
    row: dict[str, Any] = {}
    if isinstance(task, Arithmetic):
        order = _epoch(task, stream)
        rng = Random(f"{name}|{task!r}|{stream.seed}|{stream.split}|{i}")
        row = task.row(rng, order[i % len(order)])
        return row | {"data_source": name, "extra_info": {"index": i, "split": stream.split}}
    for attempt in range(_TRIES):
        rng = Random(f"{name}|{task!r}|{stream.seed}|{stream.split}|{i}|{attempt}")
        row = task.row(rng)
        prompt = row["prompt"]
        problem = prompt if isinstance(prompt, str) else repr((prompt, row["extra_info"]))
        if (_hash(problem) % 8 == 0) == (stream.split == "val"):
            break
    extra = {"index": i, "split": stream.split} | row.get("extra_info", {})
    return row | {"data_source": name, "extra_info": extra}


@lru_cache(maxsize=16)
def _epoch(task: Arithmetic, stream: Stream) -> list[tuple[int, int]]:
    """Return the problems of a split, in the order of the seed."""
    held_out = stream.split == "val"
    of_split = [p for p in task.problems() if (_hash(repr(p)) % 2 == 0) == held_out]
    chosen = of_split or task.problems()  # so few problems that one split is empty
    return Random(f"{task!r}|{stream.seed}|{stream.split}").sample(chosen, len(chosen))


def _hash(problem: str) -> int:
    return crc32(problem.encode())


_WORD = re.compile(r"\w+(?:\.\w+)*")


def corrupt_answer(rng: Random, answer: str, other: str = "") -> str:
    """Return a wrong answer: `other` (another row's answer), or the answer with a swap.

    The swap exchanges two neighbours: words and numbers if there are several, else characters. The
    text between words stays, so the form is right: `['3', '5']` becomes `['5', '3']`. The result
    never equals the answer.
    """
    swapped = _swap(rng, answer)
    wrong = [text for text in (other, swapped) if text and text != answer]
    return rng.choice(wrong) if wrong else answer + answer[-1:] if answer else "?"


def _swap(rng: Random, answer: str) -> str:
    words = [m.span() for m in _WORD.finditer(answer)]
    spans = words if len(words) > 1 else [(k, k + 1) for k in range(len(answer))]
    pairs = [((a, b), (c, d)) for (a, b), (c, d) in pairwise(spans) if answer[a:b] != answer[c:d]]
    if not pairs:
        return ""
    (a, b), (c, d) = rng.choice(pairs)
    return answer[:a] + answer[c:d] + answer[b:c] + answer[a:b] + answer[d:]
