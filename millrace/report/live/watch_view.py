"""What `millrace watch` draws: one look at a run, as a panel for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millrace.observe.progress import bar_line, duration, shown, sparkline
from millrace.persist.run_reader import Row
from millrace.report.live.look import RECENT, Device, Look

COLOURS = {
    "empty": "dim",
    "starting": "cyan",
    "running": "green",
    "complete": "bold green",
    "stopped": "yellow",
    "gone": "bold red",
}
_BAR = 24
"""Cells of a bar. A narrow terminal has half of them."""
_NARROW, _VERY_NARROW = 80, 56
"""Columns of a narrow terminal, and of one that has no room for the parts of a device's time."""
_DEVICES = 16
"""Devices that have a row of their own."""
_PARTS = 4
"""Parts of a device's time that are named. The others are `other`."""


def panel(look: Look, advice: Sequence[str] = (), width: int = 80) -> RenderableType:
    """Return the picture of a look. Alarms come first: a low terminal cuts the end off."""
    title = plain("  ".join(part for part in ("millrace", look.name, look.mode) if part))
    parts: list[RenderableType] = []
    if look.total:
        bar = ProgressBar(total=look.total, completed=min(look.samples, look.total))
        parts.append(bar_line(bar))
    parts += [_progress(look), _life(look), *_alarms(look)]
    if look.rewards:
        parts.append(_reward(look, width))
    if look.validation:
        parts.append(_validation(look))
    if look.row:
        parts.append(_figures(look.row, slots=not look.devices))
    if look.devices:
        parts += [Text(), _devices(look.devices, width)]
    if look.tokens:
        parts.append(_tokens(look))
    for sentence in advice:
        parts.append(Text.assemble(("advice ", "bold cyan"), plain(sentence)))
    return Panel(Group(*parts), title=Text(title), subtitle=Text(plain(look.folder), "dim"))


def plain(text: str) -> str:
    """Return a text of the folder without characters that control a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def _progress(look: Look) -> Text:
    found = [
        (look.state, COLOURS[look.state]),
        (f"version {_of(look.version, look.versions)}", ""),
        (f"samples {_of(look.samples, look.total)}", ""),
    ]
    if look.eta_s is not None:
        found.append((f"ETA {duration(look.eta_s)}", ""))
    if look.attempt > 1:
        found.append((f"attempt {look.attempt}", ""))
    return Text("  ").join(Text(text, style) for text, style in found)


def _of(done: int, whole: int | None) -> str:
    return f"{done:,}" if whole is None else f"{done:,} of {whole:,}"


def _life(look: Look) -> Text:
    """Return the age of the last sign of life, and what is known of the process."""
    age = "no sign of life yet" if look.age_s is None else f"last sign of life {ago(look.age_s)}"
    return Text(plain(f"{age}; {look.process}"), "yellow" if look.quiet else "dim")


def ago(seconds: float) -> str:
    """Return how long ago something was, in the largest unit that it fills."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _alarms(look: Look) -> Iterator[Text]:
    for alarm in look.alarms:
        yield Text.assemble(
            (f"alarm {plain(alarm.name)} since version {alarm.since}  ", "bold red"), alarm.text
        )


def _reward(look: Look, width: int) -> Text:
    line = sparkline(look.rewards, max(10, min(80, width - 26)))
    ends = f" {look.rewards[0]:.3f} to {look.rewards[-1]:.3f}"
    return Text.assemble(("reward ", "dim"), (line, "green"), ends)


def _validation(look: Look) -> Text:
    text = Text.assemble((f"held out, version {look.validated}  ", "dim"))
    text.append(plain(shown(look.validation)))
    if look.before:
        text.append(plain(f"  before: {shown(look.before)}"), "dim")
    return text


