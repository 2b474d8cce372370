"""The endpoint over sockets: ten attacks with their codes, streams, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millrace.agents.request import ChatRequest
from millrace.agents.service import Service
from millrace.errors import ConfigError, MissingDependency
from millrace.types import Message
from tests import listening
from tests.agents.talks import CHAT, USER, Desk, in_loop, options, said
from tests.waiting import HANG_S, until_async

pytest.importorskip("aiohttp", reason="the endpoint listens with aiohttp")
from millrace.agents.endpoint import Endpoint

BODY = json.dumps({"model": "policy", "messages": [USER]}).encode()


def hello(_: ChatRequest) -> Message:
    return said("hi")


@asynccontextmanager
async def listening_desk(
    script: Callable[[ChatRequest], Message | Exception] = hello, **changes: Any
) -> AsyncIterator[tuple[Desk, Endpoint]]:
    desk = Desk(script, **changes)
    endpoint = Endpoint(desk.service, "127.0.0.1", 0)
    await endpoint.start()
    try:
        yield desk, endpoint
    finally:
        await endpoint.close()


def head_of(desk: Desk, path: str = CHAT, key: str | None = None, **headers: Any) -> bytes:
    given = {"host": "x", "authorization": f"Bearer {desk.episode.key if key is None else key}"}
    given |= {name.replace("_", "-"): str(value) for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode()


async def spoken(endpoint: Endpoint, raw: bytes) -> tuple[int, str]:
    """Send bytes, and return the status and the body of the answer."""
    port = int(endpoint.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        async with asyncio.timeout(HANG_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            body = (await reader.readexactly(length)).decode()
    finally:
        writer.close()
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("host", "fix"),
    [("127.0.0.1", "agents.port = .*in use.*agents.port=0"), ("203.0.113.7", "agents.host = ")],
)
@in_loop
async def test_an_address_that_is_taken_or_elsewhere_is_named_with_the_fix(
    host: str, fix: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = Endpoint(Service(options()), host, other.getsockname()[1])
        with pytest.raises(ConfigError, match=fix):
            await endpoint.start()
        await endpoint.close()


@in_loop
async def test_ten_attacks_fail_with_the_documented_code() -> None:
    async with listening_desk(max_body=5000) as (desk, endpoint):
        other = desk.open()
        await desk.service.end(other)
        size = len(BODY)
        image = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]
        picture = json.dumps({"messages": [{"role": "user", "content": image}]}).encode()
        deep = b'{"messages": ' + b"[" * 2000 + b"]" * 2000 + b"}"
        attacks = {
            "no key": (head_of(desk, key="", content_length=size) + BODY, 401, "invalid_api_key"),
            "a guessed key": (
                head_of(desk, key="0" * 32, content_length=size) + BODY, 401, "invalid_api_key"
            ),
            "a dead key": (
                head_of(desk, key=other.key, content_length=size) + BODY, 400, "episode_over"
            ),
            "a huge body": (head_of(desk, content_length=10**12), 413, "body_too_large"),
            "a huge body in chunks": (
                head_of(desk, transfer_encoding="chunked") + b"1400\r\n" + b"x" * 5120 + b"\r\n",
                413, "body_too_large",
            ),
            "a slow body": (head_of(desk, content_length=100) + b"{", 408, "body_deadline"),
            "a path": (
                head_of(desk, "/v1/../../etc/passwd", content_length=size) + BODY,
                404, "not_found",
            ),
            "deep JSON": (head_of(desk, content_length=len(deep)) + deep, 400, "too_deep"),
            "an image": (
                head_of(desk, content_length=len(picture)) + picture, 400, "unsupported_content"
            ),
            "a bomb": (
                head_of(desk, content_encoding="gzip", content_length=3) + b"abc",
                415, "unsupported_encoding",
            ),
        }  # fmt: skip
        for name, (raw, status, code) in attacks.items():
            slow = 0.1 if name == "a slow body" else HANG_S
            desk.service.options = options(max_body=5000, body_deadline_s=slow)
            found, body = await spoken(endpoint, raw)
            assert (name, found) == (name, status)
            assert json.loads(body)["error"]["code"] == code, name
        many = {f"h{k}": "x" for k in range(200)}
        assert (await spoken(endpoint, head_of(desk, **many)))[0] == 400
        assert (await spoken(endpoint, head_of(desk, long="x" * 20_000)))[0] == 400
        assert not desk.talk.requests
        assert (await spoken(endpoint, head_of(desk, content_length=size) + BODY))[0] == 200


@in_loop
async def test_nobody_outside_this_machine_reaches_the_endpoint() -> None:
    async with listening_desk() as (_, endpoint):
        port = int(endpoint.url.rpartition(":")[2])
        assert await asyncio.to_thread(listening.reachable, "127.0.0.1", port)
        for address in listening.other_addresses():
            assert not await asyncio.to_thread(listening.reachable, address, port), address


@in_loop
async def test_another_host_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint(Desk(hello).service, "0.0.0.0", 0)
    await endpoint.start()
    await endpoint.close()
    assert "agents.host = 0.0.0.0" in caplog.text and "plain HTTP" in caplog.text


@in_loop
async def test_without_aiohttp_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingDependency, match="pip install 'aiohttp"):
        await Endpoint(Desk(hello).service, "127.0.0.1", 0).start()


@in_loop
async def test_a_client_that_is_gone_gets_the_same_turn_when_it_comes_back() -> None:
    async with listening_desk() as (desk, endpoint):
        desk.talk.gate.clear()
        raw = head_of(desk, content_length=len(BODY)) + BODY
        port = int(endpoint.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        await until_async(lambda: desk.talk.requests)
        writer.close()
        await writer.wait_closed()
        await until_async(lambda: desk.session.counts["clients_gone"])
        desk.talk.gate.set()
        status, body = await spoken(endpoint, raw)
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "hi"
        assert len(desk.talk.requests) == 1 and desk.talk.sent == [0]


@in_loop
async def test_a_stream_that_is_cut_is_not_delivered() -> None:
    async with listening_desk(keepalive_s=0.01) as (desk, endpoint):
        desk.talk.gate.clear()
        body = json.dumps({"messages": [USER], "stream": True}).encode()
        port = int(endpoint.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head_of(desk, content_length=len(body)) + body)
        await reader.readuntil(b": keepalive")
        writer.transport.abort()
        await until_async(lambda: desk.session.counts["clients_gone"])
        desk.talk.gate.set()
        await until_async(lambda: desk.session.whole)
        await desk.service.end(desk.episode)
        assert (desk.talk.sent, desk.talk.lost) == ([], [0])


@in_loop
async def test_the_end_of_the_endpoint_answers_and_closes_the_port() -> None:
    async with listening_desk() as (desk, endpoint):
        desk.talk.gate.clear()
        raw = head_of(desk, content_length=len(BODY)) + BODY
        call = asyncio.ensure_future(spoken(endpoint, raw))
        await until_async(lambda: desk.talk.requests)
        await endpoint.close()
        status, body = await call
        assert (status, json.loads(body)["error"]["code"]) == (400, "episode_over")
        port = int(endpoint.url.rpartition(":")[2])
        assert not await asyncio.to_thread(listening.reachable, "127.0.0.1", port)
