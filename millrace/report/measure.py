"""From the files of a run to the figures that advice reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.observe.timing import TOTALS
from millrace.report.measured import Measured, Setup


def measured_of(
    setup: Setup,
    rows: Sequence[Mapping[str, float]],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> Measured:
    """Return the figures of the versions in `rows`.

    `before` and `after` are the accounts at both ends of these versions.
    """

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows)

    def over_time(name: str) -> float:
        return sum((row.get(name) or 0.0) * row["perf/time_per_version"] for row in rows)

    def grown(name: str) -> dict[str, float]:
        old = before[name]
        return {key: value - old.get(key, 0) for key, value in after[name].items()}

    seconds = total("perf/time_per_version")
    # The accounts are written a moment after the rows are closed.
    scale = seconds / (after["seconds"] - before["seconds"])
    timing = {
        name.removeprefix("timing_s/"): total(name)
        for name in {n for row in rows for n in row if n.startswith("timing_s/")}
    }
    tokens, requests, scores = grown("tokens"), grown("requests"), grown("scores")
    usable = min(setup.slots, setup.schedule.capacity * setup.n)
    return Measured(
        setup=setup,
        versions=len(rows),
        seconds=seconds,
        trainer={name: value for name, value in timing.items() if name not in TOTALS},
        held={state: value * scale for state, value in grown("slots").items()},
        samples=int(total("train/samples")),
        busy_slot_s=usable * (seconds - over_time("rollouter/idle_ratio")),
        drawn_tokens=over_time("rollouter/tokens_per_s"),
        trained_tokens=tokens.get("trained", 0.0),
        dropped_tokens={
            name.removeprefix("dropped/"): value
            for name, value in tokens.items()
            if name.startswith("dropped/")
        },
        request_s=requests.get("seconds", 0.0) * scale,
        score_s=scores.get("seconds", 0.0) * scale,
        scores=scores.get("count", 0.0),
        hold_s=total("sync/hold_s"),
        longest=total("response_length/max") / len(rows),
    )
