"""Messages between the pool and its workers: msgpack in frames."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import field

from millrace.codec import decoder, pack, sendable
from millrace.errors import RewardError
from millrace.process.channel import Frames, framed
from millrace.types import Floats, Message, Score, floats_of


class Job(msgspec.Struct, frozen=True):
    """A reward or a teacher in plain types, as a worker process gets it. It has no secret."""

    kind: Literal["function", "model", "judge", "teacher"]
    key: str
    """The section with the keys, such as reward, reward.judge or reward.mix.NAME.model."""
    num_workers: int
    room: int
    """Most completions that a worker of coroutines or of batches has at a time."""
    timeout_s: float
    start_s: float
    """Seconds that a worker may take to load."""
    spec: dict[str, Any]
    """The keys of the section, and the function."""
    memory_mb: int = 0
    """Megabytes of data that each process of a function may have. 0 sets no limit."""
    sandbox: bool = False
    """Whether a sandbox isolates the worker. It then runs each call in a child of its own."""

    @property
    def name(self) -> str:
        """The name in metrics: the part's name in a mix, or else the kind."""
        _, mixed, rest = self.key.partition("reward.mix.")
        return rest.partition(".")[0] if mixed else self.kind


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of the reward function: the completions of one prompt."""

    id: int
    prompt: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any]
    completions: list[str]
    messages: list[tuple[Message, ...]] = []
    """The conversation of each completion, by author. Empty if none has one."""
    completion_ids: list[list[int]] = []
    """The tokens of each completion, for a function that takes them."""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call: scores, or the reason and detail of a RewardError."""

    id: int
    scores: list[Score] = []
    reason: str = ""
    detail: str = ""
    figures: dict[str, float] = {}
    """Counts of the worker since its last reply, such as the tokens of a judge."""
    trace: str = ""
    """The traceback of the worker, if the function raised."""
    last: bool = False
    """Whether the worker must be replaced: it has no memory left."""
    log_probs: Floats = field(default_factory=floats_of)
    """In place of scores, a teacher's log p of each token after those before it, and 0 first."""


def refusal(call: Call, error: RewardError) -> Reply:
    """Return the reply to a call that has no score."""
    detail = sendable(str(error).removeprefix(f"{error.reason}: "))
    return Reply(call.id, reason=sendable(error.reason) or "exception", detail=detail)


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """A worker's first frame: the function is loaded, or the error of the load."""

    is_async: bool
    whole_group: bool = False
    """Whether the function gets all completions of a sample in one call."""
    error: str = ""
    in_batches: bool = False
    takes_tokens: bool = False
    """Whether the function takes the tokens of completions."""
    columns: list[str] = []
    """The columns of a row that the function cannot do without."""
    notes: list[str] = []
    """Lines on the function, for the user."""


calls_decoder = decoder(list[Call])
reply_decoder = decoder(Reply)
hello_decoder = decoder(Hello)


def frame(value: Any) -> bytes:
    """Return `value` as one frame. Raise TypeError for a value that msgpack cannot encode."""
    return framed(pack(value))


def calls_from(connection: socket.socket) -> Iterator[Call]:
    """Yield calls until the socket closes."""
    frames = Frames()
    while data := connection.recv(1 << 18):
        for payload in frames.feed(data):
            yield from calls_decoder.decode(payload)
