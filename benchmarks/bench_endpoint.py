"""Measure the endpoint over a conversation that answers at once.

    python benchmarks/bench_endpoint.py

The endpoint and the load run in two processes, as a run and its programs do. The turns have 2 kB of
messages. Clients are plain HTTP/1.1 connections that stay open, so that the load costs little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, cast

from millrace.agents.conversation import Conversation
from millrace.agents.endpoint import Endpoint
from millrace.agents.request import ChatRequest, ChatTurn
from millrace.agents.service import Service
from millrace.agents.transport import client_of
from millrace.ports import PolicySession
from millrace.types import Message, floats_of, tokens_of
from tests.agents.talks import ScriptedTalk, options, said

MESSAGES: list[Message] = [
    {"role": "system", "content": "You add numbers. " * 20},
    {"role": "user", "content": "What is 12 + 7? " * 80},
    {"role": "assistant", "content": "Let me see."},
    {"role": "user", "content": "Go on."},
]
BODY = {"model": "policy", "messages": MESSAGES}


class InstantTalk(ScriptedTalk):
    """Answers at once, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(lambda _: said("The sum is 19."))
        self.number = 0

    async def chat(self, request: ChatRequest) -> ChatTurn:
        self.number += 1
        drawn = tokens_of(range(16))
        return ChatTurn(self.number, said("The sum is 19."), "stop", 500, drawn, floats_of(drawn))

    def delivered(self, number: int) -> None:
        pass


async def opened(service: Service) -> str:
    talk = InstantTalk()
    return service.open(cast(Conversation, talk), cast(PolicySession, talk.session)).key


def serve(pipe: Connection, episodes: int) -> None:
    """Serve until the pipe says stop. Send the address, the keys and the memory of a session."""

    async def main() -> None:
        endpoint = Endpoint(Service(options()), "127.0.0.1", 0)
        await endpoint.start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        keys = [await opened(endpoint.service) for _ in range(episodes)]
        pipe.send((int(endpoint.url.rpartition(":")[2]), keys))
        await asyncio.to_thread(pipe.recv)
        after = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send((after.ru_utime + after.ru_stime, (after.ru_maxrss - before) / episodes))
        await endpoint.close()

    asyncio.run(main())


