"""The worker process, which runs one reward for a RewardPool: a function, a model or a judge.

A synchronous function runs in the main thread, one call at a time. Each reply is sent before the
next call starts, so the pool knows that the first unanswered call is running. Coroutines run
together. A judge is one too. The pool never sends more of them than may run. A model scores calls
in batches, see `batches`.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.data.user_code import failure, remedy
from millrace.errors import ConfigError, MissingDependency, RewardError
from millrace.process.channel import Frames, payloads_of, write_all
from millrace.process.death import die_with, prctl
from millrace.rewards.functions import Function, load_function
from millrace.rewards.wire import (
    Call,
    Hello,
    Job,
    Reply,
    calls_decoder,
    calls_from,
    frame,
    refusal,
    reply_decoder,
)

if TYPE_CHECKING:
    from millrace.rewards.judge import Judge

_MOST_TRACE = 8000
"""Characters of a traceback."""
_MOST_REPLY = 1 << 20
"""Bytes of a reply."""
_STOP_SIGNALS: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Each stop signal with its handler in a new process."""
_forking = threading.local()
"""`mask` is the set of signals that this thread blocked before its fork."""


def main(fd: int, parent: int, job: Job) -> None:
    """Send Hello, then answer calls until the socket closes."""
    _ignore_stop_signals()
    if parent:  # A sandbox sees to it by itself.
        die_with(parent)
    if job.memory_mb:  # Data, not address space: numeric libraries reserve far more than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (job.memory_mb << 20, job.memory_mb << 20))
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    serve(connection, job)


def serve(connection: socket.socket, job: Job) -> None:
    """Load the reward, send Hello, and answer calls until the socket closes."""
    try:
        scorer = _load(job)
    except (ConfigError, MissingDependency) as error:
        # A function in a mix has the same key, in another section.
        text = str(error).replace("reward.function = ", f"{job.key}.function = ")
        connection.sendall(frame(Hello(is_async=False, error=text)))
        return
    if job.kind in ("model", "teacher"):
        from millrace.rewards.batches import serve_batches

        connection.sendall(frame(Hello(is_async=False, in_batches=True)))
        serve_batches(connection, scorer)
    elif job.sandbox:
        connection.sendall(frame(_hello(scorer)))
        _serve_in_children(connection, lambda call: answer(scorer, call, job))
    elif scorer.is_async:
        connection.sendall(frame(_hello(scorer)))
        asyncio.run(_serve_async(connection, scorer, job))
    else:
        connection.sendall(frame(_hello(scorer)))
        for call in calls_from(connection):
            connection.sendall(frame(answer(scorer, call, job)))


def _hello(scorer: Function | Judge) -> Hello:
    if not isinstance(scorer, Function):
        return Hello(scorer.is_async, scorer.whole_group)
    facts = scorer.takes_tokens, scorer.columns, scorer.notes
    return Hello(scorer.is_async, scorer.whole_group, "", False, *facts)


def _load(job: Job) -> Any:
    """Return what a job names: a function, a model, a teacher or a judge. Each import is late."""
    if job.kind == "model":
        from millrace.rewards.model import RewardModel

        return RewardModel.load(job.key, job.spec)
    if job.kind == "teacher":
        from millrace.rewards.model import TeacherModel

        return TeacherModel.load(job.key, job.spec)
    if job.kind == "judge":
        from millrace.rewards.judge import Judge

        return Judge.load(job.key, job.spec)
    return load_function(job.spec["function"], job.spec)


def _ignore_stop_signals() -> None:
    """Ignore the stop signals. The driver gets them too, and it needs scores until it stops.

    Processes that a reward function starts must still end at these signals. So the worker installs
    a handler: exec resets a handler, but not SIG_IGN. A forked child resets it itself.
    """
    for number in _STOP_SIGNALS:
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)  # no system call in foreign code fails with EINTR
    os.register_at_fork(
        before=_block_stop_signals,
        after_in_parent=_restore_mask,
        after_in_child=_restore_stop_signals,
    )


def _do_nothing(number: int, frame: object) -> None:
    return


