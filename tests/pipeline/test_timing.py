"""The seconds of a row, against a run on the virtual clock whose times are known.

The expected times come from the lengths of the trajectories and from the cost model alone.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from millrace.observe.timing import SYNC
from millrace.simulate.cost import CostModel
from millrace.types import Prompt, Sample
from tests.pipeline import simulated
from tests.pipeline.simulated import RUNS, LongTail, Outcome, parts_of, schedule_of, simulate

SLOTS, MINI, BATCHES = 12, 4, 6
WAITS = ("samples", "prev_gen", "rollouts", "validation", "publish")
COST = CostModel(
    train_token_s=2e-4, log_prob_token_s=6e-5, ref_token_s=4e-5, step_s=0.1, transfer_s=0.3
)


def ends(batches: Sequence[Sequence[Sample]]) -> list[float]:
    """Return when the last trajectory of each batch ends, if all start together.

    The slots take the trajectories in order. A slot takes the next one when its own ends.
    """
    free, found = [0.0] * SLOTS, []
    for batch in batches:
        last = 0.0
        for trajectory in (t for sample in batch for t in sample.trajectories):
            end = heapq.heappop(free) + trajectory.num_tokens * COST.token_s
            heapq.heappush(free, end)
            last = max(last, end)
        found.append(last)
    return found


def tokens_of(batch: Sequence[Sample]) -> int:
    return sum(len(s.prompt.tokens) + t.num_tokens for s in batch for t in s.trajectories)


def step_of(batch: Sequence[Sample]) -> float:
    token_s = COST.train_token_s + COST.log_prob_token_s + COST.ref_token_s
    return COST.step_s + token_s * tokens_of(batch)


@dataclass(frozen=True)
class Known:
    """The known times of one version."""

    step: float
    wait_samples: float
    wait_prev_gen: float
    wait_publish: float = 0.0
    generated: float = 0.0
    """Seconds in which its samples were drawn."""
    active: float = 0.0
    """Seconds in which anything was drawn while the version before it was live."""


def drained(batches: list[list[Sample]]) -> list[Known]:
    """Return the versions of one_step_off: while batch k trains, batch k + 1 is drawn."""
    first, second = ends(batches[:2])  # the start weights draw two batches
    known = []
    for k, batch in enumerate(batches):
        following = batches[k + 1 : k + 2]
        wait = first if k == 0 else 0.0
        left = max(first, second) if k == 0 else ends(following)[0] if following else 0.0
        busy = wait + step_of(batch) + COST.transfer_s
        drain = max(0.0, left - busy)
        generated = (first, second)[k] if k < 2 else ends([batch])[0]
        known.append(
            Known(busy + drain + COST.pause_s, wait, drain, generated=generated, active=left)
        )
    return known


def overlapped(batches: list[list[Sample]], transfer_s: float) -> list[Known]:
    """Return the versions of one_step_off with overlap_sync: a version arrives behind a step."""
    first, second = ends(batches[:2])
    drawn = [first, second, *(0.0 for _ in batches[2:])]
    """When each batch is drawn."""
    closed = live = 0.0
    known = []
    for k, batch in enumerate(batches):
        last = k == len(batches) - 1
        began = max(closed, drawn[k])
        stepped = began + step_of(batch)
        sealed = max(stepped, live)  # the version before this one is live first
        left = drawn[k + 1] if not last else 0.0
        live = max(sealed + transfer_s, left) + COST.pause_s
        if k + 2 < len(batches):
            drawn[k + 2] = live + ends([batches[k + 2]])[0]
        end = live if last else sealed
        wait = began - closed
        known.append(
            Known(end - closed, wait if k == 0 else 0.0, wait if k else 0.0, sealed - stepped)
        )
        closed = end
    return known


def run_of(mode: str, transfer_s: float = COST.transfer_s) -> tuple[Outcome, list[list[Sample]]]:
    cost = replace(COST, transfer_s=transfer_s)
    outcome = simulate(
        schedule_of(mode, mini=MINI, trigger=1), MINI * BATCHES, cost=cost, slots=SLOTS
    )
    return outcome, [list(samples) for _, samples in outcome.engine.trained]


def test_one_step_off_shows_the_seconds_that_the_trainer_waited_for_the_previous_batch() -> None:
    outcome, batches = run_of("one_step_off")
    for row, known in zip(outcome.record.rows, drained(batches), strict=True):
        assert row["timing_s/wait_prev_gen"] == pytest.approx(known.wait_prev_gen)
        assert row["timing_s/wait_samples"] == pytest.approx(known.wait_samples)
        assert row["timing_s/step"] == pytest.approx(known.step)
        assert row["timing_s/wait_rollouts"] == 0.0, "drain mode interrupts nothing"
        assert row["rollouter/generate_sequences_s"] == pytest.approx(known.generated)
    waits = [row["timing_s/wait_prev_gen"] for row in outcome.record.rows]
    assert sum(seconds > 0.4 for seconds in waits) >= 3, "a long tail is longer than a step"


@pytest.mark.parametrize("transfer_s", [COST.transfer_s, 5.0])
def test_a_version_that_arrives_behind_a_step_leaves_the_wait_for_the_batch(
    transfer_s: float,
) -> None:
    outcome, batches = run_of("one_step_off+overlap", transfer_s)
    found = overlapped(batches, transfer_s)
    assert (max(known.wait_publish for known in found) > 1) == (transfer_s == 5)
    for row, known in zip(outcome.record.rows, found, strict=True):
        assert row["timing_s/wait_prev_gen"] == pytest.approx(known.wait_prev_gen)
        assert row["timing_s/wait_samples"] == pytest.approx(known.wait_samples)
        assert row.get("timing_s/wait_publish", 0.0) == pytest.approx(known.wait_publish)
        assert row["timing_s/step"] == pytest.approx(known.step)


def test_the_rollouters_idle_time_by_verls_definition_begins_when_all_is_drawn() -> None:
    """The rollouter is idle while the trainer trains on, and after the last batch."""
    outcome, batches = run_of("one_step_off")
    for row, known in zip(outcome.record.rows, drained(batches), strict=True):
        assert row["fully_async/rollouter/active_time"] == pytest.approx(known.active)
        assert row["fully_async/rollouter/version_time"] == pytest.approx(known.step)
        idle = 1 - known.active / known.step
        assert row["fully_async/rollouter/idle_ratio"] == pytest.approx(idle)
    assert row["fully_async/rollouter/idle_ratio"] == 1.0
    assert row["rollouter/idle_ratio"] == 1.0
    swapped = simulate(schedule_of("async_swap", staleness=4.0), 80, cost=COST, slots=SLOTS)
    busy = [row["fully_async/rollouter/idle_ratio"] for row in swapped.record.rows[:4]]
    assert busy == [0.0] * 4, "some sample always runs"


@pytest.mark.parametrize("mode", RUNS)
def test_parts_add_up_to_the_step_and_totals_to_their_parts(mode: str) -> None:
    outcome = simulate(schedule_of(mode), 40, cost=COST, slots=SLOTS)
    batches = iter(outcome.engine.trained)
    for row in outcome.record.rows:
        parts, step = parts_of(row), row["timing_s/step"]
        assert sum(parts.values()) == pytest.approx(step) == row["perf/time_per_version"]
        assert min(parts.values()) >= 0
        for name, seconds in parts.items():
            assert row[f"timing_share/{name}"] == pytest.approx(seconds / step)
        steps = list(itertools.islice(batches, int(row["train/optimizer_steps"])))
        tokens = sum(tokens_of(samples) for _, samples in steps)
        assert parts["old_log_prob"] == pytest.approx(COST.log_prob_token_s * tokens)
        assert parts["ref"] == pytest.approx(COST.ref_token_s * tokens)
        update = COST.step_s * len(steps) + COST.train_token_s * tokens
        assert parts["update_actor"] == pytest.approx(update)
        assert parts["train_other"] == pytest.approx(0.0, abs=1e-9)
        train = sum(parts[name] for name in ("old_log_prob", "ref", "update_actor", "train_other"))
        assert row["timing_s/train"] == pytest.approx(train)
        assert row["timing_s/gen"] == parts["wait_samples"] + parts["wait_prev_gen"]
        assert row["timing_s/sync"] == pytest.approx(sum(parts.get(name, 0.0) for name in SYNC))
        assert row["fully_async/trainer/idle_ratio"] == pytest.approx(row["timing_s/gen"] / step)


@pytest.mark.parametrize("mode", RUNS)
def test_every_part_has_its_known_seconds(mode: str) -> None:
    """Every version is validated, and every second one is saved."""
    cost = replace(COST, keep_s=0.25, pause_s=0.05, switch_s=0.5)
    schedule = schedule_of(mode)
    outcome = simulate(schedule, 40, cost=cost, slots=SLOTS, save_s=0.7, validation_s=2.0)
    rows, waited = outcome.record.rows, list(outcome.record.waited)
    assert max(waited) > 0.1
    for k, row in enumerate(rows):
        parts, step = parts_of(row), row["timing_s/step"]
        assert parts["other"] == pytest.approx(0.0, abs=1e-9)
        idle = sum(parts.get(f"wait_{name}", 0.0) for name in WAITS)
        assert row["trainer/idle_ratio"] == pytest.approx(idle / step)
        saved = 0.7 if k and k % 2 == 0 else 0.0
        assert parts.get("save_checkpoint", 0.0) == pytest.approx(saved)
        switches = 0 if not schedule.colocated else 4 if k else 2  # after a row: half of them
        assert parts.get("switch", 0.0) == pytest.approx(switches * cost.switch_s)
        behind = schedule.overlap_sync and k % 2 == 0 and k < len(rows) - 1
        assert parts.get("sync_keep", 0.0) == pytest.approx(cost.keep_s if behind else 0.0)
        assert parts.get("sync_transfer", 0.0) == pytest.approx(0.0 if behind else cost.transfer_s)
        assert parts.get("sync_activate", 0.0) == pytest.approx(0.0 if behind else cost.pause_s)
        if not schedule.overlap_sync:
            assert parts["wait_validation"] == pytest.approx(waited[k])


@pytest.mark.parametrize("mode", ["colocate_sync", "colocate_partial"])
def test_rollouts_on_shared_devices_are_idle_in_the_trainers_turn(mode: str) -> None:
    """A version has no rollouts if the next window is ready when the trainer's turn ends."""
    outcome = simulate(schedule_of(mode), 80, cost=COST, slots=SLOTS)
    drawing = [row for row in outcome.record.rows if row["fully_async/rollouter/active_time"]]
    assert len(drawing) >= 5
    for row in drawing:
        turn = row["timing_s/train"] + row["timing_s/sync"] + 2 * COST.switch_s
        idle = row["fully_async/rollouter/idle_ratio"] * row["fully_async/rollouter/version_time"]
        assert idle == pytest.approx(turn - row["timing_s/wait_rollouts"])


