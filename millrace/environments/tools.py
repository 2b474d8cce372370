"""Tools for the policy: functions as tools, and the calls of one turn with their limits."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.data.user_code import failure, message_of
from millrace.environments.chat import Tool, ToolError
from millrace.environments.deadline import deadline
from millrace.environments.threads import RAISED, in_thread, own_cancellation
from millrace.errors import EpisodeError, bad_value
from millrace.types import Message
from millrace.waits.registry import count as counted
from millrace.waits.registry import waiting

Count = Callable[[str, float], None]
"""Adds a value to the episode's count of a name."""

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_SURELY = 4
"""Tokens for each ASCII character that no tokenizer needs. A text that fits so is not encoded."""
_CHARACTERS = 32
"""Characters for each token of the limit that are encoded at all. The rest is cut before."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts the middle out of a long result, and leaves a mark."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    max_tokens: int

    def __call__(self, text: str) -> tuple[str, bool]:
        """Return a text of about `max_tokens` at most, and whether something was cut."""
        if text.isascii() and _SURELY * len(text) <= self.max_tokens:
            return text, False
        most = _CHARACTERS * self.max_tokens
        head = text if len(text) <= most else text[: most // 2]
        tail = "" if len(text) <= most else text[-(most // 2) :]
        tokens = self.encode(head)
        if not tail and len(tokens) <= self.max_tokens:
            return text, False
        keep = self.max_tokens // 2
        end = (self.encode(tail) if tail else tokens)[-keep:] if keep else []
        start = self.decode(tokens[: self.max_tokens - keep])
        rest = self.decode(end) if end else ""
        lost = max(len(text) - len(start) - len(rest), 1)
        return f"{start}[... {lost} characters cut ...]{rest}", True


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The limits of the calls of one turn."""

    deadline_s: float = 60.0
    max_parallel: int = 8
    """Calls that run. Each further one gets a result that says so."""


class FunctionTool:
    """A Python function as a tool. A plain function runs in a thread."""

    def __init__(
        self, function: Callable[..., Any], schema: Mapping[str, Any] | None = None
    ) -> None:
        """Make a tool. The schema comes from the signature and the docstring, if it is not given.

        Raises ConfigError if they do not describe every parameter.
        """
        self.function = function
        self.schema = dict(schema) if schema is not None else schema_of(function)
        self.name = str(self.schema["function"]["name"])

    async def call(self, arguments: Mapping[str, Any]) -> str:
        check_arguments(self.schema, arguments)
        result = (
            self.function(**arguments)
            if inspect.iscoroutinefunction(self.function)
            else await in_thread(self.function, **arguments)
        )
        return text_of(await result if inspect.isawaitable(result) else result)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's schema in OpenAI's form. Raise ConfigError if it cannot be read."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    name = getattr(function, "__qualname__", repr(function))
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError) as error:
        rule = f"a tool needs a type for each parameter and a docstring that describes it: {error}"
        fix = 'def f(x: int) -> str with """What it does.\n\nArgs:\n    x: what x is"""'
        raise bad_value("agents.tools", name, " ".join(rule.split()), fix) from error
    schema["function"].pop("return", None)
    return schema


def text_of(result: Any) -> str:
    """Return a tool's result as text: a string as it is, and anything else as JSON if possible."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise ToolError if arguments are missing, unknown or of another type than the schema says."""
    parameters = schema["function"].get("parameters") or {}
    known = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            raise ToolError(f"the argument {name!r} is missing")
    for name, value in arguments.items():
        if name not in known:
            raise ToolError(f"unknown argument {name!r}; known are {', '.join(known) or 'none'}")
        _check_type(name, value, known[name])


def _check_type(name: str, value: Any, schema: Any) -> None:
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    allowed = tuple(t for kind in kinds for t in _TYPES.get(kind, (object,)))
    if allowed and (
        not isinstance(value, allowed)
        or (isinstance(value, bool) and bool not in allowed and object not in allowed)
    ):
        raise ToolError(f"the argument {name!r} must be of type {' or '.join(kinds)}")
    choices = schema.get("enum")
    if choices and value not in choices:
        raise ToolError(f"the argument {name!r} must be one of {', '.join(map(str, choices))}")


async def run_calls(
    tools: Mapping[str, Tool],
    calls: Sequence[Mapping[str, Any]],
    limits: CallLimits,
    cut: Cut | None,
    count: Count,
) -> list[Message]:
    """Return the results of a turn's calls, one for each call and in their order.

    The calls run at the same time. A wrong call, a tool's own error and a missed deadline become
    text for the policy. Raises EpisodeError if a tool's machinery failed.
    """
    start = time.perf_counter()
    running = calls[: limits.max_parallel]
    texts = await _run_all([_run_one(tools, call, limits.deadline_s, count) for call in running])
    refused = len(calls) - len(running)
    if refused:
        count("refused_calls", refused)
        texts += [f"Error: too many calls: {limits.max_parallel} at once at most"] * refused
    count("tool_seconds", time.perf_counter() - start)
    return [_result(call, text, cut, count) for call, text in zip(calls, texts, strict=True)]


async def _run_all(calls: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
    """Return the results of calls that run at the same time. A single call needs no task."""
    if len(calls) == 1:
        return [await calls[0]]
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()


def _result(call: Mapping[str, Any], text: str, cut: Cut | None, count: Count) -> Message:
    if cut is not None:
        text, was_cut = cut(text)
        if was_cut:
            count("cut_results", 1)
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}


async def _run_one(
    tools: Mapping[str, Tool], call: Mapping[str, Any], deadline_s: float, count: Count
) -> str:
    name = call["function"]["name"]
    tool = tools.get(name)
    if tool is None:
        count("invalid_calls", 1)
        return f"Error: no tool {name!r}; the tools are {', '.join(tools) or 'none'}"
    try:
        arguments = _arguments(call)
        with waiting(f"tool {name}", "a call"):
            async with deadline(deadline_s):
                text = await tool.call(arguments)
            counted("tool calls")
            return text
    except ToolError as error:
        count("invalid_calls", 1)
        return f"Error: {error}"
    except TimeoutError:
        count("tool_timeouts", 1)
        return f"Error: the call took longer than {deadline_s:g} s"
    except EpisodeError:
        raise
    except (ConnectionError, MemoryError) as error:
        raise EpisodeError("tool", f"{name}: {failure(error)}") from error
    except (*RAISED, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and own_cancellation():
            raise
        count("tool_errors", 1)
        return f"Error: {message_of(error)}"


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be an object")
    return arguments
