"""The cases of `test_invariance`: one mini-batch under every loss.

Each case can run at any number of ranks and with micro-batches of any size.
"""

from __future__ import annotations

import os
from typing import Any, get_args

import torch
import torch.distributed as dist

from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.policy_loss import AggMode
from millrace.config import Config
from millrace.ports import TrainBatch
from millrace.train.experience import Models, make_experience
from millrace.train.fsdp.critic import PackedCritic
from millrace.train.fsdp.engine import FsdpTrainEngine
from millrace.train.fsdp.policy import PackedPolicy
from millrace.train.fsdp.sharding import mesh_of, shard
from millrace.train.metrics import Meter
from millrace.train.mini_batch import mini_batches, settle
from millrace.train.optim import gradients_of
from millrace.train.options import step_options
from millrace.train.policy_loss import CRITIC_SUMS, POLICY_SUMS, CriticLoss, PolicyLoss
from millrace.train.rows import arrays_of
from tests.train import cases as train_cases
from tests.train.cases import CPU, OPTIM
from tests.train.samples import random_samples

CUTS = (40, 70)
"""Token limits of a micro-batch on ranks: they make many micro-batches, and some."""
WHOLE = 4096
SAMPLES = random_samples(3, [4, 1, 3, 5, 2, 3, 0])
VERSION = 2

COV = {"clip_cov_ratio": 0.2, "clip_cov_lb": -5.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.2}
BOUNDS = {
    "dppo_tv": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
    "dppo_kl": {"clip_ratio_low": 0.004, "clip_ratio_high": 0.004},
}
OWN = {"async_training": {"use_rollout_log_probs": False}}


def _correction(**keys: Any) -> dict[str, Any]:
    return {"algorithm": {"rollout_correction": keys}}


