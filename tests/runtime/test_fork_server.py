"""The process that forks workers: it may die, be late or be stopped, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from millrace.config import Config
from millrace.errors import WorkerError
from millrace.runtime import local
from millrace.runtime.local import LocalRuntime
from tests.workers import workers_of


def runtime(folder: Path) -> LocalRuntime:
    return LocalRuntime(folder, Config().sides, gpus=[])


def servers() -> list[psutil.Process]:
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "millrace.runtime.fork_server" in p.cmdline()]


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(10):
        while any(map(psutil.pid_exists, pids)):  # noqa: ASYNC110 - another process ends
            await asyncio.sleep(0.01)


def test_workers_are_forked_with_their_own_names_and_groups(tmp_path: Path) -> None:
    async def main() -> None:
        workers = runtime(tmp_path)
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

    asyncio.run(main())


def test_a_worker_that_ended_is_no_zombie_once_it_was_reported(tmp_path: Path) -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_server_that_is_killed_takes_its_workers_along_and_the_next_start_has_another(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        workers = runtime(tmp_path)
        try:
            peer = await workers.start("rollout-0", "rollout", 0)
            (server,) = servers()
            pid = workers_of()["rollout-0"].pid
            server.kill()
            await until_gone([pid])
            with pytest.raises(WorkerError, match="worker rollout-0 was killed by SIGKILL"):
                await peer.call("listen")
            again = await workers.start("rollout-0", "rollout", 0)
            await again.call("ping")
            assert [s.pid for s in servers()] != [server.pid]
        finally:
            await workers.close()
        assert not servers() and not workers_of()

    asyncio.run(main())


def test_a_server_that_dies_or_hangs_while_a_worker_waits_for_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        workers = runtime(tmp_path)
        try:
            starting = asyncio.create_task(workers.start("rollout-0", "rollout", 0))
            await asyncio.sleep(0)
            (server,) = servers()
            server.kill()
            with pytest.raises(WorkerError, match="rollout-0 did not start: the fork server"):
                await starting
            monkeypatch.setattr(local, "START_DEADLINE_S", 1.0)
            starting = asyncio.create_task(workers.start("rollout-0", "rollout", 0))
            await asyncio.sleep(0)
            (server,) = servers()
            server.send_signal(signal.SIGSTOP)
            with pytest.raises(WorkerError, match="did not answer within 1 s"):
                await starting
        finally:
            await workers.close()
        assert not servers() and not workers_of()

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_no_worker(tmp_path: Path) -> None:
    async def main() -> None:
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
            async with asyncio.timeout(10):
                while "rollout-0" in workers_of():  # noqa: ASYNC110 - another process ends
                    await asyncio.sleep(0.01)
            await workers.end(other)
            assert psutil.Process().num_fds() <= fds + 1, "the socket of the server"
        finally:
            await workers.close()
        assert not servers()

    asyncio.run(main())
