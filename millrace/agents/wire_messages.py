"""Anthropic's /v1/messages: blocks to messages, turns to blocks and events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from millrace.agents import wire
from millrace.agents.request import (
    ChatTurn,
    RequestError,
    call_of,
    normal,
    text_of,
    wrong,
)
from millrace.agents.wire import Asked, Body, Count, Drawn, Reader, Wire
from millrace.types import Message

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


class _Said(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Body]


class _Choice(msgspec.Struct, frozen=True):
    type: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str = ""
    stream: bool = False
    messages: list[_Said]
    system: str | list[Body] = ""
    max_tokens: Count | None = None
    stop_sequences: wire.Stops = []
    tools: list[Body] = []
    tool_choice: _Choice = _Choice()


def _read(reader: Reader) -> Asked:
    """Return what a body of /v1/messages asks for, or one of its count_tokens."""
    body, given = reader.into(_Body), reader.body
    if body.max_tokens is None and not reader.counting:
        raise wrong("max_tokens", None, "must be a whole number of at least 1")
    system = text_of(body.system, "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for k, said in enumerate(body.messages):
        messages += _messages(reader, said, f"messages[{k}]")
    if not body.messages:
        raise wrong("messages", [], "must not be empty")
    reader.refuse("mcp_servers", "container")
    reader.ignore_hints()
    fix = "the chat template decides"
    reader.ignore_unless("thinking", given.get("thinking"), "disabled", fix)
    for name in ("output_config", "output_format"):
        if name in given:
            reader.ignore(name)
    return reader.asked(
        body,
        body.stop_sequences,
        messages=tuple(messages),
        tools=reader.tools("custom", "input_schema"),
        max_tokens=body.max_tokens,
        parallel_tool_calls=not body.tool_choice.disable_parallel_tool_use,
    )


def _messages(reader: Reader, said: _Said, where: str) -> list[Message]:
    """Return one message of Anthropic's as messages of OpenAI's form."""
    text = [{"type": "text", "text": said.content}]
    blocks = text if isinstance(said.content, str) else said.content
    if said.role == "assistant":
        return [_assistant(blocks, where)]
    found: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result" and said.role == "user":
            if block.get("is_error"):
                reader.ignore("is_error", "say in the content that the tool failed")
            found.append({**block, "role": "tool", "tool_call_id": block.get("tool_use_id")})
        elif found and found[-1]["role"] == said.role:
            found[-1]["content"].append(block)
        else:
            found.append({"role": said.role, "content": [block]})
    return [wire.message_of(m, where) for m in found or [{"role": said.role}]]


def _assistant(blocks: list[Body], where: str) -> Message:
    texts, thinking, calls = [], [], []
    for block in blocks:
        if block.get("type") == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise wrong(f"{where}.input", given, "must be an object")
            calls.append(call_of(block.get("id"), block.get("name"), wire.json_text(given)))
        elif block.get("type") == "thinking":
            thinking.append({"text": block.get("thinking")})
        else:
            texts.append(block)
    found = {"role": "assistant", "content": texts, "tool_calls": calls}
    return normal({**found, "reasoning_content": text_of(thinking, where)}, where)


def _answer(drawn: Drawn) -> Body:
    """Return a message."""
    turn = drawn.turns[0]
    ended = {"stop_reason": _reason(turn), "stop_sequence": turn.stopped_by}
    return {**_head(drawn, turn), "content": _blocks(turn), **ended}


def _head(drawn: Drawn, turn: ChatTurn) -> Body:
    return {
        "id": f"msg_{drawn.nonce}",
        "type": "message",
        "role": "assistant",
        "model": drawn.asked.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.tokens)},
    }


def _blocks(turn: ChatTurn) -> list[Body]:
    blocks: list[Body] = []
    if turn.message.get("reasoning_content"):
        thinking = turn.message["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": thinking, "signature": "none"})
    if turn.message.get("content"):
        blocks.append({"type": "text", "text": turn.message["content"]})
    for number, name, arguments in wire.calls_of(turn.message):
        given = msgspec.json.decode(arguments or "{}")
        if not isinstance(given, dict):  # this format requires an object
            given = {"arguments": given}
        blocks.append({"type": "tool_use", "id": number, "name": name, "input": given})
    return blocks


def _reason(turn: ChatTurn) -> str:
    if turn.finish == "tool_calls":
        return "tool_use"
    if turn.finish == "length":
        return "max_tokens"
    return "end_turn" if turn.stopped_by is None else "stop_sequence"


def _events(drawn: Drawn) -> Iterator[str]:
    """Yield the events of a stream, up to message_stop."""
    turn = drawn.turns[0]
    head = _head(drawn, turn)
    usage = {**head["usage"], "output_tokens": 0}
    yield _event("message_start", message={**head, "usage": usage})
    for k, block in enumerate(_blocks(turn)):
        first, deltas = _parts(block)
        yield _event("content_block_start", index=k, content_block=first)
        for delta in deltas:
            yield _event("content_block_delta", index=k, delta=delta)
        yield _event("content_block_stop", index=k)
    ended = {"stop_reason": _reason(turn), "stop_sequence": turn.stopped_by}
    yield _event("message_delta", delta=ended, usage={"output_tokens": len(turn.tokens)})
    yield _event("message_stop")


def _parts(block: Body) -> tuple[Body, list[Body]]:
    """Return a block's beginning, and the deltas that complete it."""
    if block["type"] == "tool_use":
        parts = wire.pieces(wire.json_text(block["input"]))
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in parts]
        return {**block, "input": {}}, deltas
    texts = {name: value for name, value in block.items() if name != "type"}
    deltas = [{"type": f"{name}_delta", name: value} for name, value in texts.items()]
    return {"type": block["type"], **dict.fromkeys(texts, "")}, deltas


def _event(name: str, **fields: Any) -> str:
    return wire.event({"type": name, **fields}, name)


def _problem(error: RequestError) -> Body:
    """Return an error in Anthropic's shape. It has no code, so the message begins with it."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else KINDS[400])
    return {"type": "error", "error": {"type": kind, "message": f"{error.code}: {error}"}}


def _trouble(error: RequestError) -> str:
    """Return the event of an error in a stream."""
    return wire.event(_problem(error), "error")


MESSAGES = Wire(_read, _answer, _events, _problem, _trouble)
