"""A taskset of verifiers is played against an endpoint of OpenAI's form.

The endpoint is scripted. The program and its tool server are real, in the environment of verifiers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the extra agents is not installed")
from aiohttp import web

from tests.environments.servers import PEERS, ROOT, needs_peers, run

PROGRAM = ROOT / "examples" / "verifiers" / "verifiers_agent.py"


def answer(body: dict[str, Any], diligent: bool) -> dict[str, Any]:
    """Follow the table with the tool, or answer at once."""
    messages = body["messages"]
    found = [m["content"] for m in messages if m["role"] == "tool"]
    hops, seed = map(int, re.findall(r"\d+", messages[0]["content"])[:2])
    if not diligent or len(found) == hops:
        return {"role": "assistant", "content": found[-1] if found else "x"}
    arguments = json.dumps({"seed": seed, "place": int(found[-1]) if found else 7})
    name = body["tools"][0]["function"]["name"]
    call = {"id": f"c{len(found)}", "type": "function"}
    call["function"] = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def episode(tmp_path: Path, kind: str) -> tuple[int, str, str, list[dict[str, Any]]]:
    """Play one task. Return the exit status, the output, the errors and the requests."""
    asked: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer a-key"
        asked.append(await request.json())
        code = {"limit": "max_turns_reached", "failed": "episode_failed"}.get(kind)
        if code and len(asked) > 1:
            error = {"message": "no", "type": "invalid_request_error", "code": code}
            return web.json_response({"error": error}, status=400)
        message = answer(asked[-1], kind != "lazy")
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
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    task = tmp_path / "task.json"
    row = {"verifiers": {"taskset": "chase_taskset", "index": 1}}
    task.write_text(json.dumps({"extra_info": row}))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "OPENAI_BASE_URL": f"http://127.0.0.1:{runner.addresses[0][1]}/v1",
        "OPENAI_API_KEY": "a-key",
        "MILLRACE_TASK": str(task),
    }
    process = await asyncio.create_subprocess_exec(
        PEERS, PROGRAM, "play", env=environment, stdout=-1, stderr=-1, cwd=tmp_path
    )
    out, errors = await process.communicate()
    await runner.cleanup()
    return process.returncode or 0, out.decode(), errors.decode(), asked


def check(kind: str, status: int, out: str, errors: str, asked: list[dict[str, Any]]) -> None:
    if kind == "failed":  # an error of the machinery, so there is no score
        assert status == 1 and not out and "episode_failed" in errors
        return
    assert status == 0, errors
    reward = json.loads(out.splitlines()[-1])["reward"]
    assert reward == (1.0 if kind == "diligent" else 0.0)
    assert len(asked) == {"diligent": 3, "lazy": 1, "limit": 2}[kind]
    assert {body["model"] for body in asked} == {"policy"}
    # The history is sent back as it came, so each episode is one thread.
    for before, after in itertools.pairwise(asked):
        assert after["messages"][: len(before["messages"])] == before["messages"]


@needs_peers
def test_a_task_with_a_tool_is_played(tmp_path: Path) -> None:
    async def work() -> None:
        kinds = ("diligent", "lazy", "limit", "failed")
        for kind, played in zip(
            kinds, await asyncio.gather(*(episode(tmp_path, k) for k in kinds)), strict=True
        ):
            check(kind, *played)

    run(work)


@needs_peers
def test_a_taskset_becomes_rows(tmp_path: Path) -> None:
    async def work() -> None:
        process = await asyncio.create_subprocess_exec(
            PEERS, PROGRAM, "rows", "chase_taskset", "3", stdout=-1, cwd=tmp_path
        )
        out, _ = await process.communicate()
        rows = [json.loads(line) for line in out.splitlines()]
        assert [r["extra_info"]["verifiers"]["index"] for r in rows] == [0, 1, 2]
        assert rows[1]["prompt"].startswith("Look up 2 times in table 1")

    run(work)


def test_the_environment_of_verifiers_has_no_torch() -> None:
    """It installs in seconds, and no build of torch is chosen for the user."""
    pins = (ROOT / "constraints-peers.txt").read_text().splitlines()
    names = {line.partition("==")[0] for line in pins}
    assert "verifiers" in names and "torch" not in names and sys.version_info >= (3, 11)
