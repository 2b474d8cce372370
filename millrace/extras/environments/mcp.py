"""Environments with the tools of MCP servers, the connection to one, and the ways it fails."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import importlib
import json
import logging
import os
import shlex
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TextIO
from urllib.parse import urlsplit

from millrace.environments.chat import OneAnswer, Start, ToolError
from millrace.environments.prompts import messages_of
from millrace.errors import EpisodeError, bad_value, needed
from millrace.types import Prompt

_CONNECTION_CLOSED, _INVALID_PARAMS, _INTERNAL_ERROR = -32000, -32602, -32603
_REASONS = {_CONNECTION_CLOSED: "tool_lost", _INTERNAL_ERROR: "tool_error"}
"""The reasons of JSON-RPC's codes. All others mean that a side does not keep the protocol."""

_MOST_LINE = 16 * 2**20
"""Bytes of one line of a stdio server. More end the connection."""
_CLOSE_S = 10.0
"""The most seconds for an orderly end. A stdio server that ignores its end is killed sooner."""


@dataclass(frozen=True, slots=True)
class McpOptions:
    """How to reach an MCP server, and how long to wait for it."""

    command: tuple[str, ...] = ()
    """The command of a stdio server. Its environment has PATH and HOME, and no keys of yours."""
    url: str = ""
    """The address of an HTTP server, if there is no command."""
    shared: bool = False
    """One connection for all episodes. Otherwise each episode has its own."""
    start_deadline_s: float = 30.0
    """The most seconds until the server has listed its tools."""
    deadline_s: float = 60.0
    """The most seconds for one call."""
    max_bytes: int = 1 << 20
    """The longest result. The policy reads an error instead of a longer one."""

    @property
    def where(self) -> str:
        return self.url or " ".join(self.command)


class McpConnection:
    """One initialized session with a server. One task opens it, holds it and closes it.

    The package's contexts must be left in the task that entered them.
    """

    def __init__(self, options: McpOptions) -> None:
        self.options = options
        self.tools: tuple[ServerTool, ...] = ()
        self.users = 0
        self.late = False
        """Whether a call missed its deadline."""
        self.lost = False
        """Whether no call is possible any more."""
        self._session: Any = None
        self._said = _Tail()
        self._stop = asyncio.Event()
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(), name=f"mcp {options.where}")

    @classmethod
    async def open(cls, options: McpOptions) -> McpConnection:
        """Start or reach the server, and list its tools. Raise EpisodeError if that fails."""
        _mcp()
        self = cls(options)
        try:
            await self._up
        except asyncio.CancelledError:
            await self.close()
            raise
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        mcp = _mcp()
        options = self.options
        if self.lost:
            raise self._failure("tool_lost", f"{name}: the connection was lost before")
        try:
            async with asyncio.timeout(options.deadline_s):
                result = await self._session.call_tool(name, dict(arguments))
        except TimeoutError:
            self.late = True
            detail = f"{name}: no answer within {options.deadline_s:g} s"
            raise self._failure("tool_deadline", detail) from None
        except mcp.MCPError as error:
            if error.code == _INVALID_PARAMS:  # an unknown tool, or wrong arguments
                raise ToolError(error.message) from None
            self.lost = error.code != _INTERNAL_ERROR
            reason = _REASONS.get(error.code, "tool_garbage")
            raise self._failure(reason, f"{name}: {error.message}") from error
        except (OSError, RuntimeError, ValueError) as error:
            self.lost = True
            detail = f"{name}: {type(error).__name__}: {error}"
            raise self._failure("tool_garbage", detail) from error
        text = _text(result)
        if len(text) > options.max_bytes:
            raise ToolError(
                f"the result has {len(text)} characters, and the limit is {options.max_bytes}"
            )
        if getattr(result, "is_error", False) or getattr(result, "isError", False):
            raise ToolError(text or "the tool failed without a message")
        return text

    async def close(self) -> None:
        """End the session, and the server's process if there is one. The wait is bounded."""
        self.lost = True
        self._stop.set()
        if self._session is None:
            self._owner.cancel()
        _, late = await asyncio.wait((self._owner,), timeout=_CLOSE_S)
        if late:
            self._owner.cancel()
            await asyncio.wait((self._owner,), timeout=_CLOSE_S)

    async def _own(self) -> None:
        options = self.options
        try:
            async with self._transport() as streams, _mcp().ClientSession(*streams[:2]) as session:
                async with asyncio.timeout(options.start_deadline_s):
                    await session.initialize()
                    listed = await session.list_tools()
                self._session = session
                self.tools = tuple(ServerTool(t.model_dump(), self.call) for t in listed.tools)
                if not self._up.done():
                    self._up.set_result(None)
                await self._stop.wait()
        except (TimeoutError, OSError, ValueError, _mcp().MCPError, ExceptionGroup) as error:
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            slow = isinstance(cause, TimeoutError)
            late = f"no answer within {options.start_deadline_s:g} s"
            text = late if slow else f"{type(cause).__name__}: {cause}"
            if not self._up.done():
                reason = "tool_deadline" if slow else "tool_lost"
                self._up.set_exception(self._failure(reason, f"the server is not up: {text}"))
        finally:
            self.lost = True
            self._up.cancel()

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        mcp = _mcp()
        if not self.options.command:
            connect = mcp.client.streamable_http.streamable_http_client
            limit = 16 * self.options.max_bytes  # the policy may ask for too much, and reads so
            async with connect(self.options.url, max_sse_event_size=limit) as streams:
                yield streams
            return
        program, *arguments = self.options.command
        parameters = mcp.StdioServerParameters(
            command=program, args=arguments, encoding=_LINES.name
        )
        with self._said.pipe() as pipe:
            async with mcp.stdio_client(parameters, errlog=pipe) as streams:
                yield streams

    def _failure(self, reason: str, detail: str) -> EpisodeError:
        said = self._said.text()
        last = f" Its last words: {said}" if said else ""
        return EpisodeError(reason, f"{self.options.where}: {detail}.{last}")


