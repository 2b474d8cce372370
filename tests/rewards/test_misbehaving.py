"""Functions that leak, print without end and leave processes, on real workers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.config import RewardConfig
from millrace.errors import RewardError
from millrace.rewards.output import KEPT
from millrace.rewards.pool import RewardPool
from millrace.types import Prompt, tokens_of
from tests.rewards.completions import completed
from tests.waiting import HANG_S, until_async

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="rlimits, /proc and splice")

CODE = """
import os, re, subprocess, sys, time

kept = []

def score(data_source, solution_str, ground_truth, extra_info):
    exec(solution_str, globals())
    return float(globals().get("out", 1))
"""
PRINTED = 300 << 20
PRINTS = f"piece = b'x' * (1 << 20)\nfor _ in range({PRINTED >> 20}): os.write(1, piece)"
LEAVES = """
if not os.fork():  # it keeps the worker's socket
    os.setsid()
    time.sleep(10_000)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)", __file__],
                 start_new_session=True)
"""


def run(
    tmp_path: Path, *sources: str, late: Collection[str] = (), **keys: Any
) -> tuple[list[Any], RewardPool]:
    """Return the score of each call, one after the other, or the reason why it has none.

    The calls in `late` have little time, and the others all the time of the world.
    """
    (tmp_path / "fn.py").write_text(CODE)

    async def main() -> tuple[list[Any], RewardPool]:
        keys["timeout_s"] = HANG_S
        pool = RewardPool(RewardConfig(function=f"{tmp_path}/fn.py:score", **keys))
        await pool.start()
        found: list[Any] = []
        try:
            for source in sources:
                await until_async(lambda: any(worker.hello for worker in pool.workers))
                for worker in pool.workers if source in late else ():
                    worker.job = msgspec.structs.replace(worker.job, timeout_s=0.5)
                try:
                    prompt = Prompt(0, tokens_of([1]), "p", "d", "4")
                    (score,) = await pool.score(prompt, completed([source]))
                    found.append(score.value)
                except RewardError as error:
                    found.append(error.reason)
        finally:
            await pool.close()
        return found, pool

    return asyncio.run(main())


def test_a_flood_of_output_is_dropped_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found, pool = run(tmp_path, "print('first')", PRINTS, "")
    assert found == [1, 1, 1]
    assert pool.figures["output_dropped"] == PRINTED + len("first\n") - KEPT
    captured = capfd.readouterr().err
    assert captured.startswith("first\n") and len(captured) < KEPT + 200
    assert f"reward: {PRINTED + 6 - KEPT:,} bytes of output were dropped" in captured


def test_a_leak_ends_a_worker_and_no_other_call(tmp_path: Path) -> None:
    leak = "kept.append(bytearray(60 << 20)); out = len(kept)"
    found, _ = run(tmp_path, leak, leak, leak, leak, "out = len(kept)", memory_mb=230)
    assert found == [1, 2, 3, "out_of_memory", 0]


@pytest.mark.parametrize(
    ("end", "reason"),
    [("os._exit(3)", "worker_died"), ("while True: pass", "timeout")],
)
def test_what_a_worker_leaves_ends_with_it(tmp_path: Path, end: str, reason: str) -> None:
    source = f"{LEAVES}\n{end}"
    late = [source] if reason == "timeout" else []
    found, _ = run(tmp_path, source, "out = 2", late=late)
    assert found == [reason, 2]
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _names(pid, tmp_path)]


def _names(pid: str, folder: Path) -> bool:
    """Return whether the folder is in the arguments of a process."""
    with suppress(OSError):
        return str(folder) in Path(f"/proc/{pid}/cmdline").read_text()
    return False


HANGS = {
    "a regex": "re.fullmatch('(a+)+', 'a' * 60 + 'b')",
    "a loop in C": "sum(range(10 ** 15))",
}


def test_every_hang_is_killed_and_the_others_are_answered(tmp_path: Path) -> None:
    found, _ = run(tmp_path, *HANGS.values(), "", late=HANGS.values())
    assert found == ["timeout"] * len(HANGS) + [1]
