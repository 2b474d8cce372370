"""Tests that two ranks over NCCL train the same policy as one GPU.

Layouts: one copy of the model over both ranks, one copy on each rank, and one copy with weights in
host memory.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from millrace.config import Config, ModelShape, OptimConfig
from millrace.models.model import write_shape
from millrace.ports import TrainBatch
from millrace.train.fsdp import engine as fsdp_train
from millrace.train.fsdp.engine import FsdpTrainEngine
from tests.train.samples import VOCAB, random_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs"),
    pytest.mark.xdist_group("ranks"),
]
OPTIM = OptimConfig(lr=1e-3, eps=1e-3)
RANKS = 2
MODELS: dict[str, dict[str, Any]] = {
    "float32": {"model": {"dtype": "float32"}},
    "bfloat16, compiled, half of the layers recompute": {
        "model": {
            "dtype": "bfloat16",
            "compile": True,
            "gradient_checkpointing": True,
            "gradient_checkpointing_share": 0.5,
        }
    },
    "adapters": {"model": {"dtype": "bfloat16", "lora_rank": 4, "lora_alpha": 8.0}},
    "critic and reference": {
        "model": {"dtype": "bfloat16"},
        "algorithm": {"adv_estimator": "gae"},
        "actor": {"entropy_coeff": 0.01, "use_kl_loss": True, "ppo_mini_batch_size": 2},
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one copy": {},
    "two copies": {"fsdp_size": 1},
    "one copy, in host memory": {"offload_policy": True},
}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS]
METRICS = ("actor/grad_norm", "actor/entropy", "actor/pg_loss")
TOLERANCE = {"float32": 1e-4}
"""The relative tolerance by model.

Other models have a wider tolerance: bf16 rounds the sums differently for each split of a batch.
"""


def built(folder: str, model: str, layout: str, rank: int, ranks: int) -> FsdpTrainEngine:
    sections = MODELS[model]
    tree: dict[str, Any] = {
        "rollout": {"max_prompt_length": 8, "max_response_length": 25},
        "actor": {"entropy_coeff": 0.01},
    }
    trainer = {"device": "cuda", "n_gpus_per_node": ranks} | (LAYOUTS[layout] if ranks > 1 else {})
    # Each rank has several micro-batches. The clip range is so wide that no token is near its edge,
    # where rounding would decide whether the token has a gradient.
    actor = {
        "ppo_max_token_len_per_gpu": 60,
        "clip_ratio_low": 0.99,
        "clip_ratio_high": 100.0,
        "clip_ratio_c": 1000.0,
    }
    tree |= sections | {
        "trainer": trainer,
        "actor": tree["actor"] | actor | sections.get("actor", {}),
    }
    engine = fsdp_train.build(Config.model_validate(tree), folder, rank=rank, world_size=ranks)
    engine.restart(OPTIM, 10)
    return engine


def batch(seed: int) -> TrainBatch:
    return TrainBatch(random_samples(seed, [4, 3, 5, 2]), 0)


def run(folder: str, model: str, layout: str, rank: int, ranks: int) -> dict[str, Any]:
    """Run three steps; return metrics, log-probs, whole weights and the rows that this rank sends.

    With several ranks, an engine of another layout repeats the last step from a checkpoint.
    """
    engine = built(folder, model, layout, rank, ranks)
    metrics = [asyncio.run(engine.step(batch(seed))).metrics for seed in (0, 1)]
    saved = f"{folder}/{model}, {layout}, {ranks}"
    asyncio.run(engine.save(saved))
    metrics.append(asyncio.run(engine.step(batch(2))).metrics)
    parts = [*engine.shards(), *(engine.adapters() if engine.adapted else [])]
    rows = {name: (shape, first, own.clone().cpu()) for name, shape, _, first, own in parts}
    log_probs = asyncio.run(engine.log_probs(batch(3).samples))
    whole = {name: tensor.float().cpu() for name, tensor in engine.full_weights()}
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    again = {name: tensor.float().cpu() for name, tensor in engine.full_weights()}
    assert all(torch.equal(whole[name], tensor) for name, tensor in again.items())
    asyncio.run(engine.close())
    found = {"metrics": metrics, "rows": rows, "log_probs": log_probs, "whole": whole}
    if ranks > 1:
        other = built(folder, model, next(name for name in LAYOUTS if name != layout), rank, ranks)
        asyncio.run(other.load(saved))
        found["loaded"] = asyncio.run(other.step(batch(2))).metrics
        asyncio.run(other.close())
    return found


def run_rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for number, (model, layout) in enumerate(CASES):
        store = dist.FileStore(f"{folder}/store {number}", RANKS)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=RANKS)
        torch.save(run(folder, model, layout, rank, RANKS), f"{folder}/{number}-{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with weights, so that all engines start from the same weights.

    Without it, CPU and GPU draw different weights. Offloaded and adapted models are drawn on the
    CPU.
    """
    path = str(tmp_path_factory.mktemp("model"))
    shape = ModelShape(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=320,
    )
    write_shape(f"{path}/shape", shape, vocab_size=VOCAB, eos_token_id=0)
    engine = fsdp_train.build(
        Config.model_validate({"trainer": {"device": "cpu"}}), f"{path}/shape", rank=0, world_size=1
    )
    asyncio.run(engine.export(f"{path}/start"))
    asyncio.run(engine.close())
    return f"{path}/start"


