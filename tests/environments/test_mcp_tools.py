"""Tools of a real MCP server, over stdio and HTTP, and the ways in which a server fails."""

from __future__ import annotations

import asyncio
import codecs
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from millrace.environments.chat import Tool, ToolError
from millrace.errors import EpisodeError
from millrace.extras.environments import mcp
from millrace.extras.environments.mcp import McpOptions, McpServers, function_schema
from tests.environments.servers import HERE, allow, mcp_command, prompt, run, started
from tests.waiting import HANG_S, at_some_pace


@pytest.fixture(scope="module")
def http() -> Iterator[str]:
    with started(sys.executable, str(HERE / "mcp_server.py"), "{port}") as (_, url):
        yield f"{url}/mcp"


def stdio(**options: Any) -> McpServers:
    return McpServers(
        McpOptions(mcp_command(), **{"deadline_s": HANG_S, "start_deadline_s": HANG_S, **options})
    )


async def reset(servers: McpServers) -> tuple[Any, dict[str, Tool]]:
    environment = servers.make()
    start = await environment.reset(prompt("Add."))
    assert start.messages == ({"role": "user", "content": "Add."},)
    return environment, {tool.name: tool for tool in start.tools}


@pytest.mark.parametrize("where", ["stdio", "http"])
def test_a_tool_is_called(where: str, http: str) -> None:
    async def work() -> None:
        servers = stdio() if where == "stdio" else McpServers(McpOptions(url=http))
        environment, tools = await reset(servers)
        function = tools["add"].schema["function"]
        assert function["description"] == "Add two numbers."
        assert set(function["parameters"]["properties"]) == {"a", "b"}
        assert await tools["add"].call({"a": 2, "b": 3}) == "5"
        for name, arguments in (("fail", {}), ("add", {"a": "two"}), ("long", {"size": 2**21})):
            with pytest.raises(ToolError) as caught:
                await tools[name].call(arguments)
            assert 0 < len(str(caught.value)) < 1000
        assert await tools["add"].call({"a": 2, "b": 4}) == "6"  # the server goes on
        answers = await asyncio.gather(*(tools["add"].call({"a": i, "b": i}) for i in range(20)))
        assert answers == [str(2 * i) for i in range(20)]
        assert (await environment.step({"role": "assistant", "content": "6"})).done
        assert await environment.score() is None
        await environment.close()
        await servers.close()

    run(work)


@pytest.mark.parametrize("shared", [True, False])
def test_a_server_for_each_episode_or_for_all(shared: bool) -> None:
    async def work() -> None:
        servers = stdio(shared=shared)
        first, tools = await reset(servers)
        second, others = await reset(servers)
        assert await tools["remember"].call({"word": "one"}) == "one"
        words = await others["remember"].call({"word": "two"})
        assert words == ("one two" if shared else "two")
        await first.close()
        assert await others["add"].call({"a": 1, "b": 1}) == "2"
        await second.close()
        await servers.close()

    run(work)


def test_a_killed_server_fails_its_episodes_and_the_next_one_has_another() -> None:
    async def work() -> None:
        servers = stdio(shared=True)
        first, tools = await reset(servers)
        second, others = await reset(servers)
        pid = int(await tools["pid"].call({}))
        call = asyncio.ensure_future(others["sleep"].call({"seconds": 10_000}))
        await asyncio.sleep(0.2)
        psutil.Process(pid).kill()
        for waiting in (call, tools["add"].call({"a": 1, "b": 1})):
            with pytest.raises(EpisodeError) as caught:
                await waiting
            assert caught.value.reason == "tool_lost"
        third, tools = await reset(servers)
        assert int(await tools["pid"].call({})) != pid
        for environment in (first, second, third):
            await environment.close()
        await servers.close()

    run(work)


def test_a_slow_call_fails_its_own_episode_alone() -> None:
    async def work() -> None:
        servers = stdio(shared=True)
        first, tools = await reset(servers)
        second, others = await reset(servers)
        pid = await tools["pid"].call({})
        allow(servers.options, 0.5)
        with pytest.raises(EpisodeError) as caught:
            await tools["wait"].call({"seconds": 10_000})
        assert caught.value.reason == "tool_deadline"
        allow(servers.options, HANG_S)
        third, new = await reset(servers)  # a server that may hang is for no new episode
        assert await others["pid"].call({}) == pid != await new["pid"].call({})
        await first.close()
        assert await others["add"].call({"a": 1, "b": 1}) == "2"
        await second.close()
        assert not psutil.pid_exists(int(pid))
        await third.close()
        await servers.close()

    run(work)


