"""Calls over a real socket pair.

They are typed both ways and batched, and every failure arrives with a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from millrace.errors import DeadlineError, RewardError, SyncError, WorkerError
from millrace.ports import RolloutStats, StepReport, TrainBatch
from millrace.process.channel import framed, payloads_of, write_frame
from millrace.process.rpc import Peer, read_frame
from millrace.runtime.host import Host
from millrace.types import (
    Author,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Trajectory,
    floats_of,
    tokens_of,
)
from tests.waiting import HANG_S


@dataclass
class Engine:
    """The object that a worker serves in these tests."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[object] = field(default_factory=list)

    async def echo(self, value: Any, params: SamplingParams) -> tuple[Any, SamplingParams]:
        return value, params

    async def segments(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        self.calls.append(segments)
        return segments

    async def step(self, batch: TrainBatch) -> StepReport:
        self.calls.append(batch)
        return StepReport(len(batch.samples), {"a": 0.1}, {"b": 2.0})

    async def stats(self) -> RolloutStats:
        return RolloutStats(1, 2, 3.5, 4)

    async def number(self, value: int) -> int:
        await asyncio.sleep(0)
        return value

    async def text(self) -> str:
        return "no number"

    async def hang(self) -> None:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def stray(self) -> None:
        self._divide(0)

    def _divide(self, by: int) -> float:
        return 1 / by

    async def garbled(self) -> None:
        raise FileNotFoundError("caf\udce9")  # Python's form of a name that is not UTF-8

    async def refuse(self) -> None:
        raise SyncError("replica 0 holds other weights")

    async def unscored(self) -> None:
        raise RewardError("timeout", "too slow")

    async def unsendable(self) -> object:
        return object()


@dataclass
class Root:
    engine: Engine = field(default_factory=Engine)


@dataclass
class Wire:
    """Both ends of a connection, and all frames that passed."""

    peer: Peer
    root: Root
    sent: list[bytes] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def wire(deadline_s: float = HANG_S) -> AsyncIterator[Wire]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    far_reader, far_writer = await asyncio.open_connection(sock=theirs)

    def send(frame: bytes) -> None:
        w.sent.append(frame)
        writer.write(framed(frame))

    def reply(frame: bytes) -> None:
        far_writer.write(framed(frame))

    w = Wire(Peer("rollout-3", send, deadline_s=deadline_s), Root())

    async def driver() -> None:
        async for frame in payloads_of(reader):
            w.received.append(frame)
            w.peer.receive(frame)

    async def worker(group: asyncio.TaskGroup) -> None:
        host = Host(w.root, reply, group)
        async for frame in payloads_of(far_reader):
            host.receive(frame)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(driver())
            group.create_task(worker(group))

    task = asyncio.create_task(both())
    try:
        yield w
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        writer.close()
        far_writer.close()


def sample() -> Sample:
    policy = Segment(
        tokens_of([1, -2, 2**31 - 1]), version=3, log_probs=floats_of([-0.5, 0.0, -1e-8]), stop=None
    )
    tool = Segment(tokens_of([7]), Author.ENVIRONMENT)
    last = Segment(tokens_of([]), version=4, stop=Stop.INTERRUPTED)
    prompt = Prompt(
        5,
        tokens_of([9, 9]),
        "text ☃",
        "task",
        {"answer": [1, "2", None]},
        {"k": 1.5},
        {"column": True},
    )
    return Sample(
        prompt, (Trajectory.of((policy, tool, last), Score(0.5, {"format": 1.0})), Trajectory()), 2
    )


async def test_nouns_arrive_as_they_were_sent() -> None:
    async with wire() as w:
        segments = sample().trajectories[0].segments
        assert await w.peer.call("engine.segments", (segments,), tuple[Segment, ...]) == segments
        arrived = w.root.engine.calls[0][0]  # type: ignore[index]
        assert (
            isinstance(arrived, Segment)
            and arrived.tokens.typecode == "i"
            and arrived.log_probs.typecode == "f"
        )
        batch = TrainBatch((sample(),), 7)
        report = await w.peer.call("engine.step", (batch,), StepReport)
        assert report == StepReport(1, {"a": 0.1}, {"b": 2.0}) and w.root.engine.calls[1] == batch
        assert await w.peer.call("engine.stats", (), RolloutStats) == RolloutStats(1, 2, 3.5, 4)
        params = SamplingParams(
            5, 0.7, stop=("</answer>",), seed=2**62 + 1, offset=3, interruptible=False
        )
        assert (await w.peer.call("engine.echo", (None, params), tuple[Any, SamplingParams]))[
            1
        ] == params


async def test_calls_of_one_turn_travel_as_one_frame_and_so_do_their_replies() -> None:
    async with wire() as w:
        values = await asyncio.gather(
            *(w.peer.call("engine.number", (i,), int) for i in range(256))
        )
        assert values == list(range(256))
        assert [len(read_frame(f)) for f in w.sent] == [256]
        assert [len(read_frame(f)) for f in w.received] == [256]


async def test_an_error_arrives_with_its_type_and_the_line_that_raised_it() -> None:
    async with wire() as w:
        with pytest.raises(WorkerError) as caught:
            await w.peer.call("engine.stray")
        first, *rest = str(caught.value).splitlines()
        assert first == "rollout-3: engine.stray raised ZeroDivisionError: division by zero"
        assert "return 1 / by" in "\n".join(rest) and "test_rpc.py" in "\n".join(rest)
        assert await w.peer.call("engine.number", (1,), int) == 1, "the worker goes on"


async def test_an_error_whose_text_is_no_unicode_arrives_too() -> None:
    async with wire() as w:
        with pytest.raises(WorkerError, match=r"garbled raised FileNotFoundError: caf\\udce9"):
            await w.peer.call("engine.garbled")
        assert await w.peer.call("engine.number", (3,), int) == 3, "the worker lives"


async def test_millraces_own_errors_keep_their_type() -> None:
    async with wire() as w:
        with pytest.raises(SyncError, match=r"^rollout-3: replica 0 holds other weights$"):
            await w.peer.call("engine.refuse")
        with pytest.raises(
            WorkerError, match=r"engine\.unscored raised RewardError: timeout: too slow"
        ):
            await w.peer.call("engine.unscored")


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("engine.number", ("three",), "ValidationError"),
        ("engine.number", (), "ValidationError"),
        ("engine._divide", (1,), "engine._divide is private"),
        ("engine.nothing", (), "AttributeError"),
        ("engine.unsendable", (), "cannot encode object"),
    ],
)
async def test_a_call_that_cannot_be_served_fails_alone(
    method: str, args: tuple[object, ...], message: str
) -> None:
    async with wire() as w:
        with pytest.raises(WorkerError, match=message):
            await w.peer.call(method, args)
        assert await w.peer.call("engine.number", (1,), int) == 1


