"""One world: a run over faulty workers, links and a disk, attempt after attempt, until its end.

Each attempt is the code of `millrace train` from the choice of a checkpoint to the last validation.
The faults of a scenario decide nothing else. After a failure, the next attempt resumes from the
newest whole checkpoint on the simulated disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from millrace.errors import LedgerError, MillraceError, RewardError, WorkerError
from millrace.extras.faults.attempt import Attempt
from millrace.extras.faults.checks import Violation
from millrace.extras.faults.disk import View, simulated_disk
from millrace.extras.faults.kinds import ACTS
from millrace.extras.faults.scenario import LONG_S, Scenario
from millrace.extras.faults.state import Outcome, World
from millrace.pipeline.checkpoint import Checkpoints
from millrace.simulate.clock import Deadlock, VirtualLoop

ATTEMPT_S = 3 * LONG_S
"""The most virtual seconds of an attempt. Every wait has a deadline, so an attempt is shorter."""
TURNS = 100_000
"""The most turns of the event loop in one world. A loop that waits for nothing passes it."""


SEEN_S = 30.0
"""The most seconds until the death of a worker ends an attempt. An idle replica is asked at the
next sync."""


class Spinning(Exception):
    """Tasks run for ever without a wait."""


class WorldLoop(VirtualLoop):
    """The event loop of a world. Work for threads takes virtual time and runs in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.thread_s: Callable[[], float] = lambda: 0.001

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        self.call_later(self.thread_s(), self._work, future, func, args)
        return future

    @staticmethod
    def _work(future: asyncio.Future[Any], func: Callable[..., Any], args: Any) -> None:
        if future.done():
            return
        try:
            future.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 - the boundary: the caller raises it
            future.set_exception(error)

    def _run_once(self) -> None:
        self.turns += 1
        if self.turns > TURNS:
            self.turns = 0  # The loop must still be able to end.
            raise Spinning(f"{TURNS} turns of the event loop did not end the run")
        super()._run_once()  # type: ignore[misc]


async def run_to_end(world: World) -> None:
    """Run attempts until the run is complete."""
    folder = world.path(View(world.disk))
    (folder / "model").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "config.yaml").write_text("simulated: true\n")
    world.disk.sync(str(folder))
    world.disk.power_cut()  # The folder itself is durable.
    last = max((fault.attempt for fault in world.scenario.faults), default=0)
    for number in range(last + 2):
        world.outcome.attempts += 1
        if await _attempt(world, number):
            return
    raise Violation("I6: the run does not complete although the faults are over")


async def _attempt(world: World, number: int) -> bool:
    """Run one attempt. Return whether the run is complete."""
    _age_disk(world)
    attempt = Attempt(world, number, ACTS)
    task = asyncio.create_task(attempt.run(), name="driver")
    died = asyncio.create_task(attempt.died.wait(), name="died")
    await asyncio.wait([task, died], timeout=ATTEMPT_S, return_when=asyncio.FIRST_COMPLETED)
    try:
        if attempt.violation is not None:
            raise attempt.violation
        if attempt.died.is_set():
            world.tell("the driver is dead, and its workers with it")
            return False
        if not task.done():
            raise Violation(f"I6: attempt {number + 1} did not end in {ATTEMPT_S:g} s")
        return await _judge(world, attempt, task)
    finally:
        attempt.abandon()
        died.cancel()
        task.cancel()
        await asyncio.wait([task, died], timeout=LONG_S)


