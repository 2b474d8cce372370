"""Tests of the critic.

They cover learning, value steps compared with a plain loop, warm-up, and complete checkpoints.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from millrace.config import Config, OptimConfig
from millrace.train.fsdp import engine as fsdp_train
from millrace.train.fsdp.engine import FsdpTrainEngine
from millrace.types import Author, Sample, Stop, Trajectory
from tests.train import cases as train_cases
from tests.train.algorithm_cases import (
    DECOUPLED,
    config_of,
    correction,
    engine_of,
    experience,
    plain_aggregate,
    plain_optimizer,
    plain_update,
    sample,
    samples_of,
    step,
    trajectory,
    weights,
)
from tests.train.cases import OPTIM

GAE = {"adv_estimator": "gae", "gamma": 0.95, "lam": 0.9}


def optim(**keys: Any) -> dict[str, Any]:
    return OPTIM.model_dump() | keys


def critic_of(engine: FsdpTrainEngine) -> nn.Module:
    assert engine.critic is not None
    return engine.critic.module


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a) and a.keys() == b.keys()


def test_returns_that_prompts_explain_are_learned(folder: str) -> None:
    """The engine is in float32, as a user builds it. Every value starts at 0."""
    config = Config(
        trainer={"device": "cpu"},
        algorithm={"adv_estimator": "gae"},
        critic={"optim": {"lr": 3e-3}},
    )
    engine = fsdp_train.build(config, f"{folder}/tied", rank=0, world_size=1)
    engine.restart(OptimConfig(lr=0.0), 100)
    group = tuple(
        sample(i, *(trajectory(-2.0, -2.5, score=float(i % 2)) for _ in range(2))) for i in range(6)
    )
    metrics = [step(engine, group).metrics for _ in range(40)]
    assert metrics[0]["critic/values"] == 0
    explained = [row["critic/explained_variance"] for row in metrics]
    assert explained[0] == 0 and explained[-1] > 0.8


# Against a plain loop
# --------------------------------------------------------------------------------------------------


class PlainCritic(nn.Module):
    """The body of the transformers model with a value head."""

    def __init__(self, folder: str, head: float) -> None:
        super().__init__()
        self.body = train_cases.model_of({}, folder).base_model
        self.head = nn.Linear(32, 1).double()
        nn.init.constant_(self.head.weight, head)
        nn.init.zeros_(self.head.bias)

    def values(self, one: Sample, t: Trajectory) -> list[Tensor]:
        """Return the value of the state before each token of the policy."""
        tokens, at = list(one.prompt.tokens), list[int]()
        for segment in t.segments:
            if segment.author is Author.POLICY:
                at += range(len(tokens) - 1, len(tokens) - 1 + len(segment.tokens))
            tokens += segment.tokens
        out = self.head(self.body(input_ids=torch.tensor([tokens])).last_hidden_state[0]).squeeze(
            -1
        )
        return [out[i] for i in at]


def plain_returns(values: list[float], score: float) -> list[float]:
    """Return the GAE advantage plus the value, at gamma 0.95 and lambda 0.9."""
    found, advantage, following = [], 0.0, 0.0
    for t in reversed(range(len(values))):
        reward = score if t == len(values) - 1 else 0.0
        advantage = reward + 0.95 * following - values[t] + 0.95 * 0.9 * advantage
        following = values[t]
        found.append(advantage + values[t])
    return found[::-1]


def plain_critic_training(
    folder: str, samples: tuple[Sample, ...], epochs: int, cliprange: float
) -> tuple[PlainCritic, Any]:
    """Train the critic for `epochs` steps on one mini-batch.

    Returns the critic and (losses, share of clipped tokens, returns, start values).
    """
    critic = PlainCritic(folder, 0.1)
    rows = [(one, t) for one in samples for t in one.trajectories]
    with torch.no_grad():
        start = [[float(v) for v in critic.values(one, t)] for one, t in rows]
    returns = [
        plain_returns(old, t.score.value if t.score else 0.0)
        for old, (_, t) in zip(start, rows, strict=True)
    ]
    optimizer, losses, clipped = plain_optimizer(critic), [], []
    for k in range(epochs):
        tokens: list[list[Tensor]] = []
        for (one, t), before, targets in zip(rows, start, returns, strict=True):
            tokens.append([])
            for v, old, target in zip(critic.values(one, t), before, targets, strict=True):
                plain, near = (
                    (v - target) ** 2,
                    (v.clamp(old - cliprange, old + cliprange) - target) ** 2,
                )
                tokens[-1].append(0.5 * torch.maximum(plain, near))
                clipped.append(bool(near > plain))
        loss = plain_aggregate(tokens, "seq-mean-token-mean")
        losses.append(float(loss.detach()))
        plain_update(critic, optimizer, loss, k)
    return critic, (
        losses,
        float(np.mean(clipped)),
        [x for row in returns for x in row],
        [x for row in start for x in row],
    )


def test_value_steps_are_those_of_a_plain_loop(folder: str) -> None:
    """Three epochs move some values beyond the clip."""
    cliprange = 0.002
    actor = {"ppo_mini_batch_size": 100, "ppo_epochs": 3, "loss_agg_mode": "seq-mean-token-mean"}
    config = config_of(
        actor=actor, algorithm=GAE, critic={"cliprange_value": cliprange, "optim": optim()}
    )
    engine, samples = engine_of(folder, config), samples_of()
    with torch.no_grad():
        critic_of(engine).head.weight.fill_(0.1)  # type: ignore[operator]
    metrics = step(engine, samples).metrics
    plain, (losses, clipped, returns, values) = plain_critic_training(folder, samples, 3, cliprange)
    assert metrics["critic/vf_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped) and 0.05 < clipped < 0.95
    assert metrics["critic/returns"] == pytest.approx(np.mean(returns)) and metrics[
        "critic/values"
    ] == pytest.approx(np.mean(values))
    explained = 1 - np.var(np.array(returns) - values) / np.var(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-6)
    want = weights(plain)
    for name, weight in weights(critic_of(engine)).items():
        torch.testing.assert_close(weight, want[name], rtol=1e-5, atol=1e-7)


def test_a_truncated_response_ends_in_its_value_where_that_is_asked_for(folder: str) -> None:
    config = config_of(algorithm={"adv_estimator": "gae", "bootstrap_truncated": True})
    engine = engine_of(folder, config)
    with torch.no_grad():
        # The weight is 0, so every value is 0.4.
        critic_of(engine).head.bias.fill_(0.4)  # type: ignore[operator]
    group = sample(
        0, trajectory(-2.0, -2.0, score=1.0), trajectory(-2.0, -2.0, score=9.0, stop=Stop.LENGTH)
    )
    assert experience(engine, (group,)).returns.tolist() == pytest.approx([1.0, 1.0, 0.4, 0.4])


# Warm-up and checkpoints
# --------------------------------------------------------------------------------------------------


def test_in_critic_warmup_the_policy_holds_still_while_the_critic_learns(folder: str) -> None:
    engine = engine_of(
        folder, config_of(algorithm=GAE, trainer={"critic_warmup": 4}, critic={"optim": optim()})
    )
    policy, critic = weights(engine.policy), weights(critic_of(engine))
    report = step(engine, samples_of())  # two steps
    assert equal(weights(engine.policy), policy) and not equal(weights(critic_of(engine)), critic)
    assert report.optimizer_steps == 2 and report.totals["actor/rejected_steps"] == 0
    assert report.metrics["critic/vf_loss"] > 0 and not [
        name for name in report.metrics if name.startswith("actor/")
    ]
    step(engine, samples_of()[:4])
    assert equal(weights(engine.policy), policy) and engine.steps == 3
    report = step(engine, samples_of()[:4])
    assert not equal(weights(engine.policy), policy)
    assert report.metrics["actor/lr"] == pytest.approx(
        OPTIM.lr * (1 - 2 / (train_cases.HORIZON - 1))
    ), "its clock went on"


EVERYTHING: dict[str, Any] = {
    "actor": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.3,
        "entropy_coeff": 0.1,
        "policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": -5.0},
    },
    "algorithm": GAE
    | {
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.01, "horizon": 100},
    }
    | correction(rollout_is="token", rollout_rs="token_k3", rollout_rs_threshold=1.0),
    "async_training": DECOUPLED,
    "critic": {"optim": optim(lr=1e-3)},
}


def state(engine: FsdpTrainEngine) -> dict[str, Tensor]:
    """Return everything that a checkpoint contains."""
    assert engine.critic is not None and engine.reference is not None
    found = {"kl_coef": torch.tensor(engine.kl_coef, dtype=torch.float64)}
    for model in (engine.actor, engine.critic, engine.reference):
        found |= {f"{model.name} {name}": weight for name, weight in weights(model.module).items()}
        found[f"{model.name} steps"] = torch.tensor(model.steps)
        for name, p in model.module.named_parameters():
            moments = model.optimizer.state.get(p, {}) if model.optimizer else {}
            found |= {f"{model.name} {name} {key}": value.clone() for key, value in moments.items()}
    return found


@pytest.mark.parametrize("warmup", [0, 4])
def test_resumed_equals_uninterrupted_bit_for_bit(warmup: int, folder: str, tmp_path: Path) -> None:
    """This covers all models, both optimizers, step counts and the KL coefficient.

    With `warmup` 4, the policy has not stepped before the checkpoint.
    """
    config = config_of(**EVERYTHING, trainer={"critic_warmup": warmup})
    batches = [samples_of(seed) for seed in range(4)]
    whole = engine_of(folder, config)
    for batch in batches:
        step(whole, batch)
    first = engine_of(folder, config)
    step(first, batches[0])
    asyncio.run(first.save(str(tmp_path)))
    saved = state(first)
    second = engine_of(folder, config)
    step(second, samples_of(7))  # `load` must replace this state
    second.restart(OPTIM, train_cases.HORIZON)
    asyncio.run(second.load(str(tmp_path)))
    assert equal(state(second), saved) and second.steps == 2
    for batch in batches[1:]:
        step(second, batch)
    assert equal(state(second), state(whole))
    assert whole.critic is not None and whole.critic.steps == 8 and whole.kl_coef != 0.5


def test_saving_changes_nothing_of_what_comes_after(folder: str, tmp_path: Path) -> None:
    """A save before the first step must not count as a step in AdamW's bias correction."""
    saver, other = (
        engine_of(folder, config_of(**EVERYTHING)),
        engine_of(folder, config_of(**EVERYTHING)),
    )
    asyncio.run(saver.save(str(tmp_path)))
    for engine in (saver, other):
        step(engine, samples_of())
    assert equal(state(saver), state(other))


def test_critic_and_reference_begin_with_the_policys_weights(folder: str) -> None:
    engine = engine_of(folder, config_of(**EVERYTHING))
    step(engine, samples_of())
    engine.restart(OPTIM, train_cases.HORIZON)
    policy, critic = weights(engine.policy.model.base_model), critic_of(engine)
    assert (
        equal(weights(critic.body), policy)  # type: ignore[arg-type]
        and not critic.head.weight.any()  # type: ignore[operator]
        and not critic.head.bias.any()  # type: ignore[operator]
    )
    assert engine.reference is not None and equal(
        weights(engine.reference.module), weights(engine.policy)
    )
    assert experience(engine, samples_of()).values.abs().max() == 0
