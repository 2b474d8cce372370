"""Anthropic's /v1/messages: blocks to messages, turns to blocks and events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from millrace.agents.request import ChatRequest, ChatTurn
from millrace.agents.wire import (
    Asked,
    Body,
    Drawn,
    Reader,
    Refusal,
    call_of,
    calls_of,
    event,
    json_text,
    own_tools,
    text_of,
    wrong,
)
from millrace.agents.wire_chat import pieces
from millrace.types import Message

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


def read(reader: Reader, counting: bool = False) -> Asked:
    """Return what a body of /v1/messages asks for, or one of its count_tokens."""
    system = text_of(reader.body.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for k, message in enumerate(reader.objects("messages", required=True)):
        messages += _messages(reader, message, f"messages[{k}]")
    limit = reader.count("max_tokens")
    if limit is None and not counting:
        raise wrong("max_tokens", None, "must be a whole number of at least 1")
    choice = reader.object("tool_choice")
    reader.ignore_sampling()
    if choice.get("type", "auto") != "auto":
        reader.ignore("tool_choice", "let the policy choose")
    if reader.object("thinking").get("type", "disabled") != "disabled":
        reader.ignore("thinking", "the chat template decides")
    for name in ("output_config", "output_format"):
        if reader.body.get(name) is not None:
            reader.ignore(name)
    for name in ("mcp_servers", "container"):
        if reader.body.get(name):
            raise wrong(name, "...", "is not served. Fix: leave it out")
    return Asked(
        ChatRequest(
            messages=tuple(messages),
            tools=own_tools(reader, "custom", "input_schema"),
            max_tokens=limit,
            stop=reader.stops("stop_sequences"),
            model=reader.text("model"),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        ),
        stream=reader.flag("stream"),
        ignored=tuple(reader.ignored),
    )


def _messages(reader: Reader, message: Body, where: str) -> list[Message]:
    """Return one message of Anthropic's as messages of OpenAI's form."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return [{"role": "system", "content": text_of(content, where)}]
    if role not in ("user", "assistant"):
        raise wrong(f"{where}.role", role, "must be user, assistant or system")
    if not isinstance(content, str | list):
        raise wrong(f"{where}.content", content, "must be a string or a list of blocks")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(not isinstance(block, dict) for block in blocks):
        raise wrong(f"{where}.content", content, "must be a list of blocks")
    if role == "assistant":
        return [_assistant(blocks, where)]
    found: list[Message] = []
    for k, block in enumerate(blocks):
        at = f"{where}.content[{k}]"
        if block.get("type") == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise wrong(f"{at}.tool_use_id", block.get("tool_use_id"), "must be a string")
            if block.get("is_error"):
                reader.ignore("is_error", "say in the content that the tool failed")
            text = text_of(block.get("content"), at)
            found.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
            continue
        text = text_of([block], at)
        if found and found[-1]["role"] == "user":
            found[-1]["content"] += text
        else:
            found.append({"role": "user", "content": text})
    return found or [{"role": "user", "content": ""}]


def _assistant(blocks: list[Body], where: str) -> Message:
    texts, thinking, calls = [], [], []
    for k, block in enumerate(blocks):
        at = f"{where}.content[{k}]"
        kind = block.get("type")
        if kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise wrong(f"{at}.input", given, "must be an object")
            calls.append(call_of(block.get("id", 0), block.get("name"), json_text(given), at))
        elif kind == "thinking":
            thinking.append(text_of([{"type": "text", "text": block.get("thinking")}], at))
        else:
            texts.append(text_of([block], at))
    found: Message = {"role": "assistant", "content": "".join(texts)}
    if calls:
        found["tool_calls"] = calls
    if thinking:
        found["reasoning_content"] = "".join(thinking)
    return found


def answer(asked: Asked, drawn: Drawn) -> Body:
    """Return a message."""
    turn = drawn.turns[0]
    return {
        **_head(drawn, turn),
        "content": _blocks(turn),
        "stop_reason": _reason(turn),
        "stop_sequence": turn.stopped_by,
    }


def _head(drawn: Drawn, turn: ChatTurn) -> Body:
    return {
        "id": f"msg_{drawn.nonce}",
        "type": "message",
        "role": "assistant",
        "model": drawn.model,
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
    for number, name, arguments in calls_of(turn.message):
        given = _input(arguments)
        blocks.append({"type": "tool_use", "id": number, "name": name, "input": given})
    return blocks


def _input(arguments: str) -> Any:
    """Return the arguments as an object, which this format requires."""
    given = msgspec.json.decode(arguments or "{}")
    return given if isinstance(given, dict) else {"arguments": given}


def _reason(turn: ChatTurn) -> str:
    if turn.finish == "tool_calls":
        return "tool_use"
    if turn.finish == "length":
        return "max_tokens"
    return "end_turn" if turn.stopped_by is None else "stop_sequence"


def events(asked: Asked, drawn: Drawn) -> Iterator[str]:
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
    usage = {"output_tokens": len(turn.tokens)}
    yield _event("message_delta", delta=ended, usage=usage)
    yield _event("message_stop")


def _parts(block: Body) -> tuple[Body, list[Body]]:
    """Return a block's beginning, and the deltas that complete it."""
    if block["type"] == "text":
        deltas = [{"type": "text_delta", "text": block["text"]}]
        return {"type": "text", "text": ""}, deltas
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {"type": "thinking", "thinking": "", "signature": ""}, deltas
    deltas = [
        {"type": "input_json_delta", "partial_json": piece}
        for piece in pieces(json_text(block["input"]))
    ]
    return {**block, "input": {}}, deltas


def _event(name: str, **fields: Any) -> str:
    return event({"type": name, **fields}, name)


def problem(refusal: Refusal) -> Body:
    """Return an error in Anthropic's shape. It has no code, so the message begins with it."""
    kind = KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else KINDS[400])
    return {
        "type": "error",
        "error": {"type": kind, "message": f"{refusal.code}: {refusal.message}"},
    }


def trouble(refusal: Refusal) -> str:
    """Return the event of an error in a stream."""
    return event(problem(refusal), "error")
