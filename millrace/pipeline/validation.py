"""Validation of one version on problems that are never trained.

The metrics are mean@k, best@k, maj@k and greedy, of the score and of each of its components, by data
source.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from millrace.errors import EpisodeError, RewardError, SampleError
from millrace.ports import Agent, RewardFunction, RolloutEngine
from millrace.rollout.episode import SingleTurn, request_seed, run_episode
from millrace.rollout.scoring import completion_of, conversation_of, scored
from millrace.rollout.session import NO_LIMITS, Limits
from millrace.types import PolicyVersion, Prompt, SamplingParams, Score, Tokens, Trajectory

_SEED = 1 << 40
"""Offset of the seeds: validation and training have different random streams.

The streams of validation are the same at every version.
"""


_FEW = 50
"""A smaller validation may have as many failures as one of this many responses."""

OnScored = Callable[[int, int], None]
"""Called with the number of scored responses and the number of all responses."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response and its score. `score` is None if the episode or the reward failed."""

    text: str
    """The policy's last message."""
    score: Score | None
    conversation: str = ""
    """All messages by author, if there are any besides the prompt and the text."""
    error: str = ""
    """Why there is no score."""

    @property
    def answer(self) -> str | None:
        """Return the answer that the reward found. None if the response has no answer."""
        found = None if self.score is None else self.score.answer
        return self.text.strip() if found is None else found.strip() or None


@dataclass(frozen=True, slots=True)
class Played:
    """One episode of a validation: its prompt, its trajectory and its response."""

    prompt: Prompt
    trajectory: Trajectory | None
    """None if the episode failed."""
    response: Response
    greedy: bool


@dataclass(frozen=True, slots=True)
class Transcript:
    """One problem and the model's response, with the answer that the reward found in it."""

    prompt: str
    response: str
    answer: str | None
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

    def failed(self, error: SampleError) -> None:
        self.errors += 1
        share, least = self.max_error_share, max(self.total, _FEW)
        most = min(share * least, self.total - (share < 1))  # If all fail, there is no result.
        if self.errors > most:
            kind = RewardError if isinstance(error, RewardError) else EpisodeError
            raise kind(
                error.reason,
                f"{self.errors} of the {self.total} responses of a validation had no score. At "
                f"most {int(most)} may fail: reward.max_error_share = {share:g} of {least}, and "
                f"never all. The last error: {error}",
                error.trace,
            ) from error
        self.scored()


@dataclass(frozen=True, slots=True)
class Validator:
    """Plays `n` episodes for every problem with `params`, and a greedy one if `greedy`.

    They are the episodes of training: the same agent plays them, with the same limits.
    """

    prompts: Sequence[Prompt]
    pool: RolloutEngine
    reward: RewardFunction | None
    decode: Callable[[Tokens], str]
    params: SamplingParams
    n: int
    greedy: bool
    seed: int
    max_error_share: float = 1.0
    whole_group: bool = False
    """Score the `n` sampled responses of a problem in one call."""
    agent: Agent = field(default_factory=SingleTurn)
    limits: Limits = NO_LIMITS
    retries: int = 0
    """How often a failed episode begins again before it counts as failed."""
    waits: bool = False
    """Whether a request waits for another replica with the same weights once its own is lost.

    In a training run, the live weights may be others by then.
    """

    async def run(
        self,
        version: PolicyVersion,
        on_scored: OnScored | None = None,
        played: dict[int, Played] | None = None,
    ) -> Result:
        """Validate the live weights. They must stay those of `version` until this returns.

        `played` gets each response once it is scored, by its number. So a validation that fails
        leaves what it has.

        Raises SampleError once more than `max_error_share` of the responses have no score, where
        fewer than 50 count as 50, or once all have none.
        """
        played = {} if played is None else played
        asked = [
            (p, replace(self.params, seed=request_seed(self.seed, _SEED + p.index, k)))
            for p in self.prompts
            for k in range(self.n)
        ]
        sampled = len(asked)
        if self.greedy:
            asked += [(p, replace(self.params, temperature=0.0, top_p=1.0)) for p in self.prompts]
        tally = Tally(len(asked), self.max_error_share, on_scored)
        draws = [asyncio.ensure_future(self._draw(p, params)) for p, params in asked]
        size = self.n if self.whole_group else 1
        starts = [*range(0, sampled, size), *range(sampled, len(asked))]

        async def score(i: int, j: int) -> None:
            prompt, greedy = asked[i][0], i >= sampled
            ended = await self._scored(tally, prompt, draws[i:j])
            for n, (trajectory, response) in enumerate(ended, start=i):
                played[n] = Played(prompt, trajectory, response, greedy)

        calls = [asyncio.ensure_future(score(i, j)) for i, j in pairwise((*starts, len(asked)))]
        try:
            await asyncio.gather(*draws, *calls)
        finally:
            for task in (*draws, *calls):
                task.cancel()
        return self.result(version, played)

    def result(self, version: PolicyVersion, played: Mapping[int, Played]) -> Result:
        """Return the values over the responses in `played`, by their numbers."""
        n, sampled = self.n, len(self.prompts) * self.n
        drawn = [
            [played[j].response for j in range(i, i + n) if j in played]
            for i in range(0, sampled, n)
        ]
        values: dict[str, float] = {}
        by_source: dict[str, list[int]] = defaultdict(list)
        for i, prompt in enumerate(self.prompts):
            by_source[prompt.data_source].append(i)
        for source, rows in by_source.items():
            found = summarise([drawn[i] for i in rows]) if any(drawn[i] for i in rows) else {}
            greedy = [played[sampled + i].response for i in rows if sampled + i in played]
            found |= _greedy(greedy) if greedy else {}
            values |= {f"val/{source}/{name}": value for name, value in found.items()}
        shown = tuple(
            Transcript(
                _question(prompt),
                first.conversation or first.text,
                first.answer,
                float("nan") if first.score is None else first.score.value,
                prompt.data_source,
                str(prompt.ground_truth),
            )
            for prompt, responses in zip(self.prompts[:3], drawn, strict=False)
            for first in responses[:1]
        )
        return Result(version, values, shown)

    async def _draw(self, prompt: Prompt, params: SamplingParams) -> Trajectory | SampleError:
        """Return one episode, or the error that ended it."""
        try:
            return await run_episode(
                self.pool.generate,
                self.agent,
                prompt,
                replace(params, interruptible=self.waits),
                f"val/{prompt.index}/{params.seed}",
                limits=self.limits,
                retries=self.retries,
            )
        except SampleError as error:
            return error

    async def _scored(
        self,
        tally: Tally,
        prompt: Prompt,
        draws: Sequence[asyncio.Future[Trajectory | SampleError]],
    ) -> list[tuple[Trajectory | None, Response]]:
        """Return the responses to one prompt with their scores, from one call of the reward."""
        ended = [await draw for draw in draws]
        drawn = [t for t in ended if isinstance(t, Trajectory)]
        failure: SampleError | None = None
        try:
            drawn = await scored(prompt, drawn, self.reward, self.decode)
        except SampleError as error:
            failure = error
        responses: list[tuple[Trajectory | None, Response]] = []
        given = iter(drawn)
        for one in ended:
            if isinstance(one, SampleError):
                tally.failed(one)
                responses.append((None, Response("", None, error=str(one))))
                continue
            if failure is not None:
                tally.failed(failure)
            else:
                tally.scored()
            trajectory = next(given)
            text = completion_of(trajectory, self.decode).text
            shown = conversation_of(trajectory, self.decode)
            score, why = (None, str(failure)) if failure is not None else (trajectory.score, "")
            responses.append((trajectory, Response(text, score, shown, why)))
        return responses


