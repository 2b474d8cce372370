"""Agent programs as commands: a process for each episode, or workers that play many.

A worker reads a task as a line of JSON, with the episode's "api_key". It may play several at once.
It answers with {"api_key", "reward"} or {"api_key", "error"}. Other lines are its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.agents.process import Launcher, Running
from millrace.agents.programs import Task, reward_in
from millrace.errors import EpisodeError

GRACE_S = 5.0
"""Seconds in which a worker must answer for an episode that is over. Then it is killed."""


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
    found = [value if "reward" in (value := _object_in(line)) else None for line in lines]
    if any(found) and not found[-1]:
        detail = f"{name}: lines follow the reward. The last one is {lines[-1][:200]!r}"
        raise EpisodeError("bad_reward", f'{detail}. Fix: print {{"reward": ...}} last')
    return found[-1] if found else None


def _object_in(line: str) -> dict[str, Any]:
    """Return the JSON object in a line of output. Empty if the line is something else."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    return {}


class WorkerProgram(CommandProgram):
    """Plays with `workers` processes, `concurrent` episodes at once. Dead workers are replaced."""

    def __init__(self, launcher: Launcher, workers: int, concurrent: int) -> None:
        super().__init__(launcher, concurrent)
        self._most = workers
        self._starting = asyncio.Lock()
        self._workers: list[_Worker] = []

    async def _play(self, task: Task) -> Any:
        worker = await self._worker()
        return await worker.play(task)

    async def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(worker.watch for worker in self._workers))
        await super().close()

    async def _worker(self) -> _Worker:
        """Return the worker with the fewest episodes. A new one if all are busy and few."""
        async with self._starting:
            self._workers = [one for one in self._workers if not one.watch.done()]
            alive = [one for one in self._workers if one.alive]
            if len(alive) < self._most and all(one.load for one in alive):
                worker = _Worker()
                await worker.start(self._launcher)
                self._workers.append(worker)
                return worker
            return min(alive, key=lambda one: one.load)


class _Worker:
    """One process, and the episodes that it plays."""

    running: Running
    watch: asyncio.Task[None]

    def __init__(self) -> None:
        self._playing: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._late: dict[str, asyncio.TimerHandle] = {}
        self._killed = False

    async def start(self, launcher: Launcher) -> None:
        self.running = await launcher.launch({}, self._take)
        self._name = f"worker {self.running.process.pid}"
        self.watch = asyncio.get_running_loop().create_task(self._watched(), name=self._name)

    @property
    def alive(self) -> bool:
        return not self._killed and self.running.process.returncode is None

    @property
    def load(self) -> int:
        """Return the number of episodes that it plays, with those it should have ended."""
        return len(self._playing) + len(self._late)

    async def play(self, task: Task) -> Any:
        """Play one episode. A cancelled episode that the worker does not end is the worker's end."""
        loop, stdin = asyncio.get_running_loop(), self.running.process.stdin
        assert stdin is not None
        result = self._playing[task.key] = loop.create_future()
        line = json.dumps({**task.data, "api_key": task.key}, default=str)
        try:
            with contextlib.suppress(ConnectionError):  # It is dead: `_watched` says how.
                stdin.write(line.encode() + b"\n")
                await stdin.drain()
            return reward_in(await result, task.name)
        except asyncio.CancelledError:
            if result.cancelled() or not result.done():
                self._late[task.key] = loop.call_later(GRACE_S, self.kill)
            raise
        finally:
            self._playing.pop(task.key, None)

    def kill(self) -> None:
        self._killed = True
        self.running.kill()

    def _take(self, line: str) -> None:
        """Read a line of output: the result of an episode, or a line of the log."""
        answer = _object_in(line)
        key = answer.pop("api_key", None)
        if not isinstance(key, str):
            self.running.last.append(line)
        elif key in self._late:
            self._late.pop(key).cancel()
        elif key in self._playing and not self._playing[key].done():
            self._playing[key].set_result(answer)

    async def _watched(self) -> None:
        """Wait for the end of the process. The episodes that it leaves have failed."""
        code = await self.running.ended()
        await self.running.end()
        for timer in self._late.values():
            timer.cancel()
        for result in self._playing.values():
            if not result.done():
                result.set_exception(self.running.failure(self._name, code))
