"""The episodes of agents in a report: their turns, how they ended, and what sessions did."""

from __future__ import annotations

from typing import Any

from millrace.persist.run_reader import RunReader
from millrace.report.page.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    Block,
    by_version,
    figure,
    label,
    line,
    number,
    rounded,
    table,
)

_VERSION = {"title": {"text": "version"}}
_ENDED = "agents/ended/"
_OWN = ("turns/", "threads/", "context_tokens/", "ended/", "dead_turns")
_SESSIONS = {"drawing": ("draw", GREEN), "waiting": ("wait for a tool", YELLOW), "at_gate": ("wait for a pause to end", GREY)}  # fmt: skip


def agents(run: RunReader) -> list[Block]:
    """Return the charts of episodes. They are empty in a run without agents."""
    if not run.agents:
        return []
    made = (_turns(run), _ended(run), _sessions(run), _counts(run))
    return [block for block in made if block is not None]


def _turns(run: RunReader) -> Block | None:
    many = any(row.get("agents/threads/max", 0.0) > 1 for row in run.rows.values())
    data = [
        line(name, *points, colour)
        for name, key, colour in (
            ("turns, mean", "turns/mean", BLUE),
            ("turns, most", "turns/max", GREEN),
            ("threads, mean", "threads/mean", ORANGE),
            ("threads, most", "threads/max", RED),
        )
        if many or not name.startswith("threads")
        if (points := by_version(run.rows, f"agents/{key}"))[0]
    ]
    if not data:
        return None
    dead = sum(row.get("agents/dead_turns", 0.0) for row in run.rows.values())
    how = (
        "Trained turns and threads of an episode. A new thread begins if the history does not "
        "only grow: see `agents.history`. "
        if many
        else "Trained turns of an episode. Each has one thread: its history only grew. "
    ) + (
        f"{number(dead)} turns were dead: nobody received them, or another draw replaced them."
        if dead
        else "No turn was dead."
    )
    return figure(how, data, 260, xaxis=_VERSION, yaxis={"rangemode": "tozero"})


def _ended(run: RunReader) -> Block | None:
    names = sorted({n for row in run.rows.values() for n in row if n.startswith(_ENDED)})
    if not names:
        return None
    names.sort(key=lambda name: name != f"{_ENDED}done")
    colours = (GREEN, ORANGE, BLUE, PINK, SKY, RED, YELLOW)
    looks = [(n, label(n.removeprefix(_ENDED)), c) for n, c in zip(names, colours, strict=False)]
    data = _stacked(run, looks, 100)
    how = (
        "How the episodes ended. `done` is the agent's own end; the others are limits: "
        "`agents.max_turns` for turns, `agents.max_episode_tokens` and `agents.max_tokens_per_turn` "
        "for tokens, `rollout.max_response_length` for context."
    )
    return figure(how, data, 260, xaxis=_VERSION, yaxis={"title": {"text": "% of episodes"}, "range": [0, 100]})  # fmt: skip


def _sessions(run: RunReader) -> Block | None:
    found = [(f"agents/{name}", *look) for name, look in _SESSIONS.items()]
    data = _stacked(run, found, 1)
    if not data:
        return None
    how = (
        "Sessions on average. One that waits for a tool has no decode slot. If most of them wait "
        "and replicas are idle, more sessions fill them: `async_training.staleness_threshold`."
    )
    return figure(how, data, 260, xaxis=_VERSION, yaxis={"title": {"text": "sessions"}})


def _stacked(
    run: RunReader, found: list[tuple[str, str, str]], factor: float
) -> list[dict[str, Any]]:
    """Return stacked areas by version. A version that lacks a figure has 0 of it."""
    versions = [v for v in sorted(run.rows) if any(name in run.rows[v] for name, *_ in found)]
    versions = versions[:: max(1, len(versions) // 400)]
    data = []
    for name, shown, colour in found:
        values = [factor * run.rows[v].get(name, 0.0) for v in versions]
        if any(values):
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": shown,
                    "x": rounded(versions),
                    "y": rounded(values),
                    "stackgroup": "one",
                    "line": {"width": 0, "color": colour},
                    "fillcolor": colour,
                }
            )
    return data


def _counts(run: RunReader) -> Block | None:
    """Return the sums of what agents count themselves, such as the calls of each tool."""
    live = {f"agents/{name}" for name in _SESSIONS}
    sums: dict[str, float] = {}
    for row in run.rows.values():
        for name, value in row.items():
            short = name.removeprefix("agents/")
            if short != name and name not in live and not short.startswith(_OWN):
                sums[short] = sums.get(short, 0.0) + value
    if not sums:
        return None
    rows = [[name, number(value)] for name, value in sorted(sums.items())[:100]]
    return table("Counts of all trained episodes.", ["count", "sum"], rows)
