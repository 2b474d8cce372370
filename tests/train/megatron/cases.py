"""The cases of the Megatron engine: models, shapes of two ranks, and what a rank does for a case."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from millrace.config import Config, OptimConfig
from millrace.extras.megatron import engine as megatron
from millrace.extras.megatron import weights
from millrace.models.device import prepare
from millrace.models.model import load_model
from millrace.ports import TrainBatch
from millrace.testing import TrainCase, check_sleeping_train_engine
from millrace.train.fsdp import engine as fsdp
from millrace.train.log_probs import log_probs_and_entropy, sum_of_squares, vocabulary_of
from millrace.train.metrics import Meter
from millrace.train.packing import Outputs
from millrace.train.rows import Rows, rows_of_samples
from tests.random_models import sharp
from tests.train.megatron import shim
from tests.train.mixtures import routed
from tests.train.samples import VOCAB, random_samples

# The epsilon is large because AdamW's division turns gradients near 0 into noise.
OPTIM = OptimConfig(lr=3e-3, lr_warmup_steps=1, weight_decay=0.1, eps=1e-3, clip_grad=0.05)
HORIZON = 12
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": sharp(32),
    "max_position_embeddings": 64,
}
EXPERTS = WIDTHS | {"num_hidden_layers": 2}
LONG_ROPE: Any = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, Any] = {
    "qwen2": Qwen2Config(**WIDTHS, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]),
    "one KV head": Qwen2Config(
        **WIDTHS | {"num_key_value_heads": 1}, architectures=["Qwen2ForCausalLM"]
    ),
    "qwen3": Qwen3Config(**WIDTHS, head_dim=12, architectures=["Qwen3ForCausalLM"]),
    "llama": LlamaConfig(**WIDTHS, rope_parameters=LONG_ROPE, architectures=["LlamaForCausalLM"]),
    "qwen3_moe": Qwen3MoeConfig(
        **EXPERTS | {"head_dim": 8},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=False,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "mixtral": MixtralConfig(**EXPERTS, num_local_experts=4, architectures=["MixtralForCausalLM"]),
}


@dataclass(frozen=True)
class Case:
    model: str
    keys: dict[str, Any] = field(default_factory=dict)
    whole: bool = True
    """Whether every rank has the whole gradients of its weights."""
    ranks: int = 2


TP = {"tensor_model_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
PLAIN = {"use_distributed_optimizer": False}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

CASES = {
    "TP2": Case("qwen2", TP),
    "TP2, one KV head": Case("one KV head", TP),
    "TP2, sequence parallel": Case("qwen3", SP),
    "TP2, long rope": Case("llama", TP),
    "PP2, tied": Case("qwen2", PP),
    "PP2, untied": Case("qwen3", PP),
    "DP2": Case("qwen2", PLAIN),
    "DP2, distributed optimizer": Case("qwen3", whole=False),
    "DP2, distributed optimizer, overlaps": Case("qwen2", OVERLAP, whole=False),
    "CP2": Case("qwen3", CP | PLAIN),
    "CP2, one KV head": Case("one KV head", CP | PLAIN),
    "EP2": Case("qwen3_moe", EP | PLAIN),
    "EP2, distributed optimizer": Case("mixtral", EP, whole=False),
    "PP2, experts, full recompute": Case("mixtral", PP | {"recompute_granularity": "full"}),
    "TP2, experts": Case("qwen3_moe", SP),
    "TP2, EP2": Case("mixtral", SP | EP | {"expert_tensor_parallel_size": 1}),
    "TP4, two KV heads": Case("qwen2", {"tensor_model_parallel_size": 4}, ranks=4),
    "TP2, PP2": Case("qwen3", SP | PP, ranks=4),
    "TP2, DP2, overlaps": Case("qwen2", SP | OVERLAP, whole=False, ranks=4),
    "CP2, PP2": Case("qwen3", CP | PP | PLAIN, ranks=4),
    "PP2, EP2": Case("mixtral", PP | EP, whole=False, ranks=4),
    "full recompute": Case("qwen3", SP | {"recompute_granularity": "full"}),
    "selective recompute": Case(
        "qwen2", TP | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    ),
}  # fmt: skip


FAST = {
    *("TP2", "TP2, one KV head", "TP2, sequence parallel", "TP2, long rope", "PP2, tied", "EP2"),
    *("DP2, distributed optimizer, overlaps", "CP2, one KV head", "EP2, distributed optimizer"),
    *("full recompute", "TP2, PP2", "PP2, EP2"),
}
"""The cases that are not slow. Each model and each kind of parallelism has one."""
REPLAY = {"mixtral": "R3", "qwen3_moe": "R2"}


def config_of(
    engine: str,
    keys: dict[str, Any],
    ranks: int,
    model: str = "",
    *,
    device: str = "cpu",
    dtype: str = "float32",
) -> Config:
    """Return the configuration of a model. R2 needs a pass for old log-probs, and two steps."""
    replay = REPLAY.get(model, "disabled")
    recomputes = replay == "R2"
    return Config(
        model={"router_replay": replay, "dtype": dtype},
        async_training={"use_rollout_log_probs": not recomputes},
        trainer={"device": device, "n_gpus_per_node": ranks, "engine": engine, "megatron": keys},
        rollout={"max_prompt_length": 8, "max_response_length": 25, "temperature": 0.8},
        actor={
            "ppo_max_token_len_per_gpu": 60,
            "ppo_mini_batch_size": 4,
            "ppo_epochs": 1 + recomputes,
            "router_aux_loss_coef": 0.0 if replay == "disabled" else 0.2,
            "optim": OPTIM.model_dump(),
            "entropy_coeff": 0.01,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
        },
    )


def batches(model: str = "") -> list[TrainBatch]:
    """Ragged rows, some with one token. The second batch has shares without a row."""
    samples = random_samples(10, [4, 1, 3, 5]), random_samples(11, [1, 2, 0, 1])
    own = map(routed, samples) if REPLAY.get(model) == "R3" else samples
    return [TrainBatch(each, i) for i, each in enumerate(own)]


def gradient_case(model: str = "") -> tuple[Rows, Any]:
    rows = rows_of_samples(batches(model)[0].samples)
    return rows, np.arange(len(rows.starts))


def weighted(outputs: Outputs, micro: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss of log-probs and entropies whose weights differ by token."""
    factors = 0.1 + torch.sin(micro.source.double()).abs().float().to(outputs[0].device)
    loss = -(outputs[0] * factors).sum() / 40 - 0.01 * outputs[1].sum()
    return loss, loss.detach().double().reshape(1)


