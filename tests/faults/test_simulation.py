"""Simulated runs with faults: what millrace promises holds, and planted bugs are found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import CheckpointError, DiskError
from millrace.extras.faults.disk import Died, Disk, SimPath, View, simulated_disk
from millrace.extras.faults.scenario import KINDS, Fault, Trigger, draw
from millrace.extras.faults.sweep import Found, run_seed, shrink, story, sweep
from millrace.extras.faults.world import run_world
from millrace.persist.history import History
from millrace.pipeline.checkpoint import Checkpoints, read_ledger, read_manifest
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import Schedule
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimTrainEngine
from tests.faults.finders import likely_first
from tests.faults.mutants import MUTANTS, first_seed, seeds_of

SEEDS = 300


def test_no_seed_breaks_a_promise_and_every_kind_of_fault_fires() -> None:
    found = Found()
    for outcome in sweep(range(600)):
        found.add(outcome)
    assert not found.violations
    assert not found.silent and found.seeds == 600
    assert found.attempts > 1.3 * 600, "faults end attempts, and resumes follow"


def test_a_seed_replays_exactly() -> None:
    for seed in (2, 17, 40):
        first, second = run_seed(seed), run_seed(seed)
        assert first == second and first.digest and first.story
    assert run_seed(2).digest != run_seed(17).digest


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    """One of 150 seeds finds it."""
    seeds = likely_first(name, seeds_of(name, 150))
    assert first_seed(MUTANTS[name], seeds) is not None


def test_a_trainer_is_restored_soon_after_a_disk_that_refused_the_journal() -> None:
    """Long before the next regular checkpoint, one is written as soon as the disk takes files."""
    base = draw(12871)
    c = base.config
    config = c.model_copy(
        update={
            "trainer": c.trainer.model_copy(update={"save_freq": 20}),
            "rollout": c.rollout.model_copy(update={"total_rollout_steps": 240}),
        }
    )
    refuses = Fault("disk_errors", 0, Trigger("time", 3.0), "", 1.0)
    dies = Fault("rank_dies", 0, Trigger("time", 16.0), "trainer-0")
    outcome = run_world(replace(base, config=config, ranks=1, replicas=1, faults=(refuses, dies)))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"disk_errors": 1, "rank_dies": 1}


def test_a_replica_that_comes_back_during_a_slow_keep_is_connected_anew() -> None:
    """Its sync is with the worker that was lost, and not with the one of now."""
    slow = Fault("rank_freezes", 0, Trigger("sender.keep", 1), "trainer-0", 5.0)
    dies = Fault("replica_dies", 0, Trigger("time", 3.4), "rollout-0")
    outcome = run_world(replace(draw(12871), replicas=1, ranks=1, start_s=0.2, faults=(slow, dies)))
    told = [line.text for line in outcome.story]
    assert not outcome.violation and outcome.attempts == 1, told
    assert outcome.fired == {"rank_freezes": 1, "replica_dies": 1} and "rollout-0 is live" in told


def test_a_sender_that_hangs_is_replaced_before_requests_miss_their_deadline() -> None:
    """The only replica comes back, and its requests wait for weights that the sender never sends."""
    dies = Fault("replica_dies", 0, Trigger("engine.generate", 1), "rollout-0")
    hangs = Fault("sender_hangs", 0, Trigger("time", 1.9), "trainer-1")
    outcome = run_world(replace(draw(110447), faults=(dies, hangs)))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"replica_dies": 1, "sender_hangs": 1}


def test_requests_outlive_a_rank_that_is_found_at_their_deadline() -> None:
    """The replica comes back twice while the rank stands still. Each time, the wait begins anew."""
    still = Fault("rank_stands_still", 0, Trigger("time", 3.011), "trainer-0", 500.0)
    dies = [Fault("replica_dies", 0, Trigger("time", at), "rollout-0") for at in (5.082, 20.0)]
    outcome = run_world(replace(draw(15034), replicas=1, faults=(still, *dies)))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"rank_stands_still": 1, "replica_dies": 2}


def test_a_recovery_of_the_trainer_renews_the_wait_for_weights() -> None:
    """The rank is found at the deadline. The replica's requests waited nearly as long by then."""
    still = Fault("rank_stands_still", 0, Trigger("time", 3.011), "trainer-0", 500.0)
    dies = Fault("replica_dies", 0, Trigger("time", 5.082), "rollout-0")
    outcome = run_world(replace(draw(15034), replicas=1, faults=(still, dies)))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"rank_stands_still": 1, "replica_dies": 1}


