"""The training cases that the tests run at every number of ranks."""

from __future__ import annotations

import asyncio
import math
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from millrace.config import Config, ModelShape, OptimConfig
from millrace.models.model import load_model
from millrace.ports import TrainBatch
from millrace.train.fsdp import sharding
from millrace.train.fsdp.engine import FsdpTrainEngine, build
from millrace.train.fsdp.policy import PackedPolicy
from millrace.train.fsdp.sharding import mesh_of, shard
from millrace.train.metrics import Meter
from millrace.train.options import step_options
from millrace.train.rows import rows_of_examples
from millrace.types import Segment, Trajectory, floats_of, tokens_of
from tests.random_models import write_random
from tests.sweeps import sweep
from tests.train.forks import start_ranks
from tests.train.mixtures import routed, write_mixtures
from tests.train.samples import VOCAB, random_samples

sharding.UNIT = 1  # so that small models have several units of sharding
CPU = torch.device("cpu")
# The epsilon is large because AdamW's division turns gradients near 0 into noise.
OPTIM = OptimConfig(
    lr=3e-3,
    lr_warmup_steps=1,
    lr_scheduler_type="linear",
    weight_decay=0.1,
    eps=1e-3,
    clip_grad=0.05,
)
HORIZON = 12
ROUNDS = 2
CASES: dict[str, dict[str, Any]] = {
    "one micro-batch": {"on": ["2", "2 x 2"]},
    "many micro-batches": {
        "on": ["2", "3", "1 of 4", "2 x 2"],
        "fast": 3,
        "ppo_max_token_len_per_gpu": 40,
        "clip_ratio_low": 0.01,
        "clip_ratio_high": 0.02,
        "clip_ratio_c": 1.05,
    },
    "short last mini-batch, two epochs, own old log-probs": {
        "on": ["3", "1 of 4"],
        "counts": [4, 1, 3, 5],
        "ppo_max_token_len_per_gpu": 60,
        "ppo_mini_batch_size": 3,
        "ppo_epochs": 2,
        "loss_agg_mode": "seq-mean-token-mean",
        "entropy_coeff": 0.01,
        "own_old": True,
        "tied": False,
    },
    "one step, own old log-probs": {"on": ["2 x 2"], "own_old": True, "ppo_mini_batch_size": 100},
    "many lengths": {"on": ["1 of 4", "3"], "counts": [10, 1, 12], "longest": 40},
    "nothing for most ranks": {
        "on": ["2 x 2", "3"],
        "counts": [1, 2],
        "ppo_mini_batch_size": 1,
        "loss_agg_mode": "seq-mean-token-sum",
    },
    "nothing at all, and Dr.GRPO": {
        "on": ["1 of 4", "2 x 2"],
        "counts": [0, 2, 3],
        "ppo_mini_batch_size": 1,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "norm_by_std": False,
    },
    "a mixture of experts with a balance loss": {
        "on": ["2 x 2", "1 of 4"],
        "model": "mixtral",
        "ppo_max_token_len_per_gpu": 40,
        "router_aux_loss_coef": 0.3,
    },
    "a mixture of experts with replay of the rollout's": {
        "on": ["1 of 4", "2 x 2"],
        "model": "qwen3_moe",
        "router_replay": "R3",
        "counts": [4, 1, 3, 5],
        "ppo_max_token_len_per_gpu": 60,
        "ppo_mini_batch_size": 3,
        "own_old": True,
    },
    "a mixture of experts with replay of the old policy's": {
        "on": ["3", "1 of 4"],
        "model": "qwen3_moe",
        "router_replay": "R2",
        "counts": [3, 4, 2],
        "ppo_mini_batch_size": 1,
        "own_old": True,
    },
}
"""The cases. `on` names the layouts of several ranks that run a case. One rank runs all cases.

The first layout is not slow, or as many as `fast` says.
"""


def few(cases: Any) -> Any:
    """Return the cases without their slow layouts."""
    return {k: case | {"on": case["on"][: case.get("fast", 1)]} for k, case in cases.items()}


def points(cases: Any) -> list[Any]:
    """Return each case with each layout that runs it."""
    fast = {(k, layout) for k, case in few(cases).items() for layout in ("1", *case["on"])}
    every = [(k, layout) for k, case in cases.items() for layout in ("1", *case["on"])]
    return sweep(every, fast.__contains__)


def write_models(folder: Any) -> None:
    write_mixtures(folder)
    for name, tied in (("tied", True), ("untied", False)):
        shape = ModelShape(
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            num_attention_heads=4,
            tie_word_embeddings=tied,
        )
        write_random(f"{folder}/{name}", shape, vocab_size=VOCAB, eos_token_id=0)


