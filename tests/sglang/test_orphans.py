"""A scheduler whose host dies while the scheduler imports SGLang."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.extras.sglang import scheduler
from millrace.process.trees import lives
from tests.waiting import HANG_S, until

HOST = """
import multiprocessing, os
from tests.sglang.test_orphans import schedule
process = multiprocessing.get_context("spawn").Process(target=schedule)
process.start()
print(process.pid, flush=True)
os._exit(0)
"""


def schedule() -> None:
    def run_scheduler_process(*_: Any) -> None:
        time.sleep(HANG_S * 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.sglang_scheduler, "run_scheduler_process", run_scheduler_process)
        scheduler.run()


def test_a_scheduler_ends_with_a_host_that_died_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "counter"
    counter.write_bytes(bytes(8))
    monkeypatch.setenv(scheduler.COUNTER, str(counter))
    output = (tmp_path / "output").open("w+")
    subprocess.run([sys.executable, "-c", HOST], stdout=output, check=True)
    output.seek(0)
    process = psutil.Process(int(output.read().split()[0]))
    try:
        until(lambda: not lives(process))  # nobody may reap it
    finally:
        if process.is_running():
            process.kill()
