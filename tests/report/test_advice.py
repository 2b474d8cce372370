"""Each sentence of advice fits a simulated run with a known answer, and its number gives the gain."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from millrace.persist.run_reader import RunReader
from millrace.report.accounts.devices import FlowAccount
from millrace.report.accounts.pace import StepCost
from millrace.report.advice.advise import Advice, advise, advise_run
from millrace.report.advice.balance import nothing
from millrace.report.advice.measure import Measured, measure
from millrace.report.advice.throughput import Throughput
from millrace.simulate.cost import CostModel
from millrace.types import Prompt
from millrace.waits.stream import Event, Phase
from tests.report.simulated import Case, run

pytestmark = pytest.mark.xdist_group("advice")  # one worker simulates each case once

FLAT = Case()
"""A decode step takes 10 ms for any number of requests, and training is cheap."""
COST = FLAT.cost
SLOW_TRAINER = replace(COST, train_token_s=2e-4)
GROWING = replace(COST, token_s=0.001, request_s=1.4e-4)
"""A decode step whose time grows with its requests, so that more decode slots gain little."""

MEASURED = Case(
    window=32,
    slots=256,
    cost=CostModel(
        token_s=0.0023,
        request_s=36.4e-6,
        train_token_s=1.95 / (256 * 330),
        step_s=0.05,
        transfer_s=0.1,
        pause_s=0.01,
    ),
    versions=16,
)

"""1.5B on two H200s, windows of 32 x 8: 22k tokens/s from 256 requests, 13.8k from 64."""


def half_solved(prompt: Prompt) -> float:
    return (0.0, 0.5)[prompt.index % 2]


@dataclass(frozen=True)
class Situation:
    """A run, words of the first sentence, and the run that follows its advice."""

    case: Case
    words: tuple[str, ...]
    key: str
    tolerance: float = 0.1
    """Largest error of the predicted rate, as a share of it."""
    also: dict[str, Any] = field(default_factory=dict)
    """What the advice leaves out, such as the seconds of a hand-over."""


SITUATIONS = {
    "ledger full while engines idle": Situation(
        MEASURED,
        ("The ledger is full while engines idle", "the longest of its 8 responses"),
        "async_training.staleness_threshold",
    ),
    "ledger full, slow rewards": Situation(
        FLAT.but(cost=replace(COST, reward_s=10.0)),
        ("The ledger is full while engines idle", "s for its scores"),
        "async_training.staleness_threshold",
    ),
    "rollouts are the bound": Situation(
        FLAT.but(trainers=3, cost=GROWING),
        ("The trainer waits for rollouts", "Move 2 devices to rollouts"),
        "trainer.n_gpus_per_node",
    ),
    "training is the bound": Situation(
        FLAT.but(rollouts=3, staleness=4.0, cost=SLOW_TRAINER),
        ("Rollouts wait for the trainer", "samples are ready", "Move a device to training"),
        "trainer.n_gpus_per_node",
    ),
    "asynchrony gains nothing": Situation(
        FLAT.but(sigma=0.0, staleness=1.0, slots=256, cost=replace(GROWING, train_token_s=6e-5)),
        ("Nothing to gain from asynchrony here",),
        "mode",
        also={"slots": 128, "cost": replace(GROWING, train_token_s=6e-5, switch_s=0.0)},
    ),
    "syncs": Situation(
        FLAT.but(slots=256, staleness=3.0, cost=replace(SLOW_TRAINER, transfer_s=1.5)),
        ("Syncs take 15% of the trainer's time",),
        "async_training.overlap_sync",
    ),
    "drain with a long tail": Situation(
        FLAT.but(mode="async_staleness", slots=128),
        ("Each sync waits", "until the longest response is drawn"),
        "mode",
    ),
    "reward workers": Situation(
        FLAT.but(workers=4, staleness=3.0, slots=128, cost=replace(COST, reward_s=0.4)),
        ("All 4 reward workers are busy",),
        "reward.num_workers",
    ),
    "validations": Situation(
        FLAT.but(slots=256, staleness=3.0, cost=SLOW_TRAINER, test_freq=1, validation_s=10.0),
        ("Syncs wait for validations",),
        "trainer.test_freq",
        tolerance=0.03,
    ),
    "checkpoints": Situation(
        FLAT.but(slots=256, staleness=3.0, cost=SLOW_TRAINER, save_freq=2, save_s=3.0),
        ("The trainer waits for checkpoints",),
        "trainer.save_freq",
        tolerance=0.03,
    ),
    "checkpoints in between": Situation(
        FLAT.but(
            slots=256, staleness=3.0, cost=SLOW_TRAINER, save_freq=1, save_s=2.0, async_save=False
        ),
        ("The trainer waits for checkpoints",),
        "trainer.async_save",
        tolerance=0.03,
    ),
    "strict order": Situation(
        FLAT.but(lookahead=1, staleness=1.5, slots=128),
        ("The trainer waits for the oldest sample while 14 samples are ready",),
        "async_training.lookahead",
    ),
    "hand-overs": Situation(
        FLAT.but(mode="colocate_sync", slots=128, cost=replace(COST, switch_s=1.0)),
        ("Hand-overs of the shared devices take 24% of the time",),
        "async_training.trigger_parameter_sync_step",
        also={"versions": 8},
    ),
    "decode slots": Situation(
        FLAT.but(slots=32, staleness=3.0),
        ("The decode slots are full", "requests wait for one"),
        "rollout.max_num_seqs",
        tolerance=0.25,
    ),
    "turns on separate devices": Situation(
        FLAT.but(mode="on_policy_pipeline"),
        ("The sides take turns: the trainer waits 85% of the time, the engines 58%",),
        "mode",
    ),
    "turns on shared devices": Situation(
        FLAT.but(mode="colocate_sync", trainers=2, rollouts=2),
        ("The sides take turns on the same devices",),
        "mode",
    ),
}

KEYS = {
    "mode": ("mode", str),
    "async_training.staleness_threshold": ("staleness", float),
    "async_training.lookahead": ("lookahead", int),
    "async_training.trigger_parameter_sync_step": ("trigger", int),
    "async_training.overlap_sync": ("overlap_sync", bool),
    "trainer.n_gpus_per_node": ("trainers", int),
    "rollout.n_gpus_per_node": ("rollouts", int),
    "rollout.max_num_seqs": ("slots", int),
    "reward.num_workers": ("workers", int),
    "trainer.test_freq": ("test_freq", int),
    "trainer.save_freq": ("save_freq", int),
}


def followed(case: Case, advice: Advice) -> Case:
    """Return the case with every number that the advice names."""
    for override in advice.overrides:
        key, _, value = override.partition("=")
        if key == "trainer.async_save":
            case = case.but(async_save=True, save_s=0.0)
            continue
        name, kind = KEYS[key]
        case = case.but(**{name: kind(value)})
    return case


def said(measured: Measured) -> str:
    return str([str(one) for one in advise(measured)])


def on_one_cpu(measured: Measured) -> Measured:
    """Return the figures as those of devices that are processes on the cores of one CPU."""
    return replace(measured, setup=replace(measured.setup, share_cores=True))


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_first_sentence_names_the_constraint_and_its_number_gives_the_gain(name: str) -> None:
    situation = SITUATIONS[name]
    before = run(situation.case)
    first = advise(before)[0]
    assert all(words in first.text for words in situation.words), first.text
    assert first.key == situation.key and first.gain is not None
    after = run(followed(situation.case, first).but(**situation.also))
    gain = after.rate / before.rate - 1
    predicted = (1 + first.gain) * before.rate
    assert after.rate == pytest.approx(predicted, rel=situation.tolerance), (
        f"{first}: the run gains {gain:+.0%}"
    )


@pytest.mark.parametrize(
    ("case", "sentence", "key"),
    [
        (
            FLAT.but(slots=256, staleness=3.0, cost=SLOW_TRAINER),
            "The trainer computes 100% of the time: only a faster trainer or more devices help",
            "trainer.n_gpus_per_node",
        ),
        (
            FLAT.but(trainers=2, cost=replace(GROWING, train_token_s=1e-4), staleness=2.0),
            "The engines draw all the time, and the trainer waits",
            "rollout.n_gpus_per_node",
        ),
    ],
)
def test_a_side_that_binds_with_nothing_to_move_gets_another_device(
    case: Case, sentence: str, key: str
) -> None:
    before = run(case.but(trainers=1))
    last = advise(before)[-1]
    assert last.text.startswith(sentence) and last.key == key and last.gain is not None
    after = run(followed(case.but(trainers=1), last))
    assert after.rate == pytest.approx((1 + last.gain) * before.rate, rel=0.1)


def test_a_balanced_run_on_equal_lengths_hears_that_only_a_faster_trainer_helps() -> None:
    """The sentence names no key."""
    case = FLAT.but(mode="colocate_sync", sigma=0.0, slots=128, cost=replace(COST, switch_s=0.0))
    (only,) = advise(run(case.but(cost=replace(SLOW_TRAINER, train_token_s=2e-3, switch_s=0.0))))
    assert only.text.startswith("The trainer computes 9") and not only.overrides
    assert only.gain is None


def test_a_synchronous_run_hears_if_asynchrony_gains_nothing() -> None:
    """Both devices draw, and then both train: separate sides would have one device each."""
    cost = replace(GROWING, train_token_s=1e-4, switch_s=0.0)
    case = FLAT.but(mode="colocate_sync", trainers=2, rollouts=2, sigma=0.0, slots=128, cost=cost)
    (only,) = advise(run(case))
    assert only.text.startswith("Nothing to gain from asynchrony here") and not only.overrides


def test_dropped_samples_are_named_with_a_bound_of_what_they_cost() -> None:
    case = FLAT.but(staleness=3.0, cost=GROWING, chance=half_solved)
    before = run(case)
    (about,) = [one for one in advise(before) if "dropped samples" in one.text]
    assert about.at_most and about.gain is not None and "equal_outcomes" in about.text
    after = run(case.but(chance=lambda prompt: 0.5))
    assert after.rate == pytest.approx((1 + about.gain) * before.rate, rel=0.1)


def test_responses_that_are_read_again_at_each_sync_are_named() -> None:
    case = FLAT.but(slots=128, staleness=3.0, cost=replace(COST, prefill_token_s=0.005))
    before = run(case)
    (about,) = [one for one in advise(before) if one.overrides[:1] == ("mode=async_swap",)]
    assert "because syncs interrupt responses" in about.text and about.gain is None
    assert run(followed(case, about)).rate > 1.1 * before.rate


def test_advice_that_is_followed_is_not_given_again() -> None:
    """The engines are full at staleness 3.1, so the next constraint is another one."""
    first = advise(run(MEASURED))[0]
    after = advise(run(followed(MEASURED, first)))
    assert all(one.key != first.key for one in after)


def test_a_worker_that_rests_between_bursts_of_calls_is_not_busy() -> None:
    """A window's responses end together: many calls wait, but only for a moment."""
    always = run(SITUATIONS["reward workers"].case)
    bursts = replace(always, any_score_s=always.seconds / 2)
    assert always.rewards_bind and not bursts.rewards_bind
    assert all(one.key != "reward.num_workers" for one in advise(bursts))


