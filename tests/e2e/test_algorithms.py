"""Settings of the algorithm reach the workers and take effect.

Every row has their metrics. A worker with other settings is refused.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from millrace.config import Config, ModelShape
from millrace.errors import MillraceError
from millrace.models.model import write_shape
from millrace.persist.history import audit
from millrace.process.rpc import Limit, Peer
from millrace.run.engines import build_engines
from millrace.run.folder import RunDir
from millrace.runtime.host import Host
from millrace.runtime.worker import RolloutWorker, TrainWorker, make_worker
from millrace.waits.answer import ProcessStatus
from tests.e2e import runs

DECOUPLED = [
    "algorithm.rollout_correction.bypass_mode=false",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    "algorithm.rollout_correction.rollout_rs='token_k1,seq_mean_k3'",
    "algorithm.rollout_correction.rollout_rs_threshold=[0.8_1.25,0.01]",
    "algorithm.rollout_correction.rollout_token_veto_threshold=1e-4",
    "actor.use_kl_loss=true",
    "actor.optim.lr=1e-3",
]
"""Three policies: the trained one, the one at a batch's arrival, and a frozen reference."""

BYPASS = [
    "actor.policy_loss.loss_mode=reinforce",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.adv_estimator=remax",
    "algorithm.filter_groups.enable=true",
    "reward.overlong_buffer={enable: true, len: 4, penalty_factor: 0.3}",
]
"""Importance weights without an extra pass, and settings that change samples and rewards.

verl's bypass mode with loss_type=reinforce never reaches its workers. The other settings act before
samples and rewards reach the workers.
"""

OF_WEIGHTS = (
    "rollout_is_mean",
    "rollout_is_eff_sample_size",
    "rollout_is_seq_mean",
    "kl",
    "chi2_token",
    "training_ppl",
)
OF_REJECTION = (
    "rollout_is_batch_norm_factor",
    "rollout_rs_masked_fraction",
    "rollout_rs_token_k1_mean",
    "rollout_rs_seq_mean_k3_seq_masked_fraction",
    "rollout_rs_token_veto_masked_fraction",
)


