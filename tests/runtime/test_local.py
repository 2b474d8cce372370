"""Worker processes of the local runtime.

Every death is reported with name, cause and log. No worker outlives its driver.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from millrace.config.serving_checks import SCRATCH
from millrace.errors import WorkerError
from millrace.process.rpc import Peer, all_of
from millrace.process.scratch import ScratchFolder
from millrace.runtime import local
from millrace.runtime.local import LocalRuntime
from tests.waiting import HANG_S
from tests.workers import without_engine, workers_of


def runtime(folder: Path) -> LocalRuntime:
    return LocalRuntime(folder, without_engine(), gpus=[])


async def test_a_worker_killed_in_a_call_is_named_with_its_signal_and_its_log(
    tmp_path: Path,
) -> None:
    """The worker is stopped first, so the call is certainly in progress when the kill arrives."""
    workers = runtime(tmp_path)
    try:
        killed, other = await asyncio.gather(
            workers.start("rollout-0", "rollout", 0), workers.start("trainer-0", "trainer", 0)
        )
        process = workers_of()["rollout-0"]
        log = tmp_path / "rollout-0.log"
        log.write_bytes(log.read_bytes() + b"its last words\n")
        process.send_signal(signal.SIGSTOP)
        call = asyncio.create_task(all_of([other, killed], "ping"))
        await asyncio.sleep(0.1)
        process.kill()
        with pytest.raises(WorkerError) as caught:
            await asyncio.wait_for(call, HANG_S)
        message = str(caught.value)
        assert message.startswith(f"worker rollout-0 was killed by SIGKILL; its log is {log}")
        assert message.endswith("its last words")
        with pytest.raises(WorkerError, match="worker rollout-0 was killed by SIGKILL"):
            await killed.call("ping")
        await other.call("ping")
    finally:
        await workers.close()
    assert not workers_of(), "nothing is left after close"


async def test_the_files_of_a_killed_serving_engine_go_with_the_runtime(tmp_path: Path) -> None:
    sides = without_engine()
    rollout = sides.rollout.model_copy(update={"engine": "sglang"})

    workers = LocalRuntime(tmp_path, replace(sides, rollout=rollout), gpus=[])
    try:
        peer = await workers.start("rollout-0", "rollout", 0)
        folder = Path(workers_of()["rollout-0"].environ()[SCRATCH])
        (folder / "socket").touch()
        await workers.end(peer)
    finally:
        await workers.close()
    assert not folder.exists()


async def test_after_close_no_worker_is_left_not_even_a_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GOODBYE_S", 0.5)
    workers = runtime(tmp_path)
    peers = await asyncio.gather(*(workers.start(f"rollout-{i}", "rollout", i) for i in range(2)))
    assert len(workers_of()) == 2
    for worker in workers_of().values():
        worker.send_signal(signal.SIGSTOP)  # it cannot see that its socket is closed
    pending = asyncio.create_task(peers[0].call("listen"))
    await asyncio.sleep(0)
    await workers.close()
    assert not workers_of()
    with pytest.raises(WorkerError, match="the run is over"):
        await pending


class Unending:
    """A process that the kernel cannot end, because its device driver waits for a failed GPU."""

    pid, killed = 1 << 30, False

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        self.killed = True


async def test_a_worker_that_hung_up_is_lost_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GOODBYE_S", 0.2)
    monkeypatch.setattr(local, "KILLED_S", 0.2)
    workers, process, peer = (
        runtime(tmp_path),
        Unending(),
        Peer("rollout-0", lambda frame: None, deadline_s=HANG_S),
    )
    reader = asyncio.StreamReader()
    reader.feed_eof()
    (tmp_path / "rollout-0.log").write_text("a GPU fell off the bus\n")
    _, writer = await asyncio.open_connection(sock=socket.socketpair()[0])
    worker = local._Worker(peer, process, writer, os.pipe()[0])  # type: ignore[arg-type]
    await workers._read(worker, reader, tmp_path / "rollout-0.log")
    assert peer.death is not None and peer.death.startswith(
        "worker rollout-0 closed its socket, and its process does not end; its log is"
    )
    assert peer.death.endswith("a GPU fell off the bus")
    workers._workers.append(worker)
    with pytest.warns(
        RuntimeWarning, match=rf"processes \[{process.pid}\] were killed and do not end"
    ):
        await workers.close()
    assert process.killed


DRIVER = """
import asyncio, sys
from pathlib import Path
from millrace.runtime.local import LocalRuntime
from tests.workers import without_engine

async def main():
    workers = LocalRuntime(Path(sys.argv[1]), without_engine(), gpus=[])
    await asyncio.gather(workers.start("trainer-0", "trainer", 0), workers.start("rollout-0", "rollout", 0))
    print("up", flush=True)
    await asyncio.sleep(10_000)

asyncio.run(main())
"""


def test_workers_die_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    """The kernel also ends stopped workers, which cannot see that their socket closes."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None and driver.stdout.readline() == b"up\n"
        processes = psutil.Process(driver.pid).children(recursive=True)
        assert len(processes) == 3, "two workers, and the process that forks them"
        workers_of(driver.pid)["rollout-0"].send_signal(signal.SIGSTOP)
    finally:
        driver.kill()
        driver.communicate()
    _, left = psutil.wait_procs(processes, timeout=HANG_S)
    assert not left


def test_a_worker_whose_driver_died_while_it_was_started_ends_at_once() -> None:
    """Its parent process then differs from the one in its arguments.

    Its socket alone would keep it alive.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "millrace.runtime.host", str(fd), "rollout", "1234567"]
        assert subprocess.run(command, pass_fds=[fd], timeout=HANG_S).returncode == 1


async def test_a_worker_that_ends_by_itself_is_told_with_its_exit_code_and_last_words(
    tmp_path: Path,
) -> None:
    workers = runtime(tmp_path)
    with pytest.raises(WorkerError) as caught:
        await workers.start("nobody-0", "nobody", 0)
    await workers.close()
    first, *last_words = str(caught.value).splitlines()
    assert (
        first
        == f"worker nobody-0 ended with exit code 1; its log is {tmp_path / 'nobody-0.log'} (while it served ping)"
    )
    assert any("KeyError: 'nobody'" in line for line in last_words)


def test_a_long_tmpdir_leaves_room_for_the_sockets_of_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with local._folder_of_sockets() as folder:
        assert folder.startswith("/tmp/millrace-")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with local._folder_of_sockets() as folder:
        assert Path(folder).parent == Path("/tmp")


HOLDS = """
import sys, time
from millrace.process.scratch import ScratchFolder
folder = ScratchFolder(sys.argv[1])
print(folder.name, flush=True)
time.sleep(10_000)
"""


def test_what_a_killed_owner_leaves_goes_at_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    owners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        stale, living = (Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout)
        (stale / "socket").touch()
        foreign, link = tmp_path / "millrace-mine", tmp_path / "millrace-link"
        foreign.mkdir()
        (foreign / "notes").touch()
        link.symlink_to(stale)
        owners[0].kill()
        owners[0].wait()
        with ScratchFolder(str(tmp_path)) as folder:
            left = {path.name for path in tmp_path.iterdir()}
            assert left == {living.name, foreign.name, link.name, Path(folder).name}
            assert (foreign / "notes").exists()
        assert not Path(folder).exists() and living.exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
