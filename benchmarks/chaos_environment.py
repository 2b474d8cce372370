"""The environment of `chase`, whose tool asks a server at $CHAOS_TOOLS over HTTP."""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.environments import chase
from millrace.environments.chat import Start, ToolError
from millrace.types import Prompt


class Lookup(chase.Lookup):
    """Reads one entry of the table, through the server."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        entry = await super().call(arguments)
        return await asyncio.to_thread(ask, entry)


def ask(text: str) -> str:
    """Send a text to the server, which returns it."""
    request = urllib.request.Request(os.environ["CHAOS_TOOLS"], data=text.encode())
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        raise ToolError(f"the server says {error.code}") from error
    except TimeoutError as error:
        raise ToolError("the server does not answer") from error
    except OSError as error:
        raise ConnectionError(str(error)) from error


class Chase(chase.Chase):
    async def reset(self, task: Prompt) -> Start:
        start = await super().reset(task)
        return replace(start, tools=(Lookup(task.extra_info["table"]),))
