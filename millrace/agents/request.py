"""The words between a wire format and a conversation: a request for one turn, and the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.errors import MillraceError
from millrace.types import Floats, Message, Tokens, floats_of, tokens_of

ToolSchema = dict[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "description", ...}}."""

Finish = Literal["stop", "length", "tool_calls"]

ROLES = ("system", "user", "assistant", "tool")


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
    """A request cannot be served as it is, and a retry would not help.

    The endpoint answers `status`. Each wire format writes the error in its own shape.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_request", param: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def wrong(name: str, value: object, rule: str) -> RequestError:
    """Return the refusal of a field's value."""
    text = f"{name} = {short(value)}: {name} {rule}."
    return RequestError(text, code="invalid_value", param=name)


def short(value: object) -> str:
    """Return a value as an error shows it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def normal(message: Message, where: str = "message") -> Message:
    """Return a message with its known fields only, and with text as one string.

    Raise RequestError if a role is unknown or if a part of the content is not text.
    """
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", role, f"must be one of {', '.join(ROLES)}, developer")
    made: Message = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    if role == "tool":
        made["tool_call_id"] = _plain(message.get("tool_call_id"))
    if message.get("name"):
        made["name"] = _plain(message["name"])
    if role == "assistant":
        if message.get("function_call") is not None:
            raise wrong(f"{where}.function_call", "...", "is obsolete. Fix: send tool_calls")
        if calls := message.get("tool_calls"):
            if not isinstance(calls, Sequence):
                raise wrong(f"{where}.tool_calls", calls, "must be a list")
            made["tool_calls"] = [_normal_call(c, f"{where}.tool_calls") for c in calls]
        if isinstance(why := message.get("reasoning_content") or message.get("reasoning"), str):
            made["reasoning_content"] = _plain(why)
    return made


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, null, or parts of text.

    Raise RequestError for images, audio and files. Nothing is ever fetched.
    """
    if content is None or isinstance(content, str):
        return _plain(content)
    texts = []
    for part in content if isinstance(content, Sequence) else [content]:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"{where} has a part of type {kind!r}: the policy reads text alone, and no URL is "
                "fetched. Fix: send text",
                code="unsupported_content",
                param=where,
            )
        texts.append(text)
    return _plain("".join(texts))


def _plain(value: Any) -> str:
    """Return text that can be sent to another process: lone surrogates are replaced."""
    text = str(value or "")
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _normal_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, call, "needs a function with a name in each tool call")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return call_of(_plain(call.get("id")), _plain(function["name"]), _plain(arguments))


def call_of(number: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
