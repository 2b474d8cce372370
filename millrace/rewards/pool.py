"""Reward functions in separate processes with deadlines: a call that hangs is killed.

The pool takes calls of `score` in order and waits for a worker with room. Each call gets its
scores or a RewardError, exactly once, even if workers die. All calls of one tick of the event loop
travel in one frame.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Literal

from millrace.codec import pack
from millrace.config import OneReward, RewardModelConfig, TeacherConfig
from millrace.errors import ConfigError, MillraceError, RewardError, WorkerError
from millrace.rewards.output import Budget
from millrace.rewards.process import Pending, WorkerProcess
from millrace.rewards.start import DriverLauncher, Launcher, LocalLauncher
from millrace.rewards.wire import Call, Hello, Job, Reply
from millrace.types import Completion, Floats, Prompt, Score, Tokens
from millrace.waits.registry import waiting

_LOAD_FUNCTION_S = 120.0
_LOAD_MODEL_S = 900.0
_ROUND = 32
"""Batches that one worker may have waiting. Of more texts, more have similar lengths."""


def job_of(config: OneReward, section: str = "reward") -> Job:
    """Return the job of one reward. `section` is the name of its section."""
    if config.kind == "model":
        return model_job("model", f"{section}.model", config.model)
    if config.kind == "judge":
        key, judge = f"{section}.judge", config.judge
        limits = 1, judge.max_concurrency, judge.timeout_s, _LOAD_FUNCTION_S
        return Job("judge", key, *limits, judge.model_dump(mode="json"))
    limits = config.num_workers, config.max_concurrency, config.timeout_s, _LOAD_FUNCTION_S
    spec = config.model_dump(mode="json", include={"function", "format", "repetition_penalty"})
    return Job("function", section, *limits, spec, config.memory_mb, config.sandbox)


def model_job(
    kind: Literal["model", "teacher"], key: str, model: RewardModelConfig | TeacherConfig
) -> Job:
    """Return the job of a frozen model, which reads texts in batches."""
    limits = model.num_workers, _ROUND * model.batch_size, model.timeout_s, _LOAD_MODEL_S
    return Job(kind, key, *limits, model.model_dump(mode="json"))


MOST_DEATHS = 5
"""The number of workers that may die in a row, without an answer, before the pool fails."""


class RewardPool:
    """A RewardFunction over worker processes. The first call or `start` starts it.

    `section` is the name of the configuration's section. `environments` has variables for each
    worker, such as its GPU. `launcher` starts workers, by default as processes of the user.
    """

    def __init__(
        self,
        config: OneReward | Job,
        section: str = "reward",
        environments: Sequence[Mapping[str, str]] = (),
        launcher: Launcher | None = None,
    ) -> None:
        self.job = config if isinstance(config, Job) else job_of(config, section)
        self.figures: Counter[str] = Counter()
        """Counts of the workers since `figures` was last cleared."""
        self.hello = Hello(is_async=False)
        """The facts about the function. `start` sets them."""
        self.environments = environments or [{}] * self.job.num_workers
        self._launcher = launcher or LocalLauncher()
        self._budget = Budget(section, self.figures)
        self._queue: deque[Pending] = deque()
        self.workers: set[WorkerProcess] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._settled = asyncio.Event()
        self._failed: tuple[type[MillraceError], str] | None = None
        self._waking = False
        self._calls = 0
        self._deaths = 0

    async def start(self) -> None:
        """Start the workers and wait until one has loaded the function, model or judge.

        Call this before any engine starts. Raise ConfigError if the reward cannot be loaded, and
        WorkerError if workers die while they load it.
        """
        if not self._keepers and self._failed is None:
            await self._launcher.check()
        if not self._keepers and self._failed is None:
            self._keepers = [
                asyncio.create_task(self._keep(environment)) for environment in self.environments
            ]
        await self._settled.wait()
        if self._failed is not None:
            kind, message = self._failed
            raise kind(message)

    @property
    def whole_group(self) -> bool:
        """Whether the function asks for all completions of a sample in one call."""
        return self.hello.whole_group

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Return one Score for each completion.

        Raise RewardError if the function raised, returned no number, exceeded its time limit
        or killed its worker. Raise WorkerError if all workers die, or if the pool is closed.
        """
        if not self._settled.is_set() or self._failed is not None:
            await self.start()
        if len(completions) == 1 or (self.whole_group and completions):
            return await self._call(prompt, completions)
        # Each completion is a call of its own, with the whole time limit.
        answers = await asyncio.gather(
            *(self._call(prompt, [one]) for one in completions), return_exceptions=True
        )
        if failures := [a for a in answers if isinstance(a, BaseException)]:
            raise min(failures, key=lambda error: isinstance(error, RewardError))
        return [score for a in answers if isinstance(a, list) for score in a]

    async def _call(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Return the scores of one call of the function."""
        self._calls += 1
        messages = [one.messages for one in completions]
        call = Call(
            self._calls,
            prompt.text,
            prompt.data_source,
            prompt.ground_truth,
            prompt.extra_info,
            prompt.columns,
            [one.text for one in completions],
            messages if any(messages) else [],
            [one.tokens.tolist() for one in completions] if self.hello.takes_tokens else [],
        )
        return (await self._send(call, f"the score of prompt {prompt.index}")).scores

    async def read(self, tokens: Tokens) -> Floats:
        """Return a teacher's log p of each token after those before it, and 0 for the first one.

        Raises what `score` raises.
        """
        if not self._settled.is_set() or self._failed is not None:
            await self.start()
        self._calls += 1
        ids = [tokens.tolist()]
        call = Call(self._calls, "", "", None, {}, {}, [""], completion_ids=ids)
        return (await self._send(call, f"log-probs of {len(tokens)} tokens")).log_probs

    async def _send(self, call: Call, what: str) -> Reply:
        try:
            payload = pack(call)
        except (TypeError, ValueError) as error:
            raise RewardError(
                "not_sendable", f"a row of {call.data_source} cannot go to a worker: {error}"
            ) from error
        name = self.job.key
        wait = waiting(f"{name} worker *|{name} workers", what)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        pending = Pending(call.id, payload, future, wait)
        self._queue.append(pending)
        self._wake()
        with wait:
            return await pending.answer

    async def close(self) -> None:
        """Kill the workers. Calls without an answer raise WorkerError."""
        self._fail(WorkerError, "the reward pool is closed")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._budget.report()

    async def _keep(self, environment: Mapping[str, str]) -> None:
        """Keep one worker of the pool running: start a new one whenever it dies."""
        while self._failed is None:
            how = self._launcher, self._budget
            worker = WorkerProcess(self.job, environment, *how, self._wake, self._resolve)
            self.workers.add(worker)
            ended = ""
            try:
                await worker.start()
                await worker.dead.wait()
            except OSError as error:
                self._fail(WorkerError, f"no reward worker can be started: {error}")
            finally:
                ended = await worker.stop()
                self.workers.discard(worker)
            self._replace(worker, ended)

    def _resolve(self, pending: Pending, reply: Reply) -> None:
        self._deaths = 0
        self.figures.update(reply.figures)
        if pending.answer.done():
            return
        if reply.reason:
            pending.answer.set_exception(RewardError(reply.reason, reply.detail, reply.trace))
        else:
            pending.answer.set_result(reply)

    def _replace(self, worker: WorkerProcess, ended: str) -> None:
        """Fail the call that killed a worker. Put the worker's other calls first in the queue."""
        blamed = worker.blamed()
        others = [p for p in worker.running.values() if p is not blamed]
        for pending in reversed(others):
            pending.alone = blamed is None and len(others) > 1 and not worker.leaving
            self._queue.appendleft(pending)
        if blamed is not None:
            for pending in self._queue:
                pending.alone = False
            if not blamed.answer.done():
                blamed.answer.set_exception(self._reason(worker, ended))
        if not (worker.overdue or worker.leaving) or worker.hello is None:
            self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            limit = f"it has {self.job.start_s:g} s"
            loading = "" if worker.hello else f" while loading the {self.job.kind} ({limit})"
            self._fail(
                WorkerError,
                f"{self._deaths} reward workers in a row died{loading}, "
                f"the last with {ended}: see stderr",
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
        limit = f"{self.job.key}.timeout_s = {self.job.timeout_s:g}"
        left = "worker was killed"
        if isinstance(self._launcher, DriverLauncher):
            left = "thread was abandoned: it goes on until the function returns"
        detail = f"the call ran past {limit} and its {left}{blocked}"
        return RewardError("timeout", detail)

    def _wake(self) -> None:
        """Schedule one dispatch at the end of this tick."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._waking = False
        for worker in self.workers:
            if worker.hello is not None:
                self._settled.set()
                self.hello = worker.hello
                if worker.hello.error:
                    self._fail(ConfigError, worker.hello.error)
        batches: dict[WorkerProcess, list[Pending]] = {}
        while self._queue:
            pending = self._queue[0]
            if not pending.answer.done():
                open_workers = [w for w in self.workers if w.room(pending)]
                if not open_workers:
                    break
                worker = min(open_workers, key=lambda w: len(w.running))
                worker.take(pending)
                pending.wait.whom = f"{self.job.key} worker {worker.pid}"
                batches.setdefault(worker, []).append(pending)
            self._queue.popleft()
        for worker, batch in batches.items():
            worker.send(batch)

    def _fail(self, kind: type[MillraceError], message: str) -> None:
        """End the pool. Every pending and later call raises the first failure."""
        if self._failed is None:
            self._failed = kind, message
        self._settled.set()
        kind, message = self._failed
        waiting = [*self._queue, *(p for w in self.workers for p in w.running.values())]
        self._queue.clear()
        for pending in waiting:
            if not pending.answer.done():
                pending.answer.set_exception(kind(message))
        for worker in self.workers:
            worker.kill()
