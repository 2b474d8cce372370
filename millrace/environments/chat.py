"""Environments and tools that speak text. The agent renders their messages into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millrace.types import Message, Prompt, Score


class Tool(Protocol):
    """A function that the policy may call."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema in OpenAI's form: {"type": "function", "function": {...}}."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the result as text.

        Raises ToolError if the call itself is wrong: the policy reads its text. Raises EpisodeError
        if the tool's machinery failed.
        """
        ...


class ToolError(Exception):
    """The tool's own error. Its text is the result that the policy reads."""


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to the policy's message."""

    messages: tuple[Message, ...] = ()
    """The next messages for the policy. They are never from the assistant."""
    done: bool = False
    reward: float | None = None
    """A reward for the policy's last turn, if the environment rewards single turns."""


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of a conversation."""

    messages: tuple[Message, ...]
    tools: Sequence[Tool] = field(default_factory=tuple)


class OneAnswer:
    """The steps of a task: the first message of the policy that calls no tool is its answer."""

    answer: str | None = None

    async def step(self, message: Message) -> Step:
        self.answer = str(message.get("content") or "")
        return Step(done=True)

    async def score(self) -> Score | None:
        return None

    async def close(self) -> None:
        return None


class ChatEnvironment(Protocol):
    """One conversation, for a single use.

    Call `reset` once, then `step` for each message of the policy that calls no tool, until a step
    is done. The agent runs tools between steps.
    """

    async def reset(self, task: Prompt) -> Start: ...

    async def step(self, message: Message) -> Step: ...

    async def score(self) -> Score | None:
        """Return the score of the conversation. None leaves it to the reward function."""
        ...

    async def close(self) -> None: ...
