"""The panel in a terminal: a run shows there what `millrace watch` shows of it."""

from __future__ import annotations

import io

from rich.console import Console

from millrace.observe.panel import panel
from millrace.observe.progress import LiveView, Progress


def test_the_run_itself_has_the_panel_of_watch() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    view = LiveView(console)
    progress = Progress(view, "quickstart", "async_partial", lambda: 0.0)
    with progress:
        progress.phase("supervised warm-up", 3, 10, "loss 0.5")
        progress.training(0, 5120, 0, 80)
        progress.trained(64, 0.25)
        progress.row(1, {"staleness/mean": 0.5, "trainer/idle_ratio": 0.25})
        progress.validated(1, {"val/sort/mean@1": 0.75})
        console.print(panel(progress.state))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "supervised warm-up  loss 0.5" in drawn
    for words in (
        "millrace  quickstart  async_partial",
        "running  version 1 of 80  samples 64 of 5,120",
        "held out, version 1  sort/mean@1 0.750",
        "0.50 mean, - max",
        "trainer 25%",
    ):
        assert drawn.count(words) >= 2, words
    assert "no sign of life" not in drawn, "the process that draws it lives"
