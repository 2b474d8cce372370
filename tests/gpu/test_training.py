"""The train engine on a GPU compared with the CPU, and GPU-only parts compared with plain ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.config import Config, ModelShape, OptimConfig
from millrace.models.model import write_shape
from millrace.ports import TrainBatch
from millrace.train import packed_attention as attention
from millrace.train.fsdp import engine as fsdp_train
from millrace.train.fsdp import sharding
from millrace.train.fsdp.engine import FsdpTrainEngine
from millrace.train.layout import make_layout
from millrace.train.log_probs import log_probs_and_entropy
from millrace.train.ulysses import Share
from tests.train.samples import VOCAB, random_samples

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
OPTIM = OptimConfig(lr=1e-3, eps=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    shape = ModelShape(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=320,
    )
    write_shape(path, shape, vocab_size=VOCAB, eos_token_id=0)
    return path


def built(folder: str, device: str = "cuda", **sections: Any) -> FsdpTrainEngine:
    tree = {
        "rollout": {"max_prompt_length": 8, "max_response_length": 25},
        "actor": {"entropy_coeff": 0.01},
    }
    config = Config.model_validate(tree | {"trainer": {"device": device}} | sections)
    torch.manual_seed(0)
    engine = fsdp_train.build(config, folder, rank=0, world_size=1)
    engine.restart(OPTIM, 10)
    return engine


def steps(engine: FsdpTrainEngine, seeds: tuple[int, ...] = (0, 1, 0)) -> list[dict[str, float]]:
    found = [
        asyncio.run(engine.step(TrainBatch(random_samples(s, [4, 3 + s]), 0))).metrics
        for s in seeds
    ]
    asyncio.run(engine.close())
    return found


def alike(a: list[dict[str, float]], b: list[dict[str, float]], rel: float) -> None:
    for x, y in zip(a, b, strict=True):
        for key in ("actor/grad_norm", "actor/entropy", "actor/pg_loss"):
            assert x[key] == pytest.approx(y[key], rel=rel, abs=rel / 10), key


def test_varlen_attention_is_the_padded_one_and_shares_heads_of_keys() -> None:
    """Forward and backward pass agree, with fewer key heads than query heads.

    The rows have several lengths and share a prompt.
    """
    lengths = np.array([70, 64, 33, 5, 1])
    shared = np.concatenate(
        [np.arange(n) if n == 70 else np.arange(n) + 100 * i for i, n in enumerate(lengths)]
    )
    _, token = np.unique(shared, return_inverse=True)
    size, noise = int(token.max()) + 1, torch.Generator(CUDA).manual_seed(0)
    results = []
    for padded in (False, True):
        layout = make_layout(
            lengths, token.astype(np.int64), Share(size, size), CUDA, padded=padded
        )
        noise.manual_seed(0)
        q, k, v = (
            torch.randn(
                1, heads, size, 64, device=CUDA, dtype=torch.bfloat16, generator=noise
            ).requires_grad_()
            for heads in (8, 2, 2)
        )
        out, _ = attention.packed_attention(
            torch.nn.Identity(), q, k, v, None, scaling=0.125, packed_layout=layout
        )
        (out.float() * torch.arange(size, device=CUDA)[None, :, None, None] / size).sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_fused_log_probs_are_the_plain_ones() -> None:
    noise = torch.Generator(CUDA).manual_seed(0)
    found = []
    for fused in (False, True):
        noise.manual_seed(1)
        hidden = torch.randn(300, 64, device=CUDA, generator=noise).requires_grad_()
        weight = torch.randn(5000, 64, device=CUDA, generator=noise).requires_grad_()
        targets = torch.randint(5000, (300,), device=CUDA, generator=noise)
        log_probs, entropy = log_probs_and_entropy(
            hidden, weight, targets, 0.7, chunk=128, fused=fused
        )
        (log_probs.sum() + (entropy * log_probs.detach()).sum()).backward()
        found.append((log_probs, entropy, hidden.grad, weight.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_bfloat16_on_a_gpu_trains_as_float32_on_the_cpu_does(folder: str) -> None:
    """CPU and GPU draw different weights, so both start from an exported folder."""
    exact = built(folder, "cpu")
    asyncio.run(exact.export(f"{folder}/weights"))
    exact = built(f"{folder}/weights", "cpu")
    half = built(f"{folder}/weights", model={"dtype": "bfloat16"})
    alike(steps(half), steps(exact), 0.05)


@pytest.mark.parametrize(
    "model",
    [
        {"compile": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_share": 0.5},
        {"gradient_checkpointing": True, "compile": True},
    ],
)
def test_compiled_and_checkpointed_layers_train_the_same_policy(
    folder: str, model: dict[str, Any]
) -> None:
    alike(
        steps(built(folder, model={"dtype": "bfloat16"} | model)),
        steps(built(folder, model={"dtype": "bfloat16"})),
        0.02,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_waits_on_the_host_comes_back_bit_for_bit(folder: str, dtype: str) -> None:
    def weights(engine: FsdpTrainEngine) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in engine.full_weights()}

    batch = TrainBatch(random_samples(0, [4, 3]), 0)
    engine = built(folder, model={"dtype": dtype})
    asyncio.run(engine.step(batch))
    before, moments = weights(engine), engine.actor.optimizer.state_dict()["state"]
    torch.cuda.empty_cache()
    awake = torch.cuda.memory_allocated()
    asyncio.run(engine.sleep())
    assert torch.cuda.memory_allocated() < awake - 4 * 256 * 256
    asyncio.run(engine.wake())
    after = weights(engine)
    assert all(
        tensor.is_cuda and torch.equal(tensor, before[name]) for name, tensor in after.items()
    )
    for i, state in engine.actor.optimizer.state_dict()["state"].items():
        assert all(
            getattr(value, "to_local", lambda v=value: v)().is_cuda for value in state.values()
        ) and len(state) == len(moments[i])
    assert np.isfinite(asyncio.run(engine.step(batch)).metrics["actor/grad_norm"])
    assert not torch.equal(next(iter(weights(engine).values())), next(iter(after.values())))
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"dtype": "float32"}},
        {"model": {"dtype": "bfloat16", "gradient_checkpointing": True, "compile": True}},
        {"model": {"dtype": "bfloat16", "lora_rank": 4}},
        {
            "model": {"dtype": "bfloat16"},
            "algorithm": {"adv_estimator": "gae"},
            "actor": {"entropy_coeff": 0.01, "use_kl_loss": True, "ppo_mini_batch_size": 1},
        },
    ],
)
def test_weights_that_live_in_host_memory_train_the_same_policy(
    folder: str, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """This includes the critic and the reference, and a checkpoint restores all of them.

    Both engines start from a folder, because a CPU draws other weights than a GPU.
    """
    start = built(folder, "cpu")
    asyncio.run(start.export(f"{tmp_path}/start"))
    batch = TrainBatch(random_samples(0, [4, 3]), 0)
    engine, found = (
        built(f"{tmp_path}/start", **sections, trainer={"device": "cuda", "offload_policy": True}),
        [],
    )
    for _ in range(2):
        found.append(asyncio.run(engine.step(batch)).metrics)
        awake = torch.cuda.memory_reserved()
        asyncio.run(engine.sleep())
        assert torch.cuda.memory_reserved() < awake
        asyncio.run(engine.wake())
    weights = [getattr(p, "to_local", lambda p=p: p)() for p in engine.policy.parameters()]
    moments = [t for s in engine.actor.optimizer.state.values() for t in s.values()]
    assert not any(t.is_cuda for t in weights + moments) and all(t.is_pinned() for t in weights)
    assert all(b.is_cuda for b in engine.policy.buffers()) and all(
        t.is_cuda for _, t in engine.full_weights()
    )
    asyncio.run(engine.save(f"{tmp_path}/saved"))
    ahead = asyncio.run(engine.step(batch)).metrics
    asyncio.run(engine.load(f"{tmp_path}/saved"))
    alike([asyncio.run(engine.step(batch)).metrics], [ahead], 5e-3)
    alike(found, steps(built(f"{tmp_path}/start", **sections), seeds=(0, 0)), 0.02)
    asyncio.run(engine.close())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_a_gpu_has_no_room_for_twice_comes_by_the_host(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    start = built(folder, "cpu")
    asyncio.run(start.export(f"{tmp_path}/start"))
    asyncio.run(start.close())
    straight = steps(built(f"{tmp_path}/start", model={"dtype": dtype}))
    monkeypatch.setattr(sharding, "fits", lambda *_, **__: False)
    engine = built(f"{tmp_path}/start", model={"dtype": dtype})
    assert all(t.is_cuda for t in (*engine.policy.parameters(), *engine.policy.buffers()))
    # The order of bf16 sums differs in each run: equal runs have differed by up to 6e-3.
    alike(steps(engine), straight, 1e-3 if dtype == "float32" else 0.02)


def test_a_train_engine_that_is_not_to_leave_stays(folder: str) -> None:
    engine = built(folder, trainer={"device": "cuda", "offload": False})
    asyncio.run(engine.sleep())
    assert all(p.is_cuda for p in engine.policy.parameters())
    assert len(steps(engine)) == 3
