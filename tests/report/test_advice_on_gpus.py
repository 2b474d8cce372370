"""The advice on two runs that were measured on two H200s (benchmarks/results/advice.md).

Engines idle in the first run, and all slots are busy in the second one, which was slower.
"""

from __future__ import annotations

from pathlib import Path

from millrace.persist.run_reader import RunReader
from millrace.report.advice.advise import advise_run
from millrace.report.advice.measure import measure

RUNS = Path(__file__).parent / "h200"
FEW, MANY = (RunReader(RUNS / name).read() for name in ("run-0", "run-1"))


def test_the_measured_case_is_explained_without_a_promise_that_full_engines_break() -> None:
    before, after = measure(FEW), measure(MANY)
    assert before and after and before.step_cost
    assert after.drawn_tokens / after.seconds < 0.9 * before.drawn_tokens / before.seconds
    first, *others = advise_run(FEW)
    assert first.text.startswith(
        "The ledger is full while engines idle 23% of the time: a sample waits for the longest of its "
        "8 responses. A larger async_training.staleness_threshold would gain nothing"
    )
    assert f"lose {before.step_cost.queue:.0%}" in first.text and before.step_cost.queue > 0.5
    assert not first.overrides
    assert all("staleness_threshold" not in one.key and one.gain is None for one in others)


def test_more_slots_for_full_engines_are_only_a_bound() -> None:
    """No step with more requests was measured."""
    (slots,) = [one for one in advise_run(MANY) if one.key == "rollout.max_num_seqs"]
    assert slots.text.startswith("The decode slots are full") and slots.at_most