@pytest.fixture(scope="module")
def ranks(folder: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    mp.spawn(run_rank, args=(folder,), nprocs=RANKS)
    return {
        case: [
            torch.load(f"{folder}/{number}-{rank}.pt", weights_only=False) for rank in range(RANKS)
        ]
        for number, case in enumerate(CASES)
    }


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, dict[str, Any]]:
    return {model: run(folder, model, "one copy", 0, 1) for model in MODELS}


def joined(found: list[dict[str, Any]], copies: int) -> dict[str, torch.Tensor]:
    """Join the ranks' rows into whole tensors. Only the first copy sends rows."""
    each, whole = RANKS // copies, {}
    for name, (shape, *_) in found[0]["rows"].items():
        parts = [rank["rows"][name][1:] for rank in found]
        assert all(not len(own) for _, own in parts[each:]), name
        end = 0
        for first, own in parts[:each]:
            assert first == end, name
            end += len(own)
        assert end == shape[0], name
        whole[name] = torch.cat([own for _, own in parts[:each]])
    return whole


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_two_ranks_train_what_one_does(model: str, layout: str, ranks: Any, alone: Any) -> None:
    got, want, rel = ranks[model, layout], alone[model], TOLERANCE.get(model, 0.05)
    for a, b in zip(got[0]["metrics"], want["metrics"], strict=True):
        for key in (*METRICS, *(k for k in b if k in ("critic/vf_loss", "critic/grad_norm"))):
            assert a[key] == pytest.approx(b[key], rel=rel, abs=rel / 10), key
    assert got[0]["metrics"] == got[1]["metrics"] and got[0]["log_probs"] == got[1]["log_probs"]
    flat = [torch.tensor([x for row in side["log_probs"] for x in row]) for side in (got[0], want)]
    assert (flat[0] - flat[1]).abs().mean() < rel / 2
    for name, tensor in want["whole"].items():
        torch.testing.assert_close(got[1]["whole"][name], tensor, rtol=0.02, atol=4e-3)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_checkpoint_goes_on_in_another_layout(model: str, layout: str, ranks: Any) -> None:
    for rank in ranks[model, layout]:
        for key in METRICS:
            rel = TOLERANCE.get(model, 0.02)
            assert rank["loaded"][key] == pytest.approx(
                rank["metrics"][2][key], rel=rel, abs=rel / 10
            ), key


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_rows_that_ranks_send_are_the_whole_weights(model: str, layout: str, ranks: Any) -> None:
    found = ranks[model, layout]
    rows, scale = (
        joined(found, 2 if layout == "two copies" else 1),
        2.0 if model == "adapters" else 0.0,
    )
    serving = torch.float32 if model == "float32" else torch.bfloat16
    for name, whole in found[1]["whole"].items():
        weight = rows[name]
        if f"{name}.lora_A" in rows:
            weight = weight + scale * rows[f"{name}.lora_B"] @ rows[f"{name}.lora_A"]
        torch.testing.assert_close(
            whole, weight.to(serving).float(), rtol=0.01 if scale else 0, atol=1e-6 if scale else 0
        )
