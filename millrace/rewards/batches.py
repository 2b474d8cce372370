"""Batches of a reward model: responses that wait together are scored together.

A round takes what waits and cuts it into batches of similar length, the longest first, so that
little is padded. The next round comes after the last batch, so no response waits for ever. The
pool sends up to 32 batches ahead.
"""

from __future__ import annotations

import select
import socket
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.data.user_code import failure
from millrace.errors import RewardError
from millrace.process.channel import Frames
from millrace.rewards.functions import to_score
from millrace.rewards.wire import Call, Reply, calls_decoder, frame, refusal
from millrace.types import Floats

_READ = 1 << 20


class Scorer(Protocol):
    """A model that scores texts as tokens."""

    @property
    def batch_size(self) -> int:
        """Return the most texts of one batch."""
        ...

    def encode(self, call: Call, completion: str) -> list[int]:
        """Return the tokens of the call's prompt and a completion. Raise RewardError."""
        ...

    def score(self, batch: Sequence[list[int]]) -> Sequence[float | Floats]:
        """Return one number for each text, or a teacher's log-probs of its tokens.

        Raise RewardError, or the model's own error.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """A call, and its completion as tokens."""

    call: Call
    tokens: list[int]


def serve_batches(connection: socket.socket, scorer: Scorer) -> None:
    """Answer calls until the socket closes."""
    frames, waiting = Frames(), list[_Text]()
    while True:
        calls = _receive(connection, frames, wait=not waiting)
        if calls is None:
            return
        for call in calls:
            waiting += _encoded(connection, scorer, call)
        taken = whole_batches(len(waiting), scorer.batch_size)
        round_, waiting = waiting[:taken], waiting[taken:]
        for batch in plan([len(text.tokens) for text in round_], scorer.batch_size):
            _score(connection, scorer, [round_[i] for i in batch])


def whole_batches(count: int, batch_size: int) -> int:
    """Return how many of `count` waiting responses the next round takes, the oldest first.

    The rest of a batch waits for company, unless it is all that there is.
    """
    return count if count < batch_size else count // batch_size * batch_size


def plan(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches of indices: the longest texts first, at most `batch_size` in each."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


def _receive(connection: socket.socket, frames: Frames, *, wait: bool) -> list[Call] | None:
    """Return the calls that have arrived, at least one if `wait`. None once the socket is closed.

    Reading ends when the socket is empty.
    """
    calls: list[Call] = []
    while (wait and not calls) or select.select([connection], [], [], 0)[0]:
        data = connection.recv(_READ)
        if not data:
            return None
        for payload in frames.feed(data):
            calls += calls_decoder.decode(payload)
    return calls


def _encoded(connection: socket.socket, scorer: Scorer, call: Call) -> list[_Text]:
    """Return the call's completion as tokens. If it cannot be scored, refuse the call."""
    (completion,) = call.completions
    try:
        return [_Text(call, scorer.encode(call, completion))]
    except Exception as error:  # noqa: BLE001 - the boundary to a model's own code
        connection.sendall(frame(_failed(call, error)))
        return []


def _score(connection: socket.socket, scorer: Scorer, batch: Sequence[_Text]) -> None:
    """Score one batch, and answer its calls."""
    try:
        values = scorer.score([text.tokens for text in batch])
        replies = [_reply(text.call, value) for text, value in zip(batch, values, strict=True)]
    except Exception as error:  # noqa: BLE001 - the boundary to a model's own code
        replies = [_failed(text.call, error) for text in batch]
    connection.sendall(b"".join(map(frame, replies)))


def _reply(call: Call, value: float | Floats) -> Reply:
    if isinstance(value, array):
        return Reply(call.id, log_probs=value)
    try:
        return Reply(call.id, [to_score(value)])
    except RewardError as error:
        return refusal(call, error)


def _failed(call: Call, error: Exception) -> Reply:
    if isinstance(error, RewardError):
        return refusal(call, error)
    return Reply(call.id, reason="exception", detail=failure(error))
