"""The quickstart's policy, which learns from what a simulation says that its rollouts drew.

Each response is drawn with the weights of the versions that the simulation gave its tokens, scored by
the recipe's reward, and trained by the real train engine.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from command import millrace
from torch.func import functional_call
from transformers import AutoModelForCausalLM, DynamicCache

from millrace.config import recipe
from millrace.ports import StepReport, TrainBatch, TransferReport
from millrace.rewards.builtin import default as score_by_data_source
from millrace.run import problems
from millrace.simulate.engines import SimTrainEngine, SimWeightSync
from millrace.train.fsdp.engine import build as build_train_engine
from millrace.types import (
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


class Learner:
    """The quickstart's policy under training, with the weights of all live versions."""

    def __init__(self, model: str, seed: int, folder: str) -> None:
        keys = [f"model.path={model}", "sft.steps=0", f"trainer.seed={seed}"]
        config = recipe.load("quickstart", keys)
        self.tasks = problems.prepare(config, problems.load(config), Path(folder))
        self.engine = build_train_engine(config, model, rank=0, world_size=1)
        asyncio.run(self.engine.begin("rl", config.schedule.optimizer_steps(5120)))
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.seed, self.steps = seed, 0
        self.eos, self.limit = self.tasks.chat.eos_ids[0], config.rollout.max_response_length

    def keep(self, version: int) -> None:
        self.weights[version] = {name: w.clone() for name, w in self.engine.full_weights()}
        for old in [v for v in self.weights if v < version - 8]:
            del self.weights[old]

    @torch.inference_mode()
    def draw(
        self, prompts: Sequence[Prompt], versions: Sequence[Sequence[int]], seed: int
    ) -> list[Trajectory]:
        """Return a scored response to each prompt. `versions` has that of each of its tokens."""
        random = torch.Generator().manual_seed(seed)
        uniform = torch.rand((len(prompts), self.limit), generator=random, dtype=torch.float64)
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, each in enumerate(versions):
            groups.setdefault(tuple(each), []).append(i)
        drawn: dict[int, Trajectory] = {}
        for each, rows in groups.items():
            ids, mask = self._padded([prompts[i].tokens for i in rows])
            found: list[tuple[list[int], list[float]]] = []
            cache, read, end = DynamicCache(), 0, ids.shape[1]
            going = torch.ones(len(rows), dtype=torch.bool)
            for place, version in enumerate(each):
                if place and version != each[place - 1]:  # as after an interruption
                    cache, read = DynamicCache(), 0
                log = self._forward(version, ids, mask, read, cache)[:, -1]
                read = end + place
                below = log.exp().cumsum(-1) < uniform[rows, place, None]
                tokens = below.sum(-1).clamp(max=log.shape[1] - 1)
                chosen = log.gather(1, tokens[:, None])[:, 0]
                found.append((tokens.tolist(), chosen.tolist()))
                ids = torch.cat([ids, tokens[:, None]], 1)
                mask = torch.cat([mask, torch.ones_like(tokens[:, None])], 1)
                going &= tokens != self.eos
                if not going.any():
                    break
            for k, i in enumerate(rows):
                one = [(t[k], p[k], v) for (t, p), v in zip(found, each, strict=False)]
                ends = [j for j, (token, *_) in enumerate(one) if token == self.eos]
                drawn[i] = self._finished(prompts[i], one[: ends[0] + 1] if ends else one)
        return [drawn[i] for i in range(len(prompts))]

    def _padded(self, rows: Sequence[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
        most = max(map(len, rows))
        ids, mask = (torch.zeros((len(rows), most), dtype=torch.long) for _ in range(2))
        for i, row in enumerate(rows):
            ids[i, most - len(row) :] = torch.tensor(row.tolist())
            mask[i, most - len(row) :] = 1
        return ids, mask

    def _forward(
        self, version: int, ids: torch.Tensor, mask: torch.Tensor, read: int, cache: Any
    ) -> torch.Tensor:
        """Return the log-probs after each token that the cache lacks."""
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, read:]
        inputs = {
            "input_ids": ids[:, read:], "attention_mask": mask, "position_ids": places,
            "past_key_values": cache, "use_cache": cache is not None,
        }  # fmt: skip
        logits = functional_call(self.model, self.weights[version], (), inputs).logits
        return torch.as_tensor(logits).double().log_softmax(-1)

    def _finished(self, prompt: Prompt, drawn: list[tuple[int, float, int]]) -> Trajectory:
        parts = []
        for version in dict.fromkeys(v for *_, v in drawn):
            mine = [(token, p) for token, p, v in drawn if v == version]
            tokens, log_probs = tokens_of(t for t, _ in mine), floats_of(p for _, p in mine)
            parts.append(Segment(tokens, version=version, log_probs=log_probs))
        ended = Stop.EOS if drawn[-1][0] == self.eos else Stop.LENGTH
        parts[-1] = replace(parts[-1], stop=ended)
        text = self.tasks.chat.decode(tokens_of(t for t, *_ in drawn))
        value = score_by_data_source(
            prompt.data_source, text, prompt.ground_truth, prompt.extra_info
        )
        return Trajectory.of(
            tuple(parts), Score(float(value["score"] if isinstance(value, dict) else value))
        )

    def step(self, batch: TrainBatch) -> StepReport:
        """Draw what the simulated trajectories stand for, and train on it."""
        prompts = [self.tasks.train[s.prompt.index] for s in batch.samples]
        n, flat = len(batch.samples[0].trajectories), [p for p in prompts for _ in range(8)]
        versions = [self._versions(t) for s in batch.samples for t in s.trajectories]
        self.steps += 1
        drawn = self.draw(flat, versions, 1000 * self.seed + self.steps)
        samples = tuple(
            Sample(p, tuple(drawn[n * k : n * (k + 1)]), s.admitted_version)
            for k, (p, s) in enumerate(zip(prompts, batch.samples, strict=True))
        )
        work = self.engine.step(TrainBatch(samples, batch.version, batch.lr_scale))
        try:
            work.send(None)  # the engine computes in this thread, and waits for nothing
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        raise RuntimeError("the train engine waits")

    def _versions(self, simulated: Trajectory) -> list[int]:
        """Return the version of each of 8 tokens, which stand for equal shares of a response."""
        whole = [s.version for s in simulated.segments for _ in s.tokens]
        return [whole[k * len(whole) // self.limit] for k in range(self.limit)]

    @torch.inference_mode()
    def held_out(self, version: int) -> float:
        """Return the mean reward that the policy expects on the held-out problems.

        Each problem has one right answer, which scores 1, so this is the answer's probability.
        """
        chat = self.tasks.chat
        right = [tokens_of([*chat.encode(p.ground_truth), self.eos]) for p in self.tasks.val]
        ids, mask = self._padded([p.tokens + t for p, t in zip(self.tasks.val, right, strict=True)])
        log = self._forward(version, ids, mask, 0, None)[:, :-1].gather(2, ids[:, 1:, None])[
            :, :, 0
        ]
        sums = [float(row[-len(t) :].sum().exp()) for row, t in zip(log, right, strict=True)]
        return statistics.mean(sums)


class LearningEngine(SimTrainEngine):
    """A simulated train engine that also learns, if it has a learner."""

    learner: Learner | None = None

    async def step(self, batch: TrainBatch) -> StepReport:
        report = await super().step(batch)
        self.trained.clear()
        if self.learner is None:
            return report
        return replace(report, metrics=self.learner.step(batch).metrics)


class LearningSync(SimWeightSync):
    keep_weights: Callable[[int], None] = staticmethod(lambda version: None)

    async def transfer(self, version: int) -> TransferReport:
        self.keep_weights(version)
        return await super().transfer(version)


def ess_of(row: dict[str, float]) -> float:
    """Return the effective share of a version's tokens, or 1 if nothing measures it."""
    shares = {k: v for k, v in row.items() if k.startswith("staleness/token_share/")}
    each = [v * row.get(k.replace("token_share", "ess"), 1.0) for k, v in shares.items()]
    return sum(each) if each else 1.0


def start_model(folder: Path, seed: int) -> str:
    """Return the quickstart's model after its warm-up, which is made if `folder` has none."""
    if not (folder / "sft").exists():
        millrace("sft", "quickstart", f"trainer.run_dir={folder}", f"trainer.seed={seed}")
    return str(folder / "sft")


def to_reward(curve: list[dict[str, float]], target: float, axis: str) -> float:
    """Return where the mean reward of three versions first reaches a target. Never is infinite."""
    means = [
        statistics.mean(p["reward"] for p in curve[max(0, k - 2) : k + 1])
        for k in range(len(curve))
    ]
    for k, reached in enumerate(means):
        if reached >= target:
            before = curve[k - 1][axis] if k else 0.0
            share = (target - means[k - 1]) / (reached - means[k - 1]) if k else 1.0
            return before + share * (curve[k][axis] - before)
    return math.inf
