"""The advice on two runs that were measured on two H200s (benchmarks/results/advice.md)."""

from __future__ import annotations

from pathlib import Path

from millrace.report.measure import advise_run, measure

RUNS = Path(__file__).parent / "h200"


def test_the_measured_case_is_explained_with_the_number_that_lifts_it() -> None:
    first = advise_run(RUNS / "run-0")[0]
    assert first.text.startswith("The ledger is full while engines idle 25% of the time")
    assert first.overrides == ("async_training.staleness_threshold=3.3",)
    before, after = measure(RUNS / "run-0"), measure(RUNS / "run-1")
    assert before and after and first.gain is not None
    assert abs(after.rate / before.rate - 1 - first.gain) < 0.03


def test_the_run_that_followed_it_is_bound_by_its_decode_slots() -> None:
    advice = advise_run(RUNS / "run-1")
    assert advice[0].text.startswith("The decode slots are full")
    assert all(one.key != "async_training.staleness_threshold" for one in advice)
