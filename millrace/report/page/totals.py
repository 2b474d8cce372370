"""The accounts in a report: every token in a bucket, every second of every device in a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millrace.persist.accounts import Line
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
    figure,
    label,
    missing,
    number,
    rounded,
    share,
    table,
    text,
)
from millrace.report.page.states import STATES, state_of

BUCKETS = {
    "trained": ("trained a live version", GREEN),
    "held": ("are in flight", SKY),
    "evaluated": ("of validations (`trainer.test_freq`) and proofs of the engines", BLUE),
    "baseline": ("of greedy baselines: `algorithm.adv_estimator`", GREY),
    "rejected": ("removed by a correction: `algorithm.rollout_correction`", PINK),
    "filtered": ("removed by `algorithm.rollout_correction` or the overlong filter", PINK),
    "dead": ("of turns that no agent received, or that another draw replaced", GREY),
    "cancelled": ("of requests that were cancelled, by an agent or with a failed sample", GREY),
    "regenerated": ("thrown away by a stop or a resume, and drawn again", YELLOW),
    "lost": ("lost in a kill after the last checkpoint: `trainer.save_freq`", RED),
}
"""The buckets of tokens in words."""

Seconds = dict[str, float]


@dataclass
class Track:
    """The time of the devices of one track, over all attempts that have it."""

    count: int = 0
    """The devices of the last attempt."""
    length: float = 0.0
    """Seconds of the attempts."""
    each: Seconds = field(default_factory=dict)
    """Seconds of one device by state."""
    all: Seconds = field(default_factory=dict)
    """Device-seconds by state. Attempts may have different numbers of devices."""


def tokens(run: RunReader) -> list[Block]:
    """Return the tokens by bucket, with the check that they add up."""
    if not run.accounts:
        return [missing("account of tokens", "the folder has no accounts.jsonl. Runs of older versions have none.")]  # fmt: skip
    last = run.accounts[-1]
    found = sorted(last.tokens.items(), key=lambda item: -item[1])
    whole = sum(last.tokens.values())
    rows = [[name, count, share(count, last.generated), _meaning(name)] for name, count in found]
    agrees = whole == last.generated
    rows.append(["sum", whole, share(whole, last.generated), f"generated: {last.generated:,}, {'which agrees' if agrees else 'which DIFFERS'}"])  # fmt: skip
    wasted = whole - last.tokens.get("trained", 0) - last.tokens.get("held", 0)
    how = (
        f"Every drawn token is in one bucket. {share(wasted, whole)} of them trained nothing and "
        "are not in flight. The largest of the other buckets shows what to change."
    )
    chart = {
        "type": "bar",
        "orientation": "h",
        "y": [label(name, 24) for name, _ in reversed(found)],
        "x": rounded([count for _, count in reversed(found)]),
        "marker": {"color": [_colour(name) for name, _ in reversed(found)]},
        "hovertemplate": "%{y}: %{x:,}<extra></extra>",
        "showlegend": False,
    }
    layout: dict[str, Any] = {"xaxis": {"title": {"text": "tokens"}}, "yaxis": {"automargin": True}}
    return [
        figure(how, [chart], 110 + 26 * len(found), **layout),
        table("", ["bucket", "tokens", "share", "tokens that"], rows),
    ]


def _meaning(name: str) -> str:
    if name.startswith("dropped/"):
        return f"of samples dropped for `{name.removeprefix('dropped/')}`"
    return BUCKETS.get(name, ("", ""))[0]


def _colour(name: str) -> str:
    return ORANGE if name.startswith("dropped/") else BUCKETS.get(name, ("", GREY))[1]


def last_lines(lines: list[Line]) -> list[Line]:
    """Return the last line of each attempt."""
    return list({line.attempt: line for line in lines}.values())


def device_seconds(lines: list[Line]) -> dict[str, Track]:
    """Return the time of each track's devices over all attempts."""
    found: dict[str, Track] = {}
    for line in last_lines(lines):
        for name, device in line.devices.items():
            track = found.setdefault(name, Track())
            track.count = max(device.count, 1)
            track.length += line.seconds
            for part, value in device.seconds.items():
                track.each[part] = track.each.get(part, 0.0) + value
                track.all[part] = track.all.get(part, 0.0) + track.count * value
    return found


