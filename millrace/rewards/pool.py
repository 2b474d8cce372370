"""Reward functions in processes of their own, with deadlines that hold: a call that hangs is killed, never waited for.

Consumes: calls of `score`, in order. Waits for: a worker with room. Produces: for each call its scores or a RewardError,
exactly once, whatever happens to workers. Calls made in one tick of the event loop travel in one frame.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from millrace.codec import pack
from millrace.config import RewardConfig
from millrace.errors import ConfigError, MillraceError, RewardError, WorkerError
from millrace.rewards.process import START_S, Pending, WorkerProcess
from millrace.rewards.wire import Call, Reply
from millrace.types import Prompt, Score

MOST_DEATHS = 5
"""Workers that may die one after the other, with no answer between, before the pool gives up."""


class RewardPool:
    """A RewardFunction over `reward.num_workers` processes. Starts with the first call, or with `start`."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._queue: deque[Pending] = deque()
        self._workers: set[WorkerProcess] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._settled = asyncio.Event()
        self._failed: tuple[type[MillraceError], str] | None = None
        self._waking = False
        self._calls = 0
        self._deaths = 0

    async def start(self) -> None:
        """Start the workers and wait until one has loaded the function.

        Raises ConfigError if `reward.function` is wrong: call it before any model loads. Raises WorkerError if workers die
        while they load it.
        """
        if not self._keepers and self._failed is None:
            self._keepers = [
                asyncio.create_task(self._keep()) for _ in range(self.config.num_workers)
            ]
        await self._settled.wait()
        self._check()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Score]:
        """One Score for each completion.

        Raises RewardError: the function raised, returned no number, ran past `reward.timeout_s` or killed its worker.
        Raises WorkerError if workers only die, or the pool is closed.
        """
        if not self._keepers or self._failed is not None:
            await self.start()
        if not completions:
            return []
        self._calls += 1
        call = Call(
            self._calls,
            prompt.text,
            prompt.data_source,
            prompt.ground_truth,
            prompt.extra_info,
            prompt.columns,
            list(completions),
        )
        try:
            payload = pack(call)
        except (TypeError, ValueError) as error:
            raise RewardError(
                "not_sendable", f"a row of {prompt.data_source} cannot go to a worker: {error}"
            ) from error
        pending = Pending(
            call.id, payload, len(completions), asyncio.get_running_loop().create_future()
        )
        self._queue.append(pending)
        self._wake()
        return await pending.answer

    async def close(self) -> None:
        """Kill the workers. Calls without an answer raise WorkerError."""
        self._fail(WorkerError, "the reward pool is closed")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self) -> None:
        """One place in the pool: a worker, and the next one when it dies."""
        while self._failed is None:
            worker = WorkerProcess(self.config, self._wake, self._settle)
            self._workers.add(worker)
            ended = ""
            try:
                await worker.start()
                await worker.dead.wait()
            except OSError as error:
                self._fail(WorkerError, f"no reward worker can be started: {error}")
            finally:
                ended = await worker.stop()
                self._workers.discard(worker)
            self._bury(worker, ended)

    def _settle(self, pending: Pending, reply: Reply) -> None:
        self._deaths = 0
        if pending.answer.done():
            return
        if reply.reason:
            pending.answer.set_exception(RewardError(reply.reason, reply.detail))
        else:
            pending.answer.set_result(reply.scores)

    def _bury(self, worker: WorkerProcess, ended: str) -> None:
        """Fail the call that a dead worker is blamed on, and queue its others again, ahead of all."""
        guilty = worker.blamed()
        others = [p for p in worker.running.values() if p is not guilty]
        for pending in reversed(others):
            pending.alone = guilty is None and len(others) > 1
            self._queue.appendleft(pending)
        if guilty is not None:
            for pending in self._queue:
                pending.alone = False
            if not guilty.answer.done():
                guilty.answer.set_exception(self._reason(worker, ended))
        if not worker.overdue or worker.hello is None:
            self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            loading = "" if worker.hello else f" while loading the function (it has {START_S:g} s)"
            self._fail(
                WorkerError,
                f"{self._deaths} reward workers in a row died{loading}, the last with {ended}: see stderr",
            )
        self._wake()

    def _reason(self, worker: WorkerProcess, ended: str) -> RewardError:
        if not worker.overdue:
            return RewardError(
                "worker_died", f"the worker ended with {ended} while it ran the function"
            )
        blocked = (
            ": a coroutine function that blocks its event loop"
            if worker.hello and worker.hello.is_async
            else ""
        )
        detail = f"the call ran past reward.timeout_s = {self.config.timeout_s:g} and its worker was killed{blocked}"
        return RewardError("timeout", detail)

    def _wake(self) -> None:
        """Look for work at the end of this tick, once."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._waking = False
        for worker in self._workers:
            if worker.hello is not None:
                self._settled.set()
                if worker.hello.error:
                    self._fail(ConfigError, worker.hello.error)
        batches: dict[WorkerProcess, list[Pending]] = {}
        while self._queue:
            pending = self._queue[0]
            if not pending.answer.done():
                open_workers = [w for w in self._workers if w.room(pending)]
                if not open_workers:
                    break
                worker = min(open_workers, key=lambda w: w.load)
                worker.take(pending)
                batches.setdefault(worker, []).append(pending)
            self._queue.popleft()
        for worker, batch in batches.items():
            worker.send(batch)

    def _check(self) -> None:
        if self._failed is not None:
            kind, message = self._failed
            raise kind(message)

    def _fail(self, kind: type[MillraceError], message: str) -> None:
        """The pool is over: every call, waiting or to come, raises the first failure."""
        if self._failed is None:
            self._failed = kind, message
        self._settled.set()
        kind, message = self._failed
        waiting = [*self._queue, *(p for w in self._workers for p in w.running.values())]
        self._queue.clear()
        for pending in waiting:
            if not pending.answer.done():
                pending.answer.set_exception(kind(message))
        for worker in self._workers:
            worker.kill()