def _block_stop_signals() -> None:
    """Block the stop signals until a new child has its own handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_stop_signals() -> None:
    """Install the usual handlers in a forked child, unless the reward function chose others."""
    for number, handler in _STOP_SIGNALS.items():
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, handler)
    _restore_mask()


def answer(function: Function, call: Call, job: Job) -> Reply:
    """Return the reply to one call. A coroutine runs in an event loop of its own."""
    if function.is_async:
        return asyncio.run(_scored_async(function, call, job))
    try:
        return Reply(call.id, function.run(call), figures=function.take_figures())
    except BaseException as error:  # noqa: BLE001 - the boundary to user code
        return _failed(call, error, job)


def _failed(call: Call, error: BaseException, job: Job) -> Reply:
    """Return the reply to a call whose function raised."""
    if isinstance(error, RewardError):
        return refusal(call, error)
    text = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
    trace = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text).strip()
    if isinstance(error, MemoryError):
        limit = f", with {job.key}.memory_mb = {job.memory_mb}" if job.memory_mb else ""
        detail = f"{failure(error)}{limit}; its worker is replaced"
        return Reply(call.id, reason="out_of_memory", detail=detail, trace=trace, last=True)
    detail = failure(error)
    if isinstance(error, ImportError):
        detail += f". It needs {remedy(job.spec.get('function', ''), error)}"
    return Reply(call.id, reason="exception", detail=detail, trace=trace)


async def _serve_async(connection: socket.socket, function: Function | Judge, job: Job) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks = set[asyncio.Task[None]]()

    async def reply(call: Call) -> None:
        writer.write(frame(await _answer_async(function, call, job)))

    async for payload in payloads_of(reader):
        for call in calls_decoder.decode(payload):
            task = asyncio.create_task(reply(call))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def _answer_async(function: Function | Judge, call: Call, job: Job) -> Reply:
    reply = await _scored_async(function, call, job)
    return msgspec.structs.replace(reply, figures=function.take_figures())


async def _scored_async(function: Function | Judge, call: Call, job: Job) -> Reply:
    deadline = asyncio.timeout(job.timeout_s)
    try:
        async with deadline:
            return Reply(call.id, await function.run_async(call))
    except BaseException as error:  # noqa: BLE001 - the boundary to user code
        if deadline.expired() and not isinstance(error, RewardError):
            detail = f"the call ran past {job.key}.timeout_s = {job.timeout_s:g}"
            return Reply(call.id, reason="timeout", detail=detail)
        return _failed(call, error, job)


def _serve_in_children(connection: socket.socket, answer: Callable[[Call], Reply]) -> None:
    """Answer calls in a sandbox, each in a child that ends with all that it started.

    A function may run the code of a model. So nothing that one call changes is there in the next
    one, and a call finds neither the socket of the worker nor another row. The child's answer is
    checked like that of a stranger. Process 1 is the sandbox's watcher.
    """
    if os.getppid() != 1 or socket.gethostname() != "sandbox":
        raise RuntimeError("a worker that ends all processes must be in a sandbox")
    prctl("PR_SET_DUMPABLE", 0)

    for call in calls_from(connection):
        connection.sendall(frame(_in_child(connection, call, answer)))


def _in_child(connection: socket.socket, call: Call, answer: Callable[[Call], Reply]) -> Reply:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            connection.close()
            write_all(theirs, frame(answer(call)))
        finally:
            os._exit(0)
    os.close(theirs)
    payload = _first_payload(ours)
    os.close(ours)
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all but this process and process 1
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        return _checked(call, payload, status)
    except RewardError as error:
        return refusal(call, error)


def _first_payload(fd: int) -> bytes | None:
    """Return the payload of the first frame, or None if there is none within the limit."""
    frames, left = Frames(), _MOST_REPLY
    while left > 0 and (data := os.read(fd, 65536)):
        left -= len(data)
        for payload in frames.feed(data):
            return payload
    return None


def _checked(call: Call, payload: bytes | None, status: int) -> Reply:
    """Return a child's reply. Raise RewardError if it is none."""
    if payload is None:
        ended = f"signal {-status}" if status < 0 else f"exit code {status}"
        raise RewardError("worker_died", f"the process of the call ended with {ended}, unanswered")
    try:
        reply = reply_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise RewardError(
            "garbled", f"the process of the call answered nonsense: {error}"
        ) from None
    finite = all(math.isfinite(score.value) for score in reply.scores)
    if not reply.reason and (len(reply.scores) != len(call.completions) or not finite):
        raise RewardError("garbled", "the process of the call forged its answer")
    return msgspec.structs.replace(reply, id=call.id, figures={}, last=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Job))
