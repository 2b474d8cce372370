"""The command line, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import console
from millrace.cli import main as cli


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run `millrace ARGUMENTS` in an empty folder and in this process.

    Returns (exit code, stdout, stderr).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["millrace", *arguments])
        monkeypatch.setattr(console, "_printed", False)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capfd.readouterr()  # type: ignore[return-value]

    return run
