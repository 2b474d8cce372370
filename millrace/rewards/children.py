"""Calls in a sandbox: each runs in a child of the worker, which ends with all that it started.

A function may run the code of a model. So nothing that one call changes is there in the next one,
and a call finds neither the socket of the worker nor another row. The child's answer is checked
like that of a stranger.
"""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from millrace.errors import RewardError
from millrace.process.channel import Frames, write_all
from millrace.process.death import prctl
from millrace.rewards.wire import Call, Reply, calls_from, frame, refusal, reply_decoder

_MOST = 1 << 20
"""Bytes of a reply."""


def serve_in_children(connection: socket.socket, answer: Callable[[Call], Reply]) -> None:
    """Answer calls until the socket closes. Process 1 is the sandbox's watcher."""
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
    payload = _read(ours)
    os.close(ours)
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all but this process and process 1
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        return _checked(call, payload, status)
    except RewardError as error:
        return refusal(call, error)


def _read(fd: int) -> bytes | None:
    """Return the payload of the first frame, or None if there is none within the limit."""
    frames, left = Frames(), _MOST
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
