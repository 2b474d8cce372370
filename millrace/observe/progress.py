"""The progress of a run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from millrace.observe.panel import RunSnapshot, bar_line, duration, panel, shown


@dataclass
class State(RunSnapshot):
    """The figures of the run's own process, also those of its start."""

    phase: str = "starting"
    phase_done: int = 0
    phase_total: int = 0
    phase_note: str = ""
    trained_since: float = 0.0
    trained_from: int = 0
    each_version: bool = False
    """Whether plain lines show each version."""

    def left_s(self, now: float) -> float:
        """Return the seconds to the end at the average pace. NaN before the first sample."""
        trained = self.samples - self.trained_from
        if not (trained and self.trained_since):
            return math.nan
        return (now - self.trained_since) / trained * ((self.total or 0) - self.samples)


class View(Protocol):
    def open(self) -> None:
        return None

    def close(self) -> None:
        return None

    def update(self, state: State, event: str) -> None: ...

    def note(self, text: str) -> None: ...


class Progress:
    """The state of a run, updated by its events and shown in a view."""

    def __init__(
        self, view: View, name: str, mode: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = State(name=name, mode=mode)
        self._view = view
        self._clock = clock

    def __enter__(self) -> Progress:
        self._view.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._view.close()

    def note(self, text: str) -> None:
        """Print one permanent line."""
        self._view.note(text)

    def phase(self, name: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """Show a phase of the preparation, with its own progress if it is long."""
        s = self.state
        event = "phase step" if name == s.phase else "phase"
        s.phase, s.phase_done, s.phase_total, s.phase_note = name, done, total, note
        self._view.update(s, event)

    def training(
        self, samples: int, total: int, version: int, versions: int, *, each_version: bool = False
    ) -> None:
        """Show that the RL loop begins. `each_version` makes plain lines show each version."""
        s = self.state
        s.each_version = each_version
        s.phase, s.phase_total, s.phase_note = "training", 0, ""
        s.samples, s.total, s.version, s.versions = samples, total, version, versions
        s.row, s.rewards = {}, []  # An earlier run on the same engines may have left some.
        s.trained_since, s.trained_from = self._clock(), samples
        self._view.update(s, "phase")

    def trained(self, samples: int, reward: float) -> None:
        self.state.samples += samples
        self.state.rewards.append(reward)
        self._view.update(self.state, "step")

    def row(self, version: int, row: dict[str, float]) -> None:
        self.state.version, self.state.row = version, row
        self._view.update(self.state, "row")

    def validated(self, version: int, values: dict[str, float]) -> None:
        self.state.validation, self.state.validated = values, version
        self._view.note(f"validation of version {version}: {shown(values)}")


class Lines(View):
    """Plain lines for logs and pipes.

    They show phases. They show the state of training for each version, or every `every_s` seconds.
    """

    def __init__(self, console: Console, every_s: float = 5.0) -> None:
        self._console = console
        self._every_s = every_s
        self._last = -math.inf

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, state: State, event: str) -> None:
        now = time.monotonic()
        due = event == "phase" or (event == "row" and state.each_version)
        shows = event == "row" or state.phase != "training"
        if not due and (now - self._last < self._every_s or not shows):
            return
        self._last = now
        if state.phase != "training" or not state.row:
            count = f" {state.phase_done}/{state.phase_total}" if state.phase_total else ""
            self.note(f"{state.phase}{count} {state.phase_note}".rstrip())
            return
        row = state.row
        # A version in which no response ended has no reward, and a critic's warm-up no loss.
        reward = f"reward {row['reward/mean']:.3f}  " if "reward/mean" in row else ""
        names = {"loss": "actor/pg_loss", "ppo_kl": "actor/ppo_kl"}
        loss = "".join(f"{name} {row[key]:.4g}  " for name, key in names.items() if key in row)
        self.note(
            f"version {state.version}/{state.versions}  samples {state.samples}/{state.total}  "
            f"{reward}{loss}staleness {row['staleness/mean']:.2f}  "
            f"idle trainer {row['trainer/idle_ratio']:.0%} "
            f"rollouter {row['rollouter/idle_ratio']:.0%}  "
            f"{row['rollouter/tokens_per_s']:,.0f} tokens/s  ETA {duration(state.left_s(now))}"
        )


class LiveView:
    """A panel that redraws in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def open(self) -> None:
        self._live.start()

    def close(self) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def update(self, state: State, event: str) -> None:
        self._live.update(self.picture(state))

    def picture(self, state: State) -> RenderableType:
        if state.phase != "training":
            total, done = state.phase_total, state.phase_done
            bar = ProgressBar(total=total or None, completed=done, pulse=not total)
            title = f"millrace  {state.name}  {state.mode}"
            phase = Text(f"{state.phase}  {state.phase_note}")
            return Panel(Group(phase, bar_line(bar)), title=title)
        state.eta_s = state.left_s(time.monotonic())
        return panel(state, width=self._console.width)


def make_view(console: Console) -> View:
    """Return a live view on a terminal, and plain lines elsewhere."""
    return LiveView(console) if console.is_terminal else Lines(console)
