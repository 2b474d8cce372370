"""The summary of a finished run, for people and for programs."""

from __future__ import annotations

import math
import shlex
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from millrace.observe.panel import distinct, shown
from millrace.pipeline.validation import Result, Transcript
from millrace.run.train import Outcome


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the object that `millrace train --json` prints last."""
    return {
        "run_dir": str(outcome.run_dir),
        "mode": outcome.mode,
        "versions": outcome.versions,
        "optimizer_steps": outcome.optimizer_steps,
        "samples_trained": outcome.samples_trained,
        "train_seconds": outcome.train_seconds,
        "val": outcome.last.values if outcome.last else {},
        "val_before": outcome.first.values if outcome.first else {},
        "timings": outcome.timings,
        "checkpoint": str(outcome.checkpoint) if outcome.checkpoint else None,
        "report": str(outcome.report) if outcome.report else None,
        "advice": outcome.advice,
        "complete": outcome.complete,
    }


def show(console: Console, outcome: Outcome) -> None:
    """Print the accuracy before and after, the folders, and three transcripts."""
    if outcome.last is not None:
        console.print(_comparison(outcome.first, outcome.last))
        console.print(_transcripts(outcome.first, outcome.last))
    times, say = (
        outcome.timings,
        partial(console.print, highlight=False, markup=False, soft_wrap=True),
    )
    say(
        f"{outcome.samples_trained} samples in {outcome.optimizer_steps} optimizer steps, "
        f"{outcome.versions} versions; start {times.get('start', 0):.1f} s, "
        f"warm-up {times.get('warm_up', 0):.1f} s, RL {outcome.train_seconds:.1f} s",
    )
    say(f"run         {outcome.run_dir}")
    say(f"checkpoint  {outcome.checkpoint}")
    if outcome.report is not None:
        say(f"report      {outcome.report}")
    if outcome.advice:
        say(f"advice      {outcome.advice}")
    if outcome.last is not None:
        say(f"complete: held-out scores {shown(outcome.last.values, ', ')}")
    elif outcome.complete:
        say("complete; without data.val_files there are no held-out scores")
    else:
        folder = shlex.quote(str(outcome.run_dir))
        say(f"not complete: resume with trainer.resume=auto trainer.run_dir={folder}")


def _comparison(first: Result | None, last: Result) -> Table:
    """Return the table of validation metrics before and after."""
    table = Table(title="held-out problems")
    for name in ("", "before", "after"):
        table.add_column(name, justify="left" if not name else "right")
    for name, value in distinct(last.values):
        before = first.values.get(name) if first else None
        table.add_row(
            Text(name.removeprefix("val/")),
            "-" if before is None else f"{before:.3f}",
            f"{value:.3f}",
        )
    return table


def _transcripts(first: Result | None, last: Result) -> Table:
    """Return the table of responses before and after."""
    table = Table(title="transcripts")
    for name in ("problem", "truth", "before", "after"):
        table.add_column(name, overflow="fold", max_width=40)
    for i, after in enumerate(last.transcripts):
        before = first.transcripts[i] if first and i < len(first.transcripts) else None
        table.add_row(
            Text(after.prompt), Text(after.ground_truth), _response(before), _response(after)
        )
    return table


def _response(transcript: Transcript | None) -> Text:
    """Return a response with its answer and score, as plain text: rich must not read markup in it.

    An answer that is the whole response is not repeated.
    """
    if transcript is None:
        return Text("-")
    answer = "no answer" if transcript.answer is None else f"answer {transcript.answer}"
    answer = "" if transcript.answer == transcript.response.strip() else f"{answer}, "
    score = "no score" if math.isnan(transcript.score) else f"{transcript.score:g}"
    return Text(f"{transcript.response}  ({answer}{score})")
