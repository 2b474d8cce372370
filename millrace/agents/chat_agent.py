"""The agent of chat environments: policy, tools and environment speak in turn, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from millrace.agents.conversation import Conversation
from millrace.agents.request import ChatRequest, ChatTurn
from millrace.data.user_code import failure
from millrace.environments.chat import ChatEnvironment, Start, Tool
from millrace.environments.tools import CallLimits, Cut, run_calls
from millrace.errors import EpisodeError, LimitReached, MillraceError
from millrace.ports import PolicySession
from millrace.types import Ending, Message, Prompt, Score

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
            start = await self._guard("reset", environment.reset(session.prompt))
            reason = await self._talk(session, environment, conversation, start)
            conversation.settle()
            score: Score | None = await self._guard("score", environment.score())
            for name, value in getattr(environment, "counts", {}).items():
                session.count(name, value)
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
            conversation.delivered(turn.number)
            messages.append(turn.message)
            if turn.finish == "length":
                return "tokens"
            if turn.message.get("tool_calls"):
                messages += await self._results(session, tools, turn)
                continue
            step = await self._guard("step", environment.step(turn.message))
            if step.reward is not None:
                session.reward(step.reward, turn.number)
            if step.done:
                return "done"
            if not step.messages:
                rule = "step returned neither done=True nor a message"
                raise EpisodeError("environment", f"{type(environment).__name__}: {rule}")
            messages += step.messages

    async def _results(
        self, session: PolicySession, tools: Mapping[str, Tool], turn: ChatTurn
    ) -> list[Message]:
        calls = turn.message["tool_calls"]
        return await run_calls(tools, calls, self._options.calls, self._options.cut, session.count)

    async def _guard(self, what: str, answer: Awaitable[_T]) -> _T:
        """Wait for the environment. Raises EpisodeError if it fails or is late."""
        limit = self._options.environment_deadline_s
        try:
            async with asyncio.timeout(limit):
                return await answer
        except MillraceError:
            raise
        except TimeoutError as error:
            raise EpisodeError(
                "environment_late", f"{what} took longer than {limit:g} s"
            ) from error
        except Exception as error:
            raise EpisodeError("environment", f"{what}: {failure(error)}") from error