TEACHERS = {"a": {"path": "a", "weight": 0.7}, "b": {"path": "b", "weight": 0.2}}
CASES: dict[str, dict[str, Any]] = {
    f"{mode}, {agg}": {
        "actor": {
            "policy_loss": {"loss_mode": mode, **COV},
            "loss_agg_mode": agg,
            **BOUNDS.get(mode, {}),
        }
    }
    for i, mode in enumerate(POLICY_LOSSES)
    for j, agg in enumerate(get_args(AggMode))
    if mode == "vanilla" or (i + j) % len(get_args(AggMode)) == 0
} | {
    "token weights, normalised": OWN
    | _correction(rollout_is="token", rollout_is_batch_normalize=True),
    "sequence weights in a band": OWN
    | _correction(rollout_is="sequence", rollout_is_threshold="0.002_5.0"),
    "rejection by token and by sequence": OWN
    | _correction(
        rollout_rs="token_k1,seq_max_k2",
        rollout_rs_threshold=("0.4_3.0", 8),
        rollout_token_veto_threshold=0.02,
    ),
    "rejection before the baseline": OWN
    | _correction(
        rollout_rs="seq_mean_k1", rollout_rs_threshold="0.28_1.5", reject_before_baseline=True
    ),
    "rejection by the current policy": _correction(
        rollout_rs="seq_mean_k3", rollout_rs_threshold=1.1
    ),
    "weights in passing": _correction(rollout_is="sequence")
    | {"actor": {"policy_loss": {"loss_mode": "reinforce"}}},
    "interpolated": OWN | _correction(rollout_is="token", proximal="interpolate"),
    "interpolated, normalised": OWN
    | _correction(rollout_is="token", rollout_is_batch_normalize=True, proximal="interpolate"),
    "geometric weights with a lower bound": OWN
    | _correction(rollout_is="geometric", rollout_is_threshold_lower=0.25),
    "second moment": _correction(m2_threshold=0.1, rollout_rs="seq_max_k1", rollout_rs_threshold=9),
    "off-policy mask": _correction(off_policy_mask_threshold=1.0)
    | {"actor": {"policy_loss": {"loss_mode": "sapo", "importance_sampling_level": "sequence"}}},
    "linear proximal": OWN | _correction(rollout_is="token", proximal="linear"),
    "high entropy": {
        "actor": {
            "policy_loss": {
                "loss_mode": "cispo",
                "importance_sampling_level": "sequence",
                "top_entropy_quantile": 0.3,
            },
            "use_kl_loss": True,
            "use_bias_correction_kl": True,
            "kl_loss_coef": 0.3,
        }
    },
    "gspo with dual clip": {
        "actor": {"policy_loss": {"importance_sampling_level": "sequence"}, "clip_ratio_c": 1.05},
        "algorithm": {
            "adv_estimator": "gpg",
            "f_norm": "std",
            "adv_norm": {"mean_level": "batch", "std_level": "group"},
        },
    },
    "age": _correction(max_token_age=1),
    "KL and entropy": {
        "actor": {
            "use_kl_loss": True,
            "kl_loss_type": "k3+",
            "kl_loss_coef": 0.3,
            "entropy_coeff": 0.1,
        }
    },
    "KL in the reward": {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.5}}},
    "critic": {"algorithm": {"adv_estimator": "gae", "lam": 0.9, "gamma": 0.95}},
    "Huber": {
        "algorithm": {
            "adv_estimator": "gae",
            "reward_norm": {"mean_level": "group", "mean_leave1out": True},
            "adv_norm": {"mean_level": "batch", "std_level": "batch"},
        },
        "critic": {"loss_fn_type": "huber", "huber_delta": 0.2},
    },
    "optimal token baseline": {"algorithm": {"adv_estimator": "optimal_token_baseline"}},
    "everything": {
        "actor": {
            "policy_loss": {"loss_mode": "gspo"},
            "clip_ratio_low": 0.01,
            "use_kl_loss": True,
            "kl_loss_coef": 0.2,
            "entropy_coeff": 0.1,
            "loss_agg_mode": "seq-mean-token-sum-norm",
        },
        "algorithm": {
            "adv_estimator": "reinforce_plus_plus",
            "use_kl_in_reward": True,
            "rollout_correction": {
                "rollout_is": "token",
                "rollout_rs": "token_k3",
                "rollout_rs_threshold": 0.4,
                "max_token_age": 1,
            },
        },
    }
    | OWN,
    "k1 of two teachers, beside rewards": {
        "teachers": TEACHERS,
        "distillation": {"task_loss_coef": 0.5, "max_log_ratio": 2.0},
    },
    "forward KL to a teacher's likeliest tokens": {
        "teachers": {"a": TEACHERS["a"]},
        "distillation": {"loss_mode": "forward_kl_topk", "topk": 3, "use_task_rewards": False},
    },
    "reverse KL to those of two teachers": {
        "teachers": TEACHERS,
        "distillation": {"loss_mode": "reverse_kl_topk", "topk": 13},
    },
}

"""Each loss has one aggregation in turn; `vanilla` has them all."""

LAYOUTS = {"4": (4, 0, 1), "2 x 2": (4, 2, 1), "2 x 1": (2, 1, 1), "2 of 2": (4, 2, 2)}
"""The number of ranks, how many share one copy of the model (0: all), and how many share tokens."""


