"""Answers that come too late and connections that are cut: nothing undelivered is trained."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the endpoint listens with aiohttp")
import httpx2
import openai

from millrace.types import SamplingParams, Segment, Tokens
from tests.agents.adversary import Engine, differences, episode_of, finish, trained_turns
from tests.agents.clients import QUESTION, TOOL
from tests.agents.episodes import endpoint
from tests.agents.talks import in_loop
from tests.waiting import HANG_S

TIMEOUT_S = 0.4
"""A client waits as long at first. With each try it waits longer, until the machine is as fast."""
LATE_S = 0.7


class SlowEngine(Engine):
    """One draw in ten takes longer than the client waits."""

    async def draw(self, tokens: Tokens, params: SamplingParams, name: str) -> tuple[Segment, ...]:
        if not params.offset and random.Random(params.seed).random() < 0.1:
            await asyncio.sleep(LATE_S)
        return await super().draw(tokens, params, name)


class Wire:
    """A proxy. Of its answers, some are late, and some are cut before, within or after a byte."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port = port
        self._rng = rng
        self.done: Counter[str] = Counter()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [self._send(reader, up_writer), self._answer(up_reader, writer)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in (writer, up_writer):
            one.transport.abort()

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self._rng.random() < 0.04:
                self.done["cut while drawing"] += 1
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0.002)
                return
            writer.write(data)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            chance = self._rng.random()
            if chance < 0.05:
                self.done["late"] += 1
                await asyncio.sleep(LATE_S)
            elif chance < 0.11:
                self.done["cut answer"] += 1
                writer.write(data[: self._rng.randrange(len(data))])
                await writer.drain()
                return
            writer.write(data)


@asynccontextmanager
async def broken_wire(port: int, rng: random.Random) -> AsyncIterator[tuple[str, Wire]]:
    wire = Wire(port, rng)
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", wire
    finally:
        server.close()


async def ask(client: Any, stream: bool, **asked: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the message and its token ids. A program asks again if its client gave up."""
    for attempt in range(20):
        client = client.with_options(timeout=TIMEOUT_S * 1.5**attempt)
        with suppress(openai.APIConnectionError, httpx2.HTTPError):
            if not stream:
                answer = await client.chat.completions.create(**asked)
                choice = answer.choices[0]
                return choice.message.model_dump(exclude_none=True), tuple(choice.token_ids)
            async with client.chat.completions.stream(**asked) as events:
                ids: tuple[int, ...] = ()
                async for event in events:
                    if event.type == "chunk" and event.chunk.choices:
                        ids = tuple(getattr(event.chunk.choices[0], "token_ids", None) or ids)
                with suppress(openai.LengthFinishReasonError):
                    await events.get_final_completion()
                message = events.current_completion_snapshot.choices[0].message
                return _plain(message.model_dump(exclude_none=True)), ids
    raise AssertionError("no answer after 20 requests")


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    message.pop("parsed", None)
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return message


async def program(url: str, key: str, stream: bool) -> list[tuple[int, ...]]:
    """Play an episode, and return the token ids of each answer that it read."""
    received = []
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=3)
    async with client:
        for _ in range(4):
            more = {"return_token_ids": True}
            message, ids = await ask(
                client, stream, model="policy", messages=messages, tools=[TOOL], extra_body=more
            )
            received.append(ids)
            messages.append(message)
            for call in message.get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "1"})
            messages.append({"role": "user", "content": "go on"})
    return received


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@in_loop
async def test_what_is_trained_is_what_the_client_read(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 % of the answers come after the client's timeout. 10 % of the connections are cut."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    engine = SlowEngine()
    async with endpoint() as served:
        port = int(served.url.rpartition(":")[2])
        async with broken_wire(port, random.Random(stream)) as (url, wire):

            async def episode(k: int) -> Counter[str]:
                session, talk = episode_of(engine, f"{k}", k, max_turns=100)
                live = served.service.open(talk, session)
                async with asyncio.timeout(HANG_S):
                    received = await program(url, live.key, stream)
                await served.service.end(live)
                one = finish(session, talk)
                assert live.error is None and not differences(one, engine, session)
                trained = trained_turns(one, session.prompt.tokens)
                assert Counter(turn[1] for turn in trained) == Counter(received)
                return Counter({name: int(value) for name, value in one.counts.items()})

            counts = sum(await asyncio.gather(*map(episode, range(40))), Counter[str]())
    assert all(wire.done[kind] for kind in ("late", "cut answer", "cut while drawing"))
    assert counts["turns"] == 160
    assert counts["clients_gone"] > 3 and counts["retries_coalesced"] > 3
