"""Advice is computed in the background, seldom, and once for each moment of a run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from millrace.config import plugins
from millrace.persist.run_reader import RunReader
from millrace.report.advice import REST_S, Advice, advise
from tests.report.folders import Run


class Part:
    """A part of the group `advice` that counts its calls, and waits until it may end."""

    def __init__(self) -> None:
        self.calls, self.free = 0, threading.Event()

    def __call__(self, run: RunReader) -> list[Advice]:
        self.calls += 1
        assert self.free.wait(60)
        return [Advice(f"advice {self.calls}")]


def given(patch: pytest.MonkeyPatch, part: Any) -> None:
    patch.setattr(plugins, "load", lambda *_: part)


def test_a_run_that_goes_on_gets_advice_seldom_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, now, made = Part(), [0.0], Run(tmp_path / "run")
    given(monkeypatch, part)
    made.version(1)
    reader = RunReader(made.path)

    def text(wait: bool) -> str:
        return str(advise(reader.read(), wait, lambda: now[0])[0])

    assert "being computed" in text(wait=False)
    part.free.set()
    assert text(wait=True) == "advice 1"
    made.version(2)
    assert text(wait=True) == "advice 1"
    now[0] = REST_S + 1
    assert text(wait=True) == text(wait=True) == "advice 2"
    made.version(3)
    made.end(3, complete=True)
    assert text(wait=True) == text(wait=True) == "advice 3"


def test_advice_that_fails_ends_no_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: RunReader) -> list[Advice]:
        raise ValueError("no figures")

    given(monkeypatch, fail)
    assert str(advise(RunReader(tmp_path))[0]) == "none: ValueError: no figures"


def test_without_its_extra_there_is_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plugins.OWN["advice"], "plan", "millrace.extras.missing:advise")
    (one,) = advise(RunReader(tmp_path))
    assert "millrace.extras.missing is missing in this installation" in one.text
    assert not one.overrides
