"""The head of a report: what the run was, its alarms, and advice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from millrace import __version__
from millrace.config import Config
from millrace.errors import MillraceError
from millrace.observe.guard import CAUSES, PREFIX
from millrace.report.advice.advise import Advice
from millrace.report.advice.measure import advise_run
from millrace.report.page.figures import Block, box, number, seconds, table, text
from millrace.report.page.folder import RunFolder
from millrace.schedule.modes import name_of
from millrace.schedule.schedule import Schedule

_MOST_FAILED = 0.02
"""The largest share of samples that errors may drop without an alarm."""


def facts(run: RunFolder) -> Block:
    """Return the list of what the run was."""
    items = {
        "folder": run.name,
        "recipe": str(run.key("name", "unknown")),
        "mode": mode_of(run),
        "devices": _devices(run),
        "model": _model(run),
        "training data": _sources(run.key("data.train_files")),
        "validation data": _sources(run.key("data.val_files")),
        "state": state_of(run),
        "samples": _samples(run),
        "versions": number(run.versions),
        "time": _time(run),
        "report": f"made by millrace {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    return {"type": "facts", "items": [[k, v] for k, v in items.items() if v]}


def mode_of(run: RunFolder) -> str:
    """Return the mode that the Schedule of the run's configuration shows."""
    asked = run.key("mode")
    schedule = run.key("async_training", {})
    numbers = [
        f"{short} {schedule[name]}"
        for name, short in (
            ("placement", "devices"),
            ("staleness_threshold", "staleness"),
            ("trigger_parameter_sync_step", "local steps per version"),
            ("on_sync", "on_sync"),
        )
        if isinstance(schedule, dict) and schedule.get(name) is not None
    ]
    return f"{_shown_mode(run) or asked or 'unknown'}{' (' + ', '.join(numbers) + ')' if numbers else ''}"  # fmt: skip


def _shown_mode(run: RunFolder) -> str:
    """Return the name that the run shows, or nothing for a configuration of another version."""
    schedule = _schedule(run)
    return name_of(schedule, run.key("mode")) if schedule else ""


def _schedule(run: RunFolder) -> Schedule | None:
    try:
        return Config.model_validate(run.config).schedule
    except (ValueError, TypeError, MillraceError):
        return None


def state_of(run: RunFolder) -> str:
    """Return whether the run is complete, with its attempts and how each of them ended."""
    audit = run.audit
    if audit is None or not run.lines:
        damaged = any(note.startswith("history.jsonl: ") for note in run.notes)
        return "unknown: history.jsonl is not readable" if damaged else "unknown: no history.jsonl"
    if audit.complete:
        words = "complete"
    elif run.running:
        words = "still going on: this page shows the run so far"
    else:
        words = "not complete: `trainer.resume=auto` resumes it"
    ends = attempts(run)
    if len(ends) > 1 or not (audit.complete or run.running):
        words += ". " + ", ".join(ends).capitalize()
    return words


def attempts(run: RunFolder) -> list[str]:
    """Return the beginning and the end of each attempt in words."""
    words = []
    for attempt in sorted({line.attempt for line in run.lines}):
        lines = [line for line in run.lines if line.attempt == attempt]
        first, last = lines[0], lines[-1]
        start = f"attempt {attempt}"
        if first.version:
            start += f", from version {first.version},"
        if last.event == "end":
            end = "complete" if last.complete else "stopped"
        else:
            end = "goes on" if run.running and last is run.lines[-1] else "killed"
        words.append(f"{start} {end} at version {last.version}")
    return words


def alarms(run: RunFolder) -> list[Block]:
    """Return a box for every alarm of the run. Active ones come first."""
    periods: dict[str, list[list[int]]] = {}
    for version, row in sorted(run.rows.items()):
        for name, value in row.items():
            if not name.startswith(PREFIX):
                continue
            spans = periods.setdefault(name.removeprefix(PREFIX), [])
            if value and spans and spans[-1][1] == -1:
                continue
            if value:
                spans.append([version, -1])
            elif spans and spans[-1][1] == -1:
                spans[-1][1] = version
    boxes = []
    for name, spans in sorted(periods.items(), key=lambda item: item[1][-1][1:] != [-1] if item[1] else True):  # fmt: skip
        if not spans:
            continue
        active = spans[-1][1] == -1
        since = spans[-1][0] if active else spans[0][0]
        when = f"since version {since}, still active" if active else _past(spans)
        boxes.append(box("alarm" if active else "past", f"{name}: {when}", _fix(name)))
    boxes = _of_samples(run) + boxes
    return boxes or [_no_alarms(run)]


def _of_samples(run: RunFolder) -> list[Block]:
    """Return boxes for samples that are lost, trained twice, or dropped because of errors."""
    audit = run.audit
    if audit is None:
        return []
    boxes = []
    for count, what in ((audit.lost, "lost"), (audit.trained_twice, "trained twice")):
        if count:
            words = "This is a fault of millrace. `millrace ledger RUN` has the counts: report it."
            boxes.append(box("alarm", f"{count:,} samples are {what}", words))
    failed = {r: n for r, n in audit.dropped.items() if r != "equal_outcomes"}
    part = sum(failed.values()) / max(audit.admitted, 1)
    if part > _MOST_FAILED:
        reasons = ", ".join(f"{n:,} for `{reason}`" for reason, n in failed.items())
        words = (
            f"Their work was for nothing: {reasons}. Mend `reward.function`, or look at "
            "`reward.timeout_s`; the run's output has the first errors. The dropped samples may "
            "have other lengths than the trained ones, so the policy learns from a biased choice."
        )
        boxes.append(box("alarm", f"{100 * part:.0f} % of the samples were dropped", words))
    return boxes


