"""The words between a wire format and a conversation: a request for one turn, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.errors import MillraceError
from millrace.types import Floats, Message, Tokens, floats_of, tokens_of

ToolSchema = dict[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "description", ...}}."""

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the policy's next message, whatever the wire format was."""

    messages: tuple[Message, ...]
    """The whole conversation in OpenAI's form. A system message has the role "system"."""
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    """The client's own limit. It can only lower the limits of the run."""
    stop: tuple[str, ...] = ()
    model: str = ""
    """The name of the model that the client asked for."""
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """The policy's next message, with the tokens that were drawn."""

    number: int
    """Number of the turn in its session."""
    message: Message
    """The role is "assistant". Each of "tool_calls" has an id of ours and JSON as arguments."""
    finish: Finish
    prompt_tokens: int
    """Tokens of the context that the policy read."""
    tokens: Tokens = field(default_factory=tokens_of)
    log_probs: Floats = field(default_factory=floats_of)
    stopped_by: str | None = None
    """The stop string that ended the turn, if any."""


class RequestError(MillraceError):
    """A request cannot be served as it is. The endpoint answers 400. A retry would not help."""
