"""Demonstrations for the supervised warm-up, a share of them wrong on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from millrace.data.rows import Problem, problem
from millrace.data.sources import Rows
from millrace.data.tasks import corrupt_answer

_TRIES = 32


@dataclass(frozen=True, slots=True)
class Demonstration:
    problem: Problem
    answer: str
    """The text that the model should learn, without the end-of-sequence token."""
    messy: bool
    """The answer is wrong on purpose."""

    @property
    def turns(self) -> tuple[str, ...]:
        """Return the texts of the policy's turns: the lines of the answer."""
        return tuple(self.answer.split("\n"))


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Demonstrations as a pure function of (seed, i), for any i.

    Rows repeat after `len`, with other corruptions. Raise DataError for a row without an answer or
    ground truth.
    """

    rows: Rows
    seed: int
    messiness: float
    """The share of corrupted answers."""
    prompt_key: str = "prompt"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Demonstration:
        at, rng = i % len(self.rows), Random(f"demonstration|{self.seed}|{i}")
        entry = problem(self.rows, at, prompt_key=self.prompt_key, need_ground_truth=True)
        if rng.random() >= self.messiness:
            return Demonstration(entry, entry.answer, messy=False)
        part, _ = self.rows.locate(at)
        if part.task is not None:
            answer = part.task.corrupt(rng, entry.text, entry.answer)
        else:
            answer = corrupt_answer(rng, entry.answer, self._other(rng, entry).answer)
        return Demonstration(entry, answer, messy=True)

    def _other(self, rng: Random, entry: Problem) -> Problem:
        """Return another row, if possible of the same data source.

        Its answer is wrong for this row, but has the right form.
        """
        for _ in range(_TRIES):
            at = rng.randrange(len(self.rows))
            part, place = self.rows.locate(at)
            if (part.get(place).get("data_source") or part.name) == entry.data_source:
                break
        return problem(self.rows, at, prompt_key=self.prompt_key)
