"""The panel in a terminal: a run shows there what `millrace watch` shows of it."""

from __future__ import annotations

import io

from rich.console import Console

from millrace.observe.progress import LiveView, Progress


def test_a_run_has_the_panel_of_watch_and_one_for_its_start() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    view = LiveView(console)
    progress = Progress(view, "quickstart", "async_partial", lambda: 0.0)

    def drawn() -> str:
        console.print(view.picture(progress.state))
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    progress.phase("supervised warm-up", 3, 10, "loss 0.5")
    assert "supervised warm-up  loss 0.5" in drawn()
    progress.training(0, 5120, 0, 80)
    progress.trained(64, 0.25)
    progress.row(1, {"staleness/mean": 0.5, "trainer/idle_ratio": 0.25})
    progress.validated(1, {"val/sort/mean@1": 0.75})
    shown = drawn()
    assert "running  version 1 of 80  samples 64 of 5,120" in shown
    assert "held out, version 1  sort/mean@1 0.750" in shown
    assert "0.50 mean, - max" in shown and "trainer 25%" in shown
    assert "no sign of life" not in shown, "the process that draws it lives"