class ServerTool:
    """A tool that a server lists, in the form of MCP. `call` gets its name and the arguments."""

    def __init__(
        self, entry: Mapping[str, Any], call: Callable[[str, Mapping[str, Any]], Awaitable[str]]
    ) -> None:
        self.name = str(entry["name"])
        self.schema = function_schema(entry)
        self._call = call

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._call(self.name, arguments)


class _WholeLines(codecs.IncrementalDecoder):
    """Decodes whole lines. The package reads a line in pieces, in time that is quadratic in them.

    Bytes that are no text become a mark, so that such a line is no message and does no other harm.
    """

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._pieces: list[bytes] = []
        self._size = 0

    def decode(self, data: Any, final: bool = False) -> str:
        head, newline, rest = bytes(data).rpartition(b"\n")
        whole = b"".join((*self._pieces, head, newline)) if newline else b""
        if newline:
            self._pieces.clear()
            self._size = 0
        self._pieces.append(rest)
        self._size += len(rest)
        if self._size > _MOST_LINE:
            raise ValueError(f"a line of its output has over {_MOST_LINE} bytes")
        return whole.decode(errors="replace")


_LINES = codecs.CodecInfo(
    codecs.utf_8_encode, codecs.utf_8_decode, incrementaldecoder=_WholeLines, name="millrace_lines"
)
codecs.register({_LINES.name: _LINES}.get)


