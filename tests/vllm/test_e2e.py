"""Training with vLLM rollouts: each way to sync trains every sample once, the quickstart learns."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import psutil
import pytest

from millrace.persist.history import audit
from tests.e2e import runs
from tests.e2e.accounts import check_accounts
from tests.e2e.test_modes import OVERLAP, check_rows
from tests.sweeps import thorough
from tests.vllm.processes import WORKER_IN_CORE, engine_cores
from tests.waiting import HANG_S

WAYS = [
    *(("async_swap", OVERLAP), ("one_step_off",), ("colocate_partial",)),
    *(("async_partial", OVERLAP), ("async_swap",)),
]
"""Each way to sync, and shared devices. A mode is only a few numbers. The last two are slow."""
VLLM = [
    "rollout.engine=vllm",
    "model.shape.num_attention_heads=2",
    "model.shape.num_key_value_heads=1",
    "sft.steps=200",
    "sft.batch_size=128",
    "rollout.max_num_seqs=256",
]


def test_each_way_to_sync_and_the_quickstart_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv(*WORKER_IN_CORE)

    async def main() -> list[psutil.Process]:
        async with runs.session(tmp_path, *VLLM) as s:
            for mode, *more in WAYS if thorough(request.config) else WAYS[:3]:
                folder = tmp_path / "-".join([mode, *more])
                outcome = await runs.run(s, folder, *VLLM, f"mode={mode}", *more)
                assert (
                    outcome.mode == mode and outcome.complete and outcome.samples_trained == 64
                ), mode
                check_accounts(folder)
                found = audit(folder)
                assert (
                    found.admitted,
                    found.trained,
                    found.lost,
                    found.trained_twice,
                    found.in_flight,
                ) == (64, 64, 0, 0, 0), mode
                check_rows(folder, outcome.versions, mode)
            long = [
                "guard.enable=true",
                "rollout.n=8",
                "actor.ppo_mini_batch_size=32",
                "rollout.total_rollout_steps=1024",
            ]
            outcome = await runs.run(s, tmp_path / "learns", *VLLM, *long)
            rows = runs.rows(tmp_path / "learns")
            first, last = (
                statistics.mean(row["reward/mean"] for row in part)
                for part in (rows[:3], rows[-3:])
            )
            assert outcome.complete and first < 0.55 and last > 0.7, (
                f"reward went from {first:.2f} to {last:.2f}"
            )
            # vLLM and the trainer have the same weights. vLLM's log-probs must equal the trainer's.
            gaps = [
                row["actor/log_prob_gap_same_version"]
                for row in rows
                if "actor/log_prob_gap_same_version" in row
            ]
            assert gaps and max(gaps) < 1e-4
            assert all(row["sync/pause_s"] <= row["timing_s/sync_activate"] for row in rows)
            cores = engine_cores()
            assert len(cores) == 1, cores
            (core,) = cores
            # The host is killed, so the processes under it must end without its help.
            psutil.Process(core.ppid()).kill()
            return [core, *core.children(recursive=True)]

    _, left = psutil.wait_procs(asyncio.run(main()), timeout=HANG_S)
    assert not left, "vLLM outlived its host"


@pytest.mark.slow
def test_a_mixture_learns_with_the_experts_that_vllm_chose(tmp_path: Path) -> None:
    runs.mixture_learns(tmp_path / "run")
