"""The first optimizer update in float64, one sequence at a time, with plain torch on transformers.

It shares no code with millrace's training: only the samples and the numbers of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from millrace.config import Config
from millrace.types import (
    Author,
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)
from tests.real.model import Reference

OPTIM = {"lr": 3e-6, "eps": 1e-4, "weight_decay": 0.1, "clip_grad": 0.5}
"""An epsilon of the size of the gradients: else AdamW makes signs of them, and noise of zeros."""
TEMPERATURE = 0.8
PATHS: dict[str, dict[str, Any]] = {
    "rollout": {"actor": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.12, "clip_ratio_c": 1.2}},
    "corrected": {
        "async_training": {"use_rollout_log_probs": False},
        "algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 1.1}},
        "actor": {"entropy_coeff": 0.01},
    },
    "sequence": {
        "actor": {
            "policy_loss": {"loss_mode": "gspo"},
            "clip_ratio_low": 0.03,
            "clip_ratio_high": 0.03,
        }
    },
}
"""The settings of each path of the policy's loss.

    rollout    PPO with dual clip against the rollout's log-probs
    corrected  recomputed old log-probs, truncated importance weights, entropy bonus
    sequence   GSPO: the ratio and the clip of a whole response
"""
ANSWERS = (
    (("56<|im_end|>",), 1.0),
    (("The answer is 54.<|im_end|>",), 0.0),
    (("Let me see", " and think: it is", " 56.<|im_end|>"), 0.6),
    (("Paris<|im_end|>",), 1.0),
    (("It is the city of Lyon, I believe.<|im_end|>",), 0.0),
    (("Rome<|im_end|>",), 0.1),
)
"""Responses to the first two prompts, three each. The environment writes every second part."""


def samples_of(reference: Reference) -> tuple[Sample, ...]:
    """Return ragged samples. Their rollout log-probs are those of weights that were a bit older."""
    noise = torch.Generator().manual_seed(3)
    encode = reference.tokenizer.encode

    def trajectory(prompt: Tokens, parts: tuple[str, ...], score: float) -> Trajectory:
        segments: list[Segment] = []
        context = prompt
        for k, part in enumerate(parts):
            ids = tokens_of(encode(part, add_special_tokens=False))
            if k % 2:
                segments.append(Segment(ids, Author.ENVIRONMENT))
            else:
                exact = reference.log_probs(context, ids, TEMPERATURE)
                noisy = exact + 0.2 * torch.randn(len(ids), generator=noise)
                drawn = floats_of(noisy.clamp(max=-1e-3).tolist())
                segments.append(Segment(ids, version=0, log_probs=drawn, stop=Stop.EOS))
            context = context + ids
        return Trajectory.of(tuple(segments), Score(score))

    groups = ANSWERS[:3], ANSWERS[3:]
    questions = ("What is 7 times 8?", "Name the capital of France.")
    found = []
    for i, (question, group) in enumerate(zip(questions, groups, strict=True)):
        prompt = reference.prompt(question, "Be brief.")
        trajectories = tuple(trajectory(prompt, *answer) for answer in group)
        found.append(Sample(Prompt(i, prompt, question, "t"), trajectories))
    return tuple(found)


def config_of(path: str, ranks: int = 1, **sections: Any) -> Config:
    """Return the configuration of a path. One optimizer step trains all samples."""
    tree: dict[str, Any] = {
        "trainer": {"device": "cpu", "n_gpus_per_node": ranks},
        "rollout": {
            "max_prompt_length": 64,
            "max_response_length": 64,
            "temperature": TEMPERATURE,
            "n": 3,
        },
        "actor": {"ppo_mini_batch_size": 2, "optim": OPTIM},
    }
    for settings in (PATHS[path], sections):
        for section, values in settings.items():
            tree[section] = tree.get(section, {}) | values
    return Config.model_validate(tree)


@dataclass(frozen=True)
class Update:
    """What the first update computes, and the log-probs of trained tokens around it."""

    loss: float
    norm: float
    before: list[list[float]]
    after: list[list[float]]


def exact_model(reference: Reference, model: Any = None) -> Any:
    """Return the model in float64. transformers would compute its norms in float32."""
    model = model or Reference(reference.folder).model.double()
    # transformers drops the gradient of the pad token as an input. It is this model's <|im_end|>.
    model.get_input_embeddings().padding_idx = None
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(_norm, module)
    return model


def _norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def trajectories_of(samples: tuple[Sample, ...]) -> Iterator[tuple[list[int], list[int], Any]]:
    """Yield all tokens, the places of the policy's tokens, and their rollout log-probs."""
    for sample in samples:
        for trajectory in sample.trajectories:
            tokens, places, rollout = list(sample.prompt.tokens), list[int](), list[float]()
            for segment in trajectory.segments:
                if segment.author is Author.POLICY:
                    places += range(len(tokens), len(tokens) + len(segment.tokens))
                    rollout += list(segment.log_probs)
                tokens += list(segment.tokens)
            yield tokens, places, torch.tensor(rollout, dtype=torch.float64)