class _Tail:
    """The end of what a server writes to its stderr. The rest is read and forgotten."""

    def __init__(self, size: int = 2000) -> None:
        self._size = size
        self._bytes = b""

    @contextlib.contextmanager
    def pipe(self) -> Iterator[TextIO]:
        loop = asyncio.get_running_loop()
        read, write = os.pipe()
        os.set_blocking(read, False)
        loop.add_reader(read, self._read, read)
        try:
            with os.fdopen(write, "w") as file:
                yield file
        finally:
            self._read(read)
            loop.remove_reader(read)
            os.close(read)

    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace").strip()

    def _read(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if data := os.read(fd, 1 << 16):
                self._bytes = (self._bytes + data)[-self._size :]
            else:  # the last writer is gone, and the end stays readable for ever
                asyncio.get_running_loop().remove_reader(fd)


def function_schema(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of MCP in OpenAI's form. Version 1 of the package says inputSchema."""
    schema = entry.get("input_schema") or entry.get("inputSchema")
    return {
        "type": "function",
        "function": {
            "name": str(entry["name"]),
            "description": entry.get("description") or "",
            "parameters": schema or {"type": "object", "properties": {}},
        },
    }


def _mcp() -> Any:
    mcp = needed("mcp", "a tool of an MCP server")
    importlib.import_module("mcp.client.streamable_http")
    # The package logs what the EpisodeErrors say, and each line that a server prints.
    for name in ("mcp.client.stdio", "mcp.client.streamable_http"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return mcp


def _text(result: Any) -> str:
    """Return a tool's result as text. Parts that are no text are named."""
    parts = []
    for part in result.content:
        text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
        parts.append(text if isinstance(text, str) else f"[{part.type}: not shown]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


class McpServers:
    """The connections of a run. It makes one environment for each episode."""

    def __init__(self, options: McpOptions) -> None:
        self.options = options
        self._shared: McpConnection | None = None
        self._starting = asyncio.Lock()

    def make(self) -> McpEnvironment:
        return McpEnvironment(self)

    async def reach(self) -> None:
        """Raise EpisodeError if the server cannot be reached or started, or lists no tools."""
        await self.release(await self.connect())

    async def connect(self) -> McpConnection:
        """Return a connection. A shared one that failed is replaced.

        Its episodes keep the old one until they end: one slow call fails one episode.
        """
        if not self.options.shared:
            connection = await McpConnection.open(self.options)
        else:
            async with self._starting:
                await self._drop(late=True)
                if self._shared is None:
                    self._shared = await McpConnection.open(self.options)
                connection = self._shared
        connection.users += 1
        return connection

    async def release(self, connection: McpConnection) -> None:
        connection.users -= 1
        if connection is not self._shared and not connection.users:
            await connection.close()

    async def close(self) -> None:
        await self._drop(late=False)

    async def _drop(self, late: bool) -> None:
        """Forget the shared connection, or only one that is late or lost."""
        old = self._shared
        if old is not None and (not late or old.late or old.lost):
            self._shared = None
            if not old.users or not late:
                await old.close()


class McpEnvironment(OneAnswer):
    """The row's own messages, with the tools of a server.

    The first message of the policy that calls no tool ends the conversation. The run's reward
    function scores it.
    """

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers
        self._connection: McpConnection | None = None

    async def reset(self, task: Prompt) -> Start:
        self._connection = await self._servers.connect()
        return Start(messages_of(task), self._connection.tools)

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self._servers.release(connection)


def check(value: str) -> McpOptions:
    """Return what a value of agents.environment says about a server. Raises ConfigError."""
    kind, _, rest = value.partition(":")
    if rest.startswith(("http://", "https://")):
        check_url(value, rest)
        return McpOptions(url=rest, shared=kind == "mcp-shared")
    try:
        command = tuple(shlex.split(rest))
    except ValueError as error:
        rule = f"the command cannot be split: {error}"
        raise bad_value("agents.environment", value, rule, "close the quote") from None
    if not command or shutil.which(command[0]) is None:
        rule = f"there is no program {command[0] if command else ''!r} on PATH"
        raise bad_value("agents.environment", value, rule, "such as mcp:python my_server.py")
    return McpOptions(command=command, shared=kind == "mcp-shared")


def open_environments(value: str, deadline_s: float) -> McpServers:
    """Return the environments of a server. `deadline_s` bounds each call of a tool."""
    return McpServers(replace(check(value), deadline_s=deadline_s))


def check_url(value: str, url: str) -> None:
    """Raise ConfigError if `url`, a part of agents.environment, is no address of a server."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        good = False
    if not good:
        fix = "an address such as http://127.0.0.1:8000"
        raise bad_value("agents.environment", value, "has no address of a server", fix)
