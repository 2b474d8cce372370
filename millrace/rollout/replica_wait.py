"""Waits for a change of the roster, with a deadline that names the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.errors import DeadlineError, ReplicaLost
from millrace.rollout.roster import Change, Roster
from millrace.waits.registry import waiting

RESTART = "restart of rollout-"
"""The start of the names of actors that start the workers of lost replicas."""
GRACE_S = 5.0
"""Extra seconds beyond the rank's own deadline, so that the rank's error comes first.

A call that misses its deadline is found up to a second later, and its worker counts as dead up to
three seconds after that. The recovery of the trainer then renews the wait.
"""


async def wait_for_replicas(
    roster: Roster,
    who: str,
    ready: Callable[[], bool],
    deadline_s: float,
    *,
    also: set[asyncio.Event] | None = None,
    whom: str = f"{RESTART}*",
) -> None:
    """Wait until `ready()`, which is evaluated after each change of the roster.

    The wait is registered as one for `whom`. `also` has its event meanwhile: whoever sets the event
    has `ready` evaluated too. Raises what `ready` raises, and DeadlineError after `deadline_s`
    seconds, and a few more, in which the roster did not change, and nobody renewed it.
    """
    changed, events = asyncio.Event(), set[asyncio.Event]() if also is None else also
    events.add(changed)
    loop = asyncio.get_running_loop()

    def renewed() -> None:
        if not limit.expired():
            limit.reschedule(loop.time() + deadline_s + GRACE_S)

    def moved(change: Change) -> None:
        changed.set()
        renewed()

    try:
        async with asyncio.timeout(deadline_s + GRACE_S) as limit:
            with roster.subscribe(moved), roster.extended_wait(renewed), waiting(whom, "a replica"):
                while not ready():
                    changed.clear()
                    await changed.wait()
    except TimeoutError:
        raise DeadlineError(
            f"{who} waited {deadline_s:g} s for a replica. {roster.describe()} "
            "(trainer.wait_deadline_s)"
        ) from None
    finally:
        events.discard(changed)


async def sleep_until(roster: Roster, ready: Callable[[], bool]) -> None:
    """Return once `ready()`, which is evaluated after each change of the roster.

    Nobody waits for this: it is for tasks that act on a change, and may never have to.
    """
    changed = asyncio.Event()
    with roster.subscribe(lambda change: changed.set()):
        while not ready():
            changed.clear()
            await changed.wait()


def check(roster: Roster) -> None:
    """Raise ReplicaLost if every replica is given up, unless the run saves first."""
    if roster.over and not roster.saves:
        raise ReplicaLost(f"no replica is left: {roster.describe()}")
