"""Agent programs as functions in the driver: `async def function(client, task) -> float`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from millrace.agents.programs import Task
from millrace.agents.service import Service
from millrace.agents.transport import client_of
from millrace.data.user_code import failure, load
from millrace.errors import EpisodeError, bad_value

STALL_S = 1.0
"""The event loop must never stand still for longer: syncs and all episodes wait for it."""
_BEAT_S = 0.25


class FunctionProgram:
    """Runs `path.py:function` for each episode, with an OpenAI client in this process."""

    def __init__(self, spec: str, service: Service, note: Callable[[str], None]) -> None:
        """Import the function. Raises ConfigError."""
        function = load("agents.program", spec)
        if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        ):
            raise bad_value(
                "agents.program",
                spec,
                "the function must be `async def`: a plain one stops syncs and all other episodes",
                "async def, or agents.command for a program with a process of its own",
            )
        self._function: Callable[..., Any] = function
        self._spec = spec
        self._service = service
        self._note = note
        self._heart: asyncio.Task[None] | None = None
        self._stalled = 0.0

    async def start(self) -> None:
        self._heart = asyncio.get_running_loop().create_task(self._beat(), name="agents.program")

    async def run(self, task: Task) -> Any:
        client = client_of(self._service, task.key)
        try:
            return await self._function(client, task.data)
        except (EpisodeError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise EpisodeError("agent_raised", failure(error)) from error
        finally:
            await client.close()

    async def close(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
            with suppress(asyncio.CancelledError):
                await self._heart

    async def _beat(self) -> None:
        """Say once that the function blocks the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_BEAT_S)
            late = loop.time() - before - _BEAT_S
            if late > STALL_S and not self._stalled:
                self._stalled = late
                self._note(
                    f"warning: the event loop stood still for {late:.1f} s. If "
                    f"{self._spec} computes or waits without `await`, use agents.command instead."
                )
