"""The figures of one moment of a run, for live views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from millrace.errors import MillraceError
from millrace.observe.guard import CAUSES
from millrace.observe.panel import RECENT, Alarm, Device, RunSnapshot
from millrace.persist.accounts import Device as Account
from millrace.persist.accounts import Line
from millrace.persist.run_reader import Row, RunReader

PACE = 50
"""Versions whose pace predicts the end."""
_LARGEST = 1e15
"""Larger figures are not figures of a run."""
NO_ACCOUNT = Account(0, {})


def look_at(run: RunReader) -> RunSnapshot:
    """Return what the files of a run show now."""
    run.read()
    last = run.history[-1] if run.history else None
    rows = [run.rows[v] for v in sorted(run.rows)]
    validated = sorted(run.validations)
    done, version = (last.retired, last.version) if last else (0, 0)
    evaluated = last is None and run.state == "complete"
    plan = (None, None, None) if evaluated else _plan(run, rows, done, version)
    total, versions, eta = plan
    return RunSnapshot(
        folder=str(run.path),
        name=run.config.name if run.config else run.name,
        mode=run.mode,
        state=run.state,
        process=run.process,
        age_s=run.age_s,
        attempt=last.attempt if last else 0,
        version=version,
        versions=versions,
        samples=done,
        total=total,
        eta_s=eta if run.state == "running" else None,
        rewards=[row["reward/mean"] for row in rows if "reward/mean" in row],
        row=rows[-1] if rows else {},
        before=run.validations[validated[0]] if len(validated) > 1 else {},
        validation=run.validations[validated[-1]] if validated else {},
        validated=validated[-1] if validated else 0,
        alarms=[
            Alarm(alarm.name, alarm.periods[-1][0], CAUSES.get(alarm.name, ""))
            for alarm in run.alarms()
            if alarm.active
        ],
        devices=list(_devices(run.attempt)),
        generated=run.accounts[-1].generated if run.accounts else 0,
        tokens=dict(run.accounts[-1].tokens) if run.accounts else {},
        damage=run.notes,
    )


def _plan(
    run: RunReader, rows: Sequence[Row], done: int, version: int
) -> tuple[int | None, int | None, float | None]:
    """Return the samples and versions of the whole run, and the seconds that are left."""
    if run.config is None:
        return None, None, None
    total = run.accounts[-1].limit if run.accounts else None
    if total is None and not run.config.trainer.total_epochs:  # else the data say it
        with suppress(MillraceError):
            total = run.config.derived(None).samples
    if total is None or not 0 <= total < _LARGEST:
        return None, None, None
    left = max(0, total - done)
    samples = sum(row.get("train/samples", 0.0) for row in rows[-PACE:])
    seconds = sum(row.get("timing_s/step", 0.0) for row in rows[-PACE:])
    eta = left * seconds / samples if samples > 0 and seconds > 0 else None
    return total, version + run.config.schedule.versions(left), eta


def _devices(attempt: Sequence[Line]) -> Iterator[Device]:
    """Yield how each device spends its time. The accounts of time begin anew with each attempt."""
    if not attempt:
        return
    last = attempt[-1]
    earlier = next(
        (line for line in reversed(attempt) if line.version <= last.version - RECENT), attempt[0]
    )
    # The trainer is first, and replica 2 before replica 10.
    for name in sorted(last.devices, key=lambda name: (name != "trainer", len(name), name)):
        device = last.devices[name]
        before = earlier.devices.get(name, NO_ACCOUNT) if earlier is not last else NO_ACCOUNT
        recent = {k: s - before.seconds.get(k, 0.0) for k, s in device.seconds.items()}
        yield Device(name, device.count, _shares(recent), _shares(device.seconds))


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each part, largest first."""
    whole = sum(s for s in seconds.values() if s > 0)
    found = {k: s / whole for k, s in seconds.items() if s > 0} if 0 < whole < _LARGEST else {}
    return dict(sorted(found.items(), key=lambda part: -part[1]))
