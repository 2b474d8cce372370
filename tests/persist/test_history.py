"""The history and its audit.

The audit finds samples that were lost or trained twice, also over crashes and attempts.
"""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import msgspec
import pytest

from millrace.errors import CheckpointError, DiskError
from millrace.persist.history import History, Line, audit, read
from millrace.schedule.ledger import Totals


def write(run_dir: Path, *lines: Line) -> Path:
    path = run_dir / "history.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def start(attempt: int = 1, version: int = 0, **other: object) -> Line:
    return Line("start", attempt, version, **other)  # type: ignore[arg-type]


def version(
    number: int,
    admitted: int,
    trained: list[int],
    held: list[int],
    *,
    attempt: int = 1,
    **dropped: int,
) -> Line:
    return Line("version", attempt, number, admitted, dropped, held, trained)


def end(
    number: int,
    admitted: int,
    *,
    attempt: int = 1,
    held: list[int] | None = None,
    complete: bool = True,
    **dropped: int,
) -> Line:
    return Line("end", attempt, number, admitted, dropped, held or [], [], complete)


WHOLE = [
    start(),
    version(1, 6, [0, 1, 3], [4, 5], timeout=1),
    version(2, 6, [4, 5], [], timeout=1),
    end(2, 6, timeout=1),
]


def test_a_whole_history_accounts_for_every_sample(tmp_path: Path) -> None:
    write(tmp_path, *WHOLE)
    found = audit(tmp_path)
    assert (found.admitted, found.trained, found.dropped, found.in_flight) == (
        6,
        5,
        {"timeout": 1},
        0,
    )
    assert (found.lost, found.trained_twice, found.attempts, found.versions, found.complete) == (
        0,
        0,
        1,
        2,
        True,
    )


def without(i: int) -> list[Line]:
    return [
        msgspec.structs.replace(line, trained=[t for t in line.trained if t != i]) for line in WHOLE
    ]


def twice(i: int) -> list[Line]:
    return [*WHOLE[:3], version(3, 6, [i], [], timeout=1), WHOLE[3]]


@pytest.mark.parametrize(
    ("lines", "lost", "trained_twice"),
    [
        *((without(i), 1, 0) for i in (0, 1, 3, 4, 5)),
        *((twice(i), 0, 1) for i in (0, 3, 5)),
        ([start(), version(1, 2, [0, 0, 1], []), end(1, 2)], 0, 1),
        # It is still held, so it will be trained twice.
        ([start(), version(1, 3, [0, 1], [1, 2])], 0, 1),
        # One sample twice does not make up for another one lost, and neither does an unknown one.
        ([start(), version(1, 3, [0, 0, 1], []), end(1, 3)], 1, 1),
        ([start(), version(1, 3, [0, 1, 99], []), end(1, 3)], 1, 0),
        # A drop that is not counted.
        ([msgspec.structs.replace(line, dropped={}) for line in WHOLE], 1, 0),
        # A resume that trains a sample of a surviving version.
        (
            [
                *(start(), version(1, 4, [0, 1], [2, 3]), start(2, 1, admitted=4)),
                *(version(2, 4, [1, 2, 3], [], attempt=2), end(2, 4, attempt=2)),
            ],
            0,
            1,
        ),
    ],
)
def test_samples_that_are_lost_or_trained_twice_are_counted(
    tmp_path: Path, lines: list[Line], lost: int, trained_twice: int
) -> None:
    write(tmp_path, *lines)
    found = audit(tmp_path)
    assert (found.lost, found.trained_twice) == (lost, trained_twice)


