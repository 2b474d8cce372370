"""OpenAI's client without a socket: its requests go to a Service in this process.

A plain call of chat.completions.create or completions.create goes straight to the service. It
saves what the client does for a network. Everything else takes the client's own way, with a
transport instead of a socket. Both ways end in `Service.handle`, with the same bytes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pydantic
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
from openai.resources.completions import AsyncCompletions
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from millrace.agents.service import HttpReply, Service

_BASE = "http://millrace.invalid/v1"


class _Stream(httpx2.AsyncByteStream):
    """The body of a stream. The answer is delivered when it was read to its end."""

    def __init__(self, answer: HttpReply) -> None:
        self._answer = answer
        self._settled = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert self._answer.chunks is not None
        async for chunk in self._answer.chunks:
            yield chunk
        self._settle(True)

    async def aclose(self) -> None:
        self._settle(False)

    def _settle(self, delivered: bool) -> None:
        if not self._settled:
            self._settled = True
            self._answer.settle(delivered)


class _Transport(httpx2.AsyncBaseTransport):
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = request.url.raw_path.decode("ascii").partition("?")[0]
        body = await request.aread()
        answer = await _answered(self._service, request.method, path, headers, body)
        return _response(answer)


async def _answered(
    service: Service, method: str, path: str, headers: dict[str, str], body: bytes
) -> HttpReply:
    """Return the service's answer. One without a stream is delivered."""
    answer = await service.handle(method, path, headers, body)
    if answer.status >= 400:  # A program that ignores errors must not stop the event loop.
        await asyncio.sleep(0)
    if answer.chunks is None:
        answer.settle(True)
    return answer


def _response(answer: HttpReply, request: httpx2.Request | None = None) -> httpx2.Response:
    body: dict[str, Any] = {"content": answer.body}
    if answer.chunks is not None:
        body = {"stream": _Stream(answer)}
    return httpx2.Response(answer.status, headers=answer.headers, request=request, **body)


class Client(openai.AsyncOpenAI):
    """An AsyncOpenAI of a service. A copy with other options has the same service."""

    @functools.cached_property
    def chat(self) -> AsyncChat:
        chat = AsyncChat(self)
        kinds = ChatCompletion, ChatCompletionChunk
        _shorten(chat.completions, "chat/completions", _CHAT, kinds)
        return chat

    @functools.cached_property
    def completions(self) -> AsyncCompletions:
        completions = AsyncCompletions(self)
        _shorten(completions, "completions", _TEXT, (Completion, Completion))
        return completions


class _Http(httpx2.AsyncClient):
    """The HTTP client of a Client. It has the service, so that copies of a Client find it."""

    def __init__(self, service: Service) -> None:
        super().__init__(transport=_Transport(service))
        self.service = service


def _shorten(resource: Any, route: str, fields: frozenset[str], kinds: tuple[Any, Any]) -> None:
    """Let `create` of a resource go straight to the service where it can."""
    own, client = resource.create, resource._client

    @functools.wraps(own)
    async def create(**given: Any) -> Any:
        if (body := _plain(client, given, fields)) is None:
            return await own(**given)
        return await _asked(client, route, body, kinds)

    resource.create = create


_NO_BODY = ("self", "extra_headers", "extra_query", "extra_body", "timeout")
_CHAT, _TEXT = (
    frozenset(inspect.signature(kind.create).parameters).difference(_NO_BODY)
    for kind in (AsyncChatCompletions, AsyncCompletions)
)


def _plain(client: openai.AsyncOpenAI, given: dict[str, Any], fields: frozenset[str]) -> Any:
    """Return the body of a request that needs nothing of openai's way, or None.

    An argument that is wrong takes openai's way too, for its error.
    """
    required = "messages" if "messages" in fields else "prompt"
    if (
        given.get("extra_headers") is not None
        or given.get("extra_query") is not None
        or "model" not in given
        or required not in given
        or not isinstance(getattr(client, "_client", None), _Http)
        or not client.api_key
        or client.is_closed()
        or client._custom_headers
        or client._custom_query
    ):
        return None
    body = {name: given[name] for name in sorted(given) if name not in _NO_BODY}
    extra = given.get("extra_body") or {}
    if not fields.issuperset(body) or not isinstance(extra, dict) or "stream" in extra:
        return None
    nothing = openai.Omit | openai.NotGiven
    body = {name: value for name, value in body.items() if not isinstance(value, nothing)} | extra
    try:
        text = json.dumps(
            body, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_dumped
        )
        return text.encode()
    except (TypeError, ValueError):
        return None


def _dumped(value: Any) -> Any:
    """Return an object of openai's as JSON, as openai does it. Such is a message of an answer."""
    if not isinstance(value, pydantic.BaseModel):
        raise TypeError
    without = getattr(value, "__api_exclude__", None)
    return value.model_dump(exclude_unset=True, mode="json", exclude=without)


@functools.lru_cache(maxsize=64)
def _url(base: httpx2.URL, route: str) -> httpx2.URL:
    return base.join(route)


async def _asked(
    client: openai.AsyncOpenAI, route: str, body: bytes, kinds: tuple[Any, Any]
) -> Any:
    """Ask the service, and return an answer or a stream of openai's. Raises openai's errors."""
    service = client._client.service  # type: ignore[attr-defined]  # _plain has checked it
    headers = {"authorization": f"Bearer {client.api_key}"}
    path = client.base_url.raw_path.decode("ascii") + route
    answer = await _answered(service, "POST", path, headers, body)
    if answer.status < 400 and answer.chunks is None:
        done = kinds[0].construct(**json.loads(answer.body))
        done._request_id = None
        return done
    request = httpx2.Request("POST", _url(client.base_url, route), headers=headers)
    response = _response(answer, request)
    if answer.status >= 400:
        raise client._make_status_error_from_response(response)
    return openai.AsyncStream[kinds[1]](  # type: ignore[valid-type]
        cast_to=kinds[1], response=response, client=client
    )


def client_of(service: Service, key: str) -> openai.AsyncOpenAI:
    """Return a client of the episode that has `key`. It needs no close."""
    return Client(api_key=key, base_url=_BASE, http_client=_Http(service))