def run(engine: Any, model: str) -> dict[str, Any]:
    """Return log-probs, entropies, the gradient's norm, and the metrics of two batches."""
    engine.restart(OPTIM, HORIZON)
    rows, members = gradient_case(model)
    found: dict[str, Any] = {"tokens": engine.actor.tokens(rows, temperature=0.8, squares=True)}
    meter = Meter(("loss",))
    engine.actor.accumulate(rows, members, 0.8, weighted, meter)
    found["norm"] = float(engine.actor.gradient_norm())
    # A rank that counts no token has its sums on the host.
    sums = meter.take().to(engine.device)
    found["loss"] = float(engine.actor.reduce(sums, dist.ReduceOp.SUM))
    return found


def steps(
    engine: Any,
    model: str,
    between: Callable[[Any], None] = lambda _: None,
    after: Callable[[Any], bool] = lambda _: False,
) -> dict[str, Any]:
    """Forget the gradients. Return the metrics of two batches, and the log-probs after them."""
    engine.actor.clear()
    reports = []
    for batch in batches(model):
        reports.append(asyncio.run(engine.step(batch)))
        between(engine)
    return {
        "metrics": [report.metrics for report in reports],
        "late": after(engine),
        "totals": [report.totals for report in reports],
        "after": asyncio.run(engine.log_probs(batches(model)[0].samples)),
    }