def cases_of(layout: str) -> list[str]:
    """Return the cases of a layout: all where ranks share tokens, and else every fourth one.

    Every layout has all four ways to keep gradients and to cut a mini-batch: see `run_rank`.
    """
    k, shares = list(LAYOUTS).index(layout), LAYOUTS[layout][2] > 1
    return [name for i, name in enumerate(CASES) if shares or (i + i // 4) % 4 == k]


def few_of(layout: str) -> list[str]:
    """Return the cases that are not slow: each in one layout."""
    k = list(LAYOUTS).index(layout)
    return [name for i, name in enumerate(CASES) if (i + i // 4) % 4 == k]


def config_of(
    case: dict[str, Any], world_size: int = 1, fsdp_size: int = 0, sharing: int = 1
) -> Config:
    actor = {"ppo_max_token_len_per_gpu": 4096, "ppo_mini_batch_size": 7}
    actor |= {"ulysses_sequence_parallel_size": sharing} | case.get("actor", {})
    return Config(
        trainer={"device": "cpu", "n_gpus_per_node": world_size, "fsdp_size": fsdp_size},
        rollout={"max_prompt_length": 8, "max_response_length": 25, "temperature": 0.8},
        actor=actor,
        algorithm=case.get("algorithm", {}),
        async_training=case.get("async_training", {}),
        critic=case.get("critic", {}),
        teachers=case.get("teachers", {}),
        distillation=case.get("distillation", {}),
    )


def engine_of(
    folder: str, rank: int, world_size: int, fsdp_size: int = 0, sharing: int = 1
) -> FsdpTrainEngine:
    """Build an engine whose reference differs from the policy and whose critic is not zero."""
    config = config_of({}, world_size, fsdp_size, sharing)
    sections = (config.model, config.trainer)
    mesh = mesh_of(*sections, world_size, CPU)

    def model() -> PackedPolicy:
        return PackedPolicy(train_cases.model_of({}, folder))

    engine = FsdpTrainEngine(
        shard(model(), *sections, mesh, CPU),
        step_options(config),
        model_folder=folder,
        rank=rank,
        world_size=world_size,
        device=CPU,
        critic=shard(PackedCritic(model().model), *sections, mesh, CPU),
        reference=shard(model().requires_grad_(False), *sections, mesh, CPU),
        teachers={x: shard(model().requires_grad_(False), *sections, mesh, CPU) for x in TEACHERS},
    )
    engine.restart(OPTIM, 10)
    with torch.no_grad():
        factors = {engine.reference: 1.2, engine.teachers["a"]: 0.8, engine.teachers["b"]: 1.4}
        for frozen, factor in factors.items():
            for parameter in frozen.module.parameters():
                parameter.mul_(factor)
        engine.critic.module.head.weight.fill_(0.1)  # type: ignore[operator]
    return engine


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def run_case(engine: FsdpTrainEngine, case: dict[str, Any], cut: int) -> dict[str, Any]:
    """Return the sums, the gradients and the number of trained tokens of one mini-batch."""
    config = config_of(case)
    options = engine.options = step_options(config)
    critic = engine.critic if config.algorithm.needs_critic else None
    for model in (engine.actor, engine.critic, engine.reference, *engine.teachers.values()):
        model.limit = cut
    for teacher in engine.teachers.values():
        teacher.module.topk = config.distillation.candidates  # type: ignore[assignment]
    data = make_experience(
        arrays_of(TrainBatch(SAMPLES, VERSION), options.algorithm, config.teachers),
        Models(
            engine.actor,
            critic,
            engine.reference,
            {name: engine.teachers[name] for name in config.teachers},
        ),
        options,
        engine.kl_coef,
    )
    (members,) = mini_batches(data, 7)
    mini = settle(data, members, engine.actor, options, untouched=True)
    found: dict[str, Any] = {"tokens": mini.tokens, "metrics": mini.metrics}
    for model, loss, names in (
        (engine.actor, PolicyLoss, POLICY_SUMS),
        (critic, CriticLoss, CRITIC_SUMS),
    ):
        if model is not None:
            meter = Meter(names)
            model.accumulate(data.rows, members, 0.8, loss(data, mini, options), meter)
            found[f"{model.name} sums"] = model.reduce(meter.take(), dist.ReduceOp.SUM)
            found[f"{model.name} gradients"] = [whole(g) for g in gradients_of(model.parameters)]
            for parameter in model.parameters:
                parameter.grad = None
    return found


def run_rank(rank: int, folder: str, slow: bool) -> None:
    """Run the cases of every layout, in one of four processes; rank 0 writes the results."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for layout, (world_size, fsdp_size, sharing) in LAYOUTS.items():
        if rank >= world_size:
            continue
        store = dist.FileStore(f"{folder}/invariance {layout}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        engine = engine_of(folder, rank, world_size, fsdp_size, sharing)
        results = {}
        for name in cases_of(layout) if slow else few_of(layout):
            i = list(CASES).index(name)
            # A small model keeps whole gradients until the last micro-batch; a large one does not.
            engine.actor.keeps_whole_gradients = engine.critic.keeps_whole_gradients = i % 4 < 2
            results[name] = run_case(engine, CASES[name], CUTS[i % 2])
        if not rank:
            torch.save(results, f"{folder}/invariance {layout}.pt")
        dist.destroy_process_group()
