"""The agent of chat environments: policy, tools and environment speak in turn, in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.agents.conversation import Conversation
from millrace.agents.request import ChatRequest, RequestError, normal
from millrace.data.user_code import failure
from millrace.environments.chat import ChatEnvironment, Start, Step
from millrace.environments.deadline import deadline
from millrace.environments.threads import RAISED, own_cancellation
from millrace.environments.tools import CallLimits, Cut, run_calls
from millrace.errors import EpisodeError, LimitReached, MillraceError
from millrace.ports import PolicySession
from millrace.types import Ending, Prompt, Score

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat agent plays."""

    calls: CallLimits
    cut: Cut | None = None
    """Cuts the results of tools. None leaves them whole."""
    environment_deadline_s: float = 60.0
    """Seconds for each answer of the environment."""


class ChatAgent:
    """Plays a conversation with an environment, which `make` returns for each episode.

    After a restart the environment begins again, and so do its tools. Turns that were drawn before
    are not drawn again as long as the environment says the same.
    """

    def __init__(
        self,
        make: Callable[[Prompt], ChatEnvironment],
        converse: Callable[[PolicySession], Conversation],
        options: ChatOptions,
    ) -> None:
        self._make = make
        self._converse = converse
        self._options = options

    async def play(self, session: PolicySession) -> Ending:
        environment = await self._guard("its constructor", self._made(session.prompt))
        conversation = self._converse(session)
        try:
            start = await self._guard("reset", _said(Start, environment.reset(session.prompt)))
            reason = await self._talk(session, environment, conversation, start)
            conversation.end_dead_turns()
            score = await self._guard("score", _score(environment.score()))
            await self._guard("counts", _count(session, getattr(environment, "counts", {})))
        finally:
            await self._guard("close", environment.close())
        return Ending(reason, score, conversation.messages)

    async def close(self) -> None:
        return None

    async def _made(self, prompt: Prompt) -> ChatEnvironment:
        return self._make(prompt)

    async def _talk(
        self,
        session: PolicySession,
        environment: ChatEnvironment,
        conversation: Conversation,
        start: Start,
    ) -> str:
        """Take turns until the environment is done or a limit is reached. Return the reason."""
        tools = {tool.name: tool for tool in start.tools}
        schemas = tuple(tool.schema for tool in start.tools)
        messages = list(start.messages)
        while True:
            try:
                turn = await conversation.chat(ChatRequest(tuple(messages), schemas))
            except LimitReached as limit:
                return limit.limit
            except RequestError as error:
                kind = type(environment).__name__
                raise EpisodeError("environment", f"{kind}: {error}") from error
            conversation.delivered(turn.number)
            messages.append(turn.message)
            if turn.finish == "length":
                return "tokens"
            if turn.message.get("tool_calls"):
                calls, limits = turn.message["tool_calls"], self._options
                count = session.count
                messages += await run_calls(tools, calls, limits.calls, limits.cut, count)
                continue
            step = await self._guard("step", _said(Step, environment.step(turn.message)))
            if step.reward is not None:
                session.reward(step.reward, turn.number)
            if step.done:
                return "done"
            if not step.messages:
                rule = "step returned neither done=True nor a message"
                raise EpisodeError("environment", f"{type(environment).__name__}: {rule}")
            messages += step.messages

    async def _guard(self, what: str, answer: Awaitable[_T]) -> _T:
        """Wait for the environment. Raises EpisodeError if it fails or is late."""
        limit = self._options.environment_deadline_s
        try:
            async with deadline(limit):
                return await answer
        except RequestError as error:
            raise EpisodeError("environment", f"{what}: {error}") from error
        except MillraceError:
            raise
        except TimeoutError as error:
            raise EpisodeError(
                "environment_late", f"{what} took longer than {limit:g} s"
            ) from error
        except (*RAISED, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and own_cancellation():
                raise
            raise EpisodeError("environment", f"{what}: {failure(error)}") from error


async def _said(kind: type[_T], answer: Awaitable[Any]) -> _T:
    """Return a Start or a Step. Raises any error if it is none, so that no later code does."""
    said: Any = _of(kind, await answer)
    for message in said.messages:
        normal(message)
    for tool in getattr(said, "tools", ()):
        _of(str, tool.name), _of(dict, tool.schema)
    if getattr(said, "reward", None) is not None:
        _finite(said.reward)
    return _of(kind, said)


async def _score(answer: Awaitable[Score | None]) -> Score | None:
    score = await answer
    if score is not None:
        for value in (_of(Score, score).value, *score.extra.values()):
            _finite(value)
    return score


async def _count(session: PolicySession, counts: Mapping[str, float]) -> None:
    for name, value in counts.items():
        session.count(name, _finite(value))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    return float(value)


def _of(kind: type[_T], value: Any) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"it is a {type(value).__name__}, and a {kind.__name__} is needed")
    return value