async def _judge(world: World, attempt: Attempt, task: asyncio.Task[bool]) -> bool:
    error = task.exception()
    if error is None:
        if not (complete := task.result()) and not attempt.stopped:
            raise Violation("I6: an attempt ended early, and nobody stopped it")
        reward = world.scenario.config.reward
        if attempt.reward.failed and not (reward.retries or reward.max_error_share or not complete):
            raise Violation("I6: reward.max_error_share=0, and a reward that failed ended nothing")
        await _orphans()
        world.tell("the run is complete" if complete else "the run stopped and saved")
        return complete
    causes = [*_leaves(error)]
    for cause in causes:
        if isinstance(cause, Violation):
            raise cause
        if isinstance(cause, LedgerError) or not isinstance(cause, MillraceError):
            raise Violation(f"I6: {type(cause).__name__}: {cause}") from error
    text = f"{type(causes[0]).__name__}: {causes[0]}".partition("\n")[0]
    rewards = sum(fault.kind.startswith("reward_") for fault in attempt.fired)
    # The rewards of two faults may be all rewards of a validation.
    once = world.scenario.config.reward.max_error_share == 0
    unscored = isinstance(causes[0], RewardError) and world.drops
    explained = attempt.deadly or (unscored and (once or rewards > 1))
    if not explained:
        raise Violation(f"I6: no fault explains why the attempt ended: {text}") from error
    world.tell(f"the attempt ended: {text}")
    if not unscored:  # The reward may end an attempt while a worker is brought back.
        _names_the_dead(world, attempt, causes)
    await _orphans()
    return False


def _names_the_dead(world: World, attempt: Attempt, causes: list[BaseException]) -> None:
    """Check that an attempt in which only workers died names one of them, and soon."""
    deadly = attempt.deadly
    if not all(fault.kind.endswith("_dies") and fault.target for fault in deadly) or not deadly:
        return
    named = any(fault.target in str(cause) for fault in deadly for cause in causes)
    if not named or not isinstance(causes[0], WorkerError):
        raise Violation(f"I6: {deadly[0].target} died, and the error does not say so: {causes[0]}")
    took = asyncio.get_running_loop().time() - attempt.died_at
    if took > SEEN_S:
        raise Violation(f"I6: the death of {deadly[0].target} was seen after {took:.1f} s")


async def _orphans() -> None:
    """Check that no task of an attempt is left."""
    await asyncio.sleep(1.0)
    own = asyncio.current_task()
    left = [t.get_name() for t in asyncio.all_tasks() if t is not own and t.get_name() != "died"]
    if left:
        raise Violation(f"I9: {sorted(left)} run after the end of an attempt")


def _age_disk(world: World) -> None:
    """Do to the disk what happens between two attempts."""
    world.disk.full = world.disk.broken = False
    world.disk.before = lambda operation, path: None
    if world.cut:
        world.cut = False
        world.disk.power_cut()
    if world.rough:
        world.checks.forgets()
    if world.journal_rots:
        world.journal_rots = False
        _rot_journal(world)
    if world.rots:
        world.rots = False
        _rot(world)


def _rot(world: World) -> None:
    """Damage the newest checkpoint, if there is one."""
    folders = Checkpoints(world.path(View(world.disk)), keep=1).all()  # type: ignore[arg-type]
    if not folders:
        return
    inside = sorted(p for p in world.disk.files if p.startswith(f"{folders[-1]}/"))
    _damage(world, inside)
    world.checks.damaged()


def _rot_journal(world: World) -> None:
    """Damage a file of the journal, if there is one."""
    if inside := sorted(p for p in world.disk.files if "/journal/" in p):
        _damage(world, inside)
        world.checks.forgets()


def _damage(world: World, paths: list[str]) -> None:
    """Damage one of these files."""
    path = world.dice.choice(paths)
    data = world.disk.files[path]
    how = world.dice.choice(("lost", "cut", "flipped"))
    if how == "lost":
        del world.disk.files[path]
    elif how == "cut":
        world.disk.files[path] = data[: len(data) // 2]
    elif data:
        place = world.dice.randrange(len(data))
        world.disk.files[path] = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    world.tell(f"{path} is {how}")


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def run_world(scenario: Scenario) -> Outcome:
    """Run a scenario to its end, and return what happened."""
    world = World(scenario)
    with simulated_disk(), asyncio.Runner(loop_factory=WorldLoop) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda loop, context: None)
        try:
            loop.run_until_complete(run_to_end(world))
        except (Violation, Deadlock, Spinning) as error:
            named = isinstance(error, Violation)
            world.outcome.violation = str(error) if named else f"I6: {error}"
        world.outcome.virtual_s = loop.time()
    world.outcome.digest = world.checks.digest
    return world.outcome