def test_seconds_with_a_call_of_the_reward_count_once() -> None:
    account = FlowAccount(now=0.0)
    phases: list[Phase] = ["begin", "begin", "end", "end", "begin"]
    for time, phase in zip((1.0, 2.0, 3.0, 5.0, 8.0), phases, strict=True):
        account(Event(time, "rewards", "score", phase, "1/0"))
    assert account.scoring.until(10.0) == 7.0 and account.any_score.until(10.0) == 6.0


MOVES = ("rollouts are the bound", "training is the bound")


@pytest.mark.parametrize("name", [*MOVES, "asynchrony gains nothing", "turns on shared devices"])
def test_devices_on_the_cores_of_one_cpu_are_not_moved_or_added(name: str) -> None:
    """Two processes on the same cores compute no more than one."""
    measured = run(SITUATIONS[name].case)
    words = said(measured), said(on_one_cpu(measured))
    assert "n_gpus_per_node" in words[0] and "n_gpus_per_node" not in words[1]


def test_turns_are_no_advice_if_small_steps_may_take_as_long_as_large_ones() -> None:
    measured = run(SITUATIONS["asynchrony gains nothing"].case)
    assert measured.step_cost and advise(measured)[0].overrides[0] == "mode=colocate_sync"
    step_s = measured.step_cost.step_s(measured.busy_slots)
    assert "colocate_sync" not in said(replace(measured, flat_cost=StepCost(step_s, 0.0)))


