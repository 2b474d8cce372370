"""Responses that are trained in windows: real runs that are stopped, resumed and lose their trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from millrace.pipeline.checkpoint import Checkpoints, read_ledger
from tests.e2e import runs
from tests.e2e.test_modes import kill_trainer_at_version, stop_at_version, trained

KEYS = [
    *("algorithm.adv_estimator=gae", "rollout.n=1", "algorithm.tppo.window=3"),
    *("actor.ppo_mini_batch_size=16", "rollout.total_rollout_steps=256", "mode=one_step_off"),
    *("trainer.save_freq=3", "trainer.deterministic=true", "algorithm.gamma=0.99"),
]


@pytest.mark.slow
async def test_a_run_that_stops_in_the_middle_of_responses_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    async with runs.session(tmp_path, *KEYS) as s:
        assert (await runs.run(s, tmp_path / "whole", *KEYS)).complete
        expected = await runs.weights(s, tmp_path / "a")
        stop = runs.StopRequest()
        stopper = asyncio.ensure_future(stop_at_version(tmp_path / "cut", 4, stop))
        assert not (await runs.run(s, tmp_path / "cut", *KEYS, stop=stop)).complete
        await stopper
        saved = Checkpoints(tmp_path / "cut", keep=9).newest()[0]
        assert saved is not None
        snapshot = read_ledger(saved)
        going_on = [*snapshot.rests, *(slot.prompt for _, slot in snapshot.slots)]
        assert any(prompt.continues for prompt in going_on), "it stops in a response"
        assert (await runs.run(s, tmp_path / "cut", *KEYS, resume=True)).complete
        resumed = await runs.weights(s, tmp_path / "b")
        killer = asyncio.ensure_future(kill_trainer_at_version(tmp_path / "killed", 4, saved=3))
        assert (await runs.run(s, tmp_path / "killed", *KEYS)).complete
        await killer
        recovered = await runs.weights(s, tmp_path / "c")
        for found in (resumed, recovered):
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    whole = trained(tmp_path / "whole")
    assert [*map(sorted, trained(tmp_path / "killed"))] == [*map(sorted, whole)]
    rows = runs.rows(tmp_path / "whole")
    assert max(row.get("windows/mean", 0) for row in rows) > 1.5
    assert max(row.get("windows/response_length/max", 0) for row in rows) == 8
    assert all(row["response_length/max"] <= 3 for row in rows)
    assert any(row.get("critic/explained_variance", 0) != 0 for row in rows)
    found = runs.audit(tmp_path / "killed")
    assert found["trained"] == 256 and found["lost"] == found["trained_twice"] == 0
