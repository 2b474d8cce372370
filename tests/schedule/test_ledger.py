"""The Ledger under random walks.

Samples are conserved. Capacity and the lag bound are respected. No walk deadlocks, and the ledger
can be restored at any sync.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import codec
from millrace.errors import LedgerError
from millrace.schedule.continuation import next_prompt
from millrace.schedule.ledger import Ledger, LedgerSnapshot, State
from millrace.schedule.schedule import Placement, Schedule
from millrace.types import WINDOW, Prompt, Sample, Trajectory, floats_of, tokens_of

PROMPT = Prompt(0, tokens_of([1]), "1", "test")


def schedule_of(**numbers: Any) -> Schedule:
    """Return a schedule with these numbers. It has overlap only where overlap is allowed."""
    numbers["overlap_sync"] &= (
        numbers["placement"] is Placement.SEPARATE and numbers["staleness_threshold"] > 0
    )
    return Schedule(**numbers)


schedules = st.builds(
    schedule_of,
    ppo_mini_batch_size=st.integers(1, 5),
    require_batches=st.integers(1, 3),
    trigger_parameter_sync_step=st.integers(1, 4),
    staleness_threshold=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 3.7]),
    placement=st.sampled_from(Placement),
    lookahead=st.integers(1, 12),
    overlap_sync=st.booleans(),
)


def moves(ledger: Ledger) -> list[str]:
    sealed = ledger.count(State.SEALED)
    if sealed and (ledger.sync_due() or not ledger.schedule.overlap_sync):
        return ["publish"]
    if ledger.sync_due():
        return ["seal"]
    found = (
        ["publish"] * bool(sealed)
        + ["admit"] * ledger.can_admit()
        + ["start"] * bool(ledger.ids(State.WAITING))
    )
    if ledger.ids(State.RUNNING):
        found += ["finish", "finish", "finish", "drop"]
    return found + ["train"] * bool(ledger.takeable())


def lag(ledger: Ledger, sample_id: int) -> int:
    """Return the versions between the sample's admission and the weights that train now."""
    return ledger.trainer_version - ledger._slots[sample_id].version


def make(ledger: Ledger, move: str, rng: random.Random, windows: float = 0.0) -> list[int]:
    """Do one move, and return the lags of the samples that it trained.

    `windows` is the share of samples whose response goes on.
    """
    lags: list[int] = []
    if move == "admit":
        ledger.admit(ledger.rest or Prompt(ledger.begun, PROMPT.tokens, "", "test"))
    elif move == "start":
        ledger.start(rng.choice(ledger.ids(State.WAITING)))
    elif move == "finish":
        i = rng.choice(ledger.ids(State.RUNNING))
        goes_on = (Trajectory(ended=WINDOW),) if rng.random() < windows else ()
        ledger.finish(i, Sample(ledger._slots[i].prompt, goes_on))
    elif move == "drop":
        ledger.drop(rng.choice(ledger.ids(State.RUNNING)), rng.choice(["a", "b"]))
    elif move == "seal":
        ledger.seal()
    elif move == "publish":
        ledger.published()
    else:
        lags = [lag(ledger, i) for i in ledger.takeable()]
        samples = ledger.take()
        ledger.trained(next_prompt(s, floats_of()) for s in samples if s.goes_on)
    return lags


