"""The advice in a live view is computed seldom, and cannot end the view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from millrace.persist.run_reader import RunReader
from millrace.report.live.look import AdviceCache, RunSnapshot

LOOK = RunSnapshot(
    "run", "quick", "async_partial", "running", "process 1", 0.0, attempt=1, version=1
)


def test_advice_is_computed_for_new_versions_and_seldom() -> None:
    now, asked = [0.0], list[float]()

    def advise(run: RunReader) -> list[str]:
        asked.append(now[0])
        now[0] += 2.0  # it takes two seconds
        return [f"advice {len(asked)}"]

    advice_cache = AdviceCache(RunReader(Path("run")), lambda: now[0], advise)
    for second in range(100):
        now[0] = max(now[0], float(second))
        said = advice_cache.on(replace(LOOK, version=1 if second < 50 else second))
    assert asked == [0.0, 50.0, 90.0] and said == ["advice 3"]
    now[0] = 100.0
    end = replace(LOOK, version=99, state="complete")
    assert advice_cache.on(end) == ["advice 4"] and advice_cache.on(end) == ["advice 4"]


def test_advice_that_fails_does_not_end_the_view() -> None:
    def fail(run: RunReader) -> list[str]:
        raise ValueError("no figures")

    assert AdviceCache(RunReader(Path("run")), advise=fail).on(LOOK) == [
        "none: ValueError: no figures"
    ]