def test_requests_outlive_a_recovery_that_takes_longer_than_their_deadline() -> None:
    """Seven steps are trained again. The only replica is back early, and waits for weights."""
    base = draw(15034)
    c = base.config
    config = c.model_copy(
        update={
            "trainer": c.trainer.model_copy(update={"save_freq": 20}),
            "rollout": c.rollout.model_copy(update={"total_rollout_steps": 24}),
        }
    )
    faults = (
        Fault("rank_dies", 0, Trigger("engine.step", 8), "trainer-0"),
        Fault("replica_dies", 0, Trigger("time", 89.9), "rollout-0"),
    )
    cost = replace(base.cost, step_s=12.0)
    outcome = run_world(replace(base, config=config, cost=cost, replicas=1, faults=faults))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"rank_dies": 1, "replica_dies": 1}


@pytest.mark.parametrize(("method", "number"), [("engine.begin", 2), ("engine.step", 3)])
def test_requests_outlive_a_new_rank_that_stands_still(method: str, number: int) -> None:
    """The recovery itself needs a second one. Each is found at the deadline of its call."""
    faults = (
        Fault("rank_dies", 0, Trigger("time", 5.0), "trainer-0"),
        Fault("replica_dies", 0, Trigger("time", 5.05), "rollout-0"),
        Fault("rank_stands_still", 0, Trigger(method, number), "trainer-0", 500.0),
    )
    outcome = run_world(replace(draw(15034), replicas=1, faults=faults))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"rank_dies": 1, "replica_dies": 1, "rank_stands_still": 1}


def test_requests_outlive_a_rank_that_stands_still_in_the_sync_that_they_wait_for() -> None:
    faults = (
        Fault("replica_dies", 0, Trigger("time", 2.5), "rollout-0"),
        Fault("rank_stands_still", 0, Trigger("sender.keep", 2), "trainer-0", 500.0),
    )
    outcome = run_world(replace(draw(47), replicas=1, start_s=0.2, faults=faults))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"replica_dies": 1, "rank_stands_still": 1}


def test_the_wait_for_samples_outlives_a_recovery_in_the_sync_that_frees_their_slots() -> None:
    """All slots are occupied until the sync is over, and the trainer waits meanwhile."""
    base = draw(3655)
    trainer = base.config.trainer.model_copy(update={"save_freq": 20})
    scenario = replace(
        base,
        config=base.config.model_copy(update={"trainer": trainer}),
        cost=replace(base.cost, step_s=25.0),
        start_s=8.0,
        faults=(Fault("sender_hangs", 0, Trigger("sender.keep", 2), "trainer-0"),),
    )
    outcome = run_world(scenario)
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"sender_hangs": 1}


def test_a_call_whose_end_comes_before_it_reaches_no_later_group() -> None:
    """A replica dies in a sync, and the link of a rank changes the order of calls meanwhile."""
    outcome = run_world(draw(40424))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"link_reorders": 1, "replica_dies": 1}


def test_a_call_that_comes_after_a_later_one_reaches_no_later_group() -> None:
    """The end of the old transfer comes last: after the new group, and after the transfer."""
    reorders = Fault("link_reorders", 0, Trigger("time", 0.737), "trainer-0", 5.0)
    found = []
    for seed in range(40):
        dies = Fault("replica_dies", 0, Trigger("receiver.transfer", 2), f"rollout-{seed % 2}")
        scenario = replace(draw(seed), replicas=2, faults=(reorders, dies))
        outcome = run_world(scenario)
        found += [(seed, outcome.violation)] if outcome.violation else []
    assert not found


def test_a_run_is_complete_although_its_last_ranks_are_still_being_recovered() -> None:
    slow = Fault("disk_slow", 0, Trigger("time", 3.484), "", 5.0)
    dies = Fault("rank_dies", 0, Trigger("time", 5.886), "trainer-0")
    outcome = run_world(replace(draw(130220), faults=(slow, dies)))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == {"disk_slow": 1, "rank_dies": 1}


