"""A tracker, an environment and a command. They import no torch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer

from millrace.environments.chat import OneAnswer, Start
from millrace.environments.prompts import messages_of
from millrace.observe.trackers import About
from millrace.persist.run_reader import METRICS, RunReader, check
from millrace.types import Prompt, Score


class CsvTracker:
    """The figures of a run in RUN/figures.csv, one in each line: `trainer.logger=[csv]`."""

    def __init__(self, about: About) -> None:
        path = about.folder / "figures.csv"
        self.where = str(path)
        self._file = path.open("a", newline="")
        self._writer = csv.writer(self._file)

    def write(self, version: int, row: dict[str, float]) -> None:
        self._writer.writerows((version, name, value) for name, value in row.items())
        self._file.flush()

    def close(self, complete: bool) -> None:
        self._file.close()


class PartlySorted(OneAnswer):
    """The quickstart's task with a score for each digit: `agents.environment=partly_sorted`."""

    async def reset(self, task: Prompt) -> Start:
        self._truth = str(task.ground_truth)
        return Start(messages_of(task))

    async def score(self) -> Score:
        answer = self.answer or ""
        right = sum(a == b for a, b in zip(answer, self._truth, strict=False))
        return Score(right / max(len(answer), len(self._truth)), answer=answer)


def rewards(run: Annotated[Path, typer.Argument(metavar="RUN")]) -> None:
    """Print the mean reward of each version: `millrace rewards RUN`."""
    check(run, METRICS)
    for version, row in RunReader(run).read().rows.items():
        typer.echo(f"{version:4} {row['reward/mean']:.3f}")
