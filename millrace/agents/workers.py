"""Agent programs that play many episodes: one line of input for each, one line of output.

A worker reads a task as a line of JSON, with the episode's "api_key". It may play several at once.
It answers with {"api_key", "reward"} or {"api_key", "error"}. Other lines are its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from millrace.agents.process import Launcher, Running
from millrace.agents.programs import Task
from millrace.errors import EpisodeError

GRACE_S = 5.0
"""Seconds in which a worker must answer for an episode that is over. Then it is killed."""


class WorkerProgram:
    """Plays with `workers` processes, `concurrent` episodes at once. Dead workers are replaced."""

    def __init__(self, launcher: Launcher, workers: int, concurrent: int) -> None:
        self._launcher = launcher
        self._most = workers
        self._room = asyncio.Semaphore(concurrent)
        self._starting = asyncio.Lock()
        self._workers: list[_Worker] = []

    async def start(self) -> None:
        await self._launcher.start()

    async def run(self, task: Task) -> Any:
        async with self._room:
            task.begin()
            worker = await self._worker()
            return await worker.play(task)

    async def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(worker.watch for worker in self._workers))
        await self._launcher.close()

    async def _worker(self) -> _Worker:
        """Return the worker with the fewest episodes. A new one if all are busy and few."""
        async with self._starting:
            self._workers = [one for one in self._workers if not one.watch.done()]
            alive = [one for one in self._workers if one.alive]
            if len(alive) < self._most and all(one.load for one in alive):
                alive = [await _Worker.started(self._launcher)]
                self._workers += alive
            return min(alive, key=lambda one: one.load)


class _Worker:
    """One process, and the episodes that it plays."""

    running: Running
    watch: asyncio.Task[None]

    def __init__(self) -> None:
        self._playing: dict[str, asyncio.Future[Any]] = {}
        self._late: dict[str, asyncio.TimerHandle] = {}
        self._killed = False

    @classmethod
    async def started(cls, launcher: Launcher) -> _Worker:
        worker = cls()
        worker.running = await launcher.launch({}, worker._take)
        name = f"worker {worker.process.pid}"
        worker.watch = asyncio.get_running_loop().create_task(worker._watched(), name=name)
        return worker

    @property
    def process(self) -> asyncio.subprocess.Process:
        return self.running.process

    @property
    def alive(self) -> bool:
        return not self._killed and self.process.returncode is None

    @property
    def load(self) -> int:
        """Return the number of episodes that it plays, with those it should have ended."""
        return len(self._playing) + len(self._late)

    async def play(self, task: Task) -> Any:
        """Play one episode. A cancelled episode that the worker does not end is the worker's end."""
        loop = asyncio.get_running_loop()
        assert self.process.stdin is not None
        result = self._playing[task.key] = loop.create_future()
        line = json.dumps({**task.data, "api_key": task.key}, default=str)
        try:
            with contextlib.suppress(ConnectionError):  # It is dead: `_watched` says how.
                self.process.stdin.write(line.encode() + b"\n")
                await self.process.stdin.drain()
            answer = await result
        except asyncio.CancelledError:
            if result.cancelled() or not result.done():
                self._late[task.key] = loop.call_later(GRACE_S, self.kill)
            raise
        finally:
            self._playing.pop(task.key, None)
        if isinstance(answer, EpisodeError):
            raise answer
        if "error" in answer:
            raise EpisodeError("agent_raised", f"{task.name}: {answer['error']}"[:2000])
        return answer if "reward" in answer else None

    def kill(self) -> None:
        self._killed = True
        self.running.kill()

    def _take(self, line: str) -> None:
        """Read a line of output: the result of an episode, or a line of the log."""
        answer: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
        key = answer.pop("api_key", None) if isinstance(answer, dict) else None
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
                result.set_result(self.running.failure(f"worker {self.process.pid}", code))
