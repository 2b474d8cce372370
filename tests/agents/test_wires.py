"""The wire formats: what a body asks for, and what an answer shows."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from millrace.agents.request import ChatRequest
from tests.agents.talks import CHAT, USER, Desk, called, in_loop, said

CALLS = called(("c1", "add", '{"a":1}'), ("c2", "add", '{"b": [2]}'), text="so")
ASSISTANT = {**CALLS, "content": "so"}
RESULTS = [{"role": "tool", "tool_call_id": c, "content": "3"} for c in ("c1", "c2")]


async def body(desk: Desk, path: str, given: dict[str, Any]) -> Any:
    answer = await desk.post(path, given)
    answer.settle(True)
    return json.loads(answer.body)


async def events(desk: Desk, path: str, given: dict[str, Any]) -> list[Any]:
    answer = await desk.post(path, {**given, "stream": True})
    assert answer.chunks is not None
    text = b"".join([chunk async for chunk in answer.chunks]).decode()
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@in_loop
async def test_all_formats_ask_for_the_same_conversation() -> None:
    """One conversation with calls and results, as each format writes it."""
    system = {"role": "system", "content": "be kind"}
    schema = {"type": "object", "properties": {}}
    chat = {
        "messages": [system, USER, {**ASSISTANT, "content": [{"type": "text", "text": "so"}]},
                     *RESULTS],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": schema}}],
        "max_completion_tokens": 5, "stop": "x",
    }  # fmt: skip
    uses = [
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}, "caller": None},
        {"type": "tool_use", "id": "c2", "name": "add", "input": {"b": [2]}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "3"}]},
    ]
    messages = {
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": "so"}, *uses]},
            {"role": "user", "content": results},
        ],
        "tools": [{"name": "add", "input_schema": schema}],
        "max_tokens": 5, "stop_sequences": ["x"],
    }  # fmt: skip
    responses = {
        "instructions": "be kind",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "message", "role": "assistant", "id": "msg_1",
             "content": [{"type": "output_text", "text": "so", "annotations": []}]},
            *({"type": "function_call", "id": "fc", "call_id": c["id"], **c["function"]}
              for c in CALLS["tool_calls"]),
            *({"type": "function_call_output", "call_id": c, "output": "3"} for c in ("c1", "c2")),
        ],
        "tools": [{"type": "function", "name": "add", "parameters": schema, "strict": True}],
        "max_output_tokens": 5, "stop": ["x"],
    }  # fmt: skip
    desk = Desk(lambda _: said("hi"))
    for path, given in [(CHAT, chat), ("/v1/messages", messages), ("/v1/responses", responses)]:
        await body(desk, path, given)
    asked = [_plain(request) for request in desk.talk.requests]
    assert asked[0] == asked[1] == asked[2]
    assert asked[0].messages == (system, USER, _plain_message(ASSISTANT), *RESULTS)
    assert (asked[0].max_tokens, asked[0].stop) == (5, ("x",))


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its arguments in one form."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
        for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _plain(request: ChatRequest) -> ChatRequest:
    messages = tuple(_plain_message(m) for m in request.messages)
    return ChatRequest(messages, request.tools, request.max_tokens, request.stop)


@in_loop
async def test_a_chat_answer_has_what_was_asked_for() -> None:
    desk = Desk(lambda _: CALLS)
    asked = {"messages": [USER], "n": 2, "logprobs": True, "return_token_ids": True}
    found = await body(desk, CHAT, asked)
    assert [c["index"] for c in found["choices"]] == [0, 1]
    choice = found["choices"][1]
    assert choice["message"]["tool_calls"] == CALLS["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert desk.talk.decode(choice["token_ids"]).startswith("so")
    assert [p["logprob"] for p in choice["logprobs"]["content"]] == [-0.5] * len(
        choice["token_ids"]
    )
    assert len(found["prompt_token_ids"]) == found["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == 2 * len(choice["token_ids"])


@in_loop
async def test_the_chunks_of_a_chat_join_to_its_answer() -> None:
    desk = Desk(lambda _: CALLS)
    given = {"messages": [USER], "n": 2, "stream_options": {"include_usage": True}}
    chunks = await events(desk, CHAT, given)
    for index in (0, 1):
        mine = [c for e in chunks for c in e["choices"] if c["index"] == index]
        deltas = [c["delta"] for c in mine]
        assert "".join(d.get("content") or "" for d in deltas) == "so"
        calls = [call for d in deltas for call in d.get("tool_calls", ())]
        assert [c["id"] for c in calls if "id" in c] == ["c1", "c2"]
        joined = "".join(c["function"]["arguments"] for c in calls if c["index"] == 1)
        assert json.loads(joined) == {"b": [2]}
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["tool_calls"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0


@in_loop
async def test_completions_take_text_or_tokens() -> None:
    desk = Desk(lambda _: said("hi"))
    for prompt in ("ab", [97, 98], [[97, 98]]):
        given = {"prompt": prompt, "echo": True, "return_token_ids": True, "max_tokens": 3}
        found = await body(desk, "/v1/completions", given)
        choice = found["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("abhi", [104, 105])
        assert choice["prompt_token_ids"] == [97, 98]
        assert desk.talk.requests[-1].max_tokens == 3
    found = await body(desk, "/v1/completions", {"prompt": "ab", "logprobs": 0})
    assert found["choices"][0]["logprobs"]["tokens"] == ["h", "i"]
    assert found["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    for bad in ([], "", ["a", "b"], [[1], [2]], [-1], [1.5], [True], None):
        assert (await desk.post("/v1/completions", {"prompt": bad})).status == 400


@in_loop
async def test_anthropic_blocks_and_reasons() -> None:
    desk = Desk(lambda _: {**CALLS, "reasoning_content": "hm"})
    given = {"messages": [USER], "max_tokens": 9}
    found = await body(desk, "/v1/messages", given)
    assert [b["type"] for b in found["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert found["stop_reason"] == "tool_use" and found["content"][3]["input"] == {"b": [2]}
    streamed = await events(desk, "/v1/messages", given)
    kinds = [e["type"] for e in streamed]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    deltas = [e["delta"] for e in streamed if e["type"] == "content_block_delta"]
    pieces = [d["partial_json"] for d in deltas if d["type"] == "input_json_delta"]
    assert "".join(pieces) == '{"a":1}{"b":[2]}'
    counted = await body(desk, "/v1/messages/count_tokens", {"messages": [USER]})
    assert counted == {"input_tokens": desk.talk.count(ChatRequest((USER,)))}
    plain = Desk(lambda _: said("hi"))
    plain.talk.stopped_by = "!"
    assert (await body(plain, "/v1/messages", given))["stop_sequence"] == "!"
    plain.talk.finish = "length"
    assert (await body(plain, "/v1/messages", given))["stop_reason"] == "max_tokens"
    refused = await body(plain, "/v1/messages", {"messages": [USER]})
    assert refused["type"] == "error" and refused["error"]["type"] == "invalid_request_error"


@in_loop
async def test_the_items_of_a_response_and_its_stream() -> None:
    desk = Desk(lambda _: {**CALLS, "reasoning_content": "hm"})
    found = await body(desk, "/v1/responses", {"input": "hello"})
    kinds = [item["type"] for item in found["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    streamed = await events(desk, "/v1/responses", {"input": "hello"})
    assert [e["sequence_number"] for e in streamed] == list(range(len(streamed)))
    assert streamed[-1]["type"] == "response.completed"
    done = [e["item"] for e in streamed if e["type"] == "response.output_item.done"]
    assert done == streamed[-1]["response"]["output"]
    again = {"input": [{"role": "user", "content": "hello"}, *found["output"]]}
    await body(desk, "/v1/responses", again)
    assert desk.talk.requests[-1].messages == (USER, {**ASSISTANT, "reasoning_content": "hm"})
    desk.talk.finish = "length"
    cut = (await events(desk, "/v1/responses", {"input": "hello"}))[-1]
    assert (cut["type"], cut["response"]["status"]) == ("response.incomplete", "incomplete")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {"type": "input_image", "image_url": "https://example.com/a.png"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
        {"type": "text", "text": 3},
        "text",
        None,
    ],
)
@in_loop
async def test_parts_that_are_no_text_are_refused(part: Any) -> None:
    desk = Desk(lambda _: said("hi"))
    messages = [{"role": "user", "content": [part]}]
    for path in (CHAT, "/v1/messages", "/v1/responses"):
        given = {"messages": messages, "input": messages, "max_tokens": 5}
        assert (await desk.post(path, given)).status == 400
    assert not desk.talk.requests


@in_loop
async def test_a_tools_answer_without_the_id_of_its_call_is_refused() -> None:
    desk = Desk(lambda _: said("hi"))
    given = {"messages": [{"role": "user", "content": "?"}, {"role": "tool", "content": "12"}]}
    answer = await desk.post(CHAT, given)
    assert answer.status == 400 and "messages[1].tool_call_id" in str(answer.body)
    blocks = [{"role": "user", "content": [{"type": "tool_result", "content": "12"}]}]
    answer = await desk.post("/v1/messages", {"messages": blocks, "max_tokens": 5})
    assert answer.status == 400 and "tool_call_id" in str(answer.body)
    items = [{"type": "function_call_output", "output": "12"}]
    answer = await desk.post("/v1/responses", {"input": items})
    assert answer.status == 400 and "tool_call_id" in str(answer.body)
    assert not desk.talk.requests


@in_loop
async def test_an_empty_input_of_a_response_is_a_message() -> None:
    desk = Desk(lambda _: said("hi"))
    first = await body(desk, "/v1/responses", {"input": ""})
    assert desk.talk.requests[-1].messages == ({"role": "user", "content": ""},)
    await body(desk, "/v1/responses", {"input": "", "previous_response_id": first["id"]})
    assert [m["role"] for m in desk.talk.requests[-1].messages] == ["user", "assistant", "user"]


@in_loop
async def test_no_body_is_a_500() -> None:
    """Bodies with random fields and values are served or refused, never an error of ours."""
    rng = random.Random(0)
    names = ["messages", "input", "tools", "tool_calls", "role", "content", "type", "text", "stop",
             "max_tokens", "n", "system", "prompt", "function", "name", "arguments", "parameters",
             "input_schema", "tool_use_id", "id", "call_id", "stream_options", "tool_choice",
             "response_format", "thinking", "reasoning", "logit_bias", "stop_sequences", "output",
             "tool_call_id", "summary", "instructions", "model", "logprobs", "echo",
             "function_call", "parallel_tool_calls", "format"]  # fmt: skip
    words = ["user", "assistant", "tool", "system", "developer", "text", "function", "message",
             "tool_use", "tool_result", "function_call", "function_call_output", "reasoning",
             "thinking", "auto", "json_schema", "custom"]  # fmt: skip

    def value(depth: int) -> Any:
        kind = rng.randrange(9 if depth else 5)
        if kind < 5:
            return rng.choice([None, True, 3, -1.5, "", *words])
        if kind < 7:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        return {rng.choice(names): value(depth - 1) for _ in range(rng.randrange(6))}

    desk = Desk(lambda _: said("hi"))
    seen = set()
    for _ in range(4000):
        given = {rng.choice(names): value(4) for _ in range(8)}
        if rng.random() < 0.7:
            shape = {"role": rng.choice(words), "type": rng.choice(words), "content": value(3)}
            given["messages"] = given["input"] = [{**shape, rng.choice(names): value(3)}]
        path = rng.choice(
            [CHAT, "/v1/messages", "/v1/responses", "/v1/completions", "/reward",
             "/v1/messages/count_tokens"]
        )  # fmt: skip
        answer = await desk.post(path, given)
        answer.settle(True)
        seen.add(answer.status)
        assert answer.status in (200, 400), (path, given)
    assert seen == {200, 400}