def run_rank(rank: int, folder: str, size: int, names: Sequence[str]) -> None:
    """Run the cases of `size` ranks, in one of as many processes, and write its results."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    shim.install()
    prepare(config_of("megatron", SP, 2).trainer)
    store = dist.FileStore(f"{folder}/store {size}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results: dict[str, Any] = {
        name: run_case(CASES[name], folder, rank) for name in names if CASES[name].ranks == size
    }
    if size == 2:
        results["heads"] = run_heads(rank)
        results["mains"] = run_mains(folder, rank)
    results["connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    torch.save(results, f"{folder}/results-{size}-{rank}.pt")
    dist.destroy_process_group()


def conform(rank: int, folder: str) -> None:
    """Check the port of a train engine, in a process of its own."""
    torch.set_num_threads(1)
    shim.install()

    async def make() -> Any:
        tree = config_of("megatron", {}, 1).model_dump()
        tree["actor"]["use_kl_loss"] = False
        built = megatron.build(
            Config.model_validate(tree), f"{folder}/qwen2", rank=rank, world_size=1
        )
        built.restart(OptimConfig(lr=1e-2), 60)
        return built

    case = TrainCase(mini_batch_size=4, vocab_size=VOCAB)
    asyncio.run(check_sleeping_train_engine(make, case))


def write_models(folder: str) -> None:
    """Write every model with its weights, so that all engines start from the same ones."""
    for name, hf in MODELS.items():
        hf.save_pretrained(f"{folder}/{name}")
        model = load_model(f"{folder}/{name}", seed=1, dtype="float32")
        model.save_pretrained(f"{folder}/{name}")


def run_plain(name: str, folder: str, device: str = "cpu") -> dict[str, Any]:
    """Return the results of the FSDP engine on one rank. Write its gradients and its weights."""
    config = config_of("fsdp", {}, 1, name, device=device)
    engine = fsdp.build(config, f"{folder}/{name}", rank=0, world_size=1)
    found = run(engine, name)
    named = dict(engine.policy.model.named_parameters())
    gradients = {n: p.grad for n, p in named.items()}
    save = engine.policy.model.save_pretrained
    save(f"{folder}/{name} gradients", state_dict=gradients)
    found |= steps(engine, name)
    save(f"{folder}/{name} after")
    asyncio.run(engine.close())
    return found


def run_case(case: Case, folder: str, rank: int, device: str = "cpu") -> dict[str, Any]:
    config = config_of("megatron", case.keys, case.ranks, case.model, device=device)
    engine = megatron.build(config, f"{folder}/{case.model}", rank=rank, world_size=case.ranks)
    found = run(engine, case.model)
    if case.whole:
        gradients = {n: p.main_grad.clone() for n, p in engine.policy.named_parameters()}
        found["gradients"] = compare(engine, gradients, f"{folder}/{case.model} gradients")
    found |= steps(engine, case.model, sleep, late_weights)
    weights = {n: p.detach() for n, p in engine.policy.named_parameters()}
    found["weights"] = compare(engine, weights, f"{folder}/{case.model} after")
    asyncio.run(engine.close())
    return found


def run_half(case: Case, folder: str, rank: int, device: str = "cpu") -> dict[str, Any]:
    """Return what an engine in bfloat16 computes. Without ranks of Megatron, it is FSDP's."""
    ranks = case.ranks
    name = "megatron" if ranks > 1 else "fsdp"
    config = config_of(name, case.keys, ranks, case.model, device=device, dtype="bfloat16")
    build = megatron.build if ranks > 1 else fsdp.build
    engine: Any = build(config, f"{folder}/{case.model}", rank=rank, world_size=ranks)
    found = run(engine, case.model) | steps(engine, case.model)
    asyncio.run(engine.close())
    return found


def sleep(engine: Any) -> None:
    """Park the optimizer state, as on a GPU. The weights stay readable."""
    before = sum(float(p.double().sum()) for p in engine.policy.parameters())
    engine.actor.park()
    parked = [own for own, _ in engine.actor._parked]
    assert parked and not any(own.nbytes() for own in parked)
    assert before == sum(float(p.double().sum()) for p in engine.policy.parameters())
    engine.actor.unpark()


