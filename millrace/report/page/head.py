"""The head of a report: what the run was, its alarms, and advice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from millrace import __version__
from millrace.observe.guard import CAUSES, PREFIX
from millrace.persist.run_reader import RunReader
from millrace.report.advice import advise
from millrace.report.page.figures import Block, box, number, seconds, table, text

_KEY = re.compile(
    r"(?<![^\s(])((?:actor|algorithm|async_training|data|model|reward|rollout)\.\w\S*?)"
    r"(?=[.,;:)]*(?:\s|$))"
)
"""A key of the configuration in a sentence."""
_MOST_FAILED = 0.02
"""The largest share of samples that errors may drop without an alarm."""


def facts(run: RunReader) -> Block:
    """Return the list of what the run was."""

    def files(kind: str) -> str:
        found = run.key(f"data.{kind}_files")
        return ", ".join(map(str, found)) if isinstance(found, list) else ""

    shape, model = run.key("model.shape", {}), run.key("model.path", "")
    if not model and isinstance(shape, dict) and shape:
        model = f"new: {shape.get('num_hidden_layers')} layers of {shape.get('hidden_size')}"
    time, begin = run_seconds(run), ""
    if run.accounts and 0 < run.accounts[0].time < 2**33:
        begin = f", from {datetime.fromtimestamp(run.accounts[0].time, UTC):%Y-%m-%d %H:%M} UTC"
    items = {
        "folder": run.name,
        "recipe": str(run.key("name", "unknown")),
        "mode": mode_of(run),
        "devices": _devices(run),
        "model": str(model),
        "training data": files("train"),
        "validation data": files("val"),
        "state": state_of(run),
        "samples": _samples(run),
        "versions": number(run.versions),
        "time": f"{seconds(time)} of RL{begin}" if time else "",
        "report": f"made by millrace {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    return {"type": "facts", "items": [[k, v] for k, v in items.items() if v]}


def mode_of(run: RunReader) -> str:
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
    return f"{run.mode or asked or 'unknown'}{' (' + ', '.join(numbers) + ')' if numbers else ''}"


def state_of(run: RunReader) -> str:
    """Return whether the run is complete, with its attempts and how each of them ended."""
    audit = run.audit
    if audit is None:
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


def attempts(run: RunReader) -> list[str]:
    """Return the beginning and the end of each attempt in words."""
    words = []
    for attempt in sorted({line.attempt for line in run.history}):
        lines = [line for line in run.history if line.attempt == attempt]
        first, last = lines[0], lines[-1]
        start = f"attempt {attempt}"
        if first.version:
            start += f", from version {first.version},"
        if last.event == "end":
            end = "complete" if last.complete else "stopped"
        else:
            end = "goes on" if run.running and last is run.history[-1] else "killed"
        words.append(f"{start} {end} at version {last.version}")
    return words


def alarms(run: RunReader) -> list[Block]:
    """Return a box for every alarm of the run. Active ones come first."""
    boxes = _of_samples(run)
    for alarm in sorted(run.alarms(), key=lambda alarm: not alarm.active):
        kind, periods = "alarm", alarm.periods
        when = f"since version {periods[-1][0]}, still active"
        if not alarm.active:
            spans = [
                f"{first} to {last}" if last > first else f"{first}" for first, last in periods
            ]
            many = "s" * (len(spans) > 1 or " to " in spans[0])
            more = " and later" if len(spans) > 5 else ""
            kind = "past"
            when = f"over; it was active in version{many} {', '.join(spans[:5])}{more}"
        words = CAUSES.get(alarm.name, "This version of millrace does not know the alarm.")
        boxes.append(box(kind, f"{alarm.name}: {when}", _KEY.sub(r"`\1`", words)))
    if boxes:
        return boxes
    if not run.rows:
        return [text("No alarms: the run has no row of metrics yet.")]
    if not any(name.startswith(PREFIX) for name in run.names):
        return [text("No alarms: `guard.enable=false`.")]
    return [box("good", "No alarm", "No limit of the guard was passed in any version.")]


def _of_samples(run: RunReader) -> list[Block]:
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


def advice(run: RunReader, live: bool = False) -> list[Block]:
    """Return the advice on the run, after a sentence that says what it is."""
    if not run.accounts:
        why = "accounts.jsonl is missing or empty. Runs of older versions have none."
        return [text(f"No advice: {why}")]
    found = advise(run, wait=not live)
    if not found[0].overrides:
        damage = f" Files are damaged: {'; '.join(run.notes)}." if run.notes else ""
        return [text(f"No advice: {str(found[0]).removeprefix('none: ')}.{damage}")]
    how = (
        "What limits the speed of the run, and keys that lift the limit. A percentage is the change "
        "of the samples that are trained per second, as simulations over the costs of this run "
        "predict it. Its interval holds the noise of two runs."
    )
    blocks = [text(how)]
    for one in found:
        words = str(one)
        for setting in sorted(set(one.overrides), key=len, reverse=True):
            words = re.sub(rf"(?<![\w.`=]){re.escape(setting)}(?![\w`])", f"`{setting}`", words)
        blocks.append(box("advice", "", words))
    return blocks


def errors(run: RunReader) -> list[Block]:
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


def _devices(run: RunReader) -> str:
    def of(section: str) -> int:
        nodes, each = run.key(f"{section}.nnodes", 1), run.key(f"{section}.n_gpus_per_node", 1)
        return nodes * each if isinstance(nodes, int) and isinstance(each, int) else 0

    if not run.tree:
        return ""
    if run.key("async_training.placement") == "colocated":
        return f"{of('trainer')} shared"
    size = run.key("rollout.tensor_model_parallel_size", 1)
    tensor = f", {size} for each replica" if size != 1 else ""
    return f"{of('trainer')} for training, {of('rollout')} for rollouts{tensor}"


def _samples(run: RunReader) -> str:
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


def run_seconds(run: RunReader) -> float:
    """Return the seconds of RL over all attempts, or of all rows if there are no accounts."""
    last: Mapping[int, float] = {line.attempt: line.seconds for line in run.accounts}
    return sum(last.values()) or sum(row.get("timing_s/step", 0.0) for row in run.rows.values())