def test_a_disk_that_cannot_be_read_is_a_disk_error_and_no_damaged_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(self: Path) -> bytes:
        raise OSError(5, "Input/output error", str(self))

    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for read in (read_manifest, read_ledger):
        with pytest.raises(DiskError, match="Input/output error"):
            read(tmp_path)


def test_a_broken_seed_shrinks_to_the_faults_that_it_needs() -> None:
    with MUTANTS["filter off after a failover"]():
        broken = next(
            scenario
            for scenario in map(draw, range(SEEDS))
            if len(scenario.faults) > 2 and run_world(scenario).violation
        )
        fewest, outcome = shrink(broken)
        lines = story(fewest, outcome)
    assert 1 <= len(fewest.faults) < len(broken.faults)
    assert any("FAULT" in line for line in lines) and "I5" in lines[-1]
    assert not run_world(fewest).violation, "without the bug, the same faults do no harm"


def test_every_fault_is_a_kind_and_says_its_moment() -> None:
    faults = [fault for seed in range(SEEDS) for fault in draw(seed).faults]
    assert {fault.kind for fault in faults} == KINDS.keys()
    assert all(str(fault.trigger) in str(fault) for fault in faults)


# -- the disk


def disk(seed: int = 0) -> tuple[Disk, SimPath]:
    made = Disk(random.Random(seed))
    folder = SimPath(View(made), "/run")
    (folder / "model").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "config.yaml").write_text("a: 1\n")
    made.sync("/run")
    made.sync("/run/config.yaml")
    return made, folder


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_keeps_what_was_synced_and_tears_the_rest(seed: int) -> None:
    made, folder = disk(seed)
    with simulated_disk(), (folder / "log").open("ab") as file:
        file.write(b"first\n")
        file.flush()
        made.sync("/run/log")
        file.write(b"second\n")
        file.flush()
    made.power_cut()
    left = made.files["/run/log"]
    assert left.startswith(b"first\n") and b"first\nsecond\n".startswith(left)
    assert made.files["/run/config.yaml"] == b"a: 1\n"


def test_a_process_that_dies_in_a_write_leaves_a_part_and_does_nothing_more() -> None:
    made, folder = disk()

    def dies(operation: str, path: str) -> None:
        folder._view.dead = True

    made.before = dies
    with pytest.raises(Died):
        (folder / "file").write_bytes(b"whole")
    assert b"whole".startswith(made.files["/run/file"]) and made.files["/run/file"] != b"whole"
    with pytest.raises(Died):
        (folder / "other").write_bytes(b"whole")
    assert "/run/other" not in made.files


def save(folder: Any) -> None:
    """Save a checkpoint. The train engine writes nothing but an empty state."""

    class Engine(SimTrainEngine):
        async def save(self, folder_: str, staged: bool = False) -> None:
            SimPath(folder._view, f"{folder_}/state").write_bytes(b"state")

    snapshot = Ledger(Schedule(ppo_mini_batch_size=1)).snapshot()

    async def main() -> None:
        await Checkpoints(folder, keep=1).save(snapshot, Engine(CostModel()))

    asyncio.run(main())


def begin_history(folder: Any) -> None:
    History(folder, Ledger(Schedule(ppo_mini_batch_size=1)).totals())


@pytest.mark.parametrize("write", [save, begin_history])
@pytest.mark.parametrize(("state", "text"), [("full", "No space left"), ("broken", "Input/output")])
def test_a_disk_that_refuses_a_write_is_an_error_with_the_file_and_the_fix(
    write: Callable[[Any], None], state: str, text: str
) -> None:
    made, folder = disk()
    setattr(made, state, True)
    with simulated_disk(), pytest.raises(CheckpointError, match=rf"^/run/.*{text}.*Fix: a disk"):
        write(folder)


def test_a_disk_that_cannot_be_read_passes_over_no_checkpoint() -> None:
    made, folder = disk()
    with simulated_disk():
        save(folder)
        checkpoints: Any = Checkpoints(folder, keep=1)  # type: ignore[arg-type]
        assert checkpoints.newest()[0].name == "version-000000"
        made.broken = True
        with pytest.raises(CheckpointError, match="Input/output"):
            checkpoints.newest()