def _past(spans: list[list[int]]) -> str:
    one = len(spans) == 1 and spans[0][1] - 1 <= spans[0][0]
    shown = ", ".join(f"{first} to {last - 1}" if last - 1 > first else str(first) for first, last in spans[:5])  # fmt: skip
    return f"over; it was active in version{'s' * (not one)} {shown}{' and later' if len(spans) > 5 else ''}"


def _fix(name: str) -> str:
    words = CAUSES.get(name, "This version of millrace does not know the alarm.")
    for key in ("actor", "algorithm", "async_training", "data", "model", "reward", "rollout"):
        words = _marked(words, f"{key}.")
    return words


def _marked(words: str, start: str) -> str:
    """Put backticks around the words that begin with `start`, which are keys."""
    return " ".join(
        f"`{core}`{word[len(core):]}" if (core := word.rstrip(".,;:)")).startswith(start) else
        f"(`{core[1:]}`{word[len(core):]}" if core.startswith("(" + start) else word
        for word in words.split(" ")
    )  # fmt: skip


def _no_alarms(run: RunFolder) -> Block:
    if not run.rows:
        return text("No alarms: the run has no row of metrics yet.")
    if not any(name.startswith(PREFIX) for row in run.rows.values() for name in row):
        return text("No alarms: `guard.enable=false`.")
    return box("good", "No alarm", "No limit of the guard was passed in any version.")


def advice(run: RunFolder) -> list[Block]:
    """Return the advice on the run, after a sentence that says what it is."""
    if not run.accounts:
        return [
            text("No advice: accounts.jsonl is missing or empty. Runs of older versions have none.")
        ]
    try:
        found = advise_run(run.path)
    except (MillraceError, ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        return [text(f"No advice: the figures cannot be used: {error}")]
    if not found:
        words = "No advice yet: the run has too few versions in which nothing fills or drains."
        if run.notes:
            words = f"No advice, perhaps because of damaged files: {'; '.join(run.notes)}."
        return [text(words)]
    how = (
        "What limits the speed of the run, and the keys that lift the limit. The largest gain is "
        "first, but rough bounds and advice that takes more devices come last. A percentage is the "
        "predicted change of the samples that are trained per second."
    )
    return [text(how), *(box("advice", "", _keys(one)) for one in found)]


def _keys(one: Advice) -> str:
    """Return a sentence of advice with backticks around its settings."""
    words = str(one)
    for setting in sorted(set(one.overrides), key=len, reverse=True):
        words = re.sub(rf"(?<![\w.`=]){re.escape(setting)}(?![\w`])", f"`{setting}`", words)
    return words


def errors(run: RunFolder) -> list[Block]:
    """Return a table of dropped samples, and a list of what could not be read."""
    blocks: list[Block] = []
    if run.audit is not None and run.audit.dropped:
        rows = [[reason, count] for reason, count in sorted(run.audit.dropped.items())]
        how = (
            "Samples that were dropped, by reason. `equal_outcomes` is dynamic sampling. "
            "Others are errors: read RUN/logs, and see `reward.timeout_s`."
        )
        blocks.append(table(how, ["dropped samples", "number"], rows))
    blocks += [text(f"Not readable: {note}") for note in run.notes]
    return blocks


def _devices(run: RunFolder) -> str:
    def of(section: str) -> int:
        nodes, each = run.key(f"{section}.nnodes", 1), run.key(f"{section}.n_gpus_per_node", 1)
        return nodes * each if isinstance(nodes, int) and isinstance(each, int) else 0

    if not run.config:
        return ""
    if run.key("async_training.placement") == "colocated":
        return f"{of('trainer')} shared"
    size = run.key("rollout.tensor_model_parallel_size", 1)
    tensor = f", {size} for each replica" if size != 1 else ""
    return f"{of('trainer')} for training, {of('rollout')} for rollouts{tensor}"


def _model(run: RunFolder) -> str:
    if path := run.key("model.path"):
        return str(path)
    shape = run.key("model.shape", {})
    if not isinstance(shape, dict) or not shape:
        return ""
    return f"new: {shape.get('num_hidden_layers')} layers of {shape.get('hidden_size')}"


def _sources(files: Any) -> str:
    return ", ".join(map(str, files)) if isinstance(files, list) else ""


def _samples(run: RunFolder) -> str:
    audit = run.audit
    if audit is None:
        return ""
    n = run.key("rollout.n")
    dropped = sum(audit.dropped.values())
    return (
        f"{audit.trained:,} trained{f' of {n} responses each' if n else ''}"
        f"{f', {dropped:,} dropped' if dropped else ''}"
        f"{f', {audit.in_flight:,} in flight at the end' if audit.in_flight else ''}"
        f"{f', {audit.lost:,} LOST' if audit.lost else ''}"
    )


def run_seconds(run: RunFolder) -> float:
    """Return the seconds of RL over all attempts, or of all rows if there are no accounts."""
    last: Mapping[int, float] = {line.attempt: line.seconds for line in run.accounts}
    return sum(last.values()) or sum(row.get("timing_s/step", 0.0) for row in run.rows.values())


def _time(run: RunFolder) -> str:
    whole = run_seconds(run)
    if not whole:
        return ""
    begin = (
        f", from {datetime.fromtimestamp(run.accounts[0].time, UTC):%Y-%m-%d %H:%M} UTC"
        if run.accounts and 0 < run.accounts[0].time < 2**33
        else ""
    )
    return f"{seconds(whole)} of RL{begin}"
