"""The Rollouter: admits prompts, rolls samples out, and can be held still.

    consumes  prompts, free slots of the ledger
    waits for a free slot; the gate, while rollouts are held still
    produces  READY samples; drops, with a reason, those whose reward failed or whose outcomes are all equal

It reads two values of the Schedule. `on_sync` says what happens to running trajectories at a sync.
`placement` says whether the devices are shared. It knows no mode.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from millrace.errors import RewardError
from millrace.pipeline.sample_queue import SampleQueue
from millrace.rollout.dynamic_sampling import EQUAL_OUTCOMES, DynamicSampling
from millrace.rollout.pool import RolloutPool
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import State, Topic
from millrace.schedule.schedule import OnSync
from millrace.types import (
    PolicyVersion,
    Prompt,
    Sample,
    SamplingParams,
    Segment,
    Tokens,
    Trajectory,
)

_RECENT = 50  # samples over which the share of reward errors is taken


class Prompts(Protocol):
    """The prompt stream: the i-th prompt of the run, a pure function of i."""

    def __getitem__(self, index: int) -> Prompt: ...


class Rollouter:
    """The rollout side of the pipeline."""

    def __init__(
        self,
        queue: SampleQueue,
        prompts: Prompts,
        pool: RolloutPool,
        roller: SampleRoller,
        *,
        max_error_share: float = 0.2,
        dynamic_sampling: DynamicSampling | None = None,
    ) -> None:
        self.queue = queue
        self.prompts = prompts
        self.pool = pool
        self.roller = roller
        self.max_error_share = max_error_share
        self.dynamic_sampling = dynamic_sampling
        self.drawing = 0  # requests inside a rollout engine
        self.undrawn = 0  # trajectories of running samples whose last token is not drawn yet
        self.held = False
        self._gate = asyncio.Event()
        self._gate.set()
        self._outcomes: deque[bool] = deque(maxlen=_RECENT)

    async def run(self) -> None:
        """Admit and launch for as long as the run lasts; cancelled at its end."""
        ledger = self.queue.ledger
        async with asyncio.TaskGroup() as tasks:
            for sample_id in ledger.ids(State.WAITING):  # what a checkpoint left to do
                self._launch(tasks, sample_id)
            while True:
                # No deadline of its own: slots are freed by the trainer, every wait of which has one.
                await self.queue.wait(
                    "rollouter",
                    "a free slot",
                    lambda: ledger.can_admit() and not self.held,
                    on=Topic.SLOTS,
                    deadline_s=1e9,
                )
                self._launch(tasks, self.queue.do(ledger.admit, self.prompts[ledger.admitted]))

    def _launch(self, tasks: asyncio.TaskGroup, sample_id: int) -> None:
        self.undrawn += self.roller.num_responses
        tasks.create_task(self._roll(sample_id), name=f"sample-{sample_id}")

    async def _roll(self, sample_id: int) -> None:
        queue, ledger = self.queue, self.queue.ledger
        slot = queue.do(ledger.start, sample_id)
        try:
            sample = await self.roller.roll(
                self.draw,
                slot.prompt,
                slot.version,
                progress=self._kept(slot.progress),
                on_progress=partial(self._record, sample_id),
                on_drawn=self._drawn,
            )
        except RewardError as error:
            self._drop(sample_id, error)
        else:
            self._finish(sample_id, sample)
        finally:
            for i in range(self.roller.num_responses):
                self.pool.forget(f"{slot.prompt.index}/{i}")

    def _record(self, sample_id: int, trajectories: tuple[Trajectory, ...]) -> None:
        """For a restart."""
        self.queue.ledger.record(sample_id, self._kept(trajectories))

    def _kept(self, trajectories: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        """In drain mode a trajectory has one version: what a stop has cut short is drawn again, from its first token."""
        if self.queue.ledger.schedule.on_sync is not OnSync.DRAIN:
            return trajectories
        return tuple(t if t.finished else Trajectory() for t in trajectories)

    def _drawn(self) -> None:
        self.undrawn -= 1
        if self.held:
            self.queue.wake(Topic.ROLLOUTS)

    def _finish(self, sample_id: int, sample: Sample) -> None:
        ledger = self.queue.ledger
        self._outcomes.append(True)
        if self.dynamic_sampling is None or self.dynamic_sampling.keeps(sample, ledger.version):
            self.queue.do(ledger.finish, sample_id, sample)
        else:
            self.queue.do(ledger.drop, sample_id, EQUAL_OUTCOMES)

    def _drop(self, sample_id: int, error: RewardError) -> None:
        self._outcomes.append(False)
        self.queue.do(self.queue.ledger.drop, sample_id, error.reason)
        failed = self._outcomes.count(False)
        if failed > self.max_error_share * _RECENT:
            raise RewardError(
                error.reason,
                f"{failed} of the last {len(self._outcomes)} samples had no score, more than reward.max_error_share = "
                f"{self.max_error_share:g} of {_RECENT}. The last error: {error}",
            ) from error

    def row(self, version: PolicyVersion) -> dict[str, float]:
        """Metrics of the samples finished while `version` was live, to be asked for once."""
        return {} if self.dynamic_sampling is None else self.dynamic_sampling.row(version)

    async def draw(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Draw tokens once the gate is open: it is closed for the length of a sync, whose waits have deadlines."""
        if not self._gate.is_set():
            await self._gate.wait()
        self.drawing += 1
        try:
            return await self.pool.generate(tokens, params, session)
        finally:
            self.drawing -= 1
            if self.held:
                self.queue.wake(Topic.ROLLOUTS)

    @asynccontextmanager
    async def held_still(self, who: str) -> AsyncIterator[bool]:
        """No training token is drawn while the body runs. Running trajectories are awaited (drain) or interrupted.

        With `swap` on devices of its own the engine changes weights under the running requests: nothing is held, and the body gets False.
        """
        schedule = self.queue.ledger.schedule
        if schedule.on_sync is OnSync.SWAP and not schedule.colocated:
            yield False
            return
        async with self._held():
            if schedule.on_sync is OnSync.DRAIN:
                ledger = self.queue.ledger
                await self.queue.wait(
                    who,
                    "running trajectories to finish",
                    lambda: (
                        (not self.undrawn and not ledger.count(State.WAITING))
                        or self.queue.out_of_grace
                    ),
                    on=Topic.ROLLOUTS,
                )
            if schedule.on_sync is not OnSync.DRAIN or self.undrawn:
                # Undrawn in drain mode: the run was told to stop, and they take too long.
                await self._interrupt(who)
            yield True

    @asynccontextmanager
    async def parked(self, who: str) -> AsyncIterator[None]:
        """At the end of a run: what is running is interrupted, so that its tokens are kept; nothing is drawn while the body runs.

        Drain mode will draw it again, and swap mode too: neither is interrupted, but to give devices that both sides share.
        """
        schedule = self.queue.ledger.schedule
        if schedule.on_sync is not OnSync.INTERRUPT and not schedule.colocated:
            yield
            return
        async with self._held():
            await self._interrupt(who)
            yield

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Nothing is admitted while the body runs.

        Once a stop is out of grace, nothing is admitted or drawn after it either. A trajectory that
        the stop interrupted would otherwise continue with the new version before it is saved.
        """
        self.held = True
        try:
            yield
        finally:
            if not self.queue.out_of_grace:
                self.held = False
                self._gate.set()
            self.queue.wake(Topic.SLOTS)

    async def _interrupt(self, who: str) -> None:
        """Until nothing is drawn; what asks for tokens waits until `_held` ends."""
        self._gate.clear()
        await self.pool.interrupt()
        await self.queue.wait(
            who,
            "interrupted requests to come back",
            lambda: not self.drawing,
            on=Topic.ROLLOUTS,
        )