def _question(prompt: Prompt) -> str:
    """Return the last message of a chat without the marks of its template, else the whole text."""
    messages = prompt.columns.get("prompt")
    return str(messages[-1]["content"]) if messages else prompt.text


def summarise(problems: Sequence[Sequence[Response]]) -> dict[str, float]:
    """Return mean@k, best@k and maj@k of the score over problems, each with k responses.

    best@k is the mean over problems of the best score. maj@k is the mean of the score of the most
    frequent answer: the score of the first response that gives it. The answer that was drawn first
    wins a tie. A response without an answer has no vote. If no response has an answer, the first
    one counts. For each component of the scores, the same follows under COMPONENT/.

    A response whose reward failed is left out and counted in `reward_errors`. A problem without a
    scored response is left out.
    """
    k = max((len(p) for p in problems), default=0)
    scored = [[(r.answer, r.score) for r in p if r.score is not None] for p in problems]
    errors = sum(len(p) for p in problems) - sum(len(p) for p in scored)
    values = _figures(k, [[(answer, s.value) for answer, s in p] for p in scored])
    values |= {"reward_errors": float(errors)} if errors else {}
    for name in _components([s for p in scored for _, s in p]):
        votes = [[(a, s.extra[name]) for a, s in p if name in s.extra] for p in scored]
        values |= {f"{name}/{key}": value for key, value in _figures(k, votes).items()}
    return values


Vote = tuple[str | None, float]
"""An answer, and the score or the component of the response that gives it."""


def _figures(k: int, problems: Sequence[Sequence[Vote]]) -> dict[str, float]:
    scored = [p for p in problems if p]
    values = {f"mean@{k}": _mean([_mean([s for _, s in p]) for p in scored])}
    if k > 1:
        values[f"best@{k}"] = _mean([max(s for _, s in p) for p in scored])
        values[f"maj@{k}"] = _mean([_majority(p) for p in scored])
    return values


def _majority(problem: Sequence[Vote]) -> float:
    votes = Counter(answer for answer, _ in problem if answer is not None)
    winner = votes.most_common(1)[0][0] if votes else None
    return next(score for answer, score in problem if answer == winner)


def _greedy(responses: Sequence[Response]) -> dict[str, float]:
    scores = [r.score for r in responses if r.score is not None]
    values = {"greedy": _mean([s.value for s in scores])}
    for name in _components(scores):
        values[f"{name}/greedy"] = _mean([s.extra[name] for s in scores if name in s.extra])
    return values


def _components(scores: Sequence[Score]) -> list[str]:
    return sorted({name for score in scores for name in score.extra})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
