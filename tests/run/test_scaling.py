"""The scaler: rubbish among its requests, commands at once, limits, and devices that come and go."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from millrace.cli import scale as command
from millrace.errors import ConfigError, MillraceError, NoDevices
from millrace.process.files import replace_file
from millrace.process.rpc import Limit
from millrace.replicas import scaling
from millrace.replicas.roster import ReplicaState, Roster
from millrace.replicas.scaling import ANSWER, REQUEST, Reply, Request, Scaler
from millrace.simulate.clock import VirtualLoop
from millrace.waits.wait_server import FOLDER


class Machine:
    """A keeper and a starter whose workers start at once, in `start_s`, or not at all."""

    def __init__(self, replicas: int, most: int | None = None, *, fixed: str = "") -> None:
        self.roster, self.starter = Roster(replicas, max_restarts=3), self
        self.room, self.start_s, self.fails = most, 0.0, 0
        self.started: list[float] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.notes: list[str] = []
        how = {"most": replicas, "fixed": fixed, "note": self.notes.append}
        self.scaler = Scaler(cast("Any", self), **cast("Any", how))

    async def limit(self) -> Limit:
        return Limit(self.room, f"room for {self.room}", "a node, or ")

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.add(asyncio.create_task(work, name=name))

    async def join(self, replica: int) -> None:
        self.started.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.start_s)
        if self.fails:
            self.fails -= 1
            raise NoDevices("taken meanwhile")
        self.roster.proven(replica, self.roster.join(replica))

    async def leave(self, replica: int) -> None:
        self.roster.leave(replica)


def virtually(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())


def ask(folder: Path, name: str, count: int) -> Path:
    replace_file(folder / f"{name}{REQUEST}", msgspec.json.encode(Request(name, count)))
    return folder / f"{name}{ANSWER}"


def answer(file: Path) -> Reply:
    return msgspec.json.decode(file.read_bytes(), type=Reply)


def test_rubbish_among_the_requests_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    """A pipe without a writer would stop the driver, and a folder cannot be removed as a file."""
    for name, content in {
        "text": b"rollout=2",
        "list": b"[2]",
        "other": b'{"id": "a", "rollout": "two"}',
        "float": b'{"id": "a", "rollout": 1e300}',
        "huge": b" " * 10_000_000,
        "bytes": b"\xff\xfe",
    }.items():
        (tmp_path / f"{name}{REQUEST}").write_bytes(content)
    os.mkfifo(tmp_path / f"pipe{REQUEST}")
    (tmp_path / f"folder{REQUEST}").mkdir()
    (tmp_path / f"link{REQUEST}").symlink_to("/dev/zero")

    async def main() -> None:
        machine = Machine(1)
        serve = asyncio.create_task(machine.scaler.serve(tmp_path))
        await asyncio.sleep(5)
        good = ask(tmp_path, "good", 2)
        await asyncio.sleep(5)
        assert answer(good).after == 2 and len(machine.notes) == 10, machine.notes
        assert sum("is no request" in note for note in machine.notes) == 9
        assert not serve.done()
        serve.cancel()

    virtually(main)


def test_the_newest_of_several_commands_counts(tmp_path: Path) -> None:
    """A command for too many replicas can be taken back while they start."""

    async def main() -> None:
        machine = Machine(1)
        machine.start_s = 10.0
        serve = asyncio.create_task(machine.scaler.serve(tmp_path))
        many = ask(tmp_path, "many", 9999)
        await asyncio.sleep(25)
        few = ask(tmp_path, "few", 2)
        await asyncio.sleep(25)
        assert "a newer `millrace scale` asks for another number" in answer(many).error
        assert (answer(few).after, answer(few).error) == (2, "")
        assert machine.roster.members == [0, 1] and len(machine.started) == 3
        serve.cancel()

    virtually(main)


def test_an_answer_waits_no_longer_than_asked_although_the_replicas_change(tmp_path: Path) -> None:
    """The command gives up a while after its deadline, so a renewed wait would never answer it."""

    async def main() -> None:
        machine = Machine(2)
        machine.roster.lose(1, 0, "why")
        machine.roster.restarted(1)  # It waits for a sync that does not come.
        serve = asyncio.create_task(machine.scaler.serve(tmp_path))
        replace_file(
            tmp_path / f"wait{REQUEST}", msgspec.json.encode(Request("wait", 2, wait_s=30.0))
        )
        for _ in range(8):
            await asyncio.sleep(5)
            machine.roster.proven(0, 0)
            machine.roster.extend_waits()
            machine.roster.join(len(machine.roster))
        reply = answer(tmp_path / f"wait{ANSWER}")
        assert not reply.serving and not reply.error and 30 <= reply.seconds < 31
        serve.cancel()

    virtually(main)


def test_requests_are_served_in_the_order_of_their_times(tmp_path: Path) -> None:
    for age, name in enumerate("abc"):
        ask(tmp_path, name, 1)
        os.utime(tmp_path / f"{name}{REQUEST}", (1000 - age, 1000 - age))
    seen = set[str]()
    assert [file.stem for file in scaling.unread(tmp_path, seen)] == ["c", "b", "a"]
    assert not scaling.unread(tmp_path, seen)


@pytest.mark.parametrize(
    ("count", "most", "fixed", "why"),
    [
        (0, None, "", "a run needs a replica. Fix: rollout=1"),
        (-3, None, "", "a run needs a replica"),
        (3, 2, "", "room for 2. Fix: a node, or rollout=2 or less"),
        (3, 1, "", "room for 1. Fix: a node, or rollout=2 or less"),
        (1, None, "they share devices. Fix: others", "they share devices. Fix: others"),
    ],
)
def test_an_impossible_number_is_an_error_at_once(
    count: int, most: int | None, fixed: str, why: str
) -> None:
    async def main() -> None:
        machine = Machine(2, most, fixed=fixed)
        with pytest.raises(MillraceError, match=why):
            await machine.scaler.scale(count)
        assert machine.roster.live == [0, 1] and not machine.started

    virtually(main)


def test_a_run_that_has_lost_devices_may_shrink() -> None:
    async def main() -> None:
        machine = Machine(3, 1)
        machine.roster.lose(2, 0, "its node is gone")
        await machine.scaler.scale(2)
        assert machine.roster.members == [0, 1]

    virtually(main)


def test_replicas_follow_free_devices_up_to_the_number_of_the_last_command() -> None:
    async def main() -> None:
        machine = Machine(3, 3)
        roster, tasks = machine.roster, [asyncio.create_task(machine.scaler.follow())]
        roster.leave(2, "its node is gone")
        machine.room = 2
        await asyncio.sleep(60)
        assert roster.live == [0, 1] and not machine.started
        machine.room = 8
        await asyncio.sleep(10)
        assert roster.live == [0, 1, 2], "it is back, and the others of the 8 are not taken"
        await machine.scaler.scale(1)
        await asyncio.sleep(60)
        assert roster.live == [0]
        await machine.scaler.scale(3)
        while roster.state(2) is not ReplicaState.RETIRED:
            roster.lose(2, roster.incarnation(2), "a broken GPU")
            roster.state(2) is ReplicaState.LOST and roster.restarted(2)
        machine.started.clear()
        await asyncio.sleep(60)
        assert not machine.started, "a replica that is given up is not tried for ever"
        tasks[0].cancel()

    virtually(main)


def test_a_start_that_fails_is_tried_again_after_longer_and_longer_pauses() -> None:
    async def main() -> None:
        machine = Machine(2, 2)
        machine.fails = 4
        follow = asyncio.create_task(machine.scaler.follow())
        machine.roster.leave(1)
        await asyncio.sleep(200)
        assert machine.started == [5, 15, 35, 75, 155] and machine.roster.live == [0, 1]
        assert sum("no replica joined: taken meanwhile" in note for note in machine.notes) == 4
        follow.cancel()

    virtually(main)


# -- the command


def run_folder(path: Path, *told: bytes) -> Path:
    (path / FOLDER).mkdir()
    (path / ".millrace-run").touch()
    for k, content in enumerate(told):
        (path / FOLDER / f"{k}.json").write_bytes(content)
    return path


def about(pid: int, host: str = socket.gethostname()) -> bytes:
    return msgspec.json.encode({"name": "driver", "pid": pid, "host": host})


RUBBISH = (
    b"[1]",
    b"7",
    b'{"a": 1}',
    b"\xff",
    b'{"name": "driver"}',
    b'{"name": "driver", "pid": "x"}',
)


def test_rubbish_in_the_folder_of_the_run_is_no_driver(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, *RUBBISH)
    with pytest.raises(ConfigError, match="the run does not run"):
        command.running(folder)
    (folder / FOLDER / "driver.json").write_bytes(about(os.getpid()))
    assert command.running(folder)["pid"] == os.getpid()


@pytest.mark.parametrize("pid", [-1, 0, 2**22 + 1, 10**30])
def test_a_driver_that_has_ended_is_told(tmp_path: Path, pid: int) -> None:
    with pytest.raises(ConfigError, match="the run does not run"):
        command.running(run_folder(tmp_path, about(pid)))


def test_a_command_does_not_wait_for_a_driver_that_was_restarted(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, about(os.getpid()))
    driver = command.running(folder)
    (folder / FOLDER / "0.json").write_bytes(about(os.getpid() + 1))
    same = lambda: command.driver_of(folder) == driver  # noqa: E731
    with pytest.raises(MillraceError, match="has ended before it answered"):
        command.wait_for(folder / FOLDER / f"x{REQUEST}", 10_000.0, same)
