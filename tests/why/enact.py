"""Runs the real loops on the virtual clock with a planted hang, and judges them as they go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from millrace.extras.faults.attempt import Attempt
from millrace.extras.faults.disk import View, simulated_disk
from millrace.extras.faults.kinds import ACTS
from millrace.extras.faults.scenario import Scenario, draw
from millrace.extras.faults.state import World
from millrace.extras.faults.world import WorldLoop
from millrace.schedule.modes import MODES
from millrace.waits.verdict import Verdict, judge

SEEN_S = 10.0
"""Seconds without progress after which a run counts as standing still."""
MOST_S = 50.0
NEVER_S = 1e6
"""A value of rollout.heartbeat_s and rollout.stall_s that no run reaches."""


class Hung(Attempt):
    """An attempt whose episodes another agent may play."""

    agent: Any = None

    async def _session(self, run: Any) -> Any:
        session = await super()._session(run)
        return session if self.agent is None else replace(session, agent=self.agent)


async def never(*_: Any, **__: Any) -> Any:
    """Wait for an event that nobody sets."""
    await asyncio.Event().wait()


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


def stuck(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True, call: int = 1) -> Any:
    """Plant a method that never returns, from the `call`-th call with arguments `when`."""
    calls = 0

    def make(method: Any) -> Any:
        @wraps(method)
        async def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += bool(when(self, *args))
            if calls >= call and when(self, *args):
                await never()
            return await method(self, *args, **kwargs)

        return planted

    return patched(owner, name, make)


def scenario(mode: str, *, validates: bool = False, heals: bool = True) -> Scenario:
    """Return a run without faults. Unless it `heals`, no replica is ever given up as lost."""
    base = replace(draw(3), mode=mode, faults=(), ranks=2, replicas=2, slots=8)
    config = base.config
    keys = MODES[mode].over({"staleness_threshold": 1.0, "lookahead": 0})
    trainer = {"save_freq": 2, "async_save": True, "val_before_train": False}
    rollout: dict[str, float] = {"n": 2, "total_rollout_steps": 60, "test_freq": int(validates)}
    if not heals:
        rollout |= {"heartbeat_s": NEVER_S, "stall_s": NEVER_S}
    groups = config.algorithm.filter_groups.model_copy(update={"enable": False})
    whole = config.algorithm.tppo.model_copy(update={"window": 0})
    sections = {
        "async_training": config.async_training.model_copy(
            update=keys | {"require_batches": 1, "trigger_parameter_sync_step": 1}
            | {"overlap_sync": False}
        ),
        "actor": config.actor.model_copy(update={"ppo_mini_batch_size": 2}),
        "algorithm": config.algorithm.model_copy(update={"filter_groups": groups, "tppo": whole}),
        "rollout": config.rollout.model_copy(update=rollout),
        "trainer": config.trainer.model_copy(update=trainer),
    }  # fmt: skip
    return replace(base, config=config.model_copy(update=sections))


def enact(
    made: Scenario, plant: Callable[[Hung], Any], most_s: float, look_s: float = 1.0
) -> list[Verdict]:
    """Run an attempt. Judge it each `look_s` until it stands still, ends, or `most_s` have passed."""
    world = World(made)
    with simulated_disk(), ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=WorldLoop))
        runner.get_loop().set_exception_handler(lambda loop, context: None)
        return runner.run(_enact(world, plant, most_s, look_s, stack))


async def _enact(
    world: World, plant: Callable[[Hung], Any], most_s: float, look_s: float, stack: ExitStack
) -> list[Verdict]:
    folder = world.path(View(world.disk))
    (folder / "model").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "config.yaml").write_text("simulated: true\n")
    attempt = Hung(world, 0, ACTS)
    planted = plant(attempt)
    loop, found = asyncio.get_running_loop(), list[Verdict]()
    if planted is not None:
        stack.enter_context(planted)
    task = asyncio.create_task(attempt.run(), name="driver")
    try:
        end = loop.time() + most_s
        while not task.done() and loop.time() < end:
            await asyncio.wait([task], timeout=look_s)
            found.append(judge(attempt.answers(), SEEN_S))
            if found[-1].state == "still":
                break
        if task.done() and task.exception() is not None:
            raise AssertionError(f"the run ended: {task.exception()!r}") from task.exception()
        return found
    finally:
        attempt.abandon()
        task.cancel()
        await asyncio.wait([task], timeout=500)
