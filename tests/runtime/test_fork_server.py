"""The process that forks workers: it may die, be late or be stopped, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.config import Config
from millrace.errors import WorkerError
from millrace.runtime import local
from millrace.runtime.fork_server import ForkServer
from millrace.runtime.local import LocalRuntime
from tests.fork_servers import Pool
from tests.waiting import until_async
from tests.workers import without_engine, workers_of


@pytest.fixture(autouse=True)
def own_servers(monkeypatch: pytest.MonkeyPatch, kept_fork_servers: Pool) -> None:
    """Each run of these tests has its own server, as a user's run does."""
    kept_fork_servers.close()
    monkeypatch.setattr(local, "ForkServer", ForkServer)


def runtime(folder: Path) -> LocalRuntime:
    return LocalRuntime(folder, without_engine(), gpus=[])


def servers() -> list[psutil.Process]:
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "millrace.runtime.fork_server" in p.cmdline()]


async def until_gone(pids: list[int]) -> None:
    await until_async(lambda: not any(map(psutil.pid_exists, pids)))


async def test_workers_are_forked_with_their_own_names_and_groups(tmp_path: Path) -> None:
    workers = LocalRuntime(tmp_path, Config().sides, gpus=[])
    try:
        await asyncio.gather(
            workers.start("rollout-0", "rollout", 0), workers.start("trainer-0", "trainer", 0)
        )
        (server,) = servers()
        found = workers_of(server.pid)
        assert set(found) == {"rollout-0", "trainer-0"}
        assert server.num_threads() == 1, "a fork would lose other threads"
        for name, process in found.items():
            assert process.environ() == server.environ(), "exec would have shown others"
            assert os.getpgid(process.pid) == process.pid
            assert any("libtorch" in m.path for m in process.memory_maps())
            assert os.readlink(f"/proc/{process.pid}/fd/1") == str(tmp_path / f"{name}.log")
    finally:
        await workers.close()
    assert not servers()


async def test_a_worker_that_ended_is_no_zombie_once_it_was_reported(tmp_path: Path) -> None:
    workers = runtime(tmp_path)
    try:
        peer = await workers.start("rollout-0", "rollout", 0)
        pid = workers_of()["rollout-0"].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="worker rollout-0 was killed by SIGKILL"):
            await peer.call("listen")
        await until_gone([pid])
        again = await workers.start("rollout-0", "rollout", 0)
        await again.call("ping")
        await workers.end(again)
        assert not workers_of()
        assert len(servers()) == 1
    finally:
        await workers.close()


async def test_a_server_that_is_killed_takes_its_workers_along_and_the_next_start_has_another(
    tmp_path: Path,
) -> None:
    workers = runtime(tmp_path)
    try:
        peer = await workers.start("rollout-0", "rollout", 0)
        (server,) = servers()
        pid = workers_of()["rollout-0"].pid
        server.kill()
        await until_gone([pid])
        why = "rollout-0 ended with its fork server, which was killed by SIGKILL; its log"
        with pytest.raises(WorkerError, match=why):
            await peer.call("listen")
        again = await workers.start("rollout-0", "rollout", 0)
        await again.call("ping")
        assert [s.pid for s in servers()] != [server.pid]
    finally:
        await workers.close()
    assert not servers() and not workers_of()


def test_a_server_that_dies_or_hangs_while_a_worker_waits_for_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = local.ForkServer
    number = signal.SIGKILL

    def signalled(*arguments: Any) -> ForkServer:
        server = start(*arguments)
        server._process.send_signal(number)  # before it is asked for a worker
        return server

    monkeypatch.setattr(local, "ForkServer", signalled)

    async def main() -> None:
        nonlocal number
        workers = runtime(tmp_path)
        try:
            with pytest.raises(WorkerError, match="rollout-0 did not start: the fork server"):
                await workers.start("rollout-0", "rollout", 0)
            monkeypatch.setattr(local, "START_DEADLINE_S", 1.0)
            number = signal.SIGSTOP
            with pytest.raises(WorkerError, match="did not answer within 1 s"):
                await workers.start("rollout-0", "rollout", 0)
        finally:
            await workers.close()
        assert not servers() and not workers_of()

    asyncio.run(main())


NO_FORK = """
import os
forked, fork = [], os.fork
def once():
    if forked:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    forked.append(1)
    return fork()
if "fork_server" in " ".join(__import__("sys").orig_argv):
    os.fork = once
"""


async def test_a_fork_that_the_system_refuses_fails_one_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_FORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    workers = runtime(tmp_path)
    try:
        first = await workers.start("rollout-0", "rollout", 0)
        with pytest.raises(WorkerError) as caught:
            await workers.start("rollout-1", "rollout", 1)
        assert "rollout-1 did not start: the system refused a process" in str(caught.value)
        assert "Fix: look into " in str(caught.value)
        await first.call("ping")
    finally:
        await workers.close()


def test_a_driver_with_many_descriptors_starts_workers(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

    async def main() -> None:
        workers = runtime(tmp_path)
        try:
            await (await workers.start("rollout-0", "rollout", 0)).call("ping")
        finally:
            await workers.close()

    try:
        asyncio.run(main())
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_start_that_is_cancelled_as_its_worker_comes_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = runtime(tmp_path)
    hear = ForkServer._read_answer

    def cancelled(server: ForkServer) -> None:
        hear(server)
        starting.cancel()

    try:
        with monkeypatch.context() as patch:
            patch.setattr(ForkServer, "_read_answer", cancelled)
            starting = asyncio.create_task(workers.start("rollout-0", "rollout", 0))
            with pytest.raises(asyncio.CancelledError):
                await starting
        (server,) = servers()
        await until_async(lambda: not server.children())
    finally:
        await workers.close()


async def test_a_worker_that_ends_while_the_server_stands_still_has_its_cause(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GOODBYE_S", 1.0)
    workers = runtime(tmp_path)
    try:
        first, second = await asyncio.gather(
            *(workers.start(f"rollout-{i}", "rollout", i) for i in range(2))
        )
        (server,) = servers()
        server.send_signal(signal.SIGSTOP)
        workers_of()["rollout-0"].kill()
        with pytest.raises(WorkerError, match="worker rollout-0 was killed by SIGKILL"):
            await first.call("listen")
        await workers.end(second)
    finally:
        await workers.close()
    assert not [w for w in recwarn if "do not end" in str(w.message)]


async def test_a_start_that_is_cancelled_leaves_no_worker(tmp_path: Path) -> None:
    workers = runtime(tmp_path)
    try:
        fds = psutil.Process().num_fds()
        starting = asyncio.create_task(workers.start("rollout-0", "rollout", 0))
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        other = await workers.start("rollout-1", "rollout", 1)  # after the cancelled one
        await other.call("ping")
        (server,) = servers()
        await until_async(lambda: len(server.children()) <= 1)  # no zombie either
        await workers.end(other)
        # The socket of the server stays open.
        await until_async(lambda: psutil.Process().num_fds() <= fds + 1)
    finally:
        await workers.close()
    assert not servers()