def late_weights(engine: Any) -> bool:
    """Gather the weights, and return whether the last step had left them stale."""
    before = [p.detach().clone() for p in engine.policy.parameters()]
    engine.actor.gather()
    after = engine.policy.parameters()
    return not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def run_mains(folder: str, rank: int) -> list[float]:
    """Return how far a bfloat16 engine's float32 weights, and its own, are from the folder's."""
    tree = config_of("megatron", {}, 2).model_dump()
    plain, half = (
        megatron.build(
            Config.model_validate(tree | {"model": {"dtype": dtype}}),
            f"{folder}/qwen3",
            rank=rank,
            world_size=2,
        )
        for dtype in ("float32", "bfloat16")
    )
    exact = dict(
        zip(half.policy.parameters(), (p.detach() for p in plain.policy.parameters()), strict=True)
    )
    found = [0.0, 0.0]
    for parameter, start, main, _ in half.actor.owned():
        want = exact[parameter].view(-1)[start : start + main.numel()]
        own = parameter.detach().view(-1)[start : start + main.numel()]
        for i, tensor in enumerate((main.detach(), own)):
            found[i] = max(found[i], float((tensor - want).abs().max()))
    for engine in (half, plain):
        asyncio.run(engine.close())
    return found


def run_heads(rank: int) -> dict[str, float]:
    """Return the largest differences between a shared vocabulary and a whole one."""
    found = {}
    group: Any = dist.group.WORLD
    # An odd vocabulary; and one that leaves the second rank without a row.
    for vocab, padded in ((13, 7), (4, 4)):
        for chunk in (0, 2):
            torch.manual_seed(0)
            whole = torch.randn(vocab, 8)
            whole[1] = -torch.inf  # a token that cannot be drawn
            hidden, targets = torch.rand(5, 8) + 0.1, torch.tensor([0, 2, 3, 2, vocab - 1])
            head = torch.full((2 * padded, 8), 7.0)
            head[:vocab] = whole
            own: Any = head[rank * padded :][:padded].clone().requires_grad_()
            h, w, other = (x.clone().requires_grad_() for x in (hidden, whole, hidden))
            leaves: Any = (h, w, other)
            vocabulary = vocabulary_of(group, padded, vocab)
            got = log_probs_and_entropy(h, own, targets, 0.7, vocabulary, chunk=chunk)
            want = log_probs_and_entropy(other, w, targets, 0.7)
            weights = torch.rand(2, 5)
            for outputs in (got, want):
                (torch.stack(outputs) * weights).sum().backward()
            grads: list[Any] = [x.grad for x in (own, *leaves)]
            to_own, to_h, to_w, to_other = grads
            dist.all_reduce(to_h)
            squares = sum_of_squares(hidden, own, 0.7, vocabulary)
            rows = slice(rank * padded, min(vocab, (rank + 1) * padded))
            n = vocabulary.rows
            name = f"vocabulary {vocab}, chunk {chunk}"
            found[name] = max(
                *(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)),
                float((squares - sum_of_squares(hidden, whole, 0.7)).abs().max()),
                float((to_own[:n] - to_w[rows]).nan_to_num().abs().sum()),
                float(to_own[n:].abs().sum()),
                float((to_h - to_other).nan_to_num().abs().max()),
            )
    return found


def compare(engine: Any, got: dict[str, Any], folder: str) -> dict[str, float]:
    """Return the largest difference of each tensor to what a folder has for this rank."""
    got = {name: tensor.clone() for name, tensor in got.items()}
    own = {name: p.detach().clone() for name, p in engine.policy.named_parameters()}
    with torch.no_grad():
        for p in engine.policy.parameters():
            p.zero_()
    weights.load([engine.policy], folder, engine.shape, engine.hf)
    found = {}
    with torch.no_grad():
        for name, p in engine.policy.named_parameters():
            rows = slice(None)
            found[name] = float((got[name][rows] - p[rows]).abs().max())
            p.copy_(own[name])
    return found