def read(model: Any, tokens: list[int], places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p of the tokens at `places`, and the entropies before them."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0] / TEMPERATURE
    log_p = logits[[place - 1 for place in places]].log_softmax(-1)
    own = log_p.gather(1, torch.tensor([tokens[place] for place in places])[:, None])[:, 0]
    return own, -(log_p.exp() * log_p).sum(-1)


def advantages_of(samples: tuple[Sample, ...]) -> list[float]:
    """Return the advantages of GRPO."""
    found = []
    for sample in samples:
        scores = [t.score.value for t in sample.trajectories if t.score]
        mean = sum(scores) / len(scores)
        std = math.sqrt(sum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
        found += [(s - mean) / (std + 1e-6) for s in scores]
    return found


def first_update(
    model: Any,
    samples: tuple[Sample, ...],
    path: str,
    trained: dict[str, Any],
    optim: dict[str, float] = OPTIM,
) -> Update:
    """Take one step of AdamW on the parameters `trained` of a float64 model, and change it."""
    rows = list(trajectories_of(samples))
    advantages = advantages_of(samples)
    total = sum(len(places) for _, places, _ in rows)
    loss, before = 0.0, []
    for (tokens, places, rollout), advantage in zip(rows, advantages, strict=True):
        log_probs, entropies = read(model, tokens, places)
        before.append(log_probs.tolist())
        policy, extra = _loss(path, log_probs, entropies, rollout, advantage, total, len(rows))
        loss += float(policy.detach())
        (policy + extra).backward()
    grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    scale = min(1.0, optim["clip_grad"] / (norm + 1e-6))
    with torch.no_grad():
        for name, p in trained.items():
            if p.ndim >= 2:
                p.mul_(1 - optim["lr"] * optim["weight_decay"])
            if name in grads:
                grad = grads[name] * scale
                p.sub_(optim["lr"] * grad / (grad.abs() + optim["eps"]))
            p.grad = None
        after = [read(model, tokens, places)[0].tolist() for tokens, places, _ in rows]
    return Update(loss, norm, before, after)


def _loss(
    path: str,
    new: torch.Tensor,
    entropies: torch.Tensor,
    rollout: torch.Tensor,
    advantage: float,
    tokens: int,
    sequences: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence's share of the policy's loss, and of what is added to it."""
    none = torch.zeros((), dtype=torch.float64)
    actor = PATHS[path]["actor"]
    if path == "corrected":
        weights = (new.detach() - rollout).exp().clamp(max=1.1)
        ratio = (new - new.detach()).exp()
        return (-advantage * ratio * weights).sum() / tokens, (
            -actor["entropy_coeff"] * entropies.sum() / tokens
        )
    low, high = 1 - actor["clip_ratio_low"], 1 + actor["clip_ratio_high"]
    if path == "sequence":
        ratio = (new - rollout).mean().exp()
        return torch.maximum(
            -advantage * ratio, -advantage * ratio.clamp(low, high)
        ) / sequences, none
    ratio = (new - rollout).exp()
    losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
    if advantage < 0:
        losses = losses.clamp(max=-advantage * actor["clip_ratio_c"])
    return losses.sum() / tokens, none


def check(got: Any, want: Update, *, absolute: float = 1e-4, relative: float = 1e-4) -> None:
    """Check (metrics, log-probs before, log-probs after) of an engine against an update."""
    metrics, before, after = got
    assert abs(metrics["actor/pg_loss"] - want.loss) < relative * max(abs(want.loss), 0.1)
    norm = metrics["actor/grad_norm"]
    assert abs(norm / want.norm - 1) < relative, (norm, want.norm)
    for mine, exact in ((before, want.before), (after, want.after)):
        assert [len(row) for row in mine] == [len(row) for row in exact]
        assert distance(mine, exact) < absolute
    # The step moves log-probs by much more than that, so a wrong step is found.
    assert distance(want.before, want.after) > 100 * absolute


def distance(a: list[list[float]], b: list[list[float]]) -> float:
    pairs = zip(a, b, strict=True)
    return max(abs(x - y) for one, other in pairs for x, y in zip(one, other, strict=True))
