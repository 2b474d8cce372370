"""Agent programs with a process of their own for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.agents.process import Launcher
from millrace.agents.programs import Task
from millrace.errors import EpisodeError


class CommandProgram:
    """Runs a command for each episode, at most `concurrent` at once."""

    def __init__(self, launcher: Launcher, concurrent: int) -> None:
        self._launcher = launcher
        self._room = asyncio.Semaphore(concurrent)

    async def start(self) -> None:
        await self._launcher.start()

    async def run(self, task: Task) -> Any:
        async with self._room:
            task.begin()
            return await self._play(task)

    async def close(self) -> None:
        await self._launcher.close()

    async def _play(self, task: Task) -> Any:
        with tempfile.TemporaryDirectory(dir=self._launcher.folder) as folder:
            path = Path(folder, "task.json")
            path.write_text(json.dumps(task.data, default=str))
            keys = {"OPENAI_API_KEY": task.key, "ANTHROPIC_API_KEY": task.key}
            running = await self._launcher.launch({**keys, "MILLRACE_TASK": str(path)})
            try:
                code = await running.ended()
            finally:
                await running.end()
        if code:
            raise running.failure(task.name, code)
        return _reward_of(list(running.last), task.name)


def _reward_of(lines: Sequence[str], name: str) -> Any:
    """Return the reward of a program's last line, or None if it has none.

    Raises EpisodeError if only an earlier line has one: it would be lost without a word.
    """
    found = [value if "reward" in (value := object_in(line)) else None for line in lines]
    if any(found) and not found[-1]:
        detail = f"{name}: lines follow the reward. The last one is {lines[-1][:200]!r}"
        raise EpisodeError("bad_reward", f'{detail}. Fix: print {{"reward": ...}} last')
    return found[-1] if found else None


def object_in(line: str) -> dict[str, Any]:
    """Return the JSON object in a line of output. Empty if the line is something else."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    return {}
