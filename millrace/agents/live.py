"""One live episode at the endpoint: its draws, who waits for them, and what was delivered."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from millrace.agents.request import ChatRequest, ChatTurn, RequestError
from millrace.agents.wire import Asked, Drawn, Refusal, wrong
from millrace.errors import EpisodeError, LimitReached, SampleError
from millrace.ports import PolicySession
from millrace.types import Message, Tokens

LIMIT_CODES = {
    "context": "context_length_exceeded",
    "turns": "max_turns_reached",
    "tokens": "max_episode_tokens_reached",
}
"""The code of each limit of an episode."""

MOST_REFUSED = 100
"""Requests after a limit. A program that asks more often ignores the limit: its episode fails."""


class Talk(Protocol):
    """What the endpoint needs of a conversation."""

    async def chat(self, request: ChatRequest) -> ChatTurn: ...

    async def complete(
        self, tokens: Tokens, *, max_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> ChatTurn: ...

    def delivered(self, number: int) -> None: ...

    def undelivered(self, number: int) -> None: ...

    def count(self, request: ChatRequest) -> int:
        """Return the number of tokens that the policy would read. Nothing is drawn."""
        ...

    def encode(self, text: str) -> Tokens: ...

    def decode(self, tokens: Tokens) -> str: ...


@dataclass(slots=True, eq=False)
class Draw:
    """The turns of one request. Retries of the request share it."""

    asked: Asked
    nonce: str
    created: int
    turns: list[ChatTurn | None]
    task: asyncio.Task[None] = field(init=False)
    waiters: int = 0
    delivered: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class LiveEpisode:
    """The endpoint's side of one episode, from the issue of its key to the episode's end.

    After the end, `error` is what failed other than the policy, `limit` the first limit that the
    policy reached, and `reward` the reward that the program posted for the episode.
    """

    def __init__(
        self,
        talk: Talk,
        session: PolicySession,
        *,
        turn_deadline_s: float,
        retry_grace_s: float,
        max_in_flight: int,
    ) -> None:
        self.key = secrets.token_hex(16)
        self.talk = talk
        self.session = session
        self.error: BaseException | None = None
        self.on_error: Callable[[], None] | None = None
        """Called when `error` is set: the program should end."""
        self.limit: LimitReached | None = None
        self.reward: float | None = None
        self.over = False
        self.responses: dict[str, tuple[Message, ...]] = {}
        """The messages behind each id of /v1/responses, with the answer."""
        self._turn_deadline_s = turn_deadline_s
        self._retry_grace_s = retry_grace_s
        self._max_in_flight = max_in_flight
        self._draws: dict[bytes, list[Draw]] = {}
        self._numbers: dict[str, list[int]] = {}
        """The turns behind each response's nonce."""
        self._in_flight = 0
        self._refused = 0
        self._last = time.monotonic()

    def quiet_s(self) -> float:
        """Return the seconds since the last request or answer. 0 while a request waits."""
        return 0.0 if self._in_flight else time.monotonic() - self._last

    def join(self, digest: bytes, retry: bool, asked: Asked) -> Draw:
        """Return the draw that answers a request: a running or recorded one, or a new one.

        `digest` identifies the request's bytes. Call `leave` once afterwards.
        """
        self._open_for_requests()
        draw = self._shared(digest, retry)
        if draw is None:
            for name in asked.ignored:
                self.session.count(f"ignored/{name}")
            draw = self._start(asked)
            self._draws.setdefault(digest, []).append(draw)
        else:
            self.session.count("retries_coalesced")
        draw.waiters += 1
        self._in_flight += 1
        if draw.timer is not None:
            draw.timer.cancel()
            draw.timer = None
        return draw

    def _open_for_requests(self) -> None:
        if self.over:
            raise episode_over()
        if self.error is not None:
            raise Refusal(f"the episode has failed: {self.error}", code="episode_failed")
        if self._in_flight >= self._max_in_flight:
            raise Refusal(
                f"{self._in_flight} requests are in flight: an episode may have "
                f"{self._max_in_flight}. Fix: wait for an answer first.",
                code="too_many_requests",
            )

    def _shared(self, digest: bytes, retry: bool) -> Draw | None:
        """Return the draw of an equal request whose answer the client lacks, if there is one.

        An equal request is a new draw if every earlier client is served or still waits: an agent
        may want several samples. A client that says that it tries again gets an earlier draw.
        """
        equal = [draw for draw in self._draws.get(digest, ()) if not draw.failed]
        for draw in equal:
            if not draw.waiters and not draw.delivered:
                return draw
        if not retry or not equal:
            return None
        return next((draw for draw in equal if not draw.task.done()), equal[-1])

    def _start(self, asked: Asked) -> Draw:
        draw = Draw(asked, secrets.token_hex(12), int(time.time()), [None] * asked.n)
        draw.task = asyncio.get_running_loop().create_task(
            self._drawn(draw), name=f"{self.session.name}: {draw.nonce}"
        )
        return draw

    async def _drawn(self, draw: Draw) -> None:
        """Draw the turns of a request. Raises EpisodeError if they miss their deadline."""
        try:
            async with asyncio.timeout(self._turn_deadline_s):
                if len(draw.turns) == 1:
                    await self._turn(draw, 0)
                else:
                    async with asyncio.TaskGroup() as tasks:
                        for k in range(len(draw.turns)):
                            tasks.create_task(self._turn(draw, k), name=f"{draw.nonce}/{k}")
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except TimeoutError:
            raise EpisodeError(
                "turn_deadline",
                f"a turn of episode {self.session.name} took over {self._turn_deadline_s:g} s. "
                "Fix: raise agents.turn_deadline_s, or use fewer concurrent episodes",
            ) from None

    async def _turn(self, draw: Draw, index: int) -> None:
        asked = draw.asked
        if asked.prompt is None:
            turn = await self.talk.chat(asked.request)
        else:
            prompt = asked.prompt
            tokens = self.talk.encode(prompt) if isinstance(prompt, str) else prompt
            turn = await self.talk.complete(
                tokens, max_tokens=asked.request.max_tokens, stop=asked.request.stop
            )
        draw.turns[index] = turn

    def result(self, draw: Draw) -> Drawn:
        """Return the turns of a finished draw. Raises Refusal if it failed."""
        if draw.task.cancelled():
            raise episode_over()
        if (error := draw.task.exception()) is not None:
            raise self._refusal(error)
        turns = tuple(turn for turn in draw.turns if turn is not None)
        self._numbers[draw.nonce] = [turn.number for turn in turns]
        if draw.asked.continued:
            self.responses[f"resp_{draw.nonce}"] = (*draw.asked.continued, turns[0].message)
        # A record of a long conversation is small: a retry brings the messages again.
        request = replace(draw.asked.request, messages=())
        draw.asked = replace(draw.asked, request=request, continued=())
        return Drawn(
            draw.nonce,
            draw.created,
            draw.asked.request.model,
            turns,
            self._prompt,
            self.talk.decode,
        )

    def _prompt(self, turn: ChatTurn) -> Tokens:
        whole = self.session.tokens(turn.number)
        return whole[: len(whole) - len(turn.tokens)]

    def _refusal(self, error: BaseException) -> Refusal:
        """Return what a client reads about a failed draw. Keep the error for the episode."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, RequestError):
            return Refusal(str(error), code="invalid_request")
        if isinstance(error, LimitReached):
            self.limit = self.limit or error
            self._refused += 1
            if self._refused > MOST_REFUSED:
                text = f"the program made {MOST_REFUSED} requests after the limit: {error}"
                self._fail(EpisodeError("limit_ignored", text))
            return Refusal(str(error), code=LIMIT_CODES[error.limit])
        self._fail(error)
        if isinstance(error, SampleError):
            return Refusal(str(error), code="episode_failed")
        return Refusal(
            f"millrace failed: {type(error).__name__}", status=500, code="internal_error"
        )

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        if self.on_error is not None:
            self.on_error()

    def leave(self, draw: Draw, delivered: bool) -> None:
        """Note that a client got the answer of a draw, or that it is gone without it."""
        draw.waiters -= 1
        self._in_flight -= 1
        self._last = time.monotonic()
        if delivered:
            self._deliver(draw)
        elif not draw.waiters and not draw.delivered:
            self.session.count("clients_gone")
            if not draw.task.done():
                loop = asyncio.get_running_loop()
                draw.timer = loop.call_later(self._retry_grace_s, partial(draw.task.cancel))

    def _deliver(self, draw: Draw) -> None:
        if draw.delivered or not draw.task.done() or draw.failed:
            return
        draw.delivered = True
        for turn in draw.turns:
            if turn is not None:
                self.talk.delivered(turn.number)

    def post_reward(self, body: Mapping[str, Any]) -> None:
        """Record a reward of the episode, or of a turn by its number or its response's id."""
        value, turn = body.get("reward"), body.get("turn")
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not abs(value) <= sys.float_info.max
        ):
            raise wrong("reward", value, "must be a finite number")
        if self.over:
            raise episode_over()
        if turn is None:
            if self.reward is not None:
                self.session.count("rewards_replaced")
            self.reward = float(value)
            return
        numbers = [number for found in self._numbers.values() for number in found]
        if isinstance(turn, str):
            numbers = self._numbers.get(turn.rpartition("-")[2].rpartition("_")[2], [])
            turn = numbers[0] if len(numbers) == 1 else turn
        if turn not in numbers or isinstance(turn, bool):
            raise wrong("turn", turn, "must be the id of an answer with one choice, or its number")
        self.session.reward(float(value), turn)

    async def close(self) -> None:
        """End the draws that still run. A turn that no client received is then dead."""
        self.over = True
        draws = [draw for equal in self._draws.values() for draw in equal]
        for draw in draws:
            if draw.timer is not None:
                draw.timer.cancel()
            draw.task.cancel()
        await asyncio.gather(*(draw.task for draw in draws), return_exceptions=True)
        for draw in draws:
            for turn in draw.turns:
                if turn is not None and not draw.delivered:
                    self.talk.undelivered(turn.number)
        for draw in draws:
            if draw.failed and not draw.task.cancelled():
                self._refusal(draw.task.exception() or RuntimeError())
        self._draws.clear()


def episode_over() -> Refusal:
    """Return the refusal of every request after the end of an episode."""
    return Refusal("the episode is over", code="episode_over")