def devices(run: RunReader) -> list[Block]:
    """Return the seconds of every device by state, and the money if there is a price."""
    found = device_seconds(run.accounts)
    if not any(track.length > 0 for track in found.values()):
        return [_without_accounts(run)]
    spent = {name: _by_state(track.each) for name, track in found.items()}
    states = [state for state in STATES if any(s.get(state) for s in spent.values())]
    rows = [
        [f"{name}{f' ({track.count} devices)' if track.count > 1 else ''}", *(share(v, track.length) if (v := spent[name].get(s)) else "" for s in states), share(_idle(track.each), track.length)]
        for name, track in found.items()
    ]  # fmt: skip
    how = (
        "The share of each device's time by state. In the last column are all waits. If rollouts "
        "wait for the trainer, give training more devices; if the trainer waits for responses, "
        "give rollouts more (`trainer.n_gpus_per_node`, `rollout.n_gpus_per_node`). If both "
        "wait, raise `async_training.staleness_threshold`."
    )
    head = ["device", *(STATES[s].words for s in states), "all waits"]
    return [table(how, head, rows[:200]), *_money(last_lines(run.accounts))]


def _by_state(spent: Seconds) -> Seconds:
    states: Seconds = {}
    for part, value in spent.items():
        states[state_of(part)] = states.get(state_of(part), 0.0) + value
    return states


def _idle(spent: Seconds) -> float:
    return sum(v for part, v in spent.items() if STATES[state_of(part)].waits)


def _money(lines: list[Line]) -> list[Block]:
    """Return the device-seconds by part over all devices, and the check that they add up.

    Each attempt has its own devices and its own price.
    """
    total: Seconds = {}
    money: Seconds = {}
    expected = 0.0
    for line in lines:
        for device in line.devices.values():
            count = max(device.count, 1)
            expected += count * line.seconds
            for part, value in device.seconds.items():
                total[part] = total.get(part, 0.0) + count * value
                money[part] = money.get(part, 0.0) + count * value * line.price / 3600
    whole, price = sum(total.values()), any(line.price for line in lines)
    counts = [sum(max(d.count, 1) for d in line.devices.values()) for line in lines]
    length = sum(line.seconds for line in lines)
    words = f"{counts[-1]} device{'s' * (counts[-1] != 1)} x {number(length)} s" if len(set(counts)) == 1 else "devices x seconds of each attempt"  # fmt: skip
    rows: list[list[object]] = [
        [part, STATES[state_of(part)].words, number(value), share(value, whole), *([f"{money[part]:,.2f}"] if price else [])]
        for part, value in sorted(total.items(), key=lambda item: -item[1])
        if value > 1e-6 * whole
    ]  # fmt: skip
    rows.append(["sum", f"{words} = {number(expected)}", number(whole), share(whole, expected), *([f"{sum(money.values()):,.2f}"] if price else [])])  # fmt: skip
    how = "Device-seconds of all devices by part, over all attempts."
    head = ["part", "state", "device-seconds", "share", *(["money"] if price else [])]
    blocks = [table(how, head, rows)]
    if not price:
        blocks.append(text("`report.price` is 0, so there is no money here: set it to what one device costs per hour."))  # fmt: skip
    return blocks


def _without_accounts(run: RunReader) -> Block:
    """Return the idle ratios of the metrics, for runs without accounts."""
    last = run.rows[max(run.rows)] if run.rows else {}
    rows = [
        [words, f"{100 * sum(values) / len(values):.1f} %"]
        for side, words in (("trainer", "trainer waits"), ("rollouter", "free decode slots"))
        if (values := [row[f"{side}/idle_ratio"] for row in run.rows.values() if f"{side}/idle_ratio" in row])
    ]  # fmt: skip
    if not rows or not last:
        return missing("idle shares", "the folder has no accounts.jsonl, and no version was trained yet.")  # fmt: skip
    return table(
        "Mean idle ratios of the metrics: the folder has no accounts.jsonl, which says what "
        "each device waits for.",
        ["figure", "mean"],
        rows,
    )