def test_syncs_on_the_cores_of_one_cpu_are_not_overlapped() -> None:
    """The sync takes the cores from the steps that it overlaps."""
    measured = run(FLAT.but(slots=256, staleness=3.0, cost=replace(SLOW_TRAINER, transfer_s=3.0)))
    words = said(measured), said(on_one_cpu(measured))
    assert "overlap_sync" in words[0] and "overlap_sync" not in words[1]
    assert all(one.at_most for one in advise(on_one_cpu(measured)) if one.gain is not None)


def test_samples_that_a_failing_reward_dropped_ask_for_another_reward() -> None:
    measured = run(FLAT.but(staleness=3.0, cost=GROWING, chance=half_solved))
    failing = replace(measured, dropped_tokens={"exception": sum(measured.dropped_tokens.values())})
    (about,) = [one for one in advise(failing) if "dropped samples" in one.text]
    assert "most of them for exception" in about.text and "mend reward.function" in about.text


def test_turns_on_one_cpu_ask_for_a_measurement() -> None:
    measured = run(SITUATIONS["turns on shared devices"].case)
    assert nothing(Throughput(on_one_cpu(measured))).text.endswith("millrace bench modes")


def test_a_full_ledger_before_a_slow_trainer_does_not_promise_full_engines() -> None:
    """The trainer is the next bound, so the engines still idle."""
    slow = run(FLAT.but(slots=256, staleness=0.5, cost=SLOW_TRAINER))
    (about,) = [one for one in advise(slow) if one.text.startswith("The ledger is full")]
    assert "would keep the trainer busy" in about.text
    assert "would fill them" in advise(run(MEASURED))[0].text


