"""Simulated runs with faults: what millrace promises holds, and planted bugs are found."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import CheckpointError, DiskError
from millrace.extras.faults.disk import Died, Disk, SimPath, View, simulated_disk
from millrace.extras.faults.scenario import KINDS, Fault, Trigger, draw
from millrace.extras.faults.sweep import Found, run_seed, shrink, story
from millrace.extras.faults.sweep import sweep as run_seeds
from millrace.extras.faults.world import run_world
from millrace.persist.history import History
from millrace.pipeline.checkpoint import Checkpoints, read_ledger, read_manifest
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import Schedule
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimTrainEngine
from tests.faults.finders import likely_first
from tests.faults.mutants import MUTANTS, first_seed, seeds_of
from tests.sweeps import sweep

SEEDS = 300


def test_no_seed_breaks_a_promise_and_every_kind_of_fault_fires() -> None:
    found = Found()
    for outcome in run_seeds(range(500)):
        found.add(outcome)
    assert not found.violations
    assert not found.silent and found.seeds == 500
    assert found.attempts > 1.3 * 500, "faults end attempts, and resumes follow"


def test_a_seed_replays_exactly() -> None:
    for seed in (2, 17, 40):
        first, second = run_seed(seed), run_seed(seed)
        assert first == second and first.digest and first.story
    assert run_seed(2).digest != run_seed(17).digest


FAST = {
    *("ledger drop", "lag off by one", "restarted replica idle for ever", "older checkpoint"),
    *("torn tail accepted", "window twice", "recovery makes a step twice"),
    *("joiner serving at once", "wrong denominator", "journal forgets what it synced"),
    "sampler sees the newest outcomes",
}
"""The planted bugs that are not slow: one of each kind."""


@pytest.mark.parametrize("name", sweep(MUTANTS, FAST.__contains__))
def test_a_planted_bug_is_found(name: str) -> None:
    """One of 150 seeds finds it."""
    seeds = likely_first(name, seeds_of(name, 150))
    assert first_seed(MUTANTS[name], seeds) is not None


STILL = Fault("rank_stands_still", 0, Trigger("time", 3.011), "trainer-0", 500.0)
"""The rank is found at the deadline of its call."""
SOON = {"replicas": 1, "start_s": 0.2}


def dies(at: float, method: str = "time", who: str = "rollout-0") -> Fault:
    kind = "replica_dies" if who.startswith("rollout") else "rank_dies"
    return Fault(kind, 0, Trigger(method, at), who)


RACES: dict[str, tuple[int, dict[str, Any], tuple[Fault, ...]]] = {
    # The sync of the replica is with the worker that was lost, and not with the one of now.
    "a replica comes back during a slow keep": (
        12871,
        SOON | {"ranks": 1},
        (Fault("rank_freezes", 0, Trigger("sender.keep", 1), "trainer-0", 5.0), dies(3.4)),
    ),
    # The only replica comes back, and its requests wait for weights that the sender never sends.
    "a sender hangs": (
        110447,
        {},
        (dies(1, "engine.generate"), Fault("sender_hangs", 0, Trigger("time", 1.9), "trainer-1")),
    ),
    # The replica comes back twice while the rank stands still. Each time, the wait begins anew.
    "a rank is found at the deadline of requests": (
        15034,
        {"replicas": 1},
        (STILL, dies(5.082), dies(20.0)),
    ),
    # The replica's requests waited nearly as long by then.
    "a recovery renews the wait for weights": (15034, {"replicas": 1}, (STILL, dies(5.082))),
    # Seven steps are trained again. The only replica is back early, and waits for weights.
    "a recovery takes longer than the deadline": (
        15034,
        {"replicas": 1, "step_s": 12.0, "save_freq": 20, "samples": 24},
        (dies(8, "engine.step", "trainer-0"), dies(89.9)),
    ),
    # The recovery itself needs a second one. Each is found at the deadline of its call.
    **{
        f"a new rank stands still in {method}": (
            15034,
            {"replicas": 1},
            (
                *(dies(5.0, who="trainer-0"), dies(5.05)),
                Fault("rank_stands_still", 0, Trigger(method, number), "trainer-0", 500.0),
            ),
        )
        for method, number in (("engine.begin", 2), ("engine.step", 3))
    },
    "a rank stands still in the sync that requests wait for": (
        47,
        SOON,
        (dies(2.5), Fault("rank_stands_still", 0, Trigger("sender.keep", 2), "trainer-0", 500.0)),
    ),
    # All slots are occupied until the sync is over, and the trainer waits meanwhile.
    "a recovery in the sync that frees the slots of samples": (
        3655,
        {"start_s": 8.0, "step_s": 25.0, "save_freq": 20},
        (Fault("sender_hangs", 0, Trigger("sender.keep", 2), "trainer-0"),),
    ),
    "the last ranks are still being recovered at the end": (
        130220,
        {},
        (Fault("disk_slow", 0, Trigger("time", 3.484), "", 5.0), dies(5.886, who="trainer-0")),
    ),
    # One is written as soon as the disk takes files, long before the next regular checkpoint.
    "a disk refuses the journal, and the trainer is lost later": (
        12871,
        {"replicas": 1, "ranks": 1, "save_freq": 20, "samples": 240},
        (Fault("disk_errors", 0, Trigger("time", 3.0), "", 1.0), dies(16.0, who="trainer-0")),
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_a_run_outlives_its_faults_in_one_attempt(name: str) -> None:
    seed, changes, faults = RACES[name]
    base, tree = draw(seed), dict(changes)
    trainer, rollout, cost = base.config.trainer, base.config.rollout, base.cost
    if freq := tree.pop("save_freq", 0):
        trainer = trainer.model_copy(update={"save_freq": freq})
    if samples := tree.pop("samples", 0):
        rollout = rollout.model_copy(update={"total_rollout_steps": samples})
    if seconds := tree.pop("step_s", 0.0):
        cost = replace(cost, step_s=seconds)
    config = base.config.model_copy(update={"trainer": trainer, "rollout": rollout})
    outcome = run_world(replace(base, config=config, cost=cost, faults=faults, **tree))
    assert not outcome.violation and outcome.attempts == 1, outcome.story
    assert outcome.fired == Counter(fault.kind for fault in faults)
    if "slow keep" in name:
        assert "rollout-0 is live" in [line.text for line in outcome.story]


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
        lost = dies(2, "receiver.transfer", f"rollout-{seed % 2}")
        scenario = replace(draw(seed), replicas=2, faults=(reorders, lost))
        outcome = run_world(scenario)
        found += [(seed, outcome.violation)] if outcome.violation else []
    assert not found


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