async def test_a_reply_of_another_type_fails_its_call_and_no_other() -> None:
    async with wire() as w:
        wrong, right = await asyncio.wait_for(
            asyncio.gather(
                w.peer.call("engine.text", (), int),
                w.peer.call("engine.number", (2,), int),
                return_exceptions=True,
            ),
            HANG_S,
        )
        assert isinstance(
            wrong, WorkerError
        ) and "rollout-3: engine.text returned a value that is not <class 'int'>" in str(wrong)
        assert right == 2


async def test_arguments_that_cannot_travel_leave_nothing_behind() -> None:
    async with wire() as w:
        with pytest.raises(TypeError, match="cannot encode"):
            await w.peer.call("engine.number", (object(),), int)
        assert not w.peer._pending and not w.sent


async def test_cancelling_a_call_frees_the_remote_task() -> None:
    async with wire() as w:
        call = asyncio.create_task(w.peer.call("engine.hang"))
        await w.peer.call("engine.number", (1,), int)
        assert not w.root.engine.cancelled.is_set()
        call.cancel()
        await asyncio.wait_for(w.root.engine.cancelled.wait(), HANG_S)
        assert call.cancelled() or call.done()


async def test_a_host_forgets_a_call_that_ended_and_one_that_is_cancelled_before_it_begins() -> (
    None
):
    async with asyncio.TaskGroup() as tasks:
        host = Host(Root(), lambda frame: peer.receive(frame), tasks)
        peer = Peer("rollout-0", host.receive, deadline_s=HANG_S)
        assert await peer.call("engine.number", (1,), int) == 1
        call = asyncio.create_task(peer.call("engine.hang"))
        await asyncio.sleep(0)
        call.cancel()  # The call and its cancellation travel in one frame.
        await asyncio.sleep(0.01)
        assert call.cancelled() and not host._tasks


@pytest.mark.parametrize("size, writes", [(10, 1), (2**20 - 1, 1), (2**20, 2)])
def test_a_short_frame_is_written_at_once_and_a_long_one_is_not_copied(
    size: int, writes: int
) -> None:
    written: list[bytes] = []

    class Writer:
        write = staticmethod(written.append)

    frame = bytes(size)
    write_frame(Writer(), frame)  # type: ignore[arg-type]
    assert len(written) == writes and b"".join(written) == framed(frame)
    assert (written[-1] is frame) == (writes == 2)


async def test_a_deadline_names_worker_and_method_and_frees_the_remote_task() -> None:
    async with wire() as w:
        with pytest.raises(DeadlineError, match=r"rollout-3 did not answer engine\.hang in time"):
            await w.peer.call("engine.hang", deadline_s=0.1)
        await asyncio.wait_for(w.root.engine.cancelled.wait(), HANG_S)


async def test_a_lost_worker_fails_pending_and_later_calls_with_its_name() -> None:
    async with wire() as w:
        calls = [asyncio.create_task(w.peer.call("engine.hang")) for _ in range(3)]
        await w.peer.call("engine.number", (1,), int)
        w.peer.mark_dead("worker rollout-3 was killed by SIGKILL")
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, WorkerError)
            assert (
                str(error) == "worker rollout-3 was killed by SIGKILL (while it served engine.hang)"
            )
        frames = len(w.sent)
        with pytest.raises(WorkerError, match=r"^worker rollout-3 was killed by SIGKILL$"):
            await w.peer.call("engine.number", (1,), int)
        assert len(w.sent) == frames
