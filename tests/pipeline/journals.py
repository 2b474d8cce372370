"""What the tests of the journal share."""

from __future__ import annotations

from millrace.pipeline.journal_file import FORMAT, Header
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import Schedule
from millrace.types import (
    Author,
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Trajectory,
    floats_of,
    tokens_of,
)

HEADER = Header(FORMAT, 1, 0, "samples", "training")
PROMPT = Prompt(0, tokens_of([1, 2]), "", "test")


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


def drawn(*versions: int, done: bool = True) -> Trajectory:
    """Return a trajectory with two tokens of each version."""
    stops = [Stop.INTERRUPTED] * len(versions)
    if done:
        stops[-1] = Stop.EOS
    segments = tuple(
        Segment(tokens_of([7, v]), Author.POLICY, v, floats_of([-0.5, -1.5]), stop)
        for v, stop in zip(versions, stops, strict=True)
    )
    whole = Trajectory.of(segments)
    return whole.with_score(Score(0.5, {"right": 1.0})) if done else whole


def ledger_at(waiting: int = 4, version: int = 2) -> Ledger:
    """Return a ledger at a version, with samples 4 to 4 + `waiting` that wait."""
    ledger = Ledger(Schedule(ppo_mini_batch_size=2, staleness_threshold=3.0))
    for _ in range(version * 2):
        i = ledger.admit(PROMPT)
        ledger.start(i)
        ledger.finish(i, Sample(PROMPT, ()))
        if i % 2:
            ledger.take()
            ledger.trained()
            ledger.seal()
            ledger.published()
    for _ in range(waiting):
        ledger.admit(PROMPT)
    return ledger