LAYOUTS = {"1": (1, 0, 1), "2": (2, 0, 1), "3": (3, 0, 1), "2 x 2": (4, 2, 1), "1 of 4": (4, 0, 4)}
"""The number of ranks, how many share one copy of the model (0: all), and how many share tokens.

"1 of 4" has more ranks for the tokens than heads of keys.
"""


def config_of(case: Any, layout: Any = "1") -> Config:
    actor = {k: v for k, v in case.items() if k in type(Config().actor).model_fields}
    return Config(
        model={"router_replay": case.get("router_replay", "disabled")},
        trainer={
            "device": "cpu",
            "n_gpus_per_node": LAYOUTS[layout][0],
            "fsdp_size": LAYOUTS[layout][1],
        },
        rollout={"max_prompt_length": 8, "max_response_length": 25, "temperature": 0.8},
        actor={
            "ppo_max_token_len_per_gpu": 4096,
            "ppo_mini_batch_size": 4,
            "optim": OPTIM.model_dump(),
            "ulysses_sequence_parallel_size": LAYOUTS[layout][2],
        }
        | actor,
        algorithm={"norm_adv_by_std_in_grpo": case.get("norm_by_std", True)},
        async_training={"use_rollout_log_probs": not case.get("own_old", False)},
    )


def model_of(case: Any, folder: Any) -> Any:
    """Load the model in float64, so that a difference is an error and not rounding.

    Only the norms are computed in float32, by transformers.
    """
    name = case.get("model", "tied" if case.get("tied", True) else "untied")
    model: Any = load_model(f"{folder}/{name}", seed=1, dtype="float32").double()
    if "model" in case:
        model.set_experts_implementation("eager")  # a grouped GEMM has no float64
        with torch.no_grad():  # one optimizer step then changes the choice of some routers
            for layer in model.model.layers:
                layer.mlp.gate.weight.mul_(0.02)
    return model


def engine_of(case: Any, folder: Any, rank: Any, layout: Any = "1") -> Any:
    return sharded_engine(
        PackedPolicy(model_of(case, folder)), config_of(case, layout), folder, rank, layout
    )


def sharded_engine(policy: Any, config: Any, folder: Any, rank: Any, layout: Any) -> Any:
    """Shard a policy over the ranks of a layout, and return this rank's engine."""
    world_size, sections = LAYOUTS[layout][0], (config.model, config.trainer)
    mesh = mesh_of(*sections, world_size, CPU)
    engine = FsdpTrainEngine(
        shard(policy, *sections, mesh, CPU),
        step_options(config),
        model_folder=f"{folder}/tied",
        rank=rank,
        world_size=world_size,
        device=CPU,
    )
    engine.restart(OPTIM, HORIZON)
    return engine


def batches_of(case: Any) -> Any:
    counts = case.get("counts", [4, 1, 3, 5, 2, 4, 3])
    batches = [
        TrainBatch(random_samples(10 + i, counts, case.get("longest", 9)), version=i)
        for i in range(ROUNDS)
    ]
    if case.get("router_replay") != "R3":
        return batches
    return [replace(batch, samples=routed(batch.samples)) for batch in batches]


def run_case(case: Any, folder: Any, rank: Any, layout: Any = "1") -> dict[str, Any]:
    """Run the engine; return log-probs before the first batch, metrics by batch, final weights."""
    engine = engine_of(case, folder, rank, layout)
    batches = batches_of(case)
    log_probs = asyncio.run(engine.log_probs(batches[0].samples))
    reports = [asyncio.run(engine.step(batch)) for batch in batches]
    return {
        "log_probs": log_probs,
        "metrics": [report.metrics for report in reports],
        "steps": [report.optimizer_steps for report in reports],
        "weights": {name: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
                    for name, p in engine.policy.model.named_parameters()},
    }  # fmt: skip


def close(got: Any, want: Any, rtol: Any = 1e-6, atol: Any = 1e-8) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# On several ranks
# --------------------------------------------------------------------------------------------------


def with_bad_log_prob(batch: Any) -> Any:
    """Return the batch with one rollout log-prob that is NaN."""
    sample = next(s for s in batch.samples if len(s.trajectories) > 1)
    bad = Trajectory.of(
        (Segment(tokens_of([1, 2]), log_probs=floats_of([math.nan, -1.0])),),
        sample.trajectories[0].score,
    )
    changed = replace(sample, trajectories=(bad, *sample.trajectories))
    return replace(batch, samples=(changed, *batch.samples))


def demonstrations(n: Any = 24) -> Any:
    """Prompts of three tokens; the answer is the three sorted tokens and the end token."""
    rng = random.Random(5)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(3)] for _ in range(n)]
    return [(tokens_of(p), tokens_of([*sorted(p), 0])) for p in prompts]