def corrected_rows(folder: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows of a run. Each row must have the metrics that only workers can compute."""
    rows = runs.rows(folder)
    assert len(rows) >= 2
    for row in rows:
        assert {f"rollout_corr/{name}" for name in names} <= row.keys(), (
            folder.name,
            row["version"],
        )
        bad = {
            name
            for name, value in row.items()
            if not isinstance(value, int | float) or not math.isfinite(value)
        }
        assert not bad, (folder.name, row["version"], bad)
    return rows


@pytest.mark.slow
def test_correction_and_reference_act_in_modes_with_and_without_staleness(tmp_path: Path) -> None:
    modes = ("on_policy_pipeline", "async_partial", "colocate_sync")

    async def main() -> dict[str, list[dict[str, Any]]]:
        async with runs.session(tmp_path, *DECOUPLED) as s:
            for mode in modes:
                await runs.run(
                    s, tmp_path / mode, f"mode={mode}", "rollout.total_rollout_steps=32", *DECOUPLED
                )
        return {mode: corrected_rows(tmp_path / mode, OF_WEIGHTS + OF_REJECTION) for mode in modes}

    for mode, rows in asyncio.run(main()).items():
        assert rows[0]["actor/kl_loss"] < rows[-1]["actor/kl_loss"], (
            f"{mode}: the reference stays behind"
        )
        share = min(row["train/trained_token_share"] for row in rows)
        rejected = max(row["rollout_corr/rollout_rs_masked_fraction"] for row in rows)
        # Without staleness, and with one local step per version, the policy at arrival is the
        # one that drew the tokens.
        fresh = mode == "on_policy_pipeline"
        assert (share == 1 and rejected == 0) if fresh else (0 < share < 1 and rejected > 0), (
            mode,
            share,
            rejected,
        )


async def test_weights_in_passing_dynamic_sampling_shaping_and_greedy_baselines(
    tmp_path: Path,
) -> None:
    modes = ("async_partial", "colocate_sync")
    async with runs.session(tmp_path, *BYPASS) as s:
        for mode in modes:
            outcome = await runs.run(
                s, tmp_path / mode, f"mode={mode}", "rollout.total_rollout_steps=32", *BYPASS
            )
            assert outcome.complete and outcome.samples_trained == 32
    for mode in modes:
        found = audit(tmp_path / mode)
        dropped = found.dropped.get("equal_outcomes", 0)
        assert (found.trained, found.lost, found.trained_twice, found.in_flight) == (32, 0, 0, 0), (
            mode
        )
        assert dropped > 0 and found.admitted == 32 + dropped, (mode, found)
        rows = corrected_rows(tmp_path / mode, OF_WEIGHTS)
        for row in rows:
            assert row["train/zero_advantage_share"] == 0, (
                "what has equal scores was dropped, before any shaping"
            )
            assert row["reward/overlong_reward/mean"] < 0 and "reward/greedy/mean" in row
            assert row["actor/ppo_kl"] == 0, "the loss is reinforce: it knows no old policy"
        assert any(row["rollout_corr/rollout_is_std"] > 1e-3 for row in rows), (
            "weights of samples that are not fresh"
        )


class ForgetfulTrainer(TrainWorker):
    """A train worker that ignores part of its configuration and uses defaults instead."""

    async def build(
        self, config: dict[str, Any], model_folder: str, rank: int, address: tuple[str, int]
    ) -> dict[str, Any]:
        return await super().build(without_correction(config), model_folder, rank, address)


class ForgetfulReplica(RolloutWorker):
    async def build(self, config: dict[str, Any], model_folder: str) -> dict[str, Any]:
        return await super().build(without_correction(config), model_folder)


def without_correction(config: dict[str, Any]) -> dict[str, Any]:
    return config | {
        "algorithm": {k: v for k, v in config["algorithm"].items() if k != "rollout_correction"}
    }


class InThisProcess:
    """A Runtime whose workers share the event loop. One of them may be forgetful."""

    def __init__(self, tasks: asyncio.TaskGroup, forgetful: str) -> None:
        self.tasks = tasks
        self.forgetful = forgetful

    async def start(self, name: str, role: str, index: int) -> Peer:
        forgetful = {"trainer": ForgetfulTrainer, "rollout": ForgetfulReplica}[role]
        worker = forgetful() if name == self.forgetful else make_worker(role)
        host = Host(worker, lambda frame: peer.receive(frame), self.tasks)
        peer = Peer(name, host.receive, deadline_s=60.0)
        return peer

    async def end(self, peer: Peer) -> None:
        return None

    def release(self, replica: int) -> None: ...

    async def limit(self) -> Limit:
        return Limit(None)

    def answers(self) -> list[ProcessStatus]:
        return []

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("forgetful", ["trainer-0", "rollout-0"])
def test_a_worker_with_another_configuration_is_refused(tmp_path: Path, forgetful: str) -> None:
    write_shape(
        tmp_path / "model",
        ModelShape(hidden_size=16, num_hidden_layers=1),
        vocab_size=8,
        eos_token_id=0,
    )
    config = Config(
        trainer={"device": "cpu"},
        rollout={"max_num_seqs": 1},
        algorithm={
            "rollout_correction": {
                "max_token_age": 3,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": "0.5_2.0",
            }
        },
    )

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            await build_engines(InThisProcess(tasks, forgetful), config, RunDir(tmp_path, None))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, MillraceError)
    said = f"{forgetful} has another configuration: "
    assert str(error).startswith(
        said + "algorithm.rollout_correction.max_token_age = None, here 3; "
    )
    assert "algorithm.rollout_correction.rollout_rs = None, here 'token_k1'; " in str(
        error
    ) and "trainer." not in str(error)
