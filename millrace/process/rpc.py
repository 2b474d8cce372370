"""Calls to a worker: typed, batched, with a deadline and a named owner.

Sockets and Ray carry the same frames. All calls of one turn of the event loop travel as one frame,
and so do the replies. A step's 256 requests therefore cost a few messages. Arguments and results
are the types of types.py and ports.py as msgpack. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from millrace import codec, errors
from millrace.errors import DeadlineError, MillraceError, NoAnswer, SyncError, WorkerError
from millrace.waits.answer import ProcessStatus
from millrace.waits.registry import waiting

CALL, CANCEL = 0, 1
OK, FAILED = 0, 1

_DEATH_REPORT_S = 10.0
"""How long to wait, after a failed call, for a worker to be reported dead.

A killed process first frees its memory, and only then is its death reported.
"""
_SHARE = 1 / 20
"""The largest share of a call's deadline that this wait may take.

A sync that breaks off waits twice. It may break off three times in a third of the deadline.
"""
_POLL_S = 0.01


class Message(msgspec.Struct, array_like=True):
    """One call or cancellation (driver to worker), or one reply (worker to driver)."""

    id: int
    kind: int
    body: msgspec.Raw = msgspec.Raw(b"\xc0")
    method: str = ""


class Failure(msgspec.Struct, array_like=True):
    """An exception as data."""

    type: str
    text: str
    trace: str = ""


_messages = msgspec.msgpack.Decoder(list[Message])


class Outbox:
    """Collect messages and send them as one frame at the end of the event loop's turn."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._messages: list[Message] = []

    def post(self, message: Message) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        self._send(msgspec.msgpack.encode(messages))


def read_frame(frame: bytes) -> list[Message]:
    return _messages.decode(frame)


@dataclass(slots=True)
class _Pending:
    """A call that has no reply yet."""

    future: asyncio.Future[Any]
    method: str
    result: Any
    limit_s: float
    end: float


class Peer:
    """The driver's side of one worker."""

    def __init__(self, name: str, send: Callable[[bytes], None], *, deadline_s: float) -> None:
        self.name = name
        self.death: str | None = None
        """The reason why the worker is dead, or None while it lives."""
        self.on_death: Callable[[str], object] = lambda reason: None
        """Called once, with the reason."""
        self.on_call: Callable[[], None] = lambda: None
        """Called when a call begins."""
        self.beats = 0
        """Signs of life so far: frames and heartbeats."""
        self._outbox = Outbox(send)
        self.deadline_s = deadline_s
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self._watch: asyncio.TimerHandle | None = None

    async def call(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        result: Any = None,
        *,
        deadline_s: float | None = None,
    ) -> Any:
        """Call `method` and return its value as type `result`.

        `method` is a dotted path from the worker's root object. Raise WorkerError if the worker is
        dead, and DeadlineError after `deadline_s` seconds without progress. An error type of
        millrace keeps its type. Any other exception arrives as a WorkerError with its traceback.
        """
        if self.death is not None:
            raise WorkerError(self.death)
        self.on_call()
        body = msgspec.Raw(codec.pack(args))
        loop = asyncio.get_running_loop()
        self._next_id += 1
        call_id, future = self._next_id, loop.create_future()
        limit_s = deadline_s or self.deadline_s
        end = loop.time() + limit_s
        self._pending[call_id] = _Pending(future, method, result, limit_s, end)
        self._outbox.post(Message(call_id, CALL, body, method))
        if self._watch is None:
            self._watch = loop.call_later(1.0, self._expire)
        try:
            with waiting(self.name, method):
                return await future
        except (asyncio.CancelledError, DeadlineError):
            # After a DeadlineError of the worker itself, the worker ignores this message.
            if self.death is None:
                self._outbox.post(Message(call_id, CANCEL))
            raise
        finally:
            self._pending.pop(call_id, None)

    def progressed(self, method: str) -> None:
        """Restart the deadlines of all calls of `method`, because the worker makes progress."""
        now = asyncio.get_running_loop().time()
        for pending in self._pending.values():
            if pending.method == method:
                pending.end = now + pending.limit_s

    def is_in(self, *methods: str) -> bool:
        """Return whether the worker has not answered a call of one of `methods` yet."""
        return any(pending.method in methods for pending in self._pending.values())

    def beat(self) -> None:
        """Note a sign of life."""
        self.beats += 1

    def receive(self, frame: bytes) -> None:
        """Resolve the calls whose replies are in `frame`."""
        self.beat()
        for reply in read_frame(frame):
            pending = self._pending.get(reply.id)
            if pending is None or pending.future.done():
                continue  # the call was cancelled or has expired
            future, method, result = pending.future, pending.method, pending.result
            if reply.kind == FAILED:
                future.set_exception(
                    self._error(method, msgspec.msgpack.decode(reply.body, type=Failure))
                )
                continue
            try:
                future.set_result(self._decode(result, reply.body))
            except msgspec.DecodeError as error:
                future.set_exception(
                    WorkerError(
                        f"{self.name}: {method} returned a value that is not {result}: {error}"
                    )
                )

    def mark_dead(self, reason: str) -> None:
        """Record that the worker is dead. Pending and later calls fail with `reason`."""
        if self.death is not None:
            return
        self.death = reason
        first, newline, rest = reason.partition("\n")
        for pending in self._pending.values():
            if not pending.future.done():
                text = f"{first} (while it served {pending.method}){newline}{rest}"
                pending.future.set_exception(WorkerError(text))
        self.on_death(reason)

    def _decode(self, result: Any, body: msgspec.Raw) -> Any:
        if result is None:
            return None
        return codec.decoder(result).decode(body)

    def _error(self, method: str, failure: Failure) -> Exception:
        kind = vars(errors).get(failure.type)
        if (
            isinstance(kind, type)
            and issubclass(kind, MillraceError)
            and kind is not errors.RewardError
        ):
            return kind(f"{self.name}: {failure.text}")
        return WorkerError(
            f"{self.name}: {method} raised {failure.type}: {failure.text}\n{failure.trace}".rstrip()
        )

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for pending in list(self._pending.values()):
            if now > pending.end and not pending.future.done():
                text = f"{self.name} did not answer {pending.method} in time"
                error = NoAnswer(f"{text} (trainer.wait_deadline_s)")
                error.worker = self.name
                pending.future.set_exception(error)
        self._watch = loop.call_later(1.0, self._expire) if self._pending else None


