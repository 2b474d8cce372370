"""OpenEnv's protocol: with a real server, with a server of the same wire format, and with failures.

The second server shows that the tests of failures speak the real format.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the extra agents is not installed")

from millrace.environments.chat import ToolError
from millrace.errors import ConfigError, EpisodeError
from millrace.extras.environments.openenv import OpenEnvironment, OpenEnvOptions, OpenEnvServer
from millrace.types import Score
from tests.environments.servers import allow, needs_peers, openenv, prompt, run, wire_server
from tests.waiting import HANG_S

Answer = Callable[[Any, dict[str, Any]], Awaitable[None]]


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    """A real server for two episodes at once."""
    with openenv("guess") as (_, url):
        yield url


@contextlib.asynccontextmanager
async def served(real_url: str | None) -> AsyncIterator[str]:
    """Yield the address of the real server, or of one with the same wire format."""
    if real_url is not None:
        yield real_url
    else:
        async with wire_server() as url:
            yield url


@pytest.fixture(params=[pytest.param("real", marks=needs_peers), "wire"])
def real_url(request: pytest.FixtureRequest) -> str | None:
    return request.getfixturevalue("real") if request.param == "real" else None


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def make(url: str, **options: Any) -> OpenEnvironment:
    return OpenEnvServer(OpenEnvOptions(url, **{"deadline_s": HANG_S, **options})).make()


def test_a_conversation_with_a_score(real_url: str | None) -> None:
    async def work() -> None:
        async with served(real_url) as url:
            server = OpenEnvServer(OpenEnvOptions(url, deadline_s=HANG_S))
            first, other = server.make(), server.make()
            start = await first.reset(prompt("Play.", index=17))
            assert start.messages == ({"role": "user", "content": "Play.\n\nGuess a digit."},)
            await other.reset(prompt("", index=3, seed=5))
            told = [(await first.step(said(t))).messages for t in ("3", "9")]
            assert [m["content"] for (m,) in told] == ["higher", "lower"]
            assert (await first.state())["secret"] == 7
            assert (await other.state())["secret"] == 5
            last = await first.step(said("7"))
            assert last.done and not last.messages
            assert await first.score() == Score(1.0 - 0.25 - 0.25)
            assert await other.score() is None
            await first.close()
            await other.close()

    run(work)


def test_an_error_of_the_environment_has_a_reason(real_url: str | None) -> None:
    async def work() -> None:
        async with served(real_url) as url:
            environment = make(url)
            await environment.reset(prompt())
            with pytest.raises(EpisodeError, match="EXECUTION_ERROR") as caught:
                await environment.step(said("a word"))
            assert caught.value.reason == "environment_error"
            await environment.close()

    run(work)


@needs_peers
def test_a_full_server_says_so(real: str) -> None:
    async def work() -> None:
        environments = [make(real) for _ in range(3)]
        for environment in environments[:2]:
            await environment.reset(prompt())
        with pytest.raises(EpisodeError, match="max_concurrent_envs") as caught:
            await environments[2].reset(prompt())
        assert caught.value.reason == "environment_full"
        for environment in environments:
            await environment.close()

    run(work)


@needs_peers
def test_tools_of_an_environment() -> None:
    async def work() -> None:
        with openenv("tools") as (_, url):
            environment = make(url)
            start = await environment.reset(prompt())
            (tool,) = start.tools
            assert tool.name == "add"
            parameters = tool.schema["function"]["parameters"]
            assert parameters["required"] == ["a", "b"]
            assert await tool.call({"a": 2, "b": 3}) == "5"
            with pytest.raises(ToolError, match="valid integer"):
                await tool.call({"a": "two", "b": 3})
            assert (await environment.step(said("5"))).done
            await environment.close()

    run(work)


@needs_peers
def test_a_killed_server_fails_the_episode_and_the_next() -> None:
    async def work() -> None:
        with openenv("guess") as (process, url):
            server = OpenEnvServer(OpenEnvOptions(url, deadline_s=HANG_S))
            environment, next_one = server.make(), server.make()
            await environment.reset(prompt())
            process.kill()
            for _ in range(2):  # a lost socket stays lost
                with pytest.raises(EpisodeError) as caught:
                    await environment.step(said("1"))
                assert caught.value.reason == "environment_lost"
            with pytest.raises(EpisodeError) as caught:
                await next_one.reset(prompt())
            assert caught.value.reason == "environment_lost"
            assert await environment.score() is None
            await environment.close()
            await next_one.close()

    run(work)


async def _text(ws: Any, text: str) -> None:
    await ws.send_str(text)


def observation(**data: Any) -> str:
    body = {"observation": {"hint": "x"}, "reward": 0.0, "done": False, **data}
    return json.dumps({"type": "observation", "data": body})


FAILURES: dict[str, tuple[Answer, str]] = {
    "no JSON": (lambda ws, _: _text(ws, "<html>oops</html>"), "garbage"),
    "10 MB": (lambda ws, _: _text(ws, "x" * 10_000_000), "garbage"),
    "10 MB of JSON": (
        lambda ws, _: _text(ws, observation(observation={"hint": "x" * 10_000_000})),
        "garbage",
    ),
    "deep JSON": (lambda ws, _: _text(ws, "[" * 500_000), "garbage"),
    "a list": (lambda ws, _: _text(ws, "[]"), "garbage"),
    "binary": (lambda ws, _: ws.send_bytes(b"\xff\xfe\x00"), "garbage"),
    "another type": (lambda ws, _: _text(ws, '{"type": "state", "data": {}}'), "garbage"),
    "no observation": (lambda ws, _: _text(ws, '{"type": "observation", "data": {}}'), "garbage"),
    "no such field": (lambda ws, _: _text(ws, observation(observation={})), "garbage"),
    "NaN": (lambda ws, _: _text(ws, observation(reward=float("nan"))), "garbage"),
    "a reward in words": (lambda ws, _: _text(ws, observation(reward="much")), "garbage"),
    "done in words": (lambda ws, _: _text(ws, observation(done="yes")), "garbage"),
    "a closed socket": (lambda ws, _: ws.close(), "lost"),
    "silence": (lambda ws, _: asyncio.sleep(10_000), "deadline"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_is_an_error_with_a_reason_and_no_score(what: str) -> None:
    answer, reason = FAILURES[what]

    async def work() -> None:
        async with wire_server(step=answer) as url:
            server = OpenEnvServer(OpenEnvOptions(url, deadline_s=HANG_S))
            environment = server.make()
            await environment.reset(prompt())
            allow(server.options, 0.5 if reason == "deadline" else HANG_S)
            with pytest.raises(EpisodeError) as caught:
                await environment.step(said("1"))
            assert caught.value.reason == f"environment_{reason}"
            assert url in str(caught.value) and len(str(caught.value)) < 600
            assert await environment.score() is None
            await environment.close()

    run(work)


def test_an_invalid_action_is_told_to_the_policy() -> None:
    async def answer(ws: Any, action: dict[str, Any]) -> None:
        data = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": ["too long"]}
        await ws.send_json({"type": "error", "data": data})

    async def work() -> None:
        async with wire_server(step=answer) as url:
            environment = make(url)
            await environment.reset(prompt())
            step = await environment.step(said("1"))
            assert not step.done and "too long" in step.messages[0]["content"]
            await environment.close()

    run(work)


def test_a_cancelled_step_makes_the_socket_unusable() -> None:
    """Its answer is still to come. The next request must not take it for its own."""

    async def work() -> None:
        async with wire_server(step=lambda ws, _: asyncio.sleep(10_000)) as url:
            environment = make(url)
            await environment.reset(prompt())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(environment.step(said("1")), 0.2)
            with pytest.raises(EpisodeError, match="cancelled") as caught:
                await environment.state()
            assert caught.value.reason == "environment_lost"
            await environment.close()

    run(work)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [(500, "", "error"), (404, "", "error"), (200, "{", "garbage"), (200, "x" * 2**21, "garbage")],
)
def test_a_server_that_fails_at_the_start(status: int, body: str, reason: str) -> None:
    from aiohttp import web

    async def schema(request: Any) -> Any:
        return web.Response(status=status, text=body)

    async def work() -> None:
        async with wire_server(schema=schema) as url:
            environment = make(url)
            with pytest.raises(EpisodeError) as caught:
                await environment.reset(prompt())
            assert caught.value.reason == f"environment_{reason}"
            await environment.close()
            named = make(url, action="text", observation="guesses")  # no schema is needed
            start = await named.reset(prompt(""))
            assert start.messages == ({"role": "user", "content": "0"},)
            await named.close()

    run(work)


@pytest.mark.parametrize(
    "action", [{}, {"x": {"type": "integer"}}, {"a": {"type": "string"}, "b": {"type": "string"}}]
)
def test_actions_without_a_single_text_are_refused(action: dict[str, Any]) -> None:
    from aiohttp import web

    async def schema(request: Any) -> Any:
        return web.json_response({"action": {"properties": action}})

    async def work() -> None:
        async with wire_server(schema=schema) as url:
            environment = make(url)
            with pytest.raises(ConfigError, match=r"Fix: name the field .*\?action=FIELD"):
                await environment.reset(prompt())
            await environment.close()

    run(work)
