"""Starve the event loop of agent clients, and count what they see: one client for all, or one each.

    python benchmarks/agents_starved.py

The endpoint answers at once, in a process of its own. 48 workers play on one event loop, on one
core that busy processes share. A new openai client loads the certificates of the machine, which
blocks its event loop. openai gives a connection 5 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import openai
from bench_endpoint import opened

from millrace.agents.endpoint import Endpoint
from millrace.agents.service import Service
from tests.agents.talks import options

TURNS = 3
ASKED: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}


def serve(pipe: Connection, episodes: int) -> None:
    """Serve the episodes, and send the address and the keys."""

    async def main() -> None:
        service = Service(options())
        endpoint = Endpoint(service, "127.0.0.1", 0)
        await endpoint.start()
        pipe.send((endpoint.url, [await opened(service) for _ in range(episodes)]))
        await asyncio.to_thread(pipe.recv)
        await endpoint.close()

    asyncio.run(main())


def burn() -> None:
    while True:
        pass


async def play(url: str, keys: list[str], workers: int, new: bool) -> dict[str, Any]:
    """Play an episode for each key. Return what the clients saw, and the longest stall."""
    seen, todo, stalls = Counter[str](), iter(keys), [0.0]
    base: dict[str, Any] = {"base_url": f"{url}/v1", "max_retries": 0}
    shared = openai.AsyncOpenAI(api_key="none", **base)

    async def work() -> None:
        await asyncio.sleep(random.random())
        for key in todo:
            client = openai.AsyncOpenAI(api_key=key, **base) if new else shared.with_options(api_key=key)  # fmt: skip
            try:
                for _ in range(TURNS):
                    await client.chat.completions.create(**ASKED)
                seen["episodes"] += 1
            except openai.OpenAIError as error:
                seen[type(error).__name__] += 1
            finally:
                if new:
                    await client.close()

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            stalls.append(time.monotonic() - before - 0.05)

    begin = time.monotonic()
    ticking = asyncio.ensure_future(tick())
    await asyncio.gather(*(work() for _ in range(workers)))
    ticking.cancel()
    await shared.close()
    return {**seen, "longest stall, s": round(max(stalls), 2), "s": round(time.monotonic() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=144)
    parser.add_argument("--workers", type=int, default=48)
    parser.add_argument("--busy", type=int, default=9, help="processes that share the core")
    given = parser.parse_args()
    for new in (False, True):
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(theirs, given.episodes))
        server.start()
        url, keys = ours.recv()
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(everywhere)})
        busy = [multiprocessing.Process(target=burn) for _ in range(given.busy)]
        for process in busy:
            process.start()
        used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        try:
            found = asyncio.run(play(url, keys, given.workers, new))
        finally:
            for process in busy:
                process.kill()
            os.sched_setaffinity(0, everywhere)
        found["CPU s"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_utime - used, 1)
        print(json.dumps({"a new client for each episode": new, **found}), flush=True)
        ours.send(None)
        server.join()


if __name__ == "__main__":
    main()