class Admitted(LongTail):
    """Prompts with the time of their admission."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def __getitem__(self, index: int) -> Prompt:
        self.at[index] = asyncio.get_running_loop().time()
        return super().__getitem__(index)


@pytest.mark.parametrize("lookahead", [1, 8])
@pytest.mark.parametrize("mode", ["async_partial", "async_swap"])
def test_the_wait_for_each_batch_counts_for_its_generation(
    mode: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sync drains here, so every wait for samples is between two steps."""
    prompts = Admitted()
    monkeypatch.setattr(simulated, "LongTail", lambda: prompts)
    schedule = schedule_of(mode, mini=2, trigger=2, staleness=0.25, lookahead=lookahead)
    outcome = simulate(schedule, 80, cost=COST, slots=1000)
    steps = iter(zip(outcome.record.ended, outcome.engine.trained, strict=True))
    last, fresh, mixed = min(prompts.at.values()), 0, 0
    for row in outcome.record.rows:
        waits, of_row = {"wait_samples": 0.0, "wait_prev_gen": 0.0}, list[Sample]()
        for ended, (version, samples) in itertools.islice(steps, 2):
            stale = [s.admitted_version < version for s in samples]
            began = ended - step_of(samples)
            waits["wait_prev_gen" if any(stale) else "wait_samples"] += began - last
            fresh, mixed = fresh + (not any(stale)), mixed + (any(stale) and not all(stale))
            last, of_row = ended, [*of_row, *samples]
        for name, seconds in waits.items():
            assert row[f"timing_s/{name}"] == pytest.approx(seconds)
        last += row["timing_s/sync"]
        if mode == "async_swap":  # nothing interrupts a trajectory
            longest = [max(t.num_tokens for t in s.trajectories) * COST.token_s for s in of_row]
            begun = [prompts.at[s.prompt.index] for s in of_row]
            drawn = max(a + b for a, b in zip(begun, longest, strict=True)) - min(begun)
            assert row["rollouter/generate_sequences_s"] == pytest.approx(drawn, abs=0.05), (
                "a swap costs a part of a token"
            )
    assert fresh and mixed
