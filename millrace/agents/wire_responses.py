"""OpenAI's /v1/responses: items to messages, turns to items and events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from millrace.agents.request import ChatRequest
from millrace.agents.wire import (
    Asked,
    Body,
    Drawn,
    Reader,
    Refusal,
    call_of,
    calls_of,
    event,
    openai_problem,
    own_tools,
    text_of,
    wrong,
)
from millrace.agents.wire_chat import pieces
from millrace.agents.wire_chat import problem as problem
from millrace.types import Message

PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def read(reader: Reader, before: Sequence[Message] = ()) -> Asked:
    """Return what a body of /v1/responses asks for.

    `before` has the messages of the response that `previous_response_id` names, with its answer.
    Its instructions are not among them: a client sends them with each request.
    """
    _hints(reader)
    messages = (*before, *_messages(reader.body.get("input")))
    if not messages:
        raise wrong("input", None, "must be a string or a list of items")
    instructions = reader.text("instructions")
    system = ({"role": "system", "content": instructions},) if instructions else ()
    return Asked(
        ChatRequest(
            messages=(*system, *messages),
            tools=own_tools(reader, "function", "parameters"),
            max_tokens=reader.count("max_output_tokens"),
            stop=reader.stops(),
            model=reader.text("model"),
            parallel_tool_calls=reader.flag("parallel_tool_calls", True),
        ),
        stream=reader.flag("stream"),
        ignored=tuple(reader.ignored),
        continued=messages if reader.flag("store", True) else (),
    )


def _hints(reader: Reader) -> None:
    reader.ignore_sampling()
    if reader.body.get("tool_choice") not in (None, "auto"):
        reader.ignore("tool_choice", "let the policy choose")
    if Reader(reader.object("text")).object("format").get("type", "text") != "text":
        reader.ignore("response_format", "ask for JSON in the prompt")
    if any(value is not None for value in reader.object("reasoning").values()):
        reader.ignore("reasoning", "the chat template decides")
    if reader.body.get("top_logprobs"):
        reader.ignore("top_logprobs", "ask for log-probs at /v1/chat/completions")
    for name in ("background", "conversation", "prompt", "max_tool_calls"):
        if reader.body.get(name):
            raise wrong(name, "...", "is not served. Fix: leave it out")


def _messages(value: Any) -> list[Message]:
    """Return the items as messages. Items of one answer become one assistant message."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or any(not isinstance(item, dict) for item in value):
        raise wrong("input", value, "must be a string or a list of items")
    found: list[Message] = []
    for k, item in enumerate(value):
        _add(found, item, f"input[{k}]")
    return found


def _add(found: list[Message], item: Body, where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message" and item.get("role") != "assistant":
        role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
        if role not in ("system", "user"):
            raise wrong(f"{where}.role", role, "must be user, system, developer or assistant")
        found.append({"role": role, "content": text_of(item.get("content"), where, PARTS)})
    elif kind == "message":
        last = _open(found, ("tool_calls", "content"))
        last["content"] = text_of(item.get("content"), where, PARTS)
    elif kind == "reasoning":
        last = _open(found, ("tool_calls", "content", "reasoning_content"))
        parts = item.get("content") or item.get("summary")
        if text := text_of(parts, where, PARTS):
            last["reasoning_content"] = text
    elif kind == "function_call":
        last = _open(found, ())
        call = call_of(item.get("call_id", 0), item.get("name"), item.get("arguments"), where)
        last["tool_calls"] = [*last.get("tool_calls", ()), call]
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise wrong(f"{where}.call_id", item.get("call_id"), "must be a string")
        text = text_of(item.get("output"), where, PARTS)
        found.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    else:
        raise Refusal(
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


def answer(asked: Asked, drawn: Drawn) -> Body:
    """Return a response."""
    turn = drawn.turns[0]
    cut = turn.finish == "length"
    read_, written = drawn.usage
    return {
        **_head(asked, drawn),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(drawn),
        "usage": {
            "input_tokens": read_,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read_ + written,
        },
    }


def _head(asked: Asked, drawn: Drawn) -> Body:
    return {
        "id": f"resp_{drawn.nonce}",
        "object": "response",
        "created_at": drawn.created,
        "status": "in_progress",
        "model": drawn.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": asked.request.parallel_tool_calls,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in asked.request.tools],
        "temperature": None,
        "top_p": None,
        "usage": None,
    }


def _items(drawn: Drawn) -> list[Body]:
    turn = drawn.turns[0]
    status = "incomplete" if turn.finish == "length" else "completed"
    items: list[Body] = []
    if thinking := turn.message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": thinking}]
        items.append(
            {"id": f"rs_{drawn.nonce}", "type": "reasoning", "summary": [], "content": parts}
        )
    calls = calls_of(turn.message)
    text = turn.message.get("content") or ""
    if text or not calls:
        part: Body = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{drawn.nonce}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for k, (number, name, arguments) in enumerate(calls):
        call = {"id": f"fc_{drawn.nonce}_{k}", "type": "function_call", "status": status}
        items.append({**call, "call_id": number, "name": name, "arguments": arguments})
    return items


def events(asked: Asked, drawn: Drawn) -> Iterator[str]:
    """Yield the events of a stream, up to response.completed."""
    number = 0

    def step(kind: str, **fields: Any) -> str:
        nonlocal number
        body = {"type": f"response.{kind}", "sequence_number": number, **fields}
        number += 1
        return event(body, f"response.{kind}")

    head = _head(asked, drawn)
    yield step("created", response=head)
    yield step("in_progress", response=head)
    for k, item in enumerate(_items(drawn)):
        at = {"item_id": item["id"], "output_index": k}
        yield step("output_item.added", output_index=k, item=_empty(item))
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
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
    found = answer(asked, drawn)
    yield step(str(found["status"]), response=found)


def _empty(item: Body) -> Body:
    """Return an item as a stream announces it."""
    if item["type"] == "function_call":
        return {**item, "arguments": "", "status": "in_progress"}
    if item["type"] == "message":
        return {**item, "content": [], "status": "in_progress"}
    return {**item, "content": []}


def trouble(refusal: Refusal) -> str:
    """Return the event of an error in a stream."""
    error = openai_problem(refusal)["error"]
    return event({**error, "type": "error", "sequence_number": 0}, "error")
