"""The Rollouter: admits prompts, rolls samples out, and pauses on request.

    consumes   prompts, free slots of the ledger
    waits for  a free slot; the gate, while rollouts are paused
    produces   READY samples; drops, with a reason, for a failed episode or reward, or equal outcomes

It reads two values of the Schedule. `on_sync` says what happens to running trajectories at a sync.
`placement` says whether the devices are shared. It knows no mode.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from millrace.errors import EpisodeError, RewardError, SampleError, TeacherError
from millrace.pipeline.replay import RecoveredSample
from millrace.pipeline.sample_queue import SampleQueue
from millrace.ports import Prompts
from millrace.replicas.pool import RolloutPool
from millrace.rollout.dynamic_sampling import EQUAL_OUTCOMES, DynamicSampling
from millrace.rollout.episode import SingleTurn
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Slot, State, Topic
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
from millrace.waits.registry import acting, at, current, part, span, waiting

_RECENT = 50  # The share of errors covers this many samples.
_TOGETHER = 64
"""After so many admitted trajectories, the event loop has a turn.

A version frees many slots. The replicas draw the first ones while the next ones are admitted.
"""


class Curriculum(Protocol):
    """Prompts whose rows depend on the outcomes of earlier ones."""

    def ready(self, index: int, /) -> bool:
        """Whether every outcome that decides this prompt is known."""
        ...

    def ended(self, index: int, sample: Sample | None, /) -> None:
        """Note the outcome of a prompt. None is a sample that was dropped without a score."""
        ...


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
        where: Callable[[int], str] = "prompt {}".format,
        dynamic_sampling: DynamicSampling | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.queue = queue
        self.prompts = prompts
        self.pool = pool
        self.roller = roller
        self.max_error_share = max_error_share
        self.where = where
        self.dynamic_sampling = dynamic_sampling
        self.curriculum = curriculum
        self.requests = 0
        """Requests inside a rollout engine."""
        self.unfinished = 0
        """Trajectories of running samples whose last token is not drawn yet."""
        self.paused = False
        self._at_gate = 0
        self.tells_sessions = not isinstance(roller.agent, SingleTurn)
        """Whether events have the number of sessions. Those of single responses always draw."""
        self._gate = asyncio.Event()
        self._gate.set()
        self._closed_by = "trainer"
        """The actor that closed the gate last."""
        self._outcomes: deque[bool] = deque(maxlen=_RECENT)

    async def run(self) -> None:
        """Admit and launch samples until the run cancels this task."""
        ledger = self.queue.ledger
        async with asyncio.TaskGroup() as tasks:
            for sample_id in ledger.ids(State.WAITING):  # restored from a checkpoint
                self._launch(tasks, sample_id)
            begun = 0
            while True:
                while not self._may_admit():
                    # No deadline: the trainer frees slots, and each of its waits has one.
                    await self.queue.wait(
                        *("rollouter", "a free slot", self._may_admit),
                        on=Topic.SLOTS,
                        deadline_s=1e9,
                    )
                    # A version frees many slots. The trainer first sends its next step.
                    await asyncio.sleep(0)
                if not self._is_decided():
                    await self.queue.wait(
                        *("rollouter", "the outcomes that decide the next prompt"),
                        self._is_decided,
                        on=Topic.ROLLOUTS,
                        deadline_s=1e9,  # samples bring them, and each of their waits has one
                    )
                    continue
                prompt = ledger.rest or self.prompts[ledger.begun]
                self._launch(tasks, self.queue.do(ledger.admit, prompt))
                begun += self.roller.num_responses
                if begun >= _TOGETHER:
                    begun = 0
                    await asyncio.sleep(0)

    def _may_admit(self) -> bool:
        return self.queue.ledger.can_admit() and not self.paused

    def _is_decided(self) -> bool:
        return self.curriculum is None or self.curriculum.ready(self.queue.ledger.admitted)

    def _note_outcome(self, sample_id: int, sample: Sample | None = None) -> None:
        if self.curriculum is not None:
            self.curriculum.ended(sample_id, sample)
            self.queue.wake(Topic.ROLLOUTS)

    def _launch(self, tasks: asyncio.TaskGroup, sample_id: int) -> None:
        self._change_live(self.roller.num_responses)
        tasks.create_task(self._roll(sample_id), name=f"sample-{sample_id}")

    async def _roll(self, sample_id: int) -> None:
        queue, ledger = self.queue, self.queue.ledger
        slot = queue.do(ledger.start, sample_id)
        try:
            with acting(f"sample {sample_id}"):
                known = await self._recalled(sample_id, slot)
                if known.sample is not None:
                    self._finish(sample_id, known.sample)
                    return
                if known.dropped:
                    self._note_outcome(sample_id)
                    queue.do(ledger.drop, sample_id, known.dropped)
                    return
                sample = await self.roller.roll(
                    self.draw,
                    slot.prompt,
                    slot.version,
                    progress=self._resumable(known.progress),
                    on_progress=partial(self._record, sample_id, slot.prompt),
                    on_drawn=partial(self._change_live, -1),
                )
        except SampleError as error:
            self._drop(sample_id, slot.prompt, error)
        else:
            self._finish(sample_id, sample)
        finally:
            self.pool.forget(str(slot.prompt.index))

    async def _recalled(self, sample_id: int, slot: Slot) -> RecoveredSample:
        """Return what an earlier attempt left of a sample, once its weights are live.

        Such a sample is drawn, or it waits for weights that drew it. So no sync waits for it.
        """
        ledger, journal = self.queue.ledger, self.queue.journal
        if journal is None:
            return RecoveredSample(progress=slot.progress)
        past = journal.past
        drains = ledger.schedule.on_sync is OnSync.DRAIN
        while (known := journal.recall(sample_id, slot)) is not None:
            newest, undrawn = known.version, known.sample is None and not known.dropped
            if newest <= ledger.version or (undrawn and drains):
                if not undrawn:
                    self._change_live(-self.roller.num_responses)
                known = past.until(known, ledger.version)
                facts = {"tokens": known.tokens, "finished": known.sample is not None}
                at("samples", "recalled", str(sample_id), **facts)
                return known
            self._change_live(-self.roller.num_responses)
            await self.queue.wait(
                "a sample of the journal",
                f"version {newest}, which drew it",
                # It is live, or its tokens are not valid.
                partial(lambda v: ledger.version >= v or past.valid < v, newest),
                on=Topic.SLOTS,
                deadline_s=1e9,  # the trainer makes the version, and each of its waits has one
            )
            self._change_live(self.roller.num_responses)
        return RecoveredSample(progress=slot.progress)

    def _record(self, sample_id: int, prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> None:
        """Record progress for a restart."""
        resumable = self._resumable(trajectories)
        self.queue.ledger.record(sample_id, resumable)
        if self.queue.journal is not None:
            self.queue.journal.progressed(sample_id, prompt, resumable)

    def _resumable(self, trajectories: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        """Return the trajectories, without the tokens that a restart must draw again.

        In drain mode a trajectory has one version. One that a stop interrupts restarts from its
        first token.
        """
        if self.queue.ledger.schedule.on_sync is not OnSync.DRAIN:
            return trajectories
        return tuple(t if t.finished else Trajectory() for t in trajectories)

    def _change_live(self, change: int) -> None:
        """Change the number of trajectories that are drawn."""
        self.unfinished += change
        self._tell_sessions()
        if self.paused:
            self.queue.wake(Topic.ROLLOUTS)

    def _tell_sessions(self) -> None:
        if self.tells_sessions:
            numbers = {"live": self.unfinished, "drawing": self.requests, "gate": self._at_gate}
            at("rollouts", "sessions", **numbers)

    def _finish(self, sample_id: int, sample: Sample) -> None:
        ledger = self.queue.ledger
        if not sample.goes_on:  # such a window needs no score
            self._outcomes.append(True)
        self._note_outcome(sample_id, sample)
        if self.queue.journal is not None:
            self.queue.journal.finished(sample_id, sample)
        if self.dynamic_sampling is None or self.dynamic_sampling.keeps(sample, ledger.version):
            self.queue.do(ledger.finish, sample_id, sample)
        else:
            at("samples", EQUAL_OUTCOMES, str(sample_id), sample=sample)
            self.queue.do(ledger.drop, sample_id, EQUAL_OUTCOMES)

    def _drop(self, sample_id: int, prompt: Prompt, error: SampleError) -> None:
        self._outcomes.append(False)
        self._note_outcome(sample_id)
        self.queue.do(self.queue.ledger.drop, sample_id, error.reason)
        failed = self._outcomes.count(False)
        if failed > self.max_error_share * _RECENT:
            kinds = RewardError, TeacherError, EpisodeError
            kind = next((k for k in kinds if isinstance(error, k)), EpisodeError)
            lacks = "log-probs of a teacher" if kind is TeacherError else "score"
            raise kind(
                error.reason,
                f"{failed} of the last {len(self._outcomes)} samples had no {lacks}, more than "
                f"reward.max_error_share = {self.max_error_share:g} of {_RECENT}. "
                f"The last error, of sample {sample_id}, {self.where(prompt.in_stream)}: {error}",
                error.trace,
            ) from error

    def row(self, version: PolicyVersion) -> dict[str, float]:
        """Return the metrics of the samples that finished while `version` was live.

        Call this once for each version.
        """
        return {} if self.dynamic_sampling is None else self.dynamic_sampling.row(version)

    async def draw(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Draw tokens once the gate is open.

        A sync closes the gate, and every wait of a sync has a deadline.
        """
        if not self._gate.is_set():
            self._at_gate += 1
            self._tell_sessions()
            try:
                with waiting(self._closed_by, "the end of the pause"):
                    while not self._gate.is_set():  # It may be closed again before this task runs.
                        await self._gate.wait()
            finally:
                self._at_gate -= 1
                self._tell_sessions()
        self.requests += 1
        self._tell_sessions()
        try:
            return await self.pool.generate(tokens, params, session)
        finally:
            self.requests -= 1
            self._tell_sessions()
            if self.paused:
                self.queue.wake(Topic.ROLLOUTS)

    @asynccontextmanager
    async def pause_for_sync(self) -> AsyncIterator[None]:
        """Pause rollouts while the body runs.

        Drain mode waits for running trajectories. The other modes interrupt them. With `swap` on
        separate devices there is no pause: the engine changes its weights while requests run. The
        trajectories that drain mode waits for are trained in a later version, so this wait is the
        part wait_prev_gen.
        """
        schedule = self.queue.ledger.schedule
        if schedule.on_sync is OnSync.SWAP and not schedule.colocated:
            yield
            return
        async with self._paused():
            if schedule.on_sync is OnSync.DRAIN:
                ledger = self.queue.ledger
                with part("wait_prev_gen"):
                    await self.queue.wait(
                        current().name,
                        "running trajectories to finish",
                        lambda: (
                            (not self.unfinished and not ledger.count(State.WAITING))
                            or self.queue.out_of_grace
                            or not self.pool.roster.live
                        ),
                        on=Topic.ROLLOUTS,
                    )
            if schedule.on_sync is not OnSync.DRAIN or self.unfinished:
                # In drain mode, these trajectories outlast the grace period of a stop, or no
                # replica is left that could finish them.
                await self._interrupt()
            yield

    @asynccontextmanager
    async def pause_for_save(self) -> AsyncIterator[None]:
        """Interrupt rollouts at the end of a run, so that the last checkpoint has their tokens.

        Nothing is drawn while the body runs. Drain and swap mode draw these tokens again after a
        restart, so they interrupt nothing, except to free devices that both sides share.
        """
        schedule = self.queue.ledger.schedule
        if schedule.on_sync is not OnSync.INTERRUPT and not schedule.colocated:
            yield
            return
        async with self._paused():
            await self._interrupt()
            yield

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Admit nothing while the body runs.

        Once the grace period of a stop is over, the pause does not end. Otherwise an interrupted
        trajectory would continue with the new version before it is saved.
        """
        self.paused = True
        try:
            with span("rollouts", "pause"):
                yield
        finally:
            if not self.queue.out_of_grace:
                self.paused = False
                self._gate.set()
            self.queue.wake(Topic.SLOTS)

    async def _interrupt(self) -> None:
        """Close the gate, interrupt all requests, and wait until they return."""
        self._gate.clear()
        self._closed_by = who = current().name or "trainer"
        await self.pool.interrupt()
        await self.queue.wait(
            who,
            "interrupted requests to come back",
            lambda: not self.requests,
            on=Topic.ROLLOUTS,
        )