async def all_of(
    peers: Sequence[Peer], method: str, args: tuple[object, ...] = (), result: object = None
) -> list[Any]:
    """Call a method on all peers at once. The first failure ends the call."""
    peers = [*peers]  # the caller's list may get others meanwhile
    return await first_error(peers, [p.call(method, args, result) for p in peers])


async def first_error(
    peers: Sequence[Peer], calls: Sequence[Coroutine[Any, Any, Any]]
) -> list[Any]:
    """Return the results of calls on `peers`. The first failure ends all calls.

    A dead worker breaks the collectives of other workers, which then fail too. In that case the
    dead worker is the error shown.
    """
    tasks: list[asyncio.Task[Any]] = []
    try:
        if len(calls) == 1:  # Without a task, the call is sent a turn of the loop earlier.
            return [await calls[0]]
        tasks = [asyncio.ensure_future(call) for call in calls]
        return await asyncio.gather(*tasks)
    except Exception as error:
        if isinstance(error, WorkerError | SyncError):
            await wait_for_death(peers)
        if deaths := [p.death for p in peers if p.death]:
            raise WorkerError(deaths[0]) from None
        raise
    finally:
        for task in tasks:
            task.cancel()


async def wait_for_death(peers: Sequence[Peer]) -> None:
    """Wait until one of the peers is reported dead, at most _DEATH_REPORT_S seconds."""
    clock = asyncio.get_running_loop().time
    end = clock() + min([_DEATH_REPORT_S, *(_SHARE * p.deadline_s for p in peers)])
    while not any(p.death for p in peers) and clock() < end:  # noqa: ASYNC110 - a peer has no event
        await asyncio.sleep(_POLL_S)


class Limit(NamedTuple):
    """The most replicas that find devices now, with those that run."""

    most: int | None
    """None if nothing limits them."""
    why: str = ""
    more: str = ""
    """What makes room for more, such as "another node, or "."""


class Runtime(Protocol):
    """Start worker processes on one machine or on a cluster."""

    async def start(self, name: str, role: str, index: int) -> Peer:
        """Start a worker of `role` ("trainer" or "rollout"). Return its peer once it answers."""
        ...

    async def end(self, peer: Peer) -> None:
        """End one worker at once, with all processes that it started, also if it stands still."""
        ...

    def release(self, replica: int) -> None:
        """Give back the devices that a replica has taken. Its worker has ended for good."""
        ...

    async def limit(self) -> Limit:
        """Return how many replicas find devices now, with those that run."""
        ...

    def answers(self) -> list[ProcessStatus]:
        """Return who waits in workers that no socket of this machine reaches. Any thread may ask."""
        ...

    async def close(self) -> None:
        """End every worker. When this returns, no process of a worker runs."""
        ...