SMALL = FLAT.but(median=60.0, limit=256, window=8, n=8, versions=16)
SEVERAL = {
    "validations stay": SMALL.but(
        mode="on_policy_pipeline", test_freq=1, validation_s=20.0, cost=replace(COST, step_s=1.0)
    ),
    "a sync begins after the one before it": SMALL.but(
        staleness=3.0, cost=replace(SLOW_TRAINER, token_s=0.001, transfer_s=3.0)
    ),
    "scores take their time, also with more workers": SMALL.but(
        staleness=1.0, workers=8, cost=replace(COST, reward_s=10.0)
    ),
    "starved, and checkpoints": SMALL.but(
        workers=2, staleness=3.0, save_freq=1, save_s=4.0, cost=replace(COST, reward_s=0.4)
    ),
    "all that a version pays once": SMALL.but(
        mode="colocate_sync",
        cost=replace(COST, transfer_s=5.0, switch_s=2.0),
        test_freq=1,
        validation_s=3.0,
    ),
    "fewer devices keep samples for longer": SMALL.but(
        trainers=2, staleness=0.5, cost=replace(COST, train_token_s=5e-4, transfer_s=1.5)
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_gain_that_other_constraints_take_is_not_promised(name: str) -> None:
    """Each promise is within 15 points, or says that it is a bound."""
    case = SEVERAL[name]
    before = run(case)
    for one in advise(before):
        if one.gain is None or one.at_most or not one.overrides:
            continue
        gain = run(followed(case, one)).rate / before.rate - 1
        assert one.gain - gain < 0.15, f"{one}: the run gains {gain:+.0%}"


def test_each_key_is_advised_once() -> None:
    for case in SEVERAL.values():
        keys = [one.key for one in advise(run(case)) if one.overrides]
        assert len(keys) == len(set(keys))


def test_rewards_that_nobody_waits_for_are_no_advice_in_turns() -> None:
    """The rewards of early responses are computed while others are drawn."""
    case = SMALL.but(
        mode="colocate_sync", workers=1, cost=replace(COST, reward_s=0.005, switch_s=0.0)
    )
    before = run(case)
    for one in advise(before):
        if one.key == "reward.num_workers":
            gain = run(followed(case, one)).rate / before.rate - 1
            assert one.gain is not None and abs(one.gain - gain) < 0.15


LOSSY = Case(
    window=8,
    slots=96,
    median=60.0,
    limit=256,
    versions=20,
    cost=CostModel(
        token_s=0.005,
        request_s=1e-5,
        train_token_s=2e-5,
        step_s=0.02,
        transfer_s=0.05,
        pause_s=0.01,
    ),
    queue=0.6,
)
"""Engines that lose more than half of their time while requests wait, so full ones are slower."""


def test_engines_that_lose_time_while_requests_wait_are_not_filled() -> None:
    """The best staleness is where few requests wait, and a larger one is slower."""
    before = run(LOSSY.but(staleness=1.0))
    assert before.step_cost and before.step_cost.queue == pytest.approx(0.6, abs=0.1)
    first = advise(before)[0]
    assert "has the best rate" in first.text and first.at_most and first.gain is not None
    best = run(followed(LOSSY, first)).rate
    assert 1.3 * before.rate < best <= (1 + first.gain) * before.rate
    full = run(LOSSY.but(staleness=4.0)).rate
    assert best > 1.1 * full
    about = advise(run(LOSSY.but(staleness=2.6)))
    (nothing_more,) = [one for one in about if "would gain nothing" in one.text]
    assert nothing_more.gain is None and not nothing_more.overrides


def test_checkpoints_of_engines_that_lose_time_still_are_advice() -> None:
    """In turns, engines may give more samples than those that are full all the time."""
    cost = replace(LOSSY.cost, switch_s=0.05)
    case = LOSSY.but(mode="colocate_sync", slots=48, cost=cost, save_freq=1, save_s=1.0)
    before = run(case)
    first = advise(before)[0]
    assert first.key == "trainer.save_freq" and first.gain is not None
    after = run(followed(case, first))
    assert after.rate == pytest.approx((1 + first.gain) * before.rate, rel=0.05)


def test_a_gain_is_a_bound_where_syncs_make_engines_read_much_again() -> None:
    """Fuller engines read more tokens again, and no figure shows how long that takes."""
    few = SITUATIONS["ledger full, slow rewards"].case
    for case, bound in ((MEASURED, True), (MEASURED.but(mode="async_swap"), False), (few, False)):
        measured = run(case)
        first = advise(measured)[0]
        assert first.key == "async_training.staleness_threshold" and first.gain is not None
        assert first.at_most is bound is Throughput(measured).rereads


def test_contexts_that_no_sync_interrupted_are_not_read_again() -> None:
    """Siblings find their prompt in a cache. Each turn of an agent reads what came before it."""
    measured = run(MEASURED)
    # 8 responses of 300 tokens to a prompt of 1,000. A tenth of the groups is interrupted half way.
    # Of 1,220 read tokens, 220 were read again.
    groups = measured.drawn_tokens / 2400
    cached = replace(
        measured,
        read_tokens=1220 * groups,
        reused_tokens=7700 * groups,
        prompt_tokens=8000 * groups,
    )
    assert 0 < cached.read_again <= 220 / 2400
    whole = replace(cached, read_tokens=8000 * groups, reused_tokens=0.0)
    assert whole.read_again == 0
    assert replace(measured, agents=True).read_again == 0 < measured.read_again
    assert not any("mode=async_swap" in str(one) for one in advise(replace(measured, agents=True)))


@pytest.mark.parametrize("mode", ["colocate_sync", "colocate_partial"])
def test_a_larger_window_is_a_bound_where_windows_overlap_already(mode: str) -> None:
    cost = replace(GROWING, train_token_s=2.5e-4, transfer_s=0.3, switch_s=0.3)
    case = Case(mode=mode, slots=256, window=8, trainers=2, rollouts=2, cost=cost)
    key = "async_training.trigger_parameter_sync_step"
    (about,) = [one for one in advise(run(case)) if one.key == key]
    assert about.at_most is (mode == "colocate_partial")


@pytest.mark.parametrize(
    ("case", "train_token_s"),
    [
        (Case(mode="async_partial", slots=128, staleness=0.3, window=8, versions=16), 5e-4),
        (Case(mode="async_partial", slots=128, staleness=0.3, window=16, versions=16), 5e-4),
        (
            Case(mode="colocate_sync", slots=128, window=8, versions=24, trainers=2, rollouts=2),
            2.5e-4,
        ),
    ],
)
def test_the_next_step_has_slots_while_a_window_trains(case: Case, train_token_s: float) -> None:
    """With fewer, both sides take turns, and the promise would be far too large."""
    cost = replace(GROWING, train_token_s=train_token_s, transfer_s=0.1, switch_s=0.3)
    case = case.but(cost=cost)
    before = run(case)
    key = "async_training.staleness_threshold="
    (about,) = [one for one in advise(before) if any(o.startswith(key) for o in one.overrides)]
    after = run(followed(case, about))
    schedule = after.setup.schedule
    assert schedule.capacity >= schedule.window + schedule.step_size
    assert about.gain == pytest.approx(after.rate / before.rate - 1, abs=0.05)


RUNS = Path(__file__).parent / "h200"
FEW, MANY = (RunReader(RUNS / name).read() for name in ("run-0", "run-1"))
"""Two runs on two H200s (benchmarks/results/advice.md). Engines idle in the first one. In the second
one all slots are busy, and it was slower."""


def test_the_measured_case_is_explained_without_a_promise_that_full_engines_break() -> None:
    before, after = measure(FEW), measure(MANY)
    assert before and after and before.step_cost
    assert after.drawn_tokens / after.seconds < 0.9 * before.drawn_tokens / before.seconds
    first, *others = advise_run(FEW)
    assert first.text.startswith(
        "The ledger is full while engines idle 23% of the time: a sample waits for the longest of its "
        "8 responses. A larger async_training.staleness_threshold would gain nothing"
    )
    assert f"lose {before.step_cost.queue:.0%}" in first.text and before.step_cost.queue > 0.5
    assert not first.overrides
    assert all("staleness_threshold" not in one.key and one.gain is None for one in others)


def test_more_slots_for_full_engines_are_only_a_bound() -> None:
    """No step with more requests was measured."""
    (slots,) = [one for one in advise_run(MANY) if one.key == "rollout.max_num_seqs"]
    assert slots.text.startswith("The decode slots are full") and slots.at_most