def _figures(row: Row, *, slots: bool) -> Table:
    """Return figures of the newest row, two in a line. `slots` adds the idle shares of slots."""

    def value(name: str, form: str, scale: float = 1.0) -> str:
        return f"{scale * row[name]:{form}}" if name in row else "-"

    figures = [
        (
            "staleness",
            f"{value('staleness/mean', '.2f')} mean, {value('staleness/max', '.0f')} max",
        ),
        (
            "tokens/s",
            f"{value('rollouter/tokens_per_s', ',.0f')} drawn, "
            f"{value('perf/throughput', ',.0f')} trained",
        ),
        (
            "sync",
            f"{value('sync/transfer_s', ',.0f', 1e3)} ms, "
            f"pause {value('sync/pause_s', ',.1f', 1e3)} ms",
        ),
    ]
    if slots:
        sides = [
            f"{side} {value(f'{side}/idle_ratio', '.0%')}" for side in ("trainer", "rollouter")
        ]
        figures.append(("idle", ", ".join(sides)))
    table = Table.grid(padding=(0, 3))
    for i in range(0, len(figures), 2):
        table.add_row(
            *(Text.assemble((f"{name} ", "dim"), text) for name, text in figures[i : i + 2])
        )
    return table


_KINDS = {"work": ("█", "green"), "sync": ("▒", "cyan"), "idle": ("░", "yellow")}


def kind_of(device: str, part: str) -> str:
    """Return what a part of a device's time is: work, sync or idle.

    A replica in the state `other` has nothing to do. The trainer's `other` is work.
    """
    if part.startswith("wait_") or part == "tail":
        return "idle"
    if part.startswith("sync"):
        return "sync"
    return "idle" if part == "other" and device.startswith("rollout") else "work"


def share_of(kind: str, device: str, shares: dict[str, float]) -> float:
    """Return the share of all parts of one kind."""
    return math.fsum(share for part, share in shares.items() if kind_of(device, part) == kind)


def _devices(devices: Sequence[Device], width: int) -> Table:
    """Return a row for each device: its idle shares, a bar, and its largest parts."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    cells = _BAR if width >= _NARROW else _BAR // 2
    table.add_column("device", no_wrap=True)
    table.add_column("idle", justify="right")
    table.add_column("attempt", justify="right")
    table.add_column(f"last {RECENT} versions", min_width=cells)
    if width >= _VERY_NARROW:
        table.add_column("parts")
    for device in devices[:_DEVICES]:
        name = plain(device.name) + (f" x{device.count}" if device.count > 1 else "")
        named = list(device.recent.items())[:_PARTS]
        row = [
            Text(name),
            Text(f"{share_of('idle', device.name, device.recent):.0%}" if device.recent else ""),
            Text(f"{share_of('idle', device.name, device.whole):.0%}"),
            _bar(device, cells),
            Text(", ".join(f"{plain(part)} {share:.0%}" for part, share in named)),
        ]
        table.add_row(*row[: len(table.columns)])
    if len(devices) > _DEVICES:
        table.add_row(f"and {len(devices) - _DEVICES} more")
    return table


def _bar(device: Device, whole: int) -> Text:
    """Return a bar of work, syncs and idle time, with `whole` cells."""
    text, filled, end = Text(), 0, 0.0
    for kind, (mark, colour) in _KINDS.items():
        end += share_of(kind, device.name, device.recent)
        cells = max(0, min(whole, round(end * whole)) - filled)
        text.append(mark * cells, colour)
        filled += cells
    return text


def _tokens(look: Look) -> Text:
    """Return the generated tokens by bucket, the largest first."""
    whole = max(1, look.generated)
    text = Text.assemble(("tokens ", "dim"), f"{look.generated:,} generated: ")
    buckets = sorted(look.tokens.items(), key=lambda bucket: -bucket[1])
    return text.append(", ".join(f"{plain(name)} {n / whole:.1%}" for name, n in buckets if n))


def sentence(look: Look) -> str:
    """Return a look in one line."""
    parts = [*(part.plain for part in (_progress(look), _life(look)))]
    parts += [f"alarm: {plain(alarm.name)}" for alarm in look.alarms]
    return "; ".join(parts)
