"""Validation of one version on problems that are never trained.

The metrics are mean@k, best@k, maj@k and greedy, by data source.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millrace.errors import RewardError
from millrace.ports import RewardFunction, RolloutEngine
from millrace.rollout.episode import request_seed
from millrace.types import PolicyVersion, Prompt, SamplingParams, Tokens

_SEED = 1 << 40
"""Offset of the seeds: validation and training have different random streams.

The streams of validation are the same at every version.
"""


OnScored = Callable[[int, int], None]
"""Called with the number of scored responses and the number of all responses."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """One problem and the model's response."""

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


@dataclass(slots=True)
class Tally:
    """The progress of a validation."""

    total: int
    max_error_share: float
    on_scored: OnScored | None
    completed: int = 0
    errors: int = 0

    def scored(self) -> None:
        self.completed += 1
        if self.on_scored is not None:
            self.on_scored(self.completed, self.total)

    def failed(self, error: RewardError) -> None:
        self.errors += 1
        if self.errors > self.max_error_share * self.total:
            raise RewardError(
                error.reason,
                f"{self.errors} of the {self.total} responses of a validation had no score, more "
                f"than reward.max_error_share = {self.max_error_share:g} of them. "
                f"The last error: {error}",
            ) from error
        self.scored()


@dataclass(frozen=True, slots=True)
class Validator:
    """Draws `n` responses for every problem with `params`, and a greedy one if `greedy`."""

    prompts: Sequence[Prompt]
    pool: RolloutEngine
    reward: RewardFunction
    decode: Callable[[Tokens], str]
    params: SamplingParams
    n: int
    greedy: bool
    seed: int
    max_error_share: float = 1.0

    async def run(self, version: PolicyVersion, on_scored: OnScored | None = None) -> Result:
        """Validate the live weights. They must stay those of `version` until this returns.

        Raises RewardError once more than `max_error_share` of all responses have no score.
        """
        total = len(self.prompts) * (self.n + self.greedy)
        tally = Tally(total, self.max_error_share, on_scored)
        sampled = [
            self._one(tally, p, self._sampling(p, k)) for p in self.prompts for k in range(self.n)
        ]
        greedy = (
            [
                self._one(tally, p, replace(self.params, temperature=0.0, top_p=1.0))
                for p in self.prompts
            ]
            if self.greedy
            else []
        )
        tasks = [asyncio.ensure_future(one) for one in (*sampled, *greedy)]
        try:
            responses = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        drawn = [responses[i * self.n : (i + 1) * self.n] for i in range(len(self.prompts))]
        values: dict[str, float] = {}
        for source, rows in _by_source(self.prompts).items():
            values |= {
                f"val/{source}/{name}": v for name, v in summarise([drawn[i] for i in rows]).items()
            }
            if self.greedy:
                first = len(self.prompts) * self.n
                values[f"val/{source}/greedy"] = _mean(
                    [s for i in rows if (s := responses[first + i][1]) is not None]
                )
        return Result(
            version,
            values,
            tuple(self._transcript(p, d[0]) for p, d in zip(self.prompts[:3], drawn, strict=False)),
        )

    def _sampling(self, prompt: Prompt, k: int) -> SamplingParams:
        """Return the settings of the k-th sampled response."""
        seed = request_seed(self.seed, _SEED + prompt.index, k)
        return replace(self.params, seed=seed)

    async def _one(
        self, tally: Tally, prompt: Prompt, params: SamplingParams
    ) -> tuple[str, float | None]:
        segments = await self.pool.generate(
            prompt.tokens, replace(params, interruptible=False), f"val/{prompt.index}/{params.seed}"
        )
        tokens = segments[0].tokens[:]
        for segment in segments[1:]:
            tokens.extend(segment.tokens)
        text = self.decode(tokens)
        try:
            (score,) = await self.reward.score(prompt, [text])
        except RewardError as error:
            tally.failed(error)
            return text, None  # Counted in reward_errors and left out of every mean.
        tally.scored()
        return text, score.value

    @staticmethod
    def _transcript(prompt: Prompt, drawn: tuple[str, float | None]) -> Transcript:
        text, score = drawn
        return Transcript(
            prompt.text,
            text,
            float("nan") if score is None else score,
            prompt.data_source,
            str(prompt.ground_truth),
        )


def summarise(problems: Sequence[Sequence[tuple[str, float | None]]]) -> dict[str, float]:
    """Return mean@k, best@k and maj@k over problems, each with k (response, score) pairs.

    best@k is the mean over problems of the best score. maj@k is the mean of the score of the most
    frequent response; the first one drawn wins a tie. A response whose reward failed is left out
    and counted in `reward_errors`. A problem without a scored response is left out.
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
