"""A real MCP server for tests: stdio, or HTTP if a port is given."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from mcp.server import MCPServer

server = MCPServer("tests")
memory: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def remember(word: str) -> str:
    """Remember a word, and return all words so far."""
    memory.append(word)
    return " ".join(memory)


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("no luck")


@server.tool()
def pid() -> int:
    """Return the process id."""
    return os.getpid()


@server.tool()
def die() -> str:
    """Die as if by kill -9."""
    sys.stderr.write("about to die\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
def sleep(seconds: float) -> str:
    """Block the whole server."""
    time.sleep(seconds)
    return "awake"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait, while other calls are served."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def print_garbage(size: int) -> str:
    """Write lines to stdout that are no messages, and then answer."""
    sys.stdout.write(("x" * 999 + "\n") * (size // 1000))
    sys.stdout.flush()
    return "printed"


@server.tool()
def long(size: int) -> str:
    """Return a long text."""
    return "y" * size


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