@settings(max_examples=300, deadline=None)
@given(
    schedule=schedules,
    limit=st.one_of(st.none(), st.integers(1, 120)),
    seed=st.integers(0, 2**32),
    windows=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_any_walk_of_legal_moves_keeps_every_promise(
    schedule: Schedule, limit: int | None, seed: int, windows: float
) -> None:
    rng = random.Random(seed)
    ledger, worst, trained = Ledger(schedule, limit), 0, 0
    for _ in range(500):
        possible = moves(ledger)
        if not possible:
            break
        lags = make(ledger, rng.choice(possible), rng, windows)
        worst, trained = max([worst, *lags]), trained + len(lags)
        ledger.check()
        assert ledger.occupied <= schedule.capacity
        if not ledger.count(State.TAKEN, State.TRAINED, State.SEALED) and rng.random() < 0.1:
            snapshot = codec.from_json(codec.to_json(ledger.snapshot()), LedgerSnapshot)
            ledger = Ledger.restore(schedule, snapshot, limit)
            ledger.check()
    for _ in range(2000):  # from any end of the walk, a run without drops trains: no deadlock
        helpful = [m for m in moves(ledger) if m != "drop"]
        if trained or not helpful:
            break
        lags = make(ledger, rng.choice(helpful), rng)
        worst, trained = max([worst, *lags]), trained + len(lags)
    assert worst <= schedule.lag_bound
    assert trained > 0
    if not moves(ledger):  # a walk ends only if the run ends: no deadlock
        assert limit is not None and ledger.done() and ledger.retired == limit == trained


@settings(max_examples=100, deadline=None)
@given(schedule=schedules, seed=st.integers(0, 2**32))
def test_the_lag_bound_is_met_by_an_adversary(schedule: Schedule, seed: int) -> None:
    """The oldest sample finishes as late as possible. The lag stays within the bound."""
    ledger, worst = Ledger(schedule), 0
    rng = random.Random(seed)
    for _ in range(400):
        sealed = ledger.count(State.SEALED)
        if sealed and (ledger.sync_due() or not schedule.overlap_sync or rng.random() < 0.2):
            ledger.published()
        elif ledger.sync_due():
            ledger.seal()
        elif ledger.takeable():
            worst = max([worst, *(lag(ledger, i) for i in ledger.takeable())])
            ledger.take()
            ledger.trained()
        elif ledger.can_admit():
            ledger.start(ledger.admit(PROMPT))
        elif not ledger.ids(State.RUNNING):
            ledger.published()
        else:
            running = ledger.ids(State.RUNNING)
            ledger.finish(running[-1] if rng.random() < 0.9 else running[0], Sample(PROMPT, ()))
    assert worst <= schedule.lag_bound


def test_a_response_goes_on_once_its_window_is_live_and_before_new_prompts() -> None:
    ledger = Ledger(Schedule(ppo_mini_batch_size=2))
    for _ in range(2):
        ledger.start(ledger.admit(Prompt(ledger.begun, PROMPT.tokens, "", "test")))
    goes_on = Sample(ledger._slots[1].prompt, (Trajectory(ended=WINDOW),))
    ledger.finish(0, Sample(PROMPT, ()))
    ledger.finish(1, goes_on)
    ledger.take()
    with pytest.raises(LedgerError, match="nothing continues the response of sample 1"):
        ledger.trained()
    ledger.trained([next_prompt(goes_on, floats_of())])
    assert ledger.rest is None
    ledger.seal()
    assert ledger.rest is None and ledger.published() == [0, 1]
    with pytest.raises(LedgerError, match="before a response goes on"):
        ledger.admit(Prompt(2, PROMPT.tokens, "", "test"))
    snapshot = codec.from_json(codec.to_json(ledger.snapshot()), LedgerSnapshot)
    ledger = Ledger.restore(ledger.schedule, snapshot)
    rest = ledger.rest
    assert rest is not None and ledger.admit(rest) == 2
    (_, slot), *_ = ledger._slots.items()
    assert (slot.prompt.index, slot.prompt.in_stream, slot.prompt.first) == (2, 1, 1)
    assert slot.version == 1 and ledger.begun == 2 and ledger.resting == 0
    ledger._rests.append(rest)
    with pytest.raises(LedgerError, match="responses that go on were lost"):
        ledger.check()


def test_illegal_moves_name_the_state_found_and_the_state_expected() -> None:
    ledger = Ledger(Schedule(ppo_mini_batch_size=1))
    i = ledger.admit(PROMPT)
    with pytest.raises(LedgerError, match="sample 0 is waiting, expected running"):
        ledger.finish(i, Sample(PROMPT, ()))
    with pytest.raises(LedgerError, match="without a free slot"):
        ledger.admit(PROMPT)
    with pytest.raises(LedgerError, match="nothing is taken"):
        ledger.trained()
    with pytest.raises(LedgerError, match="expected something trained and nothing taken or sealed"):
        ledger.seal()
    with pytest.raises(LedgerError, match="expected something sealed"):
        ledger.published()
    ledger.start(i)
    ledger.finish(i, Sample(PROMPT, ()))
    ledger.take()
    with pytest.raises(LedgerError, match="sample 0 is taken"):
        ledger.drop(i, "late")
    with pytest.raises(LedgerError, match="middle of a window"):
        ledger.snapshot()


def test_a_colocated_window_is_takeable_only_whole() -> None:
    ledger = Ledger(
        Schedule(
            ppo_mini_batch_size=2, trigger_parameter_sync_step=2, placement=Placement.COLOCATED
        )
    )
    for _ in range(4):
        ledger.start(ledger.admit(PROMPT))
    for i in range(3):
        ledger.finish(i, Sample(PROMPT, ()))
        assert not ledger.takeable()
    ledger.finish(3, Sample(PROMPT, ()))
    assert ledger.takeable() == [0, 1]


def test_a_smaller_capacity_after_a_restart_is_reached_by_waiting() -> None:
    big, small = (
        Schedule(ppo_mini_batch_size=4, staleness_threshold=1.0),
        Schedule(ppo_mini_batch_size=4),
    )
    ledger = Ledger(big)
    while ledger.can_admit():
        ledger.admit(PROMPT)
    restored = Ledger.restore(small, ledger.snapshot())
    restored.check()
    assert restored.occupied == 8 and not restored.can_admit()