class Caller:
    """One connection of one episode."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        body = json.dumps(BODY).encode()
        self._raw = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def turn(self) -> float:
        """Return the seconds of one turn."""
        start = time.perf_counter()
        self._writer.write(self._raw)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await self._reader.readexactly(length)
        return time.perf_counter() - start


async def flood(callers: list[Caller], seconds: float) -> float:
    """Return turns/s if every episode speaks as soon as it has its answer."""
    end = time.perf_counter() + seconds

    async def speak(caller: Caller) -> int:
        turns = 0
        while time.perf_counter() < end:
            await caller.turn()
            turns += 1
        return turns

    start = time.perf_counter()
    turns = sum(await asyncio.gather(*map(speak, callers)))
    return turns / (time.perf_counter() - start)


async def steady(callers: list[Caller], rate: float, seconds: float) -> list[float]:
    """Return the seconds of each turn at `rate` turns/s that arrive at random times."""
    rng = random.Random(0)
    took: list[float] = []
    free = list(callers)
    rng.shuffle(free)

    async def one(caller: Caller) -> None:
        took.append(await caller.turn())
        free.append(caller)

    start, due = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as tasks:
        while due < seconds:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.create_task(one(free.pop(0)))
    return took


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def alone(turns: int) -> dict[str, tuple[float, float]]:
    """Return the CPU ms and the median ms of a turn for one caller, client and server together."""
    import openai

    endpoint = Endpoint(Service(options()), "127.0.0.1", 0)
    await endpoint.start()
    service = endpoint.service
    key = await opened(service)
    headers = {"authorization": f"Bearer {key}"}
    raw = json.dumps(BODY).encode()
    talk = InstantTalk()
    inside = client_of(service, key)
    outside = openai.AsyncOpenAI(base_url=endpoint.url + "/v1", api_key=key)

    async def direct() -> None:
        await talk.chat(ChatRequest(tuple(MESSAGES)))

    async def handle() -> None:
        (await service.handle("POST", "/v1/chat/completions", headers, raw)).settle(True)

    async def in_process() -> None:
        await inside.chat.completions.create(**cast(Any, BODY))

    async def in_process_stream() -> None:
        async for _ in await inside.chat.completions.create(stream=True, **cast(Any, BODY)):
            pass

    async def in_process_by_transport() -> None:
        await inside.chat.completions.create(extra_headers={"x-a": "b"}, **cast(Any, BODY))

    async def over_http() -> None:
        await outside.chat.completions.create(**cast(Any, BODY))

    caller = Caller(int(endpoint.url.rpartition(":")[2]), key)
    await caller.open()

    async def plain_http() -> None:
        await caller.turn()

    found = {}
    calls = direct, handle, in_process, in_process_stream, in_process_by_transport, over_http
    for call in (*calls, plain_http):
        for _ in range(50):
            await call()
        took, used = [], cpu_s()
        for _ in range(turns):
            start = time.perf_counter()
            await call()
            took.append(1e3 * (time.perf_counter() - start))
        found[call.__name__] = 1e3 * (cpu_s() - used) / turns, statistics.median(took)
    await outside.close()
    await endpoint.close()
    return found


async def crowds(callers: int, turns: int, rounds: int = 3) -> dict[str, list[float]]:
    """Return CPU ms of a turn while `callers` share one client of openai, client and server.

    The rounds of both transports alternate.
    """
    import openai

    endpoint = Endpoint(Service(options()), "127.0.0.1", 0)
    await endpoint.start()
    keys = [await opened(endpoint.service) for _ in range(callers)]
    found: dict[str, list[float]] = {"httpx": [], "aiohttp": []}

    async def speak(client: openai.AsyncOpenAI) -> None:
        for _ in range(turns // callers):
            await client.chat.completions.create(**cast(Any, BODY))

    for name, took in list(found.items()) * rounds:
        http = openai.DefaultAioHttpClient() if name == "aiohttp" else None
        shared = openai.AsyncOpenAI(base_url=endpoint.url + "/v1", api_key="-", http_client=http)
        async with shared:
            clients = [shared.with_options(api_key=key) for key in keys]
            await asyncio.gather(*(client.models.list() for client in clients))
            used = cpu_s()
            await asyncio.gather(*map(speak, clients))
            took.append(1e3 * (cpu_s() - used) / (turns // callers * callers))
    await endpoint.close()
    return found


async def load(port: int, keys: list[str], seconds: float, rate: float) -> None:
    callers = [Caller(port, key) for key in keys]
    for caller in callers:
        await caller.open()
    took = sorted(1e3 * one for one in await steady(callers, rate, seconds))
    print(f"| episodes live | {len(keys)} |")
    print(f"| ms a turn at {rate:g} turns/s, p50 | {took[len(took) // 2]:.2f} |")
    print(f"| ms a turn at {rate:g} turns/s, p99 | {took[len(took) * 99 // 100]:.2f} |")
    print(f"| turns/s, all episodes at once | {await flood(callers, seconds):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=200.0)
    given = parser.parse_args()
    print("| figure | value |\n|---|--:|")
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(there, given.episodes))
    server.start()
    port, keys = here.recv()
    asyncio.run(load(port, keys, given.seconds, given.rate))
    here.send("stop")
    cpu, memory = here.recv()
    server.join()
    print(f"| CPU seconds of the endpoint's process | {cpu:.1f} |")
    print(f"| kB a session and its connection, with all records of its turns | {memory:.0f} |")
    names = {
        "direct": "ms of the conversation itself",
        "handle": "ms of a turn, endpoint without transport",
        "in_process": "ms of a turn, openai's client in process",
        "in_process_stream": "ms of a turn, the same with a stream",
        "in_process_by_transport": "ms of a turn, the same by the client's own way",
        "over_http": "ms of a turn, openai's client over HTTP",
        "plain_http": "ms of a turn, a bare connection",
    }
    for name, (used, wall) in asyncio.run(alone(1000)).items():
        print(f"| {names[name]}: CPU, median of wall | {used:.3f}, {wall:.3f} |")
    for callers in (16, 128):
        for name, rounds in asyncio.run(crowds(callers, 1024)).items():
            shown = ", ".join(f"{ms:.2f}" for ms in rounds)
            print(f"| CPU ms of a turn, {callers} callers of one client over {name} | {shown} |")


if __name__ == "__main__":
    main()
