"""Name a Schedule: a mode of the table, or custom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.schedule.schedule import Schedule


def name_of(
    schedule: Schedule, table: Mapping[str, Mapping[str, Any]], asked: str | None = None
) -> str:
    """Return the mode in `table` whose values `schedule` has, or "custom".

    `table` has the values that each mode fixes, by the names of Schedule's fields. A mode that fixes
    no staleness_threshold needs one over 0. `asked` is the mode that the configuration names. If
    several modes fit, the result is `asked`, or else the mode that fixes most values. If no mode
    fits, the result mentions `asked`: "custom (from async_partial)".
    """
    fitting = [name for name, fixed in table.items() if _fits(schedule, fixed)]
    if asked in fitting or not fitting:
        return asked if asked in fitting else f"custom (from {asked})" if asked else "custom"
    return max(fitting, key=lambda name: len(table[name]))


def _fits(schedule: Schedule, fixed: Mapping[str, Any]) -> bool:
    stale = "staleness_threshold" in fixed or schedule.staleness_threshold > 0
    return stale and all(getattr(schedule, key) == value for key, value in fixed.items())
