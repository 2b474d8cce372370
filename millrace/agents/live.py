"""One live episode at the endpoint: its draws, who waits for them, and what was delivered."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import msgspec

from millrace.agents.conversation import Conversation
from millrace.agents.request import ChatTurn, RequestError, wrong
from millrace.agents.wire import Asked, Body, Drawn, converted
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

_MOST = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The settings and limits of the endpoint."""

    model: str
    """The policy's name at /v1/models."""
    max_model_len: int | None
    temperature: float
    """The run's own. A client cannot change it."""
    strict: bool
    turn_deadline_s: float
    retry_grace_s: float
    max_body: int = 32 * 2**20
    max_depth: int = 64
    max_in_flight: int = 64
    body_deadline_s: float = 30.0
    keepalive_s: float = 3.0


@dataclass(slots=True, eq=False)
class Draw(Drawn):
    """The turns of one request while they are drawn. Retries of the request share it."""

    task: asyncio.Task[None] = field(init=False)
    waiters: int = 0
    delivered: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _Reward(msgspec.Struct):
    reward: Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)]
    turn: int | str | None = None


class LiveEpisode:
    """The endpoint's side of one episode, from the issue of its key to the episode's end.

    After the end, `error` is what failed other than the policy, `limit` the first limit that the
    policy reached, and `reward` the reward that the program posted for the episode.
    """

    def __init__(self, talk: Conversation, session: PolicySession, options: ServiceOptions) -> None:
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
        self._options = options
        self._draws: dict[bytes, list[Draw]] = {}
        self._numbers: dict[str, list[int]] = {}
        """The turns behind each response's nonce."""
        self._in_flight = 0
        self._refused = 0
        self._last = asyncio.get_running_loop().time()

    def quiet_s(self) -> float:
        """Return the seconds since the last request or answer. 0 while a request waits."""
        now = asyncio.get_running_loop().time()
        return 0.0 if self._in_flight else now - self._last

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
        draw.stop_timer()
        return draw

    def _open_for_requests(self) -> None:
        if self.over:
            raise episode_over()
        if self.error is not None:
            raise RequestError(f"the episode has failed: {self.error}", code="episode_failed")
        if self._in_flight >= (most := self._options.max_in_flight):
            raise RequestError(
                f"{self._in_flight} requests are in flight: an episode may have {most}. "
                "Fix: wait for an answer first.",
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
        now, text = int(time.time()), self.talk.decode
        draw = Draw(asked, secrets.token_hex(12), now, self._prompt, text)
        draw.task = asyncio.get_running_loop().create_task(
            self._drawn(draw), name=f"{self.session.name}: {draw.nonce}"
        )
        return draw

    async def _drawn(self, draw: Draw) -> None:
        """Draw the turns of a request. Raises EpisodeError if they miss their deadline."""
        seconds = self._options.turn_deadline_s
        try:
            async with asyncio.timeout(seconds):
                if draw.asked.n == 1:
                    await self._turn(draw)
                    return
                async with asyncio.TaskGroup() as tasks:
                    for k in range(draw.asked.n):
                        tasks.create_task(self._turn(draw), name=f"{draw.nonce}/{k}")
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except TimeoutError:
            raise EpisodeError(
                "turn_deadline",
                f"a turn of episode {self.session.name} took over {seconds:g} s. "
                "Fix: raise agents.turn_deadline_s, or use fewer concurrent episodes",
            ) from None

    async def _turn(self, draw: Draw) -> None:
        asked, prompt = draw.asked, draw.asked.prompt
        if prompt is None:
            turn = await self.talk.chat(asked)
        else:
            tokens = self.talk.encode(prompt) if isinstance(prompt, str) else prompt
            turn = await self.talk.complete(tokens, max_tokens=asked.max_tokens, stop=asked.stop)
        draw.turns.append(turn)

    def result(self, draw: Draw) -> Drawn:
        """Return the turns of a finished draw. Raises RequestError if it failed."""
        if draw.task.cancelled():
            raise episode_over()
        if (error := draw.task.exception()) is not None:
            raise self._refusal(error)
        draw.turns.sort(key=lambda turn: turn.number)  # They end in any order.
        self._numbers[draw.nonce] = [turn.number for turn in draw.turns]
        if draw.asked.continued:
            self.responses[f"resp_{draw.nonce}"] = (*draw.asked.continued, draw.turns[0].message)
        # A record of a long conversation is small: a retry brings the messages again.
        draw.asked = replace(draw.asked, messages=(), continued=())
        return draw

    def _prompt(self, turn: ChatTurn) -> Tokens:
        whole = self.session.tokens(turn.number)
        return whole[: len(whole) - len(turn.tokens)]

    def _refusal(self, error: BaseException) -> RequestError:
        """Return what a client reads about a failed draw. Keep the error for the episode."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, LimitReached):
            self.limit = self.limit or error
            self._refused += 1
            if self._refused > MOST_REFUSED:
                text = f"the program made {MOST_REFUSED} requests after the limit: {error}"
                self._fail(EpisodeError("limit_ignored", text))
            return RequestError(str(error), code=LIMIT_CODES[error.limit])
        self._fail(error)
        if isinstance(error, SampleError):
            return RequestError(str(error), code="episode_failed")
        text = f"millrace failed: {type(error).__name__}"
        return RequestError(text, status=500, code="internal_error")

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        if self.on_error is not None:
            self.on_error()

    def leave(self, draw: Draw, delivered: bool) -> None:
        """Note that a client got the answer of a draw, or that it is gone without it."""
        draw.waiters -= 1
        self._in_flight -= 1
        self._last = asyncio.get_running_loop().time()
        if delivered:
            if not draw.delivered and draw.task.done() and not draw.failed:
                draw.delivered = True
                for turn in draw.turns:
                    self.talk.delivered(turn.number)
        elif not draw.waiters and not draw.delivered:
            self.session.count("clients_gone")
            if not draw.task.done():
                loop = asyncio.get_running_loop()
                grace_s = self._options.retry_grace_s
                draw.timer = loop.call_later(grace_s, partial(draw.task.cancel))

    def post_reward(self, body: Body) -> None:
        """Record a reward of the episode, or of a turn by its number or its response's id."""
        given = converted(body, _Reward)
        if self.over:
            raise episode_over()
        turn = given.turn
        if turn is None:
            if self.reward is not None:
                self.session.count("rewards_replaced")
            self.reward = given.reward
            return
        numbers = [number for found in self._numbers.values() for number in found]
        if isinstance(turn, str):
            numbers = self._numbers.get(turn.rpartition("-")[2].rpartition("_")[2], [])
            turn = numbers[0] if len(numbers) == 1 else turn
        if isinstance(turn, str) or turn not in numbers:
            raise wrong("turn", turn, "must be the id of an answer with one choice, or its number")
        self.session.reward(given.reward, turn)

    async def close(self) -> None:
        """End the draws that still run. A turn that no client received is then dead."""
        self.over = True
        draws = [draw for equal in self._draws.values() for draw in equal]
        for draw in draws:
            draw.stop_timer()
            draw.task.cancel()
        await asyncio.gather(*(draw.task for draw in draws), return_exceptions=True)
        for draw in draws:
            for turn in draw.turns if not draw.delivered else ():
                self.talk.undelivered(turn.number)
        for draw in draws:
            if draw.failed and not draw.task.cancelled():
                self._refusal(draw.task.exception() or RuntimeError())
        self._draws.clear()


def episode_over() -> RequestError:
    """Return the refusal of every request after the end of an episode."""
    return RequestError("the episode is over", code="episode_over")
