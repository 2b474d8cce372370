"""Batches of a reward model: what waits together is scored together, and each call is answered."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from millrace.codec import pack
from millrace.errors import RewardError
from millrace.process.channel import Frames
from millrace.rewards.batches import plan, serve_batches, whole_batches
from millrace.rewards.wire import Call, Reply, frame, reply_decoder
from tests.waiting import HANG_S


@given(st.lists(st.integers(0, 50)), st.integers(1, 9))
def test_a_plan_has_each_text_once_and_the_longest_first(lengths: list[int], size: int) -> None:
    batches = plan(lengths, size)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(lengths, reverse=True)
    assert all(len(batch) == size for batch in batches[:-1])


@given(st.integers(0, 100), st.integers(1, 9))
def test_a_round_takes_whole_batches_or_all_that_waits(count: int, size: int) -> None:
    taken = whole_batches(count, size)
    assert taken == count if count < size else taken % size == 0 and count - taken < size


@dataclass
class Lengths:
    """A scorer whose score is the length of a text, and the batches that it saw."""

    batch_size: int = 4
    seen: list[list[int]] = field(default_factory=list)

    def encode(self, call: Call, completion: str) -> list[int]:
        if completion == "refuse":
            raise RewardError("too_long", "the text")
        return [0] * len(completion)

    def score(self, batch: Sequence[list[int]]) -> list[float]:
        self.seen.append([len(tokens) for tokens in batch])
        if [0] * 7 in batch:
            raise ValueError("seven")
        return [float("nan") if len(tokens) == 5 else float(len(tokens)) for tokens in batch]


def answers(scorer: Lengths, *texts: str) -> dict[int, Reply]:
    """Send all calls in one frame. Return the replies by the call's number, from 0."""
    ours, theirs = socket.socketpair()
    server = threading.Thread(target=serve_batches, args=(theirs, scorer))
    server.start()
    asked = [Call(i, "p", "d", None, {}, {}, [text]) for i, text in enumerate(texts)]
    ours.sendall(frame(asked))
    assert len(pack(asked)) < 1 << 16  # one read
    frames, replies = Frames(), dict[int, Reply]()
    while len(replies) < len(texts):
        for payload in frames.feed(ours.recv(1 << 16)):
            reply = reply_decoder.decode(payload)
            assert reply.id not in replies
            replies[reply.id] = reply
    ours.close()
    server.join(HANG_S)
    assert not server.is_alive()
    theirs.close()
    return replies


def test_calls_that_wait_together_share_batches_of_similar_lengths() -> None:
    scorer = Lengths()
    replies = answers(scorer, *("x" * n for n in (1, 9, 2, 8, 3, 10, 4, 11, 6)))
    assert [replies[i].scores[0].value for i in range(9)] == [1, 9, 2, 8, 3, 10, 4, 11, 6]
    assert scorer.seen == [[11, 10, 9, 8], [4, 3, 2, 1], [6]]


def test_a_failure_is_the_failure_of_its_own_batch() -> None:
    replies = answers(Lengths(batch_size=2), "x", "x" * 5, "x" * 8, "x" * 7, "x" * 2, "refuse")
    reasons = ["", "not_finite", "exception", "exception", "", "too_long"]
    assert [replies[i].reason for i in range(6)] == reasons
    assert [replies[i].scores[0].value for i in (0, 4)] == [1, 2]
    assert "ValueError: seven" in replies[3].detail
