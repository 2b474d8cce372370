"""A taskset of verifiers is played against an endpoint of OpenAI's form.

The endpoint is scripted. The program and its tool server are real, in the environment of verifiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the extra agents is not installed")
from aiohttp import web

from tests.environments.servers import PEERS, ROOT, needs_peers, run

PROGRAM = ROOT / "examples" / "verifiers" / "verifiers_agent.py"


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Follow the table with the tool."""
    messages = body["messages"]
    found = [m["content"] for m in messages if m["role"] == "tool"]
    hops, seed = map(int, re.findall(r"\d+", messages[0]["content"])[:2])
    if len(found) == hops:
        return {"role": "assistant", "content": found[-1]}
    arguments = json.dumps({"seed": seed, "place": int(found[-1]) if found else 7})
    name = body["tools"][0]["function"]["name"]
    function = {"name": name, "arguments": arguments}
    call = {"id": f"c{len(found)}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@contextlib.asynccontextmanager
async def endpoint(asked: dict[str, list[dict[str, Any]]]) -> AsyncIterator[str]:
    """Serve chats. The key of an episode says how the policy behaves."""

    async def chat(request: web.Request) -> web.Response:
        key = request.headers["authorization"].removeprefix("Bearer ")
        asked.setdefault(key, []).append(await request.json())
        code = {"limit": "max_turns_reached", "failed": "episode_failed"}.get(key)
        if code and len(asked[key]) > 1:
            error = {"message": "no", "type": "invalid_request_error", "code": code}
            return web.json_response({"error": error}, status=400)
        message = answer(asked[key][-1])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**body, "choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        one = {"id": "policy", "object": "model", "created": 0, "owned_by": "millrace"}
        return web.json_response({"object": "list", "data": [one]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def peer(folder: Path, *arguments: str, **more: str) -> tuple[int | None, str, str]:
    """Run a Python program in the environment of verifiers."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **more}
    process = await asyncio.create_subprocess_exec(
        PEERS, *arguments, env=environment, stdout=-1, stderr=-1, cwd=folder
    )
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


ROW = {"extra_info": {"verifiers": {"taskset": "chase_taskset", "index": 1}}}


SEVERAL = f"""
import asyncio, sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import verifiers_agent
verifiers_agent.prepare()

async def work():
    task = verifiers_agent.find({ROW!r})
    keys = ("diligent", "limit", "failed")
    plays = [verifiers_agent.play(task, sys.argv[1], key, "policy") for key in keys]
    won, limit, failed = await asyncio.gather(*plays, return_exceptions=True)
    print(won, limit, type(failed).__name__, "episode_failed" in str(failed))

asyncio.run(work())
"""


@needs_peers
def test_a_task_with_a_tool_is_played_a_limit_is_scored_and_a_failure_is_not(
    tmp_path: Path,
) -> None:
    asked: dict[str, list[dict[str, Any]]] = {}

    async def work() -> None:
        async with endpoint(asked) as url:
            status, out, errors = await peer(tmp_path, "-c", SEVERAL, url)
        assert status == 0, errors
        assert out.split() == ["1.0", "0.0", "RuntimeError", "True"]

    run(work)
    chats = asked["diligent"]
    assert len(chats) == 3 and {body["model"] for body in chats} == {"policy"}
    # The history is sent back as it came, so each episode is one thread.
    for before, after in itertools.pairwise(chats):
        assert after["messages"][: len(before["messages"])] == before["messages"]


def test_the_environment_of_verifiers_has_no_torch() -> None:
    """It installs in seconds, and no build of torch is chosen for the user."""
    pins = (ROOT / "constraints-peers.txt").read_text().splitlines()
    names = {line.partition("==")[0] for line in pins}
    assert "verifiers" in names and "torch" not in names and sys.version_info >= (3, 11)
