"""The client in this process: its short way has the answers and errors of openai's own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("openai", reason="the extra agents is not installed")
import openai
from openai.types.chat import ChatCompletionMessage

from millrace.agents import transport
from millrace.agents.request import ChatRequest, RequestError
from millrace.agents.transport import client_of
from millrace.errors import LimitReached
from millrace.types import Message
from tests.agents.clients import TOOL
from tests.agents.talks import USER, Desk, called, in_loop, said

OWN_WAY = {"extra_headers": {"x-own-way": "1"}}
"""A header is nothing for the short way."""
IMAGE = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
CALLS = called(("a1", "add", '{"a": 1, "b": 2}'), ("a2", "add", "{}"), text="so")
LAST = ChatCompletionMessage(role="assistant", content="before")


@dataclass
class Case:
    """Arguments of a call, and what the policy says."""

    given: dict[str, Any] = field(default_factory=dict)
    answer: Message | Exception = field(default_factory=lambda: said("hi"))
    strict: bool = False
    route: str = "chat"


def text(**given: Any) -> Case:
    return Case({"prompt": "one", **given}, route="text")


CASES = {
    "plain": Case(),
    "tools": Case({"tools": [TOOL]}, CALLS),
    "thoughts": Case(answer=said("hi") | {"reasoning_content": "hm"}),
    "log-probs": Case({"logprobs": True, "n": 3, "user": openai.omit}),
    "ids": Case({"extra_body": {"return_token_ids": True}}),
    "nothing": Case({"max_tokens": None, "stop": None, "timeout": 3.0, "temperature": 1}),
    "limits": Case({"max_completion_tokens": 3, "stop": ["a", "b"]}),
    "ignored": Case({"temperature": 0.1, "seed": 3, "tool_choice": "required", "tools": [TOOL]}),
    "strict": Case({"temperature": 0.1}, strict=True),
    "an object": Case({"messages": [USER, LAST, USER]}),
    "a tuple": Case({"messages": (USER, LAST)}),
    "a generator": Case({"messages": (one for one in [USER])}),
    "stream": Case({"stream": True}),
    "stream of calls": Case(
        {"stream": True, "tools": [TOOL], "stream_options": {"include_usage": True}}, CALLS
    ),
    "stream of two": Case({"stream": True, "n": 2, "logprobs": True}),
    "an extra body": Case({"extra_body": {"return_token_ids": True, "n": 2}}),
    "no messages": Case({"messages": []}),
    "wrong messages": Case({"messages": "hello"}),
    "a wrong number": Case({"max_tokens": 0}),
    "NaN": Case({"max_tokens": float("nan")}),
    "half a character": Case({"messages": [{"role": "user", "content": "\ud800"}]}),
    "an image": Case({"messages": [{"role": "user", "content": IMAGE}]}),
    "unknown": Case({"colour": "red"}),
    "a class": Case({"response_format": ChatCompletionMessage}),
    "a set": Case({"stop": {1}}),
    "limit": Case(answer=LimitReached("turns", "the episode may have 3 turns")),
    "context": Case(answer=LimitReached("context", "too long")),
    "refused": Case(answer=RequestError("the template has no tools")),
    "broken": Case(answer=RuntimeError("no engine")),
    "broken stream": Case({"stream": True}, RuntimeError("no engine")),
    "text": text(),
    "text of ids": text(prompt=[104, 105], logprobs=1, n=2),
    "text with echo": text(echo=True, stop="z", extra_body={"return_token_ids": True}),
    "stream of text": text(stream=True, n=2, stream_options={"include_usage": True}),
    "texts": text(prompt=["a", "b"]),
    "no text": text(prompt=""),
}


def shown(value: Any) -> Any:
    """Return all that a program can read of an object of openai's, without ids and times."""
    if isinstance(value, openai.BaseModel):
        fields = {name: shown(one) for name, one in value if name not in ("id", "created")}
        calls = {"id": dict(value)["id"]} if type(value).__name__.endswith("ToolCall") else {}
        own = value.model_fields_set, value.model_extra
        return type(value), fields, calls, own, getattr(value, "_request_id", "none")
    return [shown(one) for one in value] if isinstance(value, list) else value


async def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns or raises."""
    try:
        done = await call()
        if isinstance(done, openai.AsyncStream):
            return "stream", [shown(chunk) async for chunk in done]
        return shown(done)
    except openai.APIStatusError as error:
        response = error.response
        return (type(error), str(error), error.status_code, error.body, error.code, error.param,
                error.type, error.request_id, response.json(), dict(response.headers),
                str(response.request.url), response.request.method)  # fmt: skip
    except openai.APIError as error:
        return type(error), str(error), error.body, error.code
    except (TypeError, ValueError) as error:
        return type(error), str(error)


async def played(case: Case, own_way: bool) -> tuple[Any, ...]:
    """Ask once, and return the outcome and what the episode saw."""

    def script(_: ChatRequest) -> Message | Exception:
        return case.answer

    desk = Desk(script, strict=case.strict)
    client = client_of(desk.service, desk.episode.key)
    assert isinstance(client, openai.AsyncOpenAI)
    create: Any = (
        client.chat.completions.create if case.route == "chat" else client.completions.create
    )
    given = {"model": "policy", **({"messages": [USER]} if case.route == "chat" else {})}
    given |= case.given | (OWN_WAY if own_way else {})
    found = await outcome(lambda: create(**given))
    saw = desk.talk.requests, desk.talk.sent, desk.session.counts, str(desk.episode.error)
    await desk.service.end(desk.episode)
    return found, *saw, desk.talk.lost


@pytest.mark.parametrize("name", [name for name in CASES if name != "a generator"])
@in_loop
async def test_both_ways_are_alike(name: str) -> None:
    short, own = await played(CASES[name], False), await played(CASES[name], True)
    assert short == own


@in_loop
async def test_what_cannot_be_copied_takes_the_own_way() -> None:
    found, requests, *_ = await played(CASES["a generator"], False)
    assert found[0].__name__ == "ChatCompletion" and requests[0].messages == (USER,)


@in_loop
async def test_a_plain_call_does_not_pass_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    real = transport._Transport.handle_async_request

    async def counted(self: Any, request: Any) -> Any:
        passed.append(request.url.path)
        return await real(self, request)

    monkeypatch.setattr(transport._Transport, "handle_async_request", counted)
    desk = Desk(lambda _: said("hi"))
    client = client_of(desk.service, desk.episode.key)
    for one in (client, client.with_options(max_retries=0)):
        answer = await one.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        assert answer.choices[0].message.content == "hi" and not passed
    raw = await client.chat.completions.with_raw_response.create(model="p", messages=[USER])  # type: ignore[list-item]
    assert raw.parse().choices[0].message.content == "hi"
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert passed == ["/v1/chat/completions", "/v1/models"]
    other = client.with_options(default_headers={"x-api-key": "wrong"})
    with pytest.raises(openai.AuthenticationError):
        await other.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]


@pytest.mark.parametrize("own_way", [False, True])
@in_loop
async def test_a_dead_key_a_wrong_key_and_a_closed_client(own_way: bool) -> None:
    desk = Desk(lambda _: said("hi"))
    client = client_of(desk.service, desk.episode.key)
    given: Any = {"model": "policy", "messages": [USER], **(OWN_WAY if own_way else {})}
    with pytest.raises(openai.AuthenticationError):
        await client_of(desk.service, "0" * 32).chat.completions.create(**given)
    await desk.service.end(desk.episode)
    with pytest.raises(openai.BadRequestError, match="episode is over"):
        await client.chat.completions.create(**given)
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.chat.completions.create(**given)
