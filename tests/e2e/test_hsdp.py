"""Two copies of the model on four trainer ranks: a run in real processes learns from what it sends, and sends it once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.pipeline.history import audit
from millrace.ports import TransferReport
from millrace.runtime.remote import all_of
from millrace.sync.buckets import ALIGN
from tests.e2e import runs

pytestmark = pytest.mark.timeout(240)

ON_POLICY = ["mode=on_policy_pipeline", "actor.optim.lr=1e-3"]


def test_copies_train_as_one_model_and_send_it_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with runs.session(tmp_path, "trainer.n_gpus_per_node=4", "trainer.fsdp_size=2") as s:
            outcome = await runs.run(s, tmp_path / "run", *ON_POLICY)
            found = audit(tmp_path / "run")
            assert outcome.complete and (found.trained, found.lost, found.trained_twice) == (64, 0, 0)
            trained = await runs.weights(s, tmp_path / "after")
            whole = sum(t.numel() * t.element_size() for t in trained.values())
            rows = runs.rows(tmp_path / "run")
            assert all(whole <= row["sync/bytes"] < whole + ALIGN * len(trained) * 2 for row in rows)
            assert all(0 < row["actor/log_prob_gap_same_version"] < 1e-5 for row in rows), "what is served is what is trained"
            assert any(row["actor/grad_norm"] > 0 for row in rows[:-1])
            assert (
                await runs.run(s, tmp_path / "run", *ON_POLICY, "rollout.total_rollout_steps=80", resume=True)
            ).samples_trained == 80

            version = 99
            sent, received = await asyncio.gather(
                all_of(s.engines.train.peers, "sender.transfer", (version,), TransferReport),
                all_of(s.engines.sync._replicas, "receiver.transfer", (version,), TransferReport),
            )
            assert [report.bytes > 0 for report in sent] == [True, True, False, False]
            assert sum(report.bytes for report in sent) == received[0].bytes == rows[0]["sync/bytes"]
            assert await s.engines.sync.transport() == "gloo"

    asyncio.run(main())
