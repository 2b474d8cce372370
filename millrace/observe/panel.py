"""The panel of a run in a terminal, for the run's own process and for `millrace watch`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millrace.observe.timing import is_quiet

BARS = "▁▂▃▄▅▆▇█"
RECENT = 10
"""Versions that the recent figures cover."""
Row = dict[str, float]
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


@dataclass(frozen=True, slots=True)
class Device:
    """One row of the accounts: how a device, or a group of them, spends its time."""

    name: str
    count: int
    recent: dict[str, float]
    """Share of each part in the last versions. The shares add up to 1."""
    whole: dict[str, float]
    """The same for the whole attempt."""


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str
    since: int
    text: str
    """The cause and the fix."""


@dataclass(slots=True)
class RunSnapshot:
    """The figures of one moment."""

    folder: str = ""
    name: str = ""
    mode: str = ""
    state: str = "running"
    process: str = ""
    """What is known of the run's process, as a sentence."""
    age_s: float | None = None
    """Seconds since a file of the run changed."""
    attempt: int = 0
    version: int = 0
    versions: int | None = None
    samples: int = 0
    total: int | None = None
    eta_s: float | None = None
    rewards: list[float] = field(default_factory=list)
    row: Row = field(default_factory=dict)
    """The newest row of metrics.jsonl."""
    before: Row = field(default_factory=dict)
    """The first validation."""
    validation: Row = field(default_factory=dict)
    """The newest validation."""
    validated: int = 0
    """The version of the newest validation."""
    alarms: list[Alarm] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    generated: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Generated tokens by bucket."""
    damage: list[str] = field(default_factory=list)
    """Files that cannot be read, with the reason."""

    @property
    def ended(self) -> bool:
        """Whether nothing more comes, as far as this machine can tell."""
        return self.state in ("complete", "stopped", "gone")

    @property
    def quiet(self) -> bool:
        """Whether a run that should go on has shown nothing for long."""
        return not self.ended and self.age_s is not None and is_quiet(self.age_s, self.row)


def panel(look: RunSnapshot, advice: Sequence[str] = (), width: int = 80) -> RenderableType:
    """Return the picture of a look. Alarms come first: a low terminal cuts the end off."""
    title = plain("  ".join(part for part in ("millrace", look.name, look.mode) if part))
    parts: list[RenderableType] = []
    if look.total:
        bar = ProgressBar(total=look.total, completed=min(look.samples, look.total))
        parts.append(bar_line(bar))
    parts += [_progress(look), *([_life(look)] if look.process else [])]
    for alarm in look.alarms:
        name = f"alarm {plain(alarm.name)} since version {alarm.since}  "
        parts.append(Text.assemble((name, "bold red"), alarm.text))
    parts += [Text(plain(f"not readable: {one}"), "yellow") for one in look.damage]
    if look.rewards:
        bars = sparkline(look.rewards, max(10, min(80, width - 26)))
        ends = f" {look.rewards[0]:.3f} to {look.rewards[-1]:.3f}"
        parts.append(Text.assemble(("reward ", "dim"), (bars, "green"), ends))
    if look.validation:
        text = Text.assemble((f"held out, version {look.validated}  ", "dim"))
        text.append(plain(shown(look.validation)))
        if look.before:
            text.append(plain(f"  before: {shown(look.before)}"), "dim")
        parts.append(text)
    if look.row:
        parts.append(_figures(look.row, slots=not look.devices))
    if look.devices:
        parts += [Text(), _devices(look.devices, width)]
    if look.tokens:
        text = Text.assemble(("tokens ", "dim"), f"{look.generated:,} generated: ")
        buckets, whole = sorted(look.tokens.items(), key=lambda b: -b[1]), max(1, look.generated)
        named = (f"{plain(name)} {n / whole:.1%}" for name, n in buckets if n)
        parts.append(text.append(", ".join(named)))
    for sentence in advice:
        parts.append(Text.assemble(("advice ", "bold cyan"), plain(sentence)))
    subtitle = Text(plain(look.folder), "dim") if look.folder else None
    return Panel(Group(*parts), title=Text(title), subtitle=subtitle)


def plain(text: str) -> str:
    """Return a text of the folder without characters that control a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def _progress(look: RunSnapshot) -> Text:
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


def _life(look: RunSnapshot) -> Text:
    """Return the age of the last sign of life, and what is known of the process."""
    age = "no sign of life yet" if look.age_s is None else f"last sign of life {ago(look.age_s)}"
    return Text(plain(f"{age}; {look.process}"), "yellow" if look.quiet else "dim")


def ago(seconds: float) -> str:
    """Return how long ago something was, in the largest unit that it fills."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _figures(row: Row, *, slots: bool) -> Table:
    """Return figures of the newest row, two in a line. `slots` adds the idle shares of slots."""

    def value(name: str, form: str, scale: float = 1.0) -> str:
        return f"{scale * row[name]:{form}}" if name in row else "-"

    stale = f"{value('staleness/mean', '.2f')} mean, {value('staleness/max', '.0f')} max"
    drawn, trained = value("rollouter/tokens_per_s", ",.0f"), value("perf/throughput", ",.0f")
    sync, pause = value("sync/transfer_s", ",.0f", 1e3), value("sync/pause_s", ",.1f", 1e3)
    figures = [
        ("staleness", stale),
        ("tokens/s", f"{drawn} drawn, {trained} trained"),
        ("sync", f"{sync} ms, pause {pause} ms"),
    ]
    if slots:
        sides = (
            f"{side} {value(f'{side}/idle_ratio', '.0%')}" for side in ("trainer", "rollouter")
        )
        figures.append(("idle", ", ".join(sides)))
    table = Table.grid(padding=(0, 3))
    cells = [Text.assemble((f"{name} ", "dim"), text) for name, text in figures]
    for i in range(0, len(cells), 2):
        table.add_row(*cells[i : i + 2])
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


def sentence(look: RunSnapshot) -> str:
    """Return a look in one line."""
    parts = [*(part.plain for part in (_progress(look), _life(look)))]
    parts += [f"alarm: {plain(alarm.name)}" for alarm in look.alarms]
    return "; ".join(parts)


def shown(validation: dict[str, float], between: str = "  ") -> str:
    """Return the values of a validation in one line."""
    return between.join(
        f"{name.removeprefix('val/')} {value:.{0 if name.endswith('/reward_errors') else 3}f}"
        for name, value in distinct(validation)
    )


def distinct(validation: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a validation, without accuracies that equal their scores."""
    for name, value in validation.items():
        score = name.replace("/acc/", "/")
        if score == name or value != validation.get(score):
            yield name, value


def sparkline(values: list[float], width: int) -> str:
    """Return `values` as at most `width` bars. Each bar is a mean of consecutive values."""
    size = max(1, math.ceil(len(values) / width))
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    means = [sum(group) / len(group) for group in groups]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((m - low) / span * len(BARS)))] for m in means)


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bar_line(bar: ProgressBar) -> Table:
    """Return a progress bar with its own line end. Without it the next line overwrites the bar."""
    grid = Table.grid(expand=True)
    grid.add_row(bar)
    return grid
