"""A signal ends the command even while data loads."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millrace.sync.background import abandonable
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
SLOW = """
import sys, time
import millrace.run.problems
from millrace.cli.main import main

def load(config, **options):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(10_000)

millrace.run.problems.load = load
main()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_a_command_whose_source_is_slow(
    tmp_path: Path, number: int, code: int
) -> None:
    arguments = ["train", "quickstart", f"trainer.run_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stderr is not None
        while "loading" not in (line := process.stderr.readline()):
            assert line, "the command ended before it loaded anything"
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(HANG_S) == code and "Traceback" not in said, said
    finally:
        process.kill()
        process.wait()


def test_abandonable_work_returns_its_value_and_raises_its_error() -> None:
    assert asyncio.run(abandonable(max, 3, 4)) == 4
    with pytest.raises(ZeroDivisionError):
        asyncio.run(abandonable(lambda: 1 / 0))


def test_a_cancelled_wait_leaves_the_work_behind() -> None:
    gate, done = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(HANG_S)
        done.set()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(abandonable(work), 0.05)

    asyncio.run(main())
    assert not done.is_set(), "the loop has ended and waited for nothing"
    gate.set()
    assert done.wait(HANG_S)
