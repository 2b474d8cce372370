"""Tiny float64 engines for the tests of algorithms in the engine, and their plain reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from millrace.config import Config
from millrace.ports import StepReport, TrainBatch
from millrace.train.experience import Experience, Models, make_experience
from millrace.train.fsdp.critic import PackedCritic
from millrace.train.fsdp.engine import FsdpTrainEngine
from millrace.train.fsdp.policy import PackedPolicy
from millrace.train.options import step_options
from millrace.train.rows import arrays_of
from millrace.types import (
    Author,
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Thread,
    Trajectory,
    floats_of,
    tokens_of,
)
from tests.train import cases as train_cases
from tests.train.cases import CPU, HORIZON, OPTIM
from tests.train.plain import plain_log_probs, plain_token_loss
from tests.train.samples import random_samples

TEMPERATURE = 0.8
COUNTS = (4, 1, 3, 5, 2, 4, 3)
"""The number of trajectories of each sample. Mini-batches of four samples make two steps."""
VERSION = 2
"""The live policy version. The tokens of `random_samples` are 0 to 2 versions old."""
DECOUPLED = {"use_rollout_log_probs": False}
REINFORCE = {"policy_loss": {"loss_mode": "reinforce"}}


def samples_of(seed: int = 10, counts: Sequence[int] = COUNTS) -> tuple[Sample, ...]:
    return random_samples(seed, list(counts))


def config_of(**sections: Any) -> Config:
    """Return a configuration: two mini-batches of several micro-batches, unless `actor` differs."""
    actor = {
        "ppo_mini_batch_size": 4,
        "ppo_max_token_len_per_gpu": 60,
        "optim": OPTIM.model_dump(),
    } | sections.pop("actor", {})
    rollout = {"max_prompt_length": 8, "max_response_length": 25, "temperature": TEMPERATURE}
    trainer = {"device": "cpu"} | sections.pop("trainer", {})
    return Config(trainer=trainer, rollout=rollout, actor=actor, **sections)


def correction(**keys: Any) -> dict[str, Any]:
    return {"rollout_correction": keys}


def engine_of(folder: str, config: Config) -> FsdpTrainEngine:
    """Build an engine with the critic and the reference that the configuration needs."""

    def model() -> PackedPolicy:
        return PackedPolicy(train_cases.model_of({}, folder))

    engine = FsdpTrainEngine(
        model(),
        step_options(config),
        model_folder=f"{folder}/tied",
        rank=0,
        world_size=1,
        device=CPU,
        critic=PackedCritic(model().model) if config.algorithm.needs_critic else None,
        reference=model().requires_grad_(False) if config.needs_reference else None,
    )
    engine.restart(OPTIM, HORIZON)
    return engine


def step(
    engine: FsdpTrainEngine, samples: tuple[Sample, ...], version: int = VERSION
) -> StepReport:
    return asyncio.run(engine.step(TrainBatch(samples, version)))


def experience(
    engine: FsdpTrainEngine, samples: tuple[Sample, ...], version: int = VERSION
) -> Experience:
    return make_experience(
        arrays_of(TrainBatch(samples, version), engine.options.algorithm),
        Models(engine.actor, engine.critic, engine.reference),
        engine.options,
        engine.kl_coef,
    )


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def moments(engine: FsdpTrainEngine) -> list[Tensor]:
    """Return copies of all state tensors of the policy's optimizer."""
    assert engine.actor.optimizer is not None
    return [
        value.clone() for state in engine.actor.optimizer.state.values() for value in state.values()
    ]


def log_probs(engine: FsdpTrainEngine, samples: tuple[Sample, ...]) -> list[list[float]]:
    return asyncio.run(engine.log_probs(samples))


def trajectory(
    *rollout: float,
    score: float | None = 0.0,
    version: int = 0,
    stop: Stop = Stop.EOS,
    extra: dict[str, float] | None = None,
) -> Trajectory:
    """A trajectory of one turn with these rollout log-probs."""
    tokens = tokens_of(1 + i % 12 for i in range(len(rollout)))
    segment = Segment(tokens, version=version, log_probs=floats_of(rollout), stop=stop)
    return Trajectory.of((segment,), None if score is None else Score(score, extra or {}))


def sample(index: int, *trajectories: Trajectory, greedy: Trajectory | None = None) -> Sample:
    return Sample(
        Prompt(index, tokens_of([3, 5, 2 + index]), "", "test"), trajectories, greedy=greedy
    )


def at_version(one: Sample, version: int) -> Sample:
    """Return the same sample with one policy version for all its tokens."""

    def moved(t: Trajectory) -> Trajectory:
        segments = (
            replace(s, version=version) if s.author is Author.POLICY else s for s in t.segments
        )
        return replace(t, threads=(Thread(tuple(segments)),))

    return replace(one, trajectories=tuple(moved(t) for t in one.trajectories))


# Plain training
# --------------------------------------------------------------------------------------------------


