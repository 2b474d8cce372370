"""Two copies of the model on four trainer ranks.

A run in real processes learns, only one copy sends its weights to the replicas, and all processes
listen on loopback alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from millrace.config import ModelShape, recipe
from millrace.models.model import write_shape
from millrace.persist.history import audit
from millrace.pipeline.checkpoint import Checkpoints
from millrace.ports import TransferReport
from millrace.process.rpc import all_of
from millrace.run.export import export
from millrace.schedule.ledger import Ledger
from millrace.sync.buckets import ALIGN
from millrace.train.fsdp import engine as fsdp_train
from tests.e2e import runs
from tests.listening import listeners, other_addresses, outside, reachable

ON_POLICY = ["mode=on_policy_pipeline", "actor.optim.lr=1e-3"]


def test_one_process_exports_what_copies_in_bfloat16_have_saved(tmp_path: Path) -> None:
    config = recipe.load(
        runs.RECIPE, ["trainer.n_gpus_per_node=4", "trainer.fsdp_size=2", "model.dtype=bfloat16"]
    )
    alone = recipe.load(runs.RECIPE, ["model.dtype=bfloat16"])
    shape = ModelShape(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    write_shape(str(tmp_path / "model"), shape, vocab_size=32, eos_token_id=0)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    engine = fsdp_train.build(alone, str(tmp_path / "model"), rank=0, world_size=1)
    engine.restart(alone.actor.optim, 1)
    checkpoint = asyncio.run(
        Checkpoints(tmp_path, keep=1).save(Ledger(config.schedule).snapshot(), engine)
    )
    want = {name: weight.clone() for name, weight in engine.full_weights()}
    asyncio.run(engine.close())
    export(checkpoint, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        (found[name] == weight).all() and weight.dtype == torch.bfloat16
        for name, weight in want.items()
    )


def check_listeners() -> None:
    """Every process of the run refuses connections from any address but loopback."""
    me = psutil.Process()
    found = listeners([me, *me.children(recursive=True)])
    assert len(found) >= 6, "a store, and gloo in four ranks and a replica"
    assert outside(found) == []
    assert all(reachable("127.0.0.1", port) for _, port, _ in found)
    others = other_addresses()
    assert others
    assert not [(to, one) for to in others for one in found if reachable(to, one[1])]


@pytest.mark.slow
async def test_copies_train_as_one_model_and_send_it_once(tmp_path: Path) -> None:
    async with runs.session(tmp_path, "trainer.n_gpus_per_node=4", "trainer.fsdp_size=2") as s:
        await asyncio.to_thread(check_listeners)
        outcome = await runs.run(s, tmp_path / "run", *ON_POLICY)
        found = audit(tmp_path / "run")
        assert outcome.complete and (found.trained, found.lost, found.trained_twice) == (64, 0, 0)
        trained = await runs.weights(s, tmp_path / "after")
        whole = sum(t.numel() * t.element_size() for t in trained.values())
        rows = runs.rows(tmp_path / "run")
        assert all(whole <= row["sync/bytes"] < whole + ALIGN * len(trained) * 2 for row in rows)
        assert all(0 < row["actor/log_prob_gap_same_version"] < 1e-5 for row in rows), (
            "what is served is what is trained"
        )
        assert any(row["actor/grad_norm"] > 0 for row in rows[:-1])
        assert (
            await runs.run(
                s, tmp_path / "run", *ON_POLICY, "rollout.total_rollout_steps=80", resume=True
            )
        ).samples_trained == 80

        version = 99
        sent, received = await asyncio.gather(
            all_of(s.engines.train.peers, "sender.transfer", (version,), TransferReport),
            all_of(
                [r.peer for r in s.engines.sync._replicas],
                "receiver.transfer",
                (version,),
                TransferReport,
            ),
        )
        assert [report.bytes > 0 for report in sent] == [True, True, False, False]
        assert sum(report.bytes for report in sent) == received[0].bytes == rows[0]["sync/bytes"]
        assert await s.engines.sync.transport() == "gloo"
