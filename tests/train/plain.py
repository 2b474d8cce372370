"""The plain single-process training that the tests compare with the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from millrace.types import Author
from tests.train.cases import HORIZON, OPTIM, batches_of, config_of, model_of
from tests.train.mixtures import EXPERTS, K, forced, routing


def plain_log_probs(model: Any, sample: Any, trajectory: Any, temperature: Any) -> Any:
    """Return (log p, entropy, rollout log p) of each token of the policy.

    One forward pass covers the whole trajectory.
    """
    tokens, drawn = list(sample.prompt.tokens), []
    if hasattr(model, "force"):
        own = routing(sample, sample.trajectories.index(trajectory), 100)
        model.force(own if model.kept is None else model.kept.get(id(trajectory)))
    for segment in trajectory.segments:
        if segment.author is Author.POLICY:
            drawn += [(len(tokens) + i, log_prob) for i, log_prob in enumerate(segment.log_probs)]
        tokens += segment.tokens
    found = model(torch.tensor([tokens]), output_router_logits=hasattr(model, "balance"))
    if drawn and hasattr(model, "balance"):
        # transformers' loss of one sequence and one layer counts k experts for each token.
        model.balance += [
            load_balancing_loss_func((layer[: drawn[-1][0]],), EXPERTS, K) / K
            for layer in found.router_logits
        ]
    log_p = torch.log_softmax(found.logits[0].double() / temperature, -1)
    return [
        (log_p[at - 1, tokens[at]], -(log_p[at - 1].exp() * log_p[at - 1]).sum(), rollout)
        for at, rollout in drawn
    ]


def plain_token_loss(new: Any, old: Any, advantage: Any, actor: Any) -> Any:
    ratio = torch.exp(new - old)
    loss = torch.maximum(
        -advantage * ratio,
        -advantage * torch.clamp(ratio, 1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high),
    )
    return (
        torch.minimum(loss, torch.tensor(-advantage * actor.clip_ratio_c))
        if advantage < 0
        else loss
    )


def plain_loss(
    model: Any, mini_batch: Any, advantages: Any, old_log_probs: Any, config: Any
) -> Any:
    """Return (PPO loss, loss with the entropy bonus) of [(key, sample, trajectory)]."""
    actor, mode = config.actor, config.actor.loss_agg_mode or "token-mean"
    sequences, entropies = [], []
    if actor.router_aux_loss_coef:
        model.balance = []
    for key, sample, trajectory in mini_batch:
        rows = plain_log_probs(model, sample, trajectory, config.rollout.temperature)
        olds = old_log_probs[key] if old_log_probs else [r for _, _, r in rows]
        sequences.append(
            [
                plain_token_loss(n, o, advantages[key], actor)
                for (n, _, _), o in zip(rows, olds, strict=True)
            ]
        )
        entropies.append([e for _, e, _ in rows])

    def agg(values: Any) -> Any:
        sums = [sum(v) for v in values]
        if mode == "token-mean":
            return sum(sums) / max(sum(len(v) for v in values), 1)
        if mode == "seq-mean-token-mean":
            sums = [s / max(len(v), 1) for s, v in zip(sums, values, strict=True)]
        if mode == "seq-mean-token-sum-norm":
            sums = [s / config.rollout.max_response_length for s in sums]
        return sum(sums) / max(sum(1 for v in values if v), 1)

    pg_loss = agg(sequences)
    loss = pg_loss - actor.entropy_coeff * agg(entropies)
    if actor.router_aux_loss_coef:  # the mean over sequences, and the sum over layers
        count = sum(1 for v in sequences if v)
        loss = loss + actor.router_aux_loss_coef * sum(model.balance) / count
    return pg_loss, loss


def plain_advantages(samples: Any, norm_by_std: Any) -> Any:
    advantages = {}
    for i, sample in enumerate(samples):
        rewards = np.array([t.score.value for t in sample.trajectories])
        std = rewards.std(ddof=1) + 1e-6 if norm_by_std and len(rewards) > 1 else 1.0
        for j, reward in enumerate(rewards):
            advantages[i, j] = (
                0.0 if len(set(rewards)) == 1 else float((reward - rewards.mean()) / std)
            )
    return advantages


def plain_run(case: Any, folder: Any, model: Any = None) -> Any:
    """Return the weights and, by batch, the means (PPO loss, gradient norm, learning rate)."""
    config, model, actor = config_of(case), model or model_of(case, folder), config_of(case).actor
    if "router_replay" in case:
        model.force, model.kept = forced(model), None if case["router_replay"] == "R3" else {}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    others = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}]
    groups += [{"params": others, "weight_decay": 0.0}] if others else []
    optimizer = torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps, foreach=False)
    step, results = 0, []
    for batch in batches_of(case):
        keys = [
            [((i, j), s, t) for j, t in enumerate(s.trajectories)]
            for i, s in enumerate(batch.samples)
        ]
        advantages = plain_advantages(batch.samples, config.algorithm.norm_adv_by_std_in_grpo)
        old = None
        if case.get("own_old"):
            with torch.no_grad():
                old, kept = {}, {}
                for k, s, t in (row for rows in keys for row in rows):
                    old[k] = [n for n, _, _ in plain_log_probs(model, s, t, 0.8)]
                    if case.get("router_replay") == "R2":
                        kept[id(t)] = [a + b for a, b in zip(*model.seen, strict=True)]
            if kept:
                model.kept = kept
        losses, norms, rates = [], [], []
        for _ in range(actor.ppo_epochs):
            for first in range(0, len(keys), actor.ppo_mini_batch_size):
                mini_batch = [
                    row for rows in keys[first : first + actor.ppo_mini_batch_size] for row in rows
                ]
                if not any(s.log_probs for _, _, t in mini_batch for s in t.segments):
                    step += 1  # nothing to learn from
                    continue
                pg_loss, loss = plain_loss(model, mini_batch, advantages, old, config)
                optimizer.zero_grad()
                for p in trained:
                    p.grad = torch.zeros_like(p)
                if isinstance(loss, torch.Tensor):
                    loss.backward()
                norms.append(torch.nn.utils.clip_grad_norm_(trained, OPTIM.clip_grad).item())
                rates.append(OPTIM.lr if step < 1 else OPTIM.lr * (1 - (step - 1) / (HORIZON - 1)))
                for group in optimizer.param_groups:
                    group["lr"] = max(rates[-1], 0.0)
                optimizer.step()
                losses.append(float(torch.as_tensor(pg_loss).detach()))
                step += 1
        results.append((np.mean(losses), np.mean(norms), np.mean(np.maximum(rates, 0.0))))
    return {name: p.detach() for name, p in model.named_parameters()}, results
