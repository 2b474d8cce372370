"""The thread of a tracker: rows wait, rest, fail, hang, and are written at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millrace.observe import trackers
from millrace.observe.background import Background, text_of
from tests.waiting import HANG_S, until


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_password_is_never_cut_open() -> None:
    long = "x" * 180 + " http://user:pass@word@host/path is out of reach"
    assert "pass" not in text_of(OSError(long)) and "***@host" in text_of(OSError(long[90:]))


class Fake:
    """A tracker that fails, hangs or works, as a test says."""

    where = "here"

    def __init__(self, act: Callable[[int], None] = lambda version: None) -> None:
        self.act, self.complete = act, False
        self.rows: list[int] = []

    def write(self, version: int, row: dict[str, float]) -> None:
        self.act(version)
        self.rows.append(version)

    def close(self, complete: bool) -> None:
        self.complete = complete


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1)])
def test_a_row_that_fails_is_dropped_and_counted_with_one_warning(
    error: BaseException, said: list[str]
) -> None:
    fake = Fake(lambda version: fail(error) if version in (2, 3) else None)
    sink = Background("fake", lambda: fake, said.append, close_s=HANG_S)
    for version in range(1, 5):
        sink.write(version, {})
    sink.close()
    assert fake.rows == [1, 4] and fake.complete is True
    assert trackers.dropped([sink]) == {"trackers/fake/dropped": 2.0}
    warning = f"warning: fake does not work: {type(error).__name__}: {error}. "
    assert said == [
        "fake: here",
        warning + "The run does not wait for it.",
        "fake: It lacks 2 rows of this run. metrics.jsonl has them.",
    ]


def test_a_tracker_that_starts_late_gets_every_row(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [Fake()]
    errors: Iterator[Exception] = iter([ConnectionError("//me:secret@host\nrefused")])
    sink = Background(
        "fake", lambda: fakes[0] if (e := next(errors, None)) is None else fail(e), said.append
    )
    for version in (1, 2):
        sink.write(version, {})
    until(lambda: fakes[0].rows == [1, 2])
    sink.close()
    assert not sink.dropped
    assert said[0].startswith("warning: fake does not work: ConnectionError: //***@host. ")
    assert said[1:] == ["fake: here"]


def test_a_tracker_that_never_starts_costs_its_rows_alone(said: list[str]) -> None:
    sink = Background("fake", lambda: fail(ConnectionError("refused")), said.append)
    sink.write(1, {})
    sink.close()
    assert len(said) == 2 and "It lacks 1 rows" in said[1]


def burn(version: int) -> None:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass


def test_a_tracker_rests_between_rows_and_the_close_writes_the_rest(said: list[str]) -> None:
    """Each row takes 50 ms of a processor, so the next one waits for over an hour."""
    fake = Fake(burn)
    sink = Background("fake", lambda: fake, said.append, share=1e-5, close_s=HANG_S)
    for version in (1, 2, 3):
        sink.write(version, {})
    until(lambda: fake.rows == [1])
    time.sleep(0.2)
    assert fake.rows == [1]
    sink.close()
    assert fake.rows == [1, 2, 3] and not sink.dropped


def test_rows_that_wait_are_written_together(said: list[str]) -> None:
    fake = Fake()
    sink = Background("fake", lambda: fake, said.append, share=0.01, pause_s=600, close_s=HANG_S)
    sink.write(1, {})
    until(lambda: fake.rows == [1])
    for version in (2, 3, 4):
        sink.write(version, {})
    time.sleep(0.1)
    assert fake.rows == [1]
    sink.close()
    assert fake.rows == [1, 2, 3, 4] and not sink.dropped


def test_a_tracker_does_not_rest_while_many_rows_wait(said: list[str]) -> None:
    go = threading.Event()
    fake = Fake(lambda version: burn(version) if go.wait() else None)
    sink = Background("fake", lambda: fake, said.append, share=1e-6, most_rows=20, close_s=HANG_S)
    for version in range(10):
        sink.write(version, {})
    go.set()
    until(lambda: len(fake.rows) == 8)
    sink.close()
    assert fake.rows == list(range(10)) and not sink.dropped


def test_a_tracker_that_hangs_takes_no_time_and_the_close_names_it(said: list[str]) -> None:
    """A row or a close that waited for it would wait for ever."""

    def hang(version: int) -> None:
        threading.Event().wait()

    fake = Fake(hang)
    sink = Background("fake", lambda: fake, said.append, most_rows=100, close_s=0.3)
    for version in range(1000):
        sink.write(version, {})
    assert sink.dropped == 900
    sink.close()
    assert "100 rows wait for it" in said[1]
    assert said[2].startswith("fake: It did not end within 0.3 s. It lacks 1000 rows of this run.")
    assert sink._thread.daemon
