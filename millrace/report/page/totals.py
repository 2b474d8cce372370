"""The accounts in a report: every token in a bucket, every second of every device in a state."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.observe.timing import Seconds
from millrace.persist.accounts import Line
from millrace.persist.run_reader import RunReader
from millrace.report.page import figures as fig
from millrace.report.page.figures import STATES, Block, missing, number, share, state_of, table

BUCKETS = {
    "trained": ("trained a live version", fig.GREEN),
    "held": ("are in flight", fig.SKY),
    "evaluated": ("of validations (`trainer.test_freq`) and proofs of the engines", fig.BLUE),
    "baseline": ("of greedy baselines: `algorithm.adv_estimator`", fig.GREY),
    "rejected": ("removed by a correction: `algorithm.rollout_correction`", fig.PINK),
    "filtered": ("removed by `algorithm.rollout_correction` or the overlong filter", fig.PINK),
    "dead": ("of turns that no agent received, or that another draw replaced", fig.GREY),
    "cancelled": ("of requests that were cancelled, by an agent or with a failed sample", fig.GREY),
    "regenerated": ("thrown away by a stop or a resume, and drawn again", fig.YELLOW),
    "lost": ("lost in a kill after the last checkpoint: `trainer.save_freq`", fig.RED),
}
"""The buckets of tokens in words."""


@dataclass
class Track:
    """The time of the devices of one track, over all attempts that have it."""

    count: int = 0
    """The devices of the last attempt."""
    length: float = 0.0
    """Seconds of the attempts."""
    each: Seconds = field(default_factory=Seconds)
    """Seconds of one device by state."""
    all: Seconds = field(default_factory=Seconds)
    """Device-seconds by state. Attempts may have different numbers of devices."""
    money: Seconds = field(default_factory=Seconds)
    """The price of `all`. Each attempt has its own."""
    whole: float = 0.0
    """Devices x seconds of each attempt."""


def tokens(run: RunReader) -> list[Block]:
    """Return the tokens by bucket, with the check that they add up."""
    if not run.accounts:
        why = "the folder has no accounts.jsonl. Runs of older versions have none."
        return [missing("account of tokens", why)]
    last = run.accounts[-1]
    found = sorted(last.tokens.items(), key=lambda item: -item[1])
    whole = sum(last.tokens.values())
    looks = {
        name: (f"of samples dropped for `{name.removeprefix('dropped/')}`", fig.ORANGE)
        if name.startswith("dropped/")
        else BUCKETS.get(name, ("", fig.GREY))
        for name, _ in found
    }
    rows = [[name, count, share(count, last.generated), looks[name][0]] for name, count in found]
    agrees = "which agrees" if whole == last.generated else "which DIFFERS"
    sums = share(whole, last.generated), f"generated: {last.generated:,}, {agrees}"
    rows.append(["sum", whole, *sums])
    wasted = whole - last.tokens.get("trained", 0) - last.tokens.get("held", 0)
    how = (
        f"Every drawn token is in one bucket. {share(wasted, whole)} of them trained nothing and "
        "are not in flight. The largest of the other buckets shows what to change."
    )
    upwards = dict(reversed(found))
    look = {"color": [looks[name][1] for name in upwards]}
    lanes = [fig.label(name, 24) for name in upwards]
    chart = fig.bars(lanes, upwards.values(), look, across=True)
    chart |= {"hovertemplate": "%{y}: %{x:,}<extra></extra>", "showlegend": False}
    axes = {"xaxis": fig.axes("", "tokens")["xaxis"], "yaxis": {"automargin": True}}
    return [
        fig.figure(how, [chart], 110 + 26 * len(found), **axes),
        table("", ["bucket", "tokens", "share", "tokens that"], rows),
    ]


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
            track.each.update(device.seconds)
            track.whole += track.count * line.seconds
            spent = {part: track.count * s for part, s in device.seconds.items()}
            track.all.update(spent)
            track.money.update({part: s * line.price / 3600 for part, s in spent.items()})
    return found


def by_state(parts: Seconds) -> Seconds:
    """Return the seconds of the states of charts."""
    states = Seconds()
    for part, value in parts.items():
        states.update({state_of(part): value})
    return states


def devices(run: RunReader) -> list[Block]:
    """Return the seconds of every device by state, and the money if there is a price."""
    found = device_seconds(run.accounts)
    if not any(track.length > 0 for track in found.values()):
        return [_without_accounts(run)]
    spent = {name: by_state(track.each) for name, track in found.items()}
    states = [state for state in STATES if any(s[state] for s in spent.values())]
    rows = []
    for name, track in found.items():
        many = f" ({track.count} devices)" if track.count > 1 else ""
        times = (spent[name][state] for state in states)
        waits = sum(value for state, value in spent[name].items() if STATES[state].waits)
        cells = (share(time, track.length) if time else "" for time in times)
        rows.append([f"{name}{many}", *cells, share(waits, track.length)])
    how = (
        "The share of each device's time by state. In the last column are all waits. If rollouts "
        "wait for the trainer, give training more devices; if the trainer waits for responses, "
        "give rollouts more (`trainer.n_gpus_per_node`, `rollout.n_gpus_per_node`). If both "
        "wait, raise `async_training.staleness_threshold`."
    )
    head = ["device", *(STATES[s].words for s in states), "all waits"]
    return [table(how, head, rows[:200]), *_money(list(found.values()), last_lines(run.accounts))]


def _money(tracks: list[Track], lines: list[Line]) -> list[Block]:
    """Return the device-seconds by part over all devices, and the check that they add up."""
    total, money = Seconds(), Seconds()
    for track in tracks:
        total.update(track.all)
        money.update(track.money)
    whole, price = sum(total.values()), any(line.price for line in lines)
    expected = sum(track.whole for track in tracks)
    counts = [sum(max(d.count, 1) for d in line.devices.values()) for line in lines]
    words = "devices x seconds of each attempt"
    if len(set(counts)) == 1:
        length = number(sum(line.seconds for line in lines))
        words = f"{counts[-1]} device{'s' * (counts[-1] != 1)} x {length} s"
    rows: list[list[object]] = [
        [part, STATES[state_of(part)].words, number(value), share(value, whole), f"{money[part]:,.2f}"]
        for part, value in sorted(total.items(), key=lambda item: -item[1])
        if value > 1e-6 * whole
    ]  # fmt: skip
    sums = f"{words} = {number(expected)}", number(whole), share(whole, expected)
    rows.append(["sum", *sums, f"{sum(money.values()):,.2f}"])
    head = ["part", "state", "device-seconds", "share", "money"]
    if not price:
        head, rows = head[:-1], [row[:-1] for row in rows]
    blocks = [table("Device-seconds of all devices by part, over all attempts.", head, rows)]
    if not price:
        fix = "set it to what one device costs per hour."
        blocks.append(fig.text(f"`report.price` is 0, so there is no money here: {fix}"))
    return blocks


def _without_accounts(run: RunReader) -> Block:
    """Return the idle ratios of the metrics, for runs without accounts."""
    rows = []
    for name, words in (("trainer", "trainer waits"), ("rollouter", "free decode slots")):
        if values := fig.by_version(run.rows, f"{name}/idle_ratio")[1]:
            rows.append([words, f"{100 * sum(v or 0.0 for v in values) / len(values):.1f} %"])
    if not rows:
        why = "the folder has no accounts.jsonl, and no version was trained yet."
        return missing("idle shares", why)
    how = (
        "Mean idle ratios of the metrics: the folder has no accounts.jsonl, which says what "
        "each device waits for."
    )
    return table(how, ["figure", "mean"], rows)
