"""Batches of a reward model: responses that wait together are scored together.

A round takes what waits and cuts it into batches of similar length, the longest first, so that
little is padded. The next round comes after the last batch, so no response waits for ever. The
pool sends up to 32 batches ahead.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millrace.errors import RewardError
from millrace.rewards.functions import failure, to_score
from millrace.rewards.wire import Call, Frames, Reply, calls_decoder, frame, refusal

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

    def score(self, batch: Sequence[list[int]]) -> list[float]:
        """Return one number for each text. Raise RewardError, or the model's own error."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call, and the scores of its completions so far."""

    call: Call
    scores: dict[int, float] = field(default_factory=dict)
    answered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One completion of a call."""

    of: _Waiting
    at: int
    tokens: list[int]


def serve_batches(connection: socket.socket, scorer: Scorer) -> None:
    """Answer calls until the socket closes."""
    frames, waiting = Frames(), list[_Item]()
    while True:
        calls = _receive(connection, frames, wait=not waiting)
        if calls is None:
            return
        for call in calls:
            waiting += _encoded(connection, scorer, call)
        taken = whole_batches(len(waiting), scorer.batch_size)
        round_, waiting = waiting[:taken], waiting[taken:]
        for batch in plan([len(item.tokens) for item in round_], scorer.batch_size):
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


def _encoded(connection: socket.socket, scorer: Scorer, call: Call) -> Iterator[_Item]:
    """Yield the completions of a call as tokens. If one cannot be scored, refuse the call."""
    waiting = _Waiting(call)
    try:
        tokens = [scorer.encode(call, text) for text in call.completions]
    except RewardError as error:
        connection.sendall(frame(refusal(call, error)))
        return
    except Exception as error:  # noqa: BLE001 - the boundary to a model's own code
        connection.sendall(frame(Reply(call.id, reason="exception", detail=failure(error))))
        return
    yield from (_Item(waiting, at, ids) for at, ids in enumerate(tokens))


def _score(connection: socket.socket, scorer: Scorer, batch: Sequence[_Item]) -> None:
    """Score one batch, and answer every call that is complete with it or that fails."""
    batch = [item for item in batch if not item.of.answered]
    if not batch:
        return
    try:
        values = scorer.score([item.tokens for item in batch])
    except RewardError as error:
        _fail(connection, batch, error)
        return
    except Exception as error:  # noqa: BLE001 - the boundary to a model's own code
        _fail(connection, batch, RewardError("exception", failure(error)))
        return
    replies = bytearray()
    for item, value in zip(batch, values, strict=True):
        waiting = item.of
        waiting.scores[item.at] = value
        if len(waiting.scores) == len(waiting.call.completions):
            replies += frame(_reply(waiting))
    connection.sendall(replies)


def _reply(waiting: _Waiting) -> Reply:
    waiting.answered = True
    try:
        scores = [to_score(waiting.scores[at]) for at in range(len(waiting.scores))]
    except RewardError as error:
        return refusal(waiting.call, error)
    return Reply(waiting.call.id, scores)


def _fail(connection: socket.socket, batch: Sequence[_Item], error: RewardError) -> None:
    for item in batch:
        if not item.of.answered:
            item.of.answered = True
            connection.sendall(frame(refusal(item.of.call, error)))
