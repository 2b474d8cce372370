"""The result of a run: its folder, read as lists and dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.errors import MillraceError
from millrace.persist.run_reader import RunReader, load
from millrace.pipeline.checkpoint import Checkpoints
from millrace.run.train import Outcome


class Run:
    """A run, as its folder has it. `Run("runs/quickstart-1")` reads any run, also one that goes on."""

    def __init__(self, folder: str | Path, outcome: Outcome | None = None) -> None:
        """Raises ConfigError if the folder is not a run's."""
        self.folder = Path(folder)
        self.outcome = outcome
        """What the run returned in this process. None if it ran elsewhere."""
        load(self.folder)

    @property
    def complete(self) -> bool:
        """Whether the run trained all its samples."""
        return self._read().state == "complete"

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The row of each version, with its number as `version`."""
        rows = self._read().rows
        return [{"version": version, **rows[version]} for version in sorted(rows)]

    @property
    def before(self) -> dict[str, float]:
        """The validation of the start weights, by metric. Empty if there was none."""
        return dict(self._read().validations.get(0, {}))

    @property
    def after(self) -> dict[str, float]:
        """The newest validation after the start, by metric. Empty if there was none."""
        values = self._read().validations
        last = max(values, default=0)
        return dict(values[last]) if last else {}

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the whole checkpoints, oldest first."""
        return Checkpoints(self.folder, keep=1).all()

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint. trainer.resume, `millrace export` and Rollouts take it."""
        return next(reversed(self.checkpoints), None)

    @property
    def report(self) -> Path | None:
        """The report, if it was written."""
        path = self.folder / "report.html"
        return path if path.is_file() else None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration: a recipe for the same run."""
        return self._read().tree

    def samples(self, version: int | None = None) -> list[dict[str, Any]]:
        """Return the trajectories that trained a version, or all versions: one dict for each.

        Raises MillraceError if the run kept none, as report.samples=0 asks.
        """
        from pyarrow import parquet

        files = self._read().samples
        if not files:
            raise MillraceError(f"{self.folder} has no samples. Fix: report.samples=1 in the run")
        rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
        return [row for row in rows if version is None or row["version"] == version]

    def _read(self) -> RunReader:
        return RunReader(self.folder).read()

    def __repr__(self) -> str:
        run = self._read()
        rewards = [
            row["reward/mean"] for _, row in sorted(run.rows.items()) if "reward/mean" in row
        ]
        shown = f", reward {rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else ""
        return f"Run({str(self.folder)!r}: {run.state}, {len(run.rows)} versions{shown})"