def test_what_an_attempt_did_after_the_version_that_the_next_one_starts_from_never_happened(
    tmp_path: Path,
) -> None:
    crashed = [
        start(),
        version(1, 4, [0, 1], [2, 3]),
        version(2, 6, [2, 3], [4, 5]),
        version(3, 8, [4, 5], [6, 7]),
    ]
    resumed = [
        start(2, 1, admitted=4, slots=[2, 3]),
        version(2, 6, [2, 3], [4, 5], attempt=2),
        end(2, 6, attempt=2, held=[4, 5], complete=False),
    ]
    write(tmp_path, *crashed, *resumed)
    found = audit(tmp_path)
    assert (found.admitted, found.trained, found.in_flight, found.lost, found.trained_twice) == (
        6,
        4,
        2,
        0,
        0,
    )
    assert (found.attempts, found.versions, found.complete) == (2, 2, False)


def test_a_torn_last_line_never_happened_and_reading_leaves_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path, *WHOLE[:2])
    torn = path.read_bytes() + msgspec.json.encode(WHOLE[2])[:25]
    path.write_bytes(torn)
    found = audit(tmp_path)
    assert (found.trained, found.in_flight, found.lost, found.versions) == (3, 2, 0, 1)
    assert path.read_bytes() == torn, "an audit while the run writes must not cut its line off"


def totals(number: int, admitted: int, held: list[int]) -> Totals:
    return Totals(number, admitted, admitted - len(held), {}, held)


def test_an_attempt_after_a_torn_line_writes_lines_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, start(), version(1, 4, [0, 1], [2, 3]))
    path.write_bytes(path.read_bytes() + b'{"event":"vers')
    history = History(tmp_path, totals(1, 4, [2, 3]))
    history.version(totals(2, 4, []), [2, 3])
    history.end(totals(2, 4, []), complete=True)
    assert [(line.event, line.attempt, line.version) for line in read(tmp_path)] == [
        ("start", 1, 0), ("version", 1, 1), ("start", 2, 1), ("version", 2, 2), ("end", 2, 2),
    ]  # fmt: skip
    found = audit(tmp_path)
    assert (found.trained, found.lost, found.trained_twice, found.attempts, found.complete) == (
        4,
        0,
        0,
        2,
        True,
    )


def test_a_line_is_on_disk_before_the_call_returns(tmp_path: Path) -> None:
    history = History(tmp_path, totals(0, 0, []))
    assert [line.event for line in read(tmp_path)] == ["start"]
    history.version(totals(1, 2, [1]), [0])
    assert read(tmp_path)[-1].trained == [0] and read(tmp_path)[-1].slots == [1]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = write(tmp_path, *WHOLE)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:10], *lines[2:]]))
    with pytest.raises(CheckpointError, match=r"history\.jsonl, line 2: not readable"):
        audit(tmp_path)


def test_no_history_is_an_empty_account(tmp_path: Path) -> None:
    found = audit(tmp_path)
    assert (found.admitted, found.trained, found.lost, found.attempts, found.complete) == (
        0,
        0,
        0,
        0,
        False,
    )


def test_a_run_that_begins_with_anothers_checkpoint_owes_nothing_for_what_that_one_trained(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        start(version=2, admitted=7, retired=5, dropped={"timeout": 1}, slots=[6]),
        version(3, 8, [6], [7], timeout=1),
        end(3, 8, held=[7], timeout=1),
    )
    found = audit(tmp_path)
    assert (found.admitted, found.trained, found.in_flight, found.lost, found.trained_twice) == (
        8,
        6,
        1,
        0,
        0,
    )


def test_lines_that_a_full_disk_refuses_wait_and_none_is_written_twice(tmp_path: Path) -> None:
    """No checkpoint is completed before them."""
    path = tmp_path / "history.jsonl"
    history = History(tmp_path, Totals(0, 0, 0, {}, []))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        for version in (1, 2):
            with pytest.raises(DiskError, match=r"history\.jsonl: File too large"):
                history.version(Totals(version, 0, 0, {}, []), [version])
        with pytest.raises(DiskError):
            history.catch_up()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    history.catch_up()
    history.end(Totals(2, 0, 0, {}, []), True)
    assert [(line.event, line.version) for line in read(tmp_path)] == [
        ("start", 0),
        ("version", 1),
        ("version", 2),
        ("end", 2),
    ]
