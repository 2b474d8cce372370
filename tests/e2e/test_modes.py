"""All eight modes for real: real engines in real processes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from millrace.persist.history import audit
from millrace.persist.run_reader import RunReader
from millrace.pipeline.checkpoint import Checkpoints
from millrace.pipeline.record import RunRecord
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import OnSync
from tests.e2e import runs
from tests.e2e.accounts import check_accounts
from tests.e2e.agreement import check_seconds
from tests.pipeline.simulated import parts_of
from tests.workers import workers_of

OVERLAP = "async_training.overlap_sync=true"


MODES_AND_OVERLAP = [
    *((mode, OVERLAP) for mode in ("async_staleness", "async_partial")),
    *zip(MODES),
]


async def test_every_mode_trains_every_sample_once(tmp_path: Path) -> None:
    async with runs.session(tmp_path) as s:
        for mode, *more in MODES_AND_OVERLAP:
            folder = tmp_path / "-".join([mode, *more])
            outcome = await runs.run(s, folder, f"mode={mode}", "guard.enable=true", *more)
            assert all(
                ("timing_s/sync_keep" in row) == bool(more) for row in runs.rows(folder)[:-1]
            ), mode
            assert outcome.mode == mode and outcome.complete and outcome.samples_trained == 64, mode
            found = audit(folder)
            assert (
                found.admitted,
                found.trained,
                found.lost,
                found.trained_twice,
                found.in_flight,
            ) == (64, 64, 0, 0, 0), mode
            check_rows(folder, outcome.versions, mode)
            last = check_accounts(folder)[-1]
            assert set(last.tokens) <= {"trained", "evaluated"}, (mode, last.tokens)
            if not more and not mode.startswith("colocate"):
                check_seconds(folder, shared=False)


@pytest.mark.parametrize("mode", ["async_partial", "colocate_partial"])
def test_metrics_accounts_and_trace_of_a_run_tell_the_same_seconds(
    tmp_path: Path, mode: str
) -> None:
    more = f"mode={mode}", "rollout.total_rollout_steps=128", "rollout.test_freq=4"
    done = runs.millrace(*runs.small(tmp_path / mode, *more, "trainer.save_freq=3"))
    assert done.code == 0, done.err
    check_seconds(tmp_path / mode, shared=mode == "colocate_partial")


def check_rows(folder: Path, versions: int, mode: str) -> None:
    rows = runs.rows(folder)
    assert [row["version"] for row in rows] == list(range(1, versions + 1)), mode
    for row in rows:
        parts = parts_of(row)
        assert sum(parts.values()) == pytest.approx(row["perf/time_per_version"], rel=1e-6)
        assert {"adv", "update_actor"} < set(parts) and min(parts.values()) >= 0, mode
        assert 0 <= row["trainer/idle_ratio"] <= 1 and 0 <= row["rollouter/idle_ratio"] <= 1, mode
        assert (
            sum(v for k, v in row.items() if k.startswith("staleness/hist/"))
            == row["train/samples"] * 4
        ), mode
        assert row["sync/bytes"] > 0 and row["actor/nonfinite_steps"] == 0, mode
    if MODES[mode].on_sync is OnSync.DRAIN:
        assert all(row["fully_async/partial/total_partial_num"] == 0 for row in rows), mode


@pytest.mark.slow
async def test_zero_staleness_is_sync_bit_for_bit(tmp_path: Path) -> None:
    """on_policy_pipeline trains like colocate_sync: same samples, order and final weights."""
    async with runs.session(tmp_path, "mode=on_policy_pipeline", "trainer.deterministic=true") as s:
        await runs.run(s, tmp_path / "pipeline", "mode=on_policy_pipeline")
        pipeline = await runs.weights(s, tmp_path / "a")
        await runs.run(
            s,
            tmp_path / "sync",
            "mode=colocate_sync",
            "async_training.trigger_parameter_sync_step=1",
        )
        sync = await runs.weights(s, tmp_path / "b")
        await runs.run(s, tmp_path / "off", "mode=one_step_off")
        off = await runs.weights(s, tmp_path / "c")
        assert all((sync[name] == tensor).all() for name, tensor in pipeline.items())
        assert any((off[name] != tensor).any() for name, tensor in pipeline.items()), (
            "one_step_off trains older samples"
        )
        for column in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "response_length/mean"):
            assert [r[column] for r in runs.rows(tmp_path / "sync")] == [
                r[column] for r in runs.rows(tmp_path / "pipeline")
            ]
        assert trained(tmp_path / "sync") == trained(tmp_path / "pipeline")
        # In one_step_off, version k - 2 drew batch k. It was trained while k - 1 was live.
        for k, row in enumerate(runs.rows(tmp_path / "off"), start=1):
            age = (k - 1) - max(0, k - 2)
            assert (
                row[f"staleness/hist/{age}"] == 32
                and row["fully_async/partial/total_partial_num"] == 0
            )
        await resumed_equals_uninterrupted(s, tmp_path)
        await resumed_from_the_middle_equals_uninterrupted(s, tmp_path)
        await stopped_after_its_last_step(s, tmp_path)
        await recovered_equals_uninterrupted(s, tmp_path)


async def resumed_equals_uninterrupted(s: runs.Session, tmp_path: Path) -> None:
    """A run that stops at a checkpoint and resumes ends with the same bits.

    The mode has samples in flight when the run stops.
    """
    whole = await runs.run(s, tmp_path / "whole", "mode=one_step_off")
    expected = await runs.weights(s, tmp_path / "d")
    stop = runs.StopRequest()
    cut = tmp_path / "cut"
    stopper = asyncio.ensure_future(stop_at_version(cut, 3, stop))
    first = await runs.run(s, cut, "mode=one_step_off", stop=stop)
    await stopper
    assert not first.complete and 0 < first.samples_trained < 64
    await s.engines.train.begin("rl", 1)
    await s.engines.train.load(str(tmp_path / "start"))  # forget everything but the checkpoint
    second = await runs.run(s, cut, "mode=one_step_off", resume=True)
    found = await runs.weights(s, tmp_path / "e")
    assert second.complete and second.versions == whole.versions
    assert all((found[name] == tensor).all() for name, tensor in expected.items())
    assert trained(cut) == trained(tmp_path / "whole")


async def resumed_from_the_middle_equals_uninterrupted(s: runs.Session, tmp_path: Path) -> None:
    """A checkpoint has the state of its own version, although later versions train meanwhile.

    The journal has every later sample, so nothing is drawn again.
    """
    expected = await runs.weights(s, tmp_path / "d")
    middle, often = (
        tmp_path / "middle",
        ["mode=one_step_off", "trainer.save_freq=3", "trainer.max_ckpt_to_keep=9"],
    )
    await runs.run(s, middle, *often)
    assert (
        min(row["version"] for row in runs.rows(middle) if row.get("checkpoint/write_s", 0) > 0) > 3
    )
    kept = Checkpoints(middle, keep=9).all()
    assert [p.name for p in kept] == ["version-000003", "version-000006", "version-000008"]
    for later in kept[1:]:
        shutil.rmtree(later)
    await runs.run(s, middle, *often, resume=True)
    drawn = RunReader(middle).read().accounts[-1].tokens
    assert drawn["lost"] == drawn["evaluated"], "only the last validation is repeated"
    found = await runs.weights(s, tmp_path / "f")
    assert all((found[name] == tensor).all() for name, tensor in expected.items())
    assert trained(middle)[-5:] == trained(tmp_path / "whole")[-5:]


async def stopped_after_its_last_step(s: runs.Session, tmp_path: Path) -> None:
    """A stop that arrives while the run waits for the end of its last version.

    The run saves a checkpoint, and does not validate.
    """
    stop, folder = runs.StopRequest(), tmp_path / "stopped late"

    async def checkpointed(self: RunRecord) -> None:
        stop.request()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecord, "checkpointed", checkpointed)
        outcome = await runs.run(
            s, folder, "mode=one_step_off", "trainer.save_last=false", stop=stop
        )
    assert (outcome.complete, outcome.last, outcome.samples_trained) == (False, None, 64)
    assert outcome.checkpoint == folder / "checkpoints" / "version-000008"
    again = await runs.run(s, folder, "mode=one_step_off", resume=True)
    assert again.complete and again.last is not None and again.versions == 8


async def recovered_equals_uninterrupted(s: runs.Session, tmp_path: Path) -> None:
    """A trainer that is killed starts anew in the same run, which ends with the same bits."""
    expected, folder = await runs.weights(s, tmp_path / "g"), tmp_path / "killed"
    killer = asyncio.ensure_future(kill_trainer_at_version(folder, 4, saved=3))
    await runs.run(s, folder, "mode=one_step_off", "trainer.save_freq=3")
    await killer
    found = await runs.weights(s, tmp_path / "h")
    assert all((found[name] == tensor).all() for name, tensor in expected.items())
    assert trained(folder) == trained(tmp_path / "whole")
    rows = runs.rows(folder)
    assert [row["version"] for row in rows] == list(range(1, 9)), "no version is made again"
    assert rows[-1]["trainer/lost"] == s.engines.train.restarts == 1


async def kill_trainer_at_version(folder: Path, version: int, *, saved: int) -> None:
    """Kill the trainer at `version`, once the checkpoint of `saved` is whole.

    Without that checkpoint, the new trainer would begin from the model's folder. The start
    weights of this test are not in that folder.
    """
    newest = folder / "checkpoints" / f"version-{saved:06d}" / "manifest.json"

    def reached() -> bool:
        return newest.exists() and any(f'"version":{version},' in x for x in _lines(folder))

    while not reached():  # noqa: ASYNC110 - a file has no event to wait for
        await asyncio.sleep(0.01)
    workers_of()["trainer-0"].kill()


async def stop_at_version(folder: Path, version: int, stop: runs.StopRequest) -> None:
    """Ask for a stop once `version` is in the history."""
    while not any(f'"version":{version},' in line for line in _lines(folder)):  # noqa: ASYNC110 - a file has no event to wait for
        await asyncio.sleep(0.01)
    stop.request()


def _lines(folder: Path) -> list[str]:
    path = folder / "history.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def trained(folder: Path) -> list[list[int]]:
    """Return the sample ids of each version."""
    return [
        row["trained"] for line in _lines(folder) if (row := json.loads(line))["event"] == "version"
    ]
