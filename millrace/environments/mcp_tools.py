"""Environments with the tools of MCP servers: one server for each episode, or one for all."""

from __future__ import annotations

import asyncio

from millrace.environments.chat import OneAnswer, Start
from millrace.environments.mcp_connection import McpConnection, McpOptions
from millrace.environments.prompts import messages_of
from millrace.types import Prompt


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
