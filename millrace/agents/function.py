"""Agent programs as functions in the driver: `async def function(client, task) -> float`."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from millrace.agents.programs import Task
from millrace.agents.service import Service
from millrace.data.user_code import failure, load
from millrace.errors import EpisodeError, bad_value, needed

STALL_S = 1.0
"""The event loop must never stand still for longer: syncs and all episodes wait for it."""
_BEAT_S = 0.25
_GRACE_S = 5.0
"""Seconds for a function that is cancelled."""


class FunctionProgram:
    """Runs `path.py:function` for each episode, with an OpenAI client in this process."""

    def __init__(self, spec: str, service: Service, note: Callable[[str], None]) -> None:
        """Import the function. Raises ConfigError, or MissingDependency without openai."""
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
        try:
            inspect.signature(function).bind(None, {})
        except TypeError as error:
            fix = "the signature `async def function(client, task)`"
            raise bad_value("agents.program", spec, f"cannot be called: {error}", fix) from None
        except ValueError:  # a function that is written in C
            pass
        needed("openai", "agents.program")
        from millrace.agents.transport import client_of

        self._client_of = partial(client_of, service)
        self._function: Callable[..., Any] = function
        self._spec = spec
        self._note = note
        self._heart: asyncio.TimerHandle | None = None
        self._beat_at = 0.0
        self._over = threading.Event()

    async def start(self) -> None:
        self._beat()
        threading.Thread(target=self._watch, name="agents.program", daemon=True).start()

    async def run(self, task: Task) -> Any:
        task.begin()
        client = self._client_of(task.key)
        running = asyncio.get_running_loop().create_task(
            self._called(client, task), name=f"{self._spec} {task.name}"
        )
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running}, timeout=_GRACE_S)
            if not running.done():
                self._note(f"warning: {self._spec} ignores its cancellation and still runs.")
            raise
        finally:
            await client.close()
        if running.cancelled():
            raise EpisodeError("agent_raised", f"{task.name}: the function cancelled itself")
        return running.result()

    async def _called(self, client: Any, task: Task) -> Any:
        try:
            return await self._function(client, task.data)
        except EpisodeError:
            raise
        except (Exception, SystemExit) as error:
            raise EpisodeError("agent_raised", f"{task.name}: {failure(error)}") from error

    async def close(self) -> None:
        self._over.set()
        if self._heart is not None:
            self._heart.cancel()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._heart = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        """Say once that the event loop stands still. It runs in a thread: the loop cannot."""
        while not self._over.wait(_BEAT_S):
            if time.monotonic() - self._beat_at > STALL_S:
                self._note(
                    f"warning: the event loop stands still for over {STALL_S:g} s. If "
                    f"{self._spec} computes or waits without `await`, use agents.command instead."
                )
                return
