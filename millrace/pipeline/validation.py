"""Validation on held-out problems: mean@k, best@k, maj@k and greedy, by data source, on the weights of one version."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millrace.errors import RewardError
from millrace.ports import RewardFunction, RolloutEngine
from millrace.rollout.episode import request_seed
from millrace.types import PolicyVersion, Prompt, SamplingParams, Tokens

_SEED = 1 << 40  # sets validation's random streams apart from training's, the same at every version


@dataclass(frozen=True, slots=True)
class Transcript:
    """One problem and what the model said."""

    prompt: str
    response: str
    score: float
    data_source: str
    ground_truth: str


@dataclass(frozen=True, slots=True)
class Result:
    """One validation: values by metric name, and the first responses as text."""

    version: PolicyVersion
    values: dict[str, float]
    transcripts: tuple[Transcript, ...]


@dataclass(frozen=True, slots=True)
class Validator:
    """Draws `n` responses for every problem at `params`, and a greedy one if asked."""

    prompts: Sequence[Prompt]
    pool: RolloutEngine
    reward: RewardFunction
    decode: Callable[[Tokens], str]
    params: SamplingParams
    n: int
    greedy: bool
    seed: int

    async def run(self, version: PolicyVersion) -> Result:
        """The weights must stay those of `version` until this returns."""
        sampled = [[self._one(p, replace(self.params, seed=request_seed(self.seed, _SEED + p.index, k))) for k in range(self.n)]
                   for p in self.prompts]  # fmt: skip
        greedy = [self._one(p, replace(self.params, temperature=0.0, top_p=1.0)) for p in self.prompts] if self.greedy else []
        everything = await asyncio.gather(*(one for problem in sampled for one in problem), *greedy)
        drawn = [everything[i * self.n : (i + 1) * self.n] for i in range(len(self.prompts))]
        values: dict[str, float] = {}
        for source, rows in _by_source(self.prompts).items():
            values |= {f"val/{source}/{name}": v for name, v in summarise([drawn[i] for i in rows]).items()}
            if self.greedy:
                first = len(self.prompts) * self.n
                values[f"val/{source}/greedy"] = _mean([s for i in rows if (s := everything[first + i][1]) is not None])
        return Result(version, values, tuple(self._transcript(p, d[0]) for p, d in zip(self.prompts[:3], drawn, strict=False)))

    async def _one(self, prompt: Prompt, params: SamplingParams) -> tuple[str, float | None]:
        segments = await self.pool.generate(
            prompt.tokens, replace(params, interruptible=False), f"val/{prompt.index}/{params.seed}"
        )
        tokens = segments[0].tokens[:]
        for segment in segments[1:]:
            tokens.extend(segment.tokens)
        text = self.decode(tokens)
        try:
            (score,) = await self.reward.score(prompt, [text])
        except RewardError:
            return text, None  # counted as reward_errors, and part of no mean
        return text, score.value

    @staticmethod
    def _transcript(prompt: Prompt, drawn: tuple[str, float | None]) -> Transcript:
        text, score = drawn
        return Transcript(
            prompt.text, text, float("nan") if score is None else score, prompt.data_source, str(prompt.ground_truth)
        )


def summarise(problems: Sequence[Sequence[tuple[str, float | None]]]) -> dict[str, float]:
    """mean@k, best@k and maj@k over problems, each with k (response, score) pairs.

    best@k is the mean of each problem's best score; maj@k that of its most frequent response (the first one drawn wins a
    tie). Responses whose reward failed are left out and counted in `reward_errors`; a problem with none left is left out.
    """
    k = max((len(p) for p in problems), default=0)
    scored = [[(text, score) for text, score in p if score is not None] for p in problems]
    errors = sum(len(p) for p in problems) - sum(len(p) for p in scored)
    scored = [p for p in scored if p]
    values = {f"mean@{k}": _mean([_mean([s for _, s in p]) for p in scored])}
    if k > 1:
        values[f"best@{k}"] = _mean([max(s for _, s in p) for p in scored])
        values[f"maj@{k}"] = _mean([_majority(p) for p in scored])
    return values | ({"reward_errors": float(errors)} if errors else {})


def _majority(problem: Sequence[tuple[str, float]]) -> float:
    winner, _ = Counter(text.strip() for text, _ in problem).most_common(1)[0]
    return next(score for text, score in problem if text.strip() == winner)


def _by_source(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        rows[prompt.data_source].append(i)
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
