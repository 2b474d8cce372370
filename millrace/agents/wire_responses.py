"""OpenAI's /v1/responses: items to messages, turns to items and events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from millrace.agents import wire
from millrace.agents.request import RequestError, call_of, text_of, wrong
from millrace.agents.wire import Asked, Body, Count, Drawn, Reader, Wire
from millrace.types import Message


class _Format(msgspec.Struct, frozen=True):
    format: Body | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str = ""
    stream: bool = False
    input: str | list[Body] = []
    instructions: str = ""
    previous_response_id: str = ""
    tools: list[Body] = []
    max_output_tokens: Count | None = None
    stop: wire.Stops = []
    store: bool = True
    parallel_tool_calls: bool = True
    text: _Format = _Format()
    reasoning: Body = {}


def _read(reader: Reader) -> Asked:
    """Return what a body of /v1/responses asks for.

    The instructions of the response that `previous_response_id` names are not continued: a client
    sends them with each request.
    """
    body = reader.into(_Body)
    previous = body.previous_response_id
    if previous and previous not in reader.earlier:
        raise RequestError(
            f"no response of this episode has the id {previous[:80]!r}",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    reader.refuse("background", "conversation", "prompt", "max_tool_calls")
    reader.ignore_hints(body.text.format)
    if any(value is not None for value in body.reasoning.values()):
        reader.ignore("reasoning", "the chat template decides")
    messages = (*reader.earlier.get(previous, ()), *_messages(body.input))
    if not messages:
        raise wrong("input", None, "must be a string or a list of items")
    system = ({"role": "system", "content": body.instructions},) if body.instructions else ()
    return reader.asked(
        body,
        body.stop,
        messages=(*system, *messages),
        tools=reader.tools("function", "parameters"),
        max_tokens=body.max_output_tokens,
        parallel_tool_calls=body.parallel_tool_calls,
        continued=messages if body.store else (),
    )


def _messages(items: str | list[Body]) -> list[Message]:
    """Return the items as messages. Items of one answer become one assistant message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    found: list[Message] = []
    for k, item in enumerate(items):
        _add(found, item, f"input[{k}]")
    return [wire.message_of(message, "input") for message in found]


def _add(found: list[Message], item: Body, where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message" and item.get("role") != "assistant":
        if item.get("role") not in ("system", "developer", "user"):
            rule = "must be user, system, developer or assistant"
            raise wrong(f"{where}.role", item.get("role"), rule)
        found.append({"role": item["role"], "content": item.get("content")})
    elif kind == "message":
        last = _open(found, ("tool_calls", "content"))
        last["content"] = text_of(item.get("content"), where)
    elif kind == "reasoning":
        last = _open(found, ("tool_calls", "content", "reasoning_content"))
        last["reasoning_content"] = text_of(item.get("content") or item.get("summary"), where)
    elif kind == "function_call":
        last = _open(found, ())
        call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
        last["tool_calls"] = [*last.get("tool_calls", ()), call]
    elif kind == "function_call_output":
        content = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
        found.append({"role": "tool", **content})
    else:
        raise RequestError(
            f"{where} is an item of type {kind!r}: the policy reads messages, reasoning and "
            "function calls. Fix: leave it out.",
            code="unsupported_content",
            param=where,
        )


def _open(found: list[Message], full: tuple[str, ...]) -> Message:
    """Return the assistant message that the next item belongs to."""
    if found and found[-1]["role"] == "assistant" and not any(found[-1].get(n) for n in full):
        return found[-1]
    found.append({"role": "assistant", "content": ""})
    return found[-1]


def _answer(drawn: Drawn) -> Body:
    """Return a response."""
    cut = drawn.turns[0].finish == "length"
    read, drew = drawn.usage
    return {
        **_head(drawn),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(drawn),
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": drew,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + drew,
        },
    }


def _head(drawn: Drawn) -> Body:
    asked = drawn.asked
    nothing = dict.fromkeys(
        ("error", "incomplete_details", "instructions", "temperature", "top_p", "usage")
    )
    return nothing | {
        "id": f"resp_{drawn.nonce}",
        "object": "response",
        "created_at": drawn.created,
        "status": "in_progress",
        "model": asked.model,
        "output": [],
        "metadata": {},
        "parallel_tool_calls": asked.parallel_tool_calls,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in asked.tools],
    }


def _items(drawn: Drawn) -> list[Body]:
    turn = drawn.turns[0]
    status = "incomplete" if turn.finish == "length" else "completed"
    items: list[Body] = []
    if thinking := turn.message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": thinking}]
        item = {"id": f"rs_{drawn.nonce}", "type": "reasoning", "summary": [], "content": parts}
        items.append(item)
    calls = wire.calls_of(turn.message)
    text = turn.message.get("content") or ""
    if text or not calls:
        parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        item = {"id": f"msg_{drawn.nonce}", "type": "message", "role": "assistant"}
        items.append({**item, "status": status, "content": parts})
    for k, (number, name, arguments) in enumerate(calls):
        call = {"id": f"fc_{drawn.nonce}_{k}", "type": "function_call", "status": status}
        items.append({**call, "call_id": number, "name": name, "arguments": arguments})
    return items


def _events(drawn: Drawn) -> Iterator[str]:
    """Yield the events of a stream, up to response.completed."""
    number = 0

    def step(kind: str, **fields: Any) -> str:
        nonlocal number
        body = {"type": f"response.{kind}", "sequence_number": number, **fields}
        number += 1
        return wire.event(body, f"response.{kind}")

    head = _head(drawn)
    yield step("created", response=head)
    yield step("in_progress", response=head)
    for k, item in enumerate(_items(drawn)):
        at = {"item_id": item["id"], "output_index": k}
        empty: Body = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
        yield step("output_item.added", output_index=k, item=item | empty | status)
        if item["type"] == "function_call":
            for piece in wire.pieces(item["arguments"]):
                yield step("function_call_arguments.delta", **at, delta=piece)
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield step("function_call_arguments.done", **at, **whole)
        else:
            part = item["content"][0]
            kind, at = part["type"], {**at, "content_index": 0}
            more: Body = {"logprobs": []} if kind == "output_text" else {}
            yield step("content_part.added", **at, part={**part, "text": ""})
            if part["text"]:
                yield step(f"{kind}.delta", **at, delta=part["text"], **more)
            yield step(f"{kind}.done", **at, text=part["text"], **more)
            yield step("content_part.done", **at, part=part)
        yield step("output_item.done", output_index=k, item=item)
    found = _answer(drawn)
    yield step(str(found["status"]), response=found)


def _trouble(error: RequestError) -> str:
    """Return the event of an error in a stream."""
    body = wire.openai_problem(error)["error"]
    return wire.event({**body, "type": "error", "sequence_number": 0}, "error")


RESPONSES = Wire(_read, _answer, _events, trouble=_trouble)