def test_the_last_words_of_a_server_are_in_the_error() -> None:
    async def work() -> None:
        environment, tools = await reset(stdio())
        with pytest.raises(EpisodeError, match="about to die") as caught:
            await tools["die"].call({})
        assert caught.value.reason == "tool_lost"
        await environment.close()

    run(work)


@pytest.mark.parametrize("where", ["stdio", "http"])
def test_a_silent_tool_misses_its_deadline(where: str, http: str) -> None:
    async def work() -> None:
        options = {"command": mcp_command()} if where == "stdio" else {"url": http}
        servers = McpServers(McpOptions(**options, start_deadline_s=HANG_S))  # type: ignore[arg-type]
        environment, tools = await reset(servers)
        allow(servers.options, 0.5)
        with pytest.raises(EpisodeError) as caught:
            await tools["sleep"].call({"seconds": 3})
        assert caught.value.reason == "tool_deadline"
        await environment.close()

    run(work)


def test_a_server_that_prints_to_its_output_is_understood() -> None:
    code = "import sys\nprint('x' * 10_000_000)\nsys.stdout.flush()\n"
    code += f"import runpy; runpy.run_path({str(HERE / 'mcp_server.py')!r}, run_name='__main__')"

    async def work() -> None:
        servers = McpServers(McpOptions((sys.executable, "-c", code), start_deadline_s=HANG_S))
        sys.argv, before = sys.argv[:1], sys.argv
        environment, tools = await reset(servers)
        sys.argv = before
        assert await tools["add"].call({"a": 2, "b": 3}) == "5"
        await environment.close()

    run(work)


@pytest.mark.parametrize(
    ("command", "reason", "seconds"),
    [
        (("no-such-command",), "lost", HANG_S),
        (("python3", "-c", "import sys; sys.exit('bad luck')"), "lost", HANG_S),
        (("sleep", "10000"), "deadline", 0.5),
        (("yes",), "deadline", 0.5),
        (("python3", "-c", "while True: print('x' * 65536)"), "deadline", 0.5),
        (("python3", "-c", "while True: print('x' * 65536, end='')"), "lost", 0.5),
    ],
)
def test_a_server_that_does_not_come_up(
    command: tuple[str, ...], reason: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a line that is too long, the package reads on until the deadline. Then the error comes."""
    monkeypatch.setattr(mcp, "_MOST_LINE", 2**20)

    async def work(seconds: float) -> None:
        servers = McpServers(McpOptions(command, start_deadline_s=seconds))
        environment = servers.make()
        with pytest.raises(EpisodeError) as caught:
            await environment.reset(prompt())
        await environment.close()
        assert caught.value.reason == f"tool_{reason}"
        said, code = str(caught.value), " ".join(command)
        assert ("bad luck" in said) == ("sys.exit" in code)
        assert ("a line of its output has over" in said) == ("end=''" in code)

    at_some_pace(lambda seconds: run(lambda: work(seconds)), seconds)


def test_lines_are_decoded_whole_however_they_come() -> None:
    """The package would join a line of 10 MB once for each of its pieces."""
    sent = "é".encode() * 5 + b"\n\xff{}\n" + b"a" * 9 + b"\n\n"
    for size in range(1, len(sent)):
        decoder = codecs.getincrementaldecoder("millrace_lines")()
        given = [decoder.decode(sent[i : i + size]) for i in range(0, len(sent), size)]
        assert "".join(given) == "ééééé\n\ufffd{}\naaaaaaaaa\n\n"
        assert all(text.endswith("\n") for text in given if text)


@pytest.mark.parametrize("kind", ["500", "garbage", "silence", "nobody"])
def test_an_http_server_that_fails(kind: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if kind == "500":
            writer.write(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n")
        elif kind == "garbage":
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: 10000000\r\n\r\n" + b"x" * 10_000_000)
        else:
            await reader.read()  # until the client gives up
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if kind == "nobody":
            server.close()
        seconds = 0.5 if kind == "silence" else HANG_S
        servers = McpServers(
            McpOptions(url=f"http://127.0.0.1:{port}/mcp", start_deadline_s=seconds)
        )
        environment = servers.make()
        with pytest.raises(EpisodeError) as caught:
            await environment.reset(prompt())
        assert caught.value.reason == ("tool_deadline" if kind == "silence" else "tool_lost")
        await environment.close()
        server.close()

    run(work)


def test_a_cancelled_start_leaves_no_server() -> None:
    async def work() -> None:
        environment = McpServers(McpOptions(("sleep", "10000"))).make()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.reset(prompt()), 0.3)
        await environment.close()

    run(work)


@pytest.mark.parametrize("field", ["input_schema", "inputSchema"])
def test_both_versions_of_the_schema_are_read(field: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema = function_schema({"name": "f", "description": None, field: parameters})
    assert schema["function"] == {"name": "f", "description": "", "parameters": parameters}