@dataclass
class Token:
    """A token of the policy in the plain loop."""

    new: Tensor
    """log p of the current policy, with a gradient."""
    rollout: float
    arrival: float
    """log p of the policy at the arrival of the batch."""
    advantage: float
    age: int

    @property
    def current(self) -> float:
        return float(self.new.detach())


Rows = list[list[Token]]
Trained = list[list[tuple[Token, float, float]]]
"""The trained tokens of each trajectory: (token, old log-prob, weight)."""
Rule = Callable[[Rows, Rows], Trained]
"""(trajectories of the mini-batch, trajectories of the batch) -> trained tokens."""


def plain_rows(
    model: Any, samples: tuple[Sample, ...], advantages: dict[tuple[int, int], float], version: int
) -> list[Rows]:
    """Return the trajectories of each sample. `arrival` is set to the current log-prob."""
    found = []
    for i, one in enumerate(samples):
        rows = []
        for j, t in enumerate(one.trajectories):
            versions = [s.version for s in t.segments for _ in s.log_probs]
            told = zip(plain_log_probs(model, one, t, TEMPERATURE), versions, strict=True)
            rows.append(
                [
                    Token(new, mu, float(new.detach()), advantages[i, j], max(version - v, 0))
                    for (new, _, mu), v in told
                ]
            )
        found.append(rows)
    return found


def plain_aggregate(rows: list[list[Tensor]], mode: str) -> Tensor:
    """Aggregate token losses to one number. A trajectory without tokens is ignored."""
    rows = [row for row in rows if row]
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)  # type: ignore[return-value]
    total, sequences = sum(sum(row) for row in rows), len(rows)
    divisor = {
        "token-mean": sum(len(row) for row in rows),
        "token-sum": 1,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-sum-norm": sequences * 25,
    }
    return total / divisor[mode]  # type: ignore[return-value]


def plain_optimizer(module: nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": OPTIM.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps, foreach=False)


def plain_update(module: nn.Module, optimizer: torch.optim.AdamW, loss: Tensor, step: int) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), OPTIM.clip_grad)
    for group in optimizer.param_groups:
        group["lr"] = OPTIM.lr if step < 1 else OPTIM.lr * (1 - (step - 1) / (HORIZON - 1))
    optimizer.step()


@dataclass
class Plain:
    """The result of plain training."""

    weights: dict[str, Tensor]
    losses: list[float]
    """The loss of each step that trained at least one token."""
    trained: int
    """The number of trained tokens of all steps."""
    tokens: int


def plain_train(
    folder: str,
    config: Config,
    samples: tuple[Sample, ...],
    advantages: dict[tuple[int, int], float],
    rule: Rule,
) -> Plain:
    """Train the steps of one batch with the policy loss alone."""
    model, actor = train_cases.model_of({}, folder), config.actor
    optimizer, size = plain_optimizer(model), actor.ppo_mini_batch_size
    arrival = plain_rows(model, samples, advantages, VERSION)
    found = Plain({}, [], 0, sum(len(row) for rows in arrival for row in rows))
    for k, first in enumerate(range(0, len(samples), size)):
        now = plain_rows(model, samples, advantages, VERSION)
        for rows, before in zip(now, arrival, strict=True):
            for row, old in zip(rows, before, strict=True):
                for token, was in zip(row, old, strict=True):
                    token.arrival = was.arrival
        mini = [row for rows in now[first : first + size] for row in rows]
        trained = rule(mini, [row for rows in now for row in rows])
        losses = [[w * plain_loss(token, old, actor) for token, old, w in row] for row in trained]
        count = sum(len(row) for row in losses)
        found.trained += count
        if count:
            loss = plain_aggregate(losses, actor.loss_agg_mode or "token-mean")
            plain_update(model, optimizer, loss, k)
            found.losses.append(float(loss.detach()))
    found.weights = weights(model)
    return found


def plain_loss(token: Token, old: float, actor: Any) -> Tensor:
    if actor.policy_loss.loss_mode == "reinforce":
        return -token.advantage * token.new
    return plain_token_loss(
        token.new, torch.tensor(old, dtype=torch.float64), token.advantage, actor
    )


def group_advantages(
    scores: list[list[float]], kept: list[list[bool]] | None = None
) -> dict[tuple[int, int], float]:
    """Return the GRPO advantages of each group, computed from the kept trajectories only."""
    found = {}
    for i, group in enumerate(scores):
        of = [s for j, s in enumerate(group) if kept is None or kept[i][j]]
        std = np.std(of, ddof=1) if len(of) > 1 else 0.0
        for j, score in enumerate(group):
            counts = (kept is None or kept[i][j]) and len(set(of)) > 1
            found[i, j] = float((score - np.mean(of)) / (std + 1e-6)) if counts else 0.0
    return found


def scores_of(samples: tuple[Sample, ...]) -> list[list[float]]:
    return [[t.score.value for t in one.trajectories if t.score] for one in samples]
