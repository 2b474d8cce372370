"""The endpoint without sockets: keys, routes, limits, retries, deliveries and rewards."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from millrace.agents.request import ChatRequest, ChatTurn, RequestError
from millrace.agents.service import HttpReply
from millrace.errors import EpisodeError, LimitReached
from tests.agents.talks import CHAT, USER, Desk, called, in_virtual_time, said

BODY = {"model": "policy", "messages": [USER]}


def hello(request: ChatRequest) -> Any:
    return said("hi")


def body_of(answer: HttpReply) -> Any:
    return json.loads(answer.body)


def code_of(answer: HttpReply) -> tuple[int, str]:
    assert answer.headers["x-should-retry"] == "false"
    return answer.status, body_of(answer)["error"]["code"]


async def stream_of(answer: HttpReply) -> str:
    assert answer.chunks is not None
    return b"".join([chunk async for chunk in answer.chunks]).decode()


@in_virtual_time
async def test_a_key_opens_its_own_episode_and_dies_with_it() -> None:
    desk = Desk(hello)
    answer = await desk.post(CHAT, BODY)
    assert (answer.status, body_of(answer)["choices"][0]["message"]["content"]) == (200, "hi")
    other = desk.open()
    assert other.key != desk.episode.key and len(bytes.fromhex(other.key)) == 16
    await desk.service.end(desk.episode)
    assert code_of(await desk.post(CHAT, BODY)) == (400, "episode_over")
    assert code_of(await desk.post("/reward", {"reward": 1})) == (400, "episode_over")
    assert (await desk.post(CHAT, BODY, other.key)).status == 200
    assert desk.service.live == 1


@pytest.mark.parametrize("key", ["", "sk-123", "0" * 32, "\udc80", "ü"])
@in_virtual_time
async def test_no_request_is_served_without_a_key(key: str) -> None:
    desk = Desk(hello)
    assert code_of(await desk.post(CHAT, BODY, key)) == (401, "invalid_api_key")
    assert code_of(await desk.post("/v1/nothing", BODY, key)) == (401, "invalid_api_key")
    assert not desk.talk.requests


@in_virtual_time
async def test_a_key_may_be_part_of_the_path_and_wins_over_the_header() -> None:
    desk = Desk(hello)
    key = desk.episode.key
    assert (await desk.post(f"/e/{key}{CHAT}", BODY, "sk-own")).status == 200
    assert (await desk.post(CHAT, BODY, "sk-own", x_api_key=key)).status == 200
    assert code_of(await desk.post(f"/e/wrong{CHAT}", BODY))[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../v1/chat/completions",
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/V1/chat/completions",
        "/v1/%63hat/completions",
        "/etc/passwd",
        "",
        "/v1/models/../../reward",
    ],
)
@in_virtual_time
async def test_paths_are_compared_as_they_are(path: str) -> None:
    desk = Desk(hello)
    assert code_of(await desk.post(path, BODY))[0] in (404, 405)
    assert code_of(await desk.post(f"/e/{desk.episode.key}{path}", BODY))[0] in (404, 405)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'{"messages": ' + b"[" * 70 + b"]" * 70 + b"}", "too_deep"),
        (b'{"messages": ' + b"[" * 100_000, "too_deep"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "invalid_json"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"messages": []}', "invalid_value"),
        (b"x" * 2001, "body_too_large"),
    ],
)
@in_virtual_time
async def test_a_bad_body_is_refused(raw: bytes, code: str) -> None:
    desk = Desk(hello, max_body=150_000 if code == "too_deep" else 2000)
    status, found = code_of(await desk.post(CHAT, raw))
    assert (status, found) == (413 if code == "body_too_large" else 400, code)
    assert not desk.talk.requests


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("context", "context_length_exceeded"),
        ("turns", "max_turns_reached"),
        ("tokens", "max_episode_tokens_reached"),
    ],
)
@in_virtual_time
async def test_a_limit_is_a_400_that_nobody_tries_again(limit: str, code: str) -> None:
    desk = Desk(lambda _: LimitReached(limit, "no room"))
    assert code_of(await desk.post(CHAT, BODY)) == (400, code)
    assert code_of(await desk.post(CHAT, {**BODY, "stream": True})) == (400, code)
    assert desk.episode.limit is not None and desk.episode.limit.limit == limit
    assert desk.episode.error is None


@in_virtual_time
async def test_a_failure_is_kept_for_the_episode_and_ends_it() -> None:
    desk = Desk(lambda _: EpisodeError("engine", "lost"))
    assert code_of(await desk.post(CHAT, BODY)) == (400, "episode_failed")
    assert code_of(await desk.post(CHAT, {**BODY, "n": 2})) == (400, "episode_failed")
    assert isinstance(desk.episode.error, EpisodeError)
    assert len(desk.talk.requests) == 1


@in_virtual_time
async def test_a_bug_is_a_500_that_names_no_detail() -> None:
    desk = Desk(lambda _: ZeroDivisionError("secret"))
    answer = await desk.post(CHAT, BODY)
    assert code_of(answer) == (500, "internal_error") and b"secret" not in answer.body
    assert isinstance(desk.episode.error, ZeroDivisionError)


@in_virtual_time
async def test_a_request_that_the_conversation_refuses_is_a_400() -> None:
    desk = Desk(lambda _: RequestError("no such role"))
    assert code_of(await desk.post(CHAT, BODY)) == (400, "invalid_request")
    assert desk.episode.error is None


@in_virtual_time
async def test_a_turn_that_misses_its_deadline_fails_the_episode() -> None:
    desk = Desk(hello, turn_deadline_s=0.01)
    desk.talk.gate.clear()
    assert code_of(await desk.post(CHAT, BODY)) == (400, "episode_failed")
    assert isinstance(desk.episode.error, EpisodeError)
    assert desk.episode.error.reason == "turn_deadline" and desk.talk.cancelled == 1


@in_virtual_time
async def test_one_choice_that_fails_ends_the_others() -> None:
    desk = Desk(hello)
    rest = asyncio.Event()

    async def draw(request: ChatRequest) -> ChatTurn:
        desk.talk.requests.append(request)
        if len(desk.talk.requests) < 3:
            try:
                await rest.wait()
            except asyncio.CancelledError:
                desk.talk.cancelled += 1
                raise
        raise LimitReached("tokens", "no room")

    desk.talk.chat = draw  # type: ignore[method-assign]
    answer = await desk.post(CHAT, {**BODY, "n": 3})
    assert code_of(answer) == (400, "max_episode_tokens_reached") and desk.talk.cancelled == 2


@in_virtual_time
async def test_too_many_requests_in_flight_are_refused() -> None:
    desk = Desk(hello, max_in_flight=3)
    desk.talk.gate.clear()
    calls = [asyncio.ensure_future(desk.post(CHAT, BODY)) for _ in range(5)]
    await asyncio.sleep(0.01)
    desk.talk.gate.set()
    answers = await asyncio.gather(*calls)
    assert sorted(a.status for a in answers) == [200, 200, 200, 400, 400]
    assert code_of(answers[-1]) == (400, "too_many_requests")
    for answer in answers:
        answer.settle(True)
    assert (await desk.post(CHAT, BODY)).status == 200


@in_virtual_time
async def test_a_retry_waits_for_the_same_turn() -> None:
    desk = Desk(hello)
    desk.talk.gate.clear()
    first = asyncio.ensure_future(desk.post(CHAT, BODY))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    again = asyncio.ensure_future(desk.post(CHAT, BODY, x_stainless_retry_count="1"))
    await asyncio.sleep(0.01)
    desk.talk.gate.set()
    answer = await again
    answer.settle(True)
    assert answer.status == 200 and len(desk.talk.requests) == 1
    assert desk.talk.sent == [0] and desk.session.counts["retries_coalesced"] == 1
    await desk.service.end(desk.episode)
    assert desk.talk.lost == []


@in_virtual_time
async def test_an_answer_that_did_not_leave_is_given_again() -> None:
    desk = Desk(hello)
    lost = await desk.post(CHAT, BODY)
    lost.settle(False)
    again = await desk.post(CHAT, BODY)
    assert again.body == lost.body and len(desk.talk.requests) == 1
    again.settle(True)
    marked = await desk.post(CHAT, BODY, x_stainless_retry_count="2")
    assert marked.body == lost.body and len(desk.talk.requests) == 1
    marked.settle(False)
    fresh = await desk.post(CHAT, BODY)
    fresh.settle(True)
    assert len(desk.talk.requests) == 2 and desk.talk.sent == [0, 1]


@in_virtual_time
async def test_equal_requests_at_once_are_samples_of_their_own() -> None:
    desk = Desk(hello)
    desk.talk.gate.clear()
    calls = [asyncio.ensure_future(desk.post(CHAT, BODY)) for _ in range(4)]
    await asyncio.sleep(0.01)
    desk.talk.gate.set()
    for answer in await asyncio.gather(*calls):
        answer.settle(True)
    assert sorted(desk.talk.sent) == [0, 1, 2, 3]


@in_virtual_time
async def test_a_draw_without_a_client_ends_after_the_grace() -> None:
    desk = Desk(hello, retry_grace_s=0.02)
    desk.talk.gate.clear()
    call = asyncio.ensure_future(desk.post(CHAT, BODY))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait({call})
    assert desk.talk.cancelled == 0
    await asyncio.sleep(0.2)
    assert desk.talk.cancelled == 1
    desk.talk.gate.set()
    (await desk.post(CHAT, BODY)).settle(True)
    assert desk.talk.sent == [1] and desk.session.counts["clients_gone"] == 1


@in_virtual_time
async def test_the_end_of_an_episode_kills_what_nobody_received() -> None:
    desk = Desk(hello)
    (await desk.post(CHAT, {**BODY, "n": 2})).settle(False)
    (await desk.post(CHAT, {**BODY, "user": "a"})).settle(True)
    desk.talk.gate.clear()
    waiting = asyncio.ensure_future(desk.post(CHAT, {**BODY, "user": "b"}))
    await asyncio.sleep(0.01)
    await desk.service.end(desk.episode)
    assert code_of(await waiting) == (400, "episode_over")
    assert (desk.talk.sent, desk.talk.lost, desk.talk.cancelled) == ([2], [0, 1], 1)


@in_virtual_time
async def test_a_stream_says_that_it_lives_and_ends_with_the_turn() -> None:
    desk = Desk(hello, keepalive_s=0.01)
    desk.talk.gate.clear()
    call = await desk.post(CHAT, {**BODY, "stream": True})
    assert call.chunks is not None
    assert await anext(call.chunks) == b": keepalive\n\n"
    desk.talk.gate.set()
    rest = await stream_of(call)
    assert rest.endswith("data: [DONE]\n\n") and '"content":"hi"' in rest
    call.settle(True)
    assert desk.talk.sent == [0]


@in_virtual_time
async def test_a_late_failure_is_an_event_of_the_stream() -> None:
    desk = Desk(lambda _: LimitReached("context", "no room"), keepalive_s=0.01)
    for path, more in [(CHAT, {}), ("/v1/messages", {"max_tokens": 9}), ("/v1/responses", {})]:
        desk.talk.gate.clear()
        call = await desk.post(path, {**BODY, "input": "hello", "stream": True, **more})
        desk.talk.gate.set()
        assert call.status == 200
        text = await stream_of(call)
        assert "context_length_exceeded" in text and "error" in text


@in_virtual_time
async def test_rewards_of_the_episode_and_of_turns() -> None:
    desk = Desk(hello)
    found = body_of(await desk.post(CHAT, BODY))
    assert (await desk.post("/reward", {"reward": 0.5})).status == 200
    assert (await desk.post("/v1/reward", {"reward": 1})).status == 200
    assert desk.episode.reward == 1.0 and desk.session.counts["rewards_replaced"] == 1
    assert (await desk.post("/reward", {"reward": 2, "turn": found["id"]})).status == 200
    assert (await desk.post("/reward", {"reward": -1, "turn": 0})).status == 200
    assert desk.session.rewards == [(2.0, 0), (-1.0, 0)]
    for bad in ({"reward": "1"}, {"reward": True}, {}, {"reward": 1, "turn": "chatcmpl-x"},
                {"reward": 1, "turn": 7}, {"reward": 1, "turn": [1]}, {"reward": 10**400}):  # fmt: skip
        assert code_of(await desk.post("/reward", bad)) == (400, "invalid_value")


@in_virtual_time
async def test_parameters_of_sampling_are_counted_or_refused() -> None:
    hints = {
        "temperature": 0.2, "top_p": 1, "seed": 3, "tool_choice": "required",
        "response_format": {"type": "json_object"}, "logit_bias": {"5": 1},
    }  # fmt: skip
    desk = Desk(hello)
    assert (await desk.post(CHAT, {**BODY, **hints})).status == 200
    ignored = {"temperature", "seed", "tool_choice", "response_format", "logit_bias"}
    assert set(desk.session.counts) == {f"ignored/{name}" for name in ignored}
    strict = Desk(hello, strict=True)
    assert (await strict.post(CHAT, {**BODY, "temperature": 1.0})).status == 200
    for name, value in hints.items():
        if name != "top_p":
            answer = await strict.post(CHAT, {**BODY, name: value})
            assert code_of(answer) == (400, "unsupported_parameter")
            assert body_of(answer)["error"]["param"] == name


@in_virtual_time
async def test_models_are_listed() -> None:
    desk = Desk(hello)
    key = {"authorization": f"Bearer {desk.episode.key}"}
    listed = await desk.service.handle("GET", "/v1/models", key, b"")
    assert [m["id"] for m in body_of(listed)["data"]] == ["policy"]
    one = await desk.service.handle("GET", "/v1/models/policy", key, b"")
    assert body_of(one)["max_model_len"] == 4096
    none = await desk.service.handle("GET", "/v1/models/gpt-9", key, b"")
    assert code_of(none) == (404, "model_not_found")


@in_virtual_time
async def test_a_previous_response_is_continued() -> None:
    desk = Desk(lambda r: said("again") if len(r.messages) > 2 else called(("c1", "add", "{}")))
    first = body_of(await desk.post("/v1/responses", {"instructions": "be kind", "input": "hello"}))
    output = [{"type": "function_call_output", "call_id": "c1", "output": "3"}]
    more = {"previous_response_id": first["id"], "input": output, "instructions": "be kind"}
    second = body_of(await desk.post("/v1/responses", more))
    assert second["output"][0]["content"][0]["text"] == "again"
    roles = [m["role"] for m in desk.talk.requests[-1].messages]
    assert roles == ["system", "user", "assistant", "tool"]
    unknown = await desk.post("/v1/responses", {"previous_response_id": "resp_1", "input": "a"})
    assert code_of(unknown) == (400, "previous_response_not_found")
