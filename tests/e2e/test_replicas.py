"""Real replicas that die and stand still: the run goes on, and they serve again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.config import recipe
from millrace.persist.run_reader import RunReader
from millrace.replicas.roster import ReplicaState
from millrace.run.session import Session, open_session
from millrace.run.signals import StopRequest
from millrace.run.start import start_state
from millrace.run.train import run_training
from millrace.schedule.ledger import Ledger
from tests.e2e import runs
from tests.e2e.accounts import check_accounts
from tests.waiting import HANG_S, until, until_async
from tests.workers import cores_of, keys_of, workers_of


def replicas() -> list[psutil.Process]:
    """Return the workers of the replicas, oldest first."""
    found = [p for name, p in workers_of().items() if name.startswith("rollout")]
    return sorted(found, key=lambda p: p.create_time())


async def stop_in_the_middle(process: psutil.Process, engine: Any) -> None:
    """Stop a process that has requests. It cannot end them any more."""
    while True:
        await until_async(lambda: engine.requests > 0)
        process.suspend()
        await asyncio.sleep(0.1)  # Answers that it has sent arrive.
        if engine.requests:
            return
        process.resume()


async def hurt(s: Session, ledger: Ledger, cores: bool) -> None:
    """Kill one replica and stop the other one in the middle of requests. Then let the run end.

    `cores` says whether the processes with the models suffer the same afterwards.
    """
    first, second = replicas()
    roster, engines = s.engines.pool.roster, s.engines.keeper.engines
    await until_async(lambda: ledger.version >= 1)
    await stop_in_the_middle(first, engines[0])
    first.kill()
    await until_async(lambda: roster.state(0) is ReplicaState.LOST)
    assert roster.live == [1]
    await stop_in_the_middle(second, engines[1])
    await until_async(lambda: roster.losses == 2 and len(roster.live) == 2)
    await until_async(lambda: len(replicas()) == 2 and not second.is_running())
    for replica, sent in ((0, signal.SIGKILL), (1, signal.SIGSTOP)) if cores else ():
        losses = roster.losses
        await until_async(lambda k=replica: engines[k].requests > 0)  # type: ignore[misc]
        (core,) = cores_of(workers_of()[f"rollout-{replica}"])
        core.send_signal(sent)
        await until_async(lambda n=losses: roster.losses > n and len(roster.live) == 2)  # type: ignore[misc]
        await until_async(lambda c=core: not c.is_running())  # type: ignore[misc]
    ledger.limit = ledger.retired + ledger.occupied + 8


AGENTS = ["data.val_files=['task:chase?split=val&size=16']", "rollout.stall_s=20"]
"""A recipe whose episodes have several turns, which are sessions of an engine."""


@pytest.mark.parametrize(
    ("engine", "name", "more"),
    [
        ("torch", runs.RECIPE, []),
        pytest.param("sglang", "agents_quickstart", AGENTS, marks=pytest.mark.slow),
    ],
)
async def test_a_run_heals_a_replica_that_is_killed_and_one_that_stands_still(
    tmp_path: Path, engine: str, name: str | Path, more: list[str]
) -> None:
    notes: list[str] = []
    keys = [
        "guard.enable=true",
        "rollout.n_gpus_per_node=2",
        "rollout.total_rollout_steps=100000",
        "rollout.heartbeat_s=0.5",
    ]
    keys += [f"trainer.run_dir={tmp_path}/run", "trainer.threads=1"]
    config = recipe.load(name, [*runs.SMALL, *keys, *keys_of(engine), *more])
    serves = config.rollout.serves
    progress = runs.progress()
    progress.note = notes.append  # type: ignore[method-assign, assignment]
    async with open_session(config, progress) as s:
        s.engines.keeper._heartbeat_s = 3.0  # A worker on a busy machine misses some of 0.5 s.
        ledger = await start_state(s)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hurt(s, ledger, serves))
            outcome = await run_training(s, ledger, StopRequest())
        assert outcome.complete and outcome.samples_trained == ledger.limit
    assert not replicas()
    found = runs.audit(tmp_path / "run")
    assert found["complete"] and found["dropped"] == {}
    assert (found["lost"], found["trained_twice"], found["in_flight"]) == (0, 0, 0)
    if not config.agents.agent_kind:  # a response of an agent has tokens of its environment, too
        check_accounts(tmp_path / "run")
    told = [note for note in notes if note.startswith("replica")]
    assert "rollout-0 was lost: worker rollout-0 was killed by SIGKILL" in told[0]
    assert "requests go on elsewhere; restart in 1 s" in told[0]
    assert any("worker rollout-1 fell silent: no heartbeat for 9 s" in note for note in told)
    if serves:
        assert any("SGLang's scheduler has died" in note for note in told)
        assert any("worker rollout-1 stood still" in note for note in told)
    # A stall on a busy machine is one more loss.
    healed = sum("serves again" in note for note in told)
    assert healed >= 4 if serves else healed == 2
    assert runs.rows(tmp_path / "run")[-1]["replicas/live"] == 2


def scale(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return runs.command("scale", str(folder), *arguments, "--json", timeout=HANG_S)


@pytest.mark.slow
def test_replicas_join_and_leave_a_running_run(tmp_path: Path) -> None:
    """One replica, then two, then the first again. The requests of the leaver go on elsewhere."""
    folder, keys = tmp_path / "run", ["rollout.total_rollout_steps=100000", "trainer.threads=1"]
    train = runs.start_command(*runs.small(folder, *keys), output=tmp_path / "out")
    try:
        begun = folder / "metrics.jsonl"
        until(lambda: begun.exists() and runs.rows(folder), train, tmp_path / "out")
        for refused, why in (("rollout=0", "from 1 to 9999"), ("trainer=2", "only the replicas")):
            done = scale(folder, refused)
            assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr
        grown = runs.last_json(scale(folder, "rollout=2").stdout)
        assert (grown["before"], grown["after"], grown["serving"]) == (1, 2, True)
        shrunk = runs.last_json(scale(folder, "rollout=1").stdout)
        assert (shrunk["before"], shrunk["after"], shrunk["error"]) == (2, 1, "")
        version = runs.rows(folder)[-1]["version"]
        until(lambda: runs.rows(folder)[-1]["version"] >= version + 2, train, tmp_path / "out")
        train.send_signal(signal.SIGTERM)
        train.wait(HANG_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(train.pid, signal.SIGKILL)
    told = (tmp_path / "out").read_text()
    assert "replica rollout-1 serves, " in told and "replica rollout-1 left the run" in told
    assert "was lost" not in told, "a leaver is no loss"
    row = runs.rows(folder)[-1]
    assert (row["replicas/live"], row["replicas/joined"], row["replicas/left"]) == (1, 1, 1)
    assert row["replicas/lost"] == 0
    found = runs.audit(folder)
    assert (found["lost"], found["trained_twice"], found["dropped"]) == (0, 0, {})
    last = RunReader(folder).read().accounts[-1]
    assert sum(last.tokens.values()) == last.generated
    seconds = {track: sum(device.seconds.values()) for track, device in last.devices.items()}
    assert seconds["rollout-0"] == pytest.approx(last.seconds, rel=1e-6)
    assert 0 < seconds["rollout-1"] < last.seconds, "it came later, and left earlier"
    gone = scale(folder, "rollout=2")
    assert gone.returncode == 2 and "the run does not run" in gone.stderr
