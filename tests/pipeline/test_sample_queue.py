"""The ledger behind one condition: waiters wake in order, each with a deadline and a name."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from millrace.errors import DeadlineError, LedgerError
from millrace.pipeline.sample_queue import SampleQueue
from millrace.schedule.ledger import Ledger, Topic
from millrace.schedule.schedule import Schedule
from millrace.types import Prompt, Sample, tokens_of

pytestmark = pytest.mark.virtual_clock


def queue(deadline_s: float = 100.0) -> SampleQueue:
    return SampleQueue(Ledger(Schedule(ppo_mini_batch_size=2), 4), deadline_s=deadline_s)


def prompt(i: int) -> Prompt:
    return Prompt(i, tokens_of([1]), "", "d")


async def test_a_wait_that_is_over_before_it_begins_returns_at_once() -> None:
    await queue().wait("trainer", "nothing", lambda: True, on=Topic.SAMPLES)
    assert asyncio.get_running_loop().time() == 0.0


async def test_a_deadline_names_everyone_who_waits_for_what_and_what_the_ledger_holds() -> None:
    q = queue(deadline_s=30.0)
    q.do(q.ledger.admit, prompt(0))
    other = asyncio.create_task(
        q.wait("rollouter", "a free slot", lambda: False, on=Topic.SLOTS, deadline_s=1e5)
    )
    await asyncio.sleep(5)
    with pytest.raises(DeadlineError) as caught:
        await q.wait("trainer", "the samples of its next step", q.ledger.can_take, on=Topic.SAMPLES)
    assert asyncio.get_running_loop().time() == pytest.approx(35.0)
    other.cancel()
    text = str(caught.value)
    assert text.startswith("trainer waited 30 s for the samples of its next step. ")
    assert "rollouter waits for a free slot since 35.0 s" in text
    assert "trainer waits for the samples of its next step since 30.0 s" in text
    assert (
        "1 admitted, 0 retired, 0 dropped, 1 of 2 slots in use (1 waiting)" in text
        and "trainer.wait_deadline_s" in text
    )


async def test_one_who_is_always_too_late_does_not_wait_past_its_deadline() -> None:
    """The waiter wakes every second. Each time, the sample is gone before the waiter's turn."""
    q = queue(deadline_s=10.0)
    there = False

    async def churn() -> None:
        nonlocal there
        for _ in range(50):
            await asyncio.sleep(1)
            there = True
            q.wake(Topic.SAMPLES)
            there = False

    task = asyncio.create_task(churn())
    with pytest.raises(DeadlineError):
        await q.wait("trainer", "what others take first", lambda: there, on=Topic.SAMPLES)
    assert asyncio.get_running_loop().time() == pytest.approx(10.0)
    task.cancel()


async def test_waiters_are_woken_in_order_and_one_that_is_too_late_waits_on() -> None:
    """Two waiters want the same slot. The first takes it, and the second continues to wait."""

    q = queue()
    order: list[str] = []

    async def take(who: str) -> None:
        await q.wait(who, "a slot", q.ledger.can_admit, on=Topic.SLOTS)
        q.do(q.ledger.admit, prompt(len(order)))
        order.append(who)

    for i in range(2):
        q.do(q.ledger.admit, prompt(i))
    tasks = [asyncio.create_task(take(f"w{i}")) for i in range(3)]
    await asyncio.sleep(1)
    assert order == []
    q.do(q.ledger.drop, 0, "test")
    await asyncio.sleep(1)
    assert order == ["w0"], "one slot, one taker"
    q.do(q.ledger.drop, 1, "test")
    await asyncio.sleep(1)
    assert order == ["w0", "w1"]
    tasks[2].cancel()


async def test_a_change_asks_only_those_who_wait_for_its_topic() -> None:
    q = queue()
    asked = dict.fromkeys(Topic, 0)

    def never(topic: Topic) -> bool:
        asked[topic] += 1
        return False

    idle = [asyncio.create_task(q.wait(str(t), "never", partial(never, t), on=t)) for t in Topic]
    await asyncio.sleep(0)
    asked.update(dict.fromkeys(Topic, 0))
    seen = []
    for change in (
        partial(q.ledger.admit, prompt(0)),
        partial(q.ledger.start, 0),
        partial(q.ledger.finish, 0, Sample(prompt(0), ())),
        partial(q.ledger.admit, prompt(1)),
        partial(q.ledger.drop, 1, "test"),
    ):
        q.do(change)
        seen.append({topic.value: n for topic, n in asked.items() if n})
        asked.update(dict.fromkeys(Topic, 0))
    everyone = {"slots": 1, "samples": 1, "rollouts": 1}
    assert seen == [{}, {"rollouts": 1}, {"samples": 1}, {}, everyone]
    q.stop(0.0)
    assert asked == everyone
    assert "slots waits for never" in q.describe()
    for task in idle:
        task.cancel()


async def test_an_illegal_change_raises_and_wakes_nobody() -> None:
    q = queue()
    with pytest.raises(LedgerError, match="sample 7 has no slot"):
        q.do(q.ledger.start, 7)
    assert q.describe().startswith("nobody waits. Ledger: version 0")


async def test_a_change_that_loses_a_sample_is_found_as_it_happens() -> None:
    q = queue()
    q.do(q.ledger.admit, prompt(0))
    with pytest.raises(LedgerError, match="samples were lost"):
        q.do(q.ledger._slots.clear)


async def test_a_cancelled_wait_is_forgotten() -> None:
    q = queue()
    task = asyncio.create_task(q.wait("trainer", "x", lambda: False, on=Topic.SAMPLES))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    assert q.describe().startswith("nobody waits")


async def test_a_stop_wakes_who_looks_for_it_at_once_and_its_grace_ends_later() -> None:
    q, loop = queue(), asyncio.get_running_loop()
    loop.call_later(3.0, q.stop, 8.0)
    await q.wait("trainer", "samples, or a stop", lambda: q.stopping, on=Topic.SAMPLES)
    stopped = loop.time()
    assert not q.out_of_grace
    await q.wait(
        "trainer", "samples, or the end of its grace", lambda: q.out_of_grace, on=Topic.ROLLOUTS
    )
    assert (stopped, loop.time()) == (pytest.approx(3.0), pytest.approx(11.0))


async def test_a_finished_sample_reaches_a_trainer_that_waits_for_it() -> None:
    q = queue()
    for i in range(2):
        q.do(q.ledger.start, q.do(q.ledger.admit, prompt(i)))
    for i in (1, 0):
        asyncio.get_running_loop().call_later(
            i + 1, q.do, q.ledger.finish, i, Sample(prompt(i), ())
        )
    await q.wait("trainer", "samples", q.ledger.can_take, on=Topic.SAMPLES)
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)
    assert [s.prompt.index for s in q.do(q.ledger.take)] == [0, 1]


async def test_progress_of_a_sync_renews_the_waits_for_samples_alone() -> None:
    q = queue(deadline_s=30.0)
    waits = [
        asyncio.create_task(q.wait("trainer", "a change", lambda: False, on=topic))
        for topic in (Topic.SAMPLES, Topic.ROLLOUTS)
    ]
    await asyncio.sleep(20)
    q.renew()
    await asyncio.sleep(11)
    assert [wait.done() for wait in waits] == [False, True]
    await asyncio.sleep(25)
    assert all(isinstance(wait.exception(), DeadlineError) for wait in waits)