def on_ranks(folder: Any, cases: Any, run_case: Any, extras: Any, slow: bool) -> Any:
    """Run the cases on several ranks; return the results by layout and rank.

    The result of the layout's function in `extras` is included. Four processes run all layouts.
    """
    start_ranks(run_rank, (folder, cases if slow else few(cases), run_case, extras), 4)
    return {
        layout: [
            torch.load(f"{folder}/results-{layout}-{rank}.pt", weights_only=False)
            for rank in range(ranks)
        ]
        for layout, (ranks, *_) in LAYOUTS.items()
        if ranks > 1
    }


def run_rank(rank: Any, folder: Any, cases: Any, run_case: Any, extras: Any) -> None:
    """Run one of the four processes and write its results to `folder`.

    It runs each case in its layouts of several ranks, the smallest layout first.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for layout, (world_size, *_) in LAYOUTS.items():
        if world_size == 1 or rank >= world_size:
            continue
        store = dist.FileStore(f"{folder}/store {layout}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        results = {
            name: run_case(case, folder, rank, layout)
            for name, case in cases.items()
            if layout in case["on"]
        }
        if layout in extras:
            results["extra"] = extras[layout](folder, rank)
        torch.save(results, f"{folder}/results-{layout}-{rank}.pt")
        dist.destroy_process_group()


def run_extra(folder: Any, rank: Any) -> dict[str, Any]:
    """Run supervised steps, a skipped step, a checkpoint, an export and one more step."""
    case = CASES["one micro-batch"]
    engine = engine_of(case, folder, rank, "2")
    sft = [asyncio.run(engine.sft_step(demonstrations(5))).metrics for _ in range(2)]
    batch = batches_of(case)[0]
    bad = asyncio.run(engine.step(with_bad_log_prob(batch))).metrics
    asyncio.run(engine.save(f"{folder}/checkpoint"))
    asyncio.run(engine.export(f"{folder}/export"))
    exported = dict(engine.full_weights())
    last = asyncio.run(engine.step(batch)).metrics
    weights = dict(engine.full_weights())
    return {
        "sft": sft,
        "bad": bad,
        "exported": exported,
        "last": last,
        "weights": weights,
        "loaded": run_loaded(folder, rank, "2"),
    }


def run_copies(folder: Any, rank: Any) -> dict[str, Any]:
    """Run two copies of the model on four ranks.

    They resume from the checkpoint of two ranks and save a checkpoint of their own.
    """
    case = CASES["one micro-batch"]
    engine = engine_of(case, folder, rank, "2 x 2")
    asyncio.run(engine.load(f"{folder}/checkpoint"))
    rows = {name: (first, own.clone()) for name, _, _, first, own in engine.shards()}
    last = asyncio.run(engine.step(batches_of(case)[0])).metrics
    asyncio.run(engine.save(f"{folder}/checkpoint of copies"))
    exchanged = {keeps: exchanges(engine, keeps) for keeps in (True, False)}
    weights, loaded = dict(engine.full_weights()), run_loaded(folder, rank, "2 x 2")
    return {
        "rows": rows,
        "last": last,
        "weights": weights,
        "exchanged": exchanged,
        "loaded": loaded,
    }


def exchanges(engine: Any, keeps_whole_gradients: Any) -> Any:
    """Count the gradient exchanges between copies in a mini-batch of several micro-batches."""
    engine.actor.keeps_whole_gradients, engine.actor.limit = keeps_whole_gradients, 12
    honest, calls = dist.all_reduce, []

    def counted(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        calls.append(group)
        return honest(tensor, op, group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        rows = rows_of_examples(demonstrations())
        members = np.arange(len(rows.starts))
        assert len(list(engine.actor.micro_batches(rows, members))) > 1
        meter = Meter(("loss",))
        engine.actor.accumulate(
            rows,
            members,
            1.0,
            lambda out, micro: (out[0].sum(), out[0].sum().detach().reshape(1)),
            meter,
        )
    return len(calls)


def run_loaded(folder: Any, rank: Any, layout: Any) -> Any:
    """Build a float32 engine as a user does; return its weights, buffers and one step's metrics.

    Only rank 0 loads the weights; the results show what each rank received.
    """
    tree = config_of({}, layout).model_dump()
    tree["actor"]["use_kl_loss"], tree["algorithm"]["adv_estimator"] = True, "gae"
    built = build(
        Config.model_validate(tree), f"{folder}/tied", rank=rank, world_size=LAYOUTS[layout][0]
    )
    buffers = [
        dict(m.named_buffers())
        for m in (built.actor.module, built.critic.module, built.reference.module)
    ]
    loaded = {"weights": dict(built.full_weights()), "buffers": buffers}
    built.restart(OPTIM, HORIZON)
    return loaded | {"metrics": asyncio.run(built.step(batches_of({})[0])).metrics}


def logits_of(folder: Any, tokens: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]
