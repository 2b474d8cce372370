"""Servers of environments for tests, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.types import Prompt, tokens_of
from tests.fork_servers import POOL
from tests.listening import reachable
from tests.waiting import until

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PEERS = Path(os.environ.get("MILLRACE_PEERS", ROOT / ".venv-peers")) / "bin" / "python"
"""Python with verifiers and openenv-core. They need other versions of packages than millrace."""

needs_peers = pytest.mark.skipif(
    not PEERS.exists(),
    reason=f"{PEERS} is missing: `make .venv-peers/.test` installs verifiers and openenv-core",
)


def prompt(text: str = "Play.", index: int = 0, **extra: Any) -> Prompt:
    return Prompt(index, tokens_of(), text, "test", extra_info=extra)


@contextlib.contextmanager
def started(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server of a command with {port} in it. Yield its process and address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = subprocess.Popen(
        [part.format(port=port) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: reachable("127.0.0.1", port), process)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def openenv(kind: str) -> contextlib.AbstractContextManager[tuple[subprocess.Popen[bytes], str]]:
    """Start a real server of openenv-core."""
    return started(str(PEERS), str(HERE / "openenv_server.py"), "{port}", kind)


def mcp_command() -> tuple[str, ...]:
    return (sys.executable, str(HERE / "mcp_server.py"))


@contextlib.asynccontextmanager
async def wire_server(
    step: Callable[[Any, dict[str, Any]], Awaitable[None]] | None = None,
    schema: Callable[[Any], Awaitable[Any]] | None = None,
) -> AsyncIterator[str]:
    """Serve OpenEnv's wire format with aiohttp, like openenv_server.py's guess.

    `step` answers steps in place of the game, with the socket and the action. `schema` answers
    requests of the schema.
    """
    from aiohttp import web

    async def play(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        secret = guesses = 0

        async def say(kind: str, data: dict[str, Any]) -> None:
            await ws.send_json({"type": kind, "data": data})

        async for frame in ws:
            message = json.loads(frame.data)
            kind, data = message["type"], message.get("data", {})
            if kind == "close":
                break
            if kind == "reset":
                secret, guesses = data["seed"] % 10, 0
                seen = {"hint": "Guess a digit.", "guesses": 0}
                await say("observation", {"observation": seen, "reward": None, "done": False})
            elif kind == "state":
                state = {"episode_id": None, "step_count": guesses, "secret": secret}
                await say("state", state)
            elif step is not None:
                await step(ws, data)
            elif not data["text"].isdigit():
                await say("error", {"message": "no number", "code": "EXECUTION_ERROR"})
            else:
                guesses += 1
                guess = int(data["text"])
                hint = "right" if guess == secret else "higher" if guess < secret else "lower"
                seen = {"hint": hint, "guesses": guesses}
                reward = 1.0 if hint == "right" else -0.25
                done = hint == "right"
                await say("observation", {"observation": seen, "reward": reward, "done": done})
        return ws

    async def schemas(request: web.Request) -> Any:
        if schema is not None:
            return await schema(request)
        text, number = {"type": "string"}, {"type": "integer"}
        action = {"text": text, "metadata": {"type": "object"}}
        seen = {"hint": text, "guesses": number, "done": {"type": "boolean"}}
        return web.json_response(
            {"action": {"properties": action}, "observation": {"properties": seen}}
        )

    app = web.Application()
    app.add_routes([web.get("/ws", play), web.get("/schema", schemas)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that the block leaves no process, file or socket. Kept fork servers do not count."""
    me = psutil.Process()

    def left() -> tuple[set[int], int]:
        kept = POOL.pids()
        return {p.pid for p in me.children(recursive=True)} - kept, me.num_fds() - len(kept)

    before = left()
    yield
    until(lambda: (after := left())[0] <= before[0] and after[1] <= before[1])


def allow(options: Any, seconds: float) -> None:
    """Change the deadline of the calls that begin from now on, and not of the start before them."""
    object.__setattr__(options, "deadline_s", seconds)


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run the work of a test in a loop of its own. It must leave nothing."""

    async def checked() -> None:
        await work()

    with nothing_left():
        asyncio.run(checked())
