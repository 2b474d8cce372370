"""OpenAI's /v1/chat/completions: bodies to requests, turns to answers and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from millrace.agents import wire
from millrace.agents.request import ChatTurn
from millrace.agents.wire import Asked, Body, Count, Drawn, Reader
from millrace.agents.wire import openai_problem as problem
from millrace.agents.wire import openai_trouble as trouble

__all__ = ["answer", "events", "problem", "read", "trouble"]


class _Options(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Tool(msgspec.Struct):
    function: wire.Function
    type: Literal["function"] = "function"


class Common(msgspec.Struct, kw_only=True):
    """The fields of chat and completions."""

    model: str = ""
    n: Count = 1
    max_tokens: Count | None = None
    stop: wire.Stops = []
    stream: bool = False
    stream_options: _Options = _Options()
    return_token_ids: bool = False


class _Body(Common, kw_only=True):
    messages: wire.Objects
    tools: list[_Tool] = []
    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False


def read(reader: Reader) -> Asked:
    """Return what a body of /v1/chat/completions asks for."""
    body = reader.into(_Body)
    messages = tuple(wire.message_of(m, f"messages[{k}]") for k, m in enumerate(body.messages))
    reader.refuse("functions", "audio", "modalities", "prediction", "web_search_options")
    reader.ignore_hints(reader.body.get("response_format"))
    limits = [n for n in (body.max_tokens, body.max_completion_tokens) if n is not None]
    return Asked(
        messages=messages,
        tools=tuple(wire.tool_of(tool.function) for tool in body.tools),
        max_tokens=min(limits, default=None),
        stop=wire.stops_of(body.stop),
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls,
        n=body.n,
        stream=body.stream,
        usage=bool(body.stream_options.include_usage),
        logprobs=body.logprobs,
        token_ids=body.return_token_ids,
        ignored=tuple(reader.ignored),
    )


def answer(drawn: Drawn) -> Body:
    """Return a chat.completion."""
    asked = drawn.asked
    choices = [
        {
            "index": k,
            "message": _message(turn),
            "finish_reason": turn.finish,
            "logprobs": _logprobs(turn, drawn) if asked.logprobs else None,
            **({"token_ids": list(turn.tokens)} if asked.token_ids else {}),
        }
        for k, turn in enumerate(drawn.turns)
    ]
    found = wire.head_of(drawn, "chatcmpl", "chat.completion")
    found |= {"choices": choices, "usage": wire.usage_of(drawn)}
    if asked.token_ids:
        found["prompt_token_ids"] = list(drawn.prompt(drawn.turns[0]))
    return found


def _message(turn: ChatTurn) -> Body:
    calls = turn.message.get("tool_calls")
    content = turn.message.get("content") or ""
    found: Body = {"role": "assistant", "content": content or (None if calls else "")}
    if turn.message.get("reasoning_content"):
        found["reasoning_content"] = turn.message["reasoning_content"]
    if calls:
        found["tool_calls"] = calls
    return found


def _logprobs(turn: ChatTurn, drawn: Drawn) -> Body:
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in drawn.words(turn)
    ]
    return {"content": content, "refusal": None}


def events(drawn: Drawn) -> Iterator[str]:
    """Yield the chunks of a stream, up to [DONE]."""
    asked, head = drawn.asked, wire.head_of(drawn, "chatcmpl", "chat.completion.chunk")
    if asked.usage:
        head["usage"] = None

    def chunk(index: int, delta: Body, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return wire.event({**head, "choices": [choice]})

    for k, turn in enumerate(drawn.turns):
        yield chunk(k, {"role": "assistant", "content": ""})
        message = _message(turn)
        if message.get("reasoning_content"):
            yield chunk(k, {"reasoning_content": message["reasoning_content"]})
        more: Body = {"logprobs": _logprobs(turn, drawn)} if asked.logprobs else {}
        if message["content"] or more:
            yield chunk(k, {"content": message["content"] or ""}, **more)
        for at, (number, name, arguments) in enumerate(wire.calls_of(turn.message)):
            function = {"name": name, "arguments": ""}
            call = {"index": at, "id": number, "type": "function", "function": function}
            yield chunk(k, {"tool_calls": [call]})
            for piece in wire.pieces(arguments):
                call = {"index": at, "function": {"arguments": piece}}
                yield chunk(k, {"tool_calls": [call]})
        ids = {"token_ids": list(turn.tokens)} if asked.token_ids else {}
        yield chunk(k, {}, finish_reason=turn.finish, **ids)
    if asked.usage:
        yield wire.event({**head, "choices": [], "usage": wire.usage_of(drawn)})
    yield "data: [DONE]\n\n"
