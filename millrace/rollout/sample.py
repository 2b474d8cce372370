"""One sample: n trajectories of one prompt, and an optional greedy one.

Each trajectory is scored as soon as it finishes. Its teachers outside of the trainer read it at the
same time. A reward that compares the trajectories of a sample scores all of them after the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from millrace.errors import SampleError
from millrace.ports import Agent, RewardFunction, Teacher
from millrace.rollout.episode import request_seed, run_episode
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.scoring import scored
from millrace.rollout.session import NO_LIMITS, Draw, Limits
from millrace.rollout.shaping import OverlongBuffer
from millrace.schedule.continuation import whole_response
from millrace.types import (
    WINDOW,
    PolicyVersion,
    Prompt,
    Sample,
    SamplingParams,
    Stop,
    Tokens,
    Trajectory,
)

T = TypeVar("T")
Progress = Callable[[tuple[Trajectory, ...]], None]

_UNDRAWN = Trajectory()
_NOBODY: Mapping[str, Teacher] = {}


@dataclass(frozen=True, slots=True)
class SampleRoller:
    """The rollout of samples, with the agent, rewards and settings that they share."""

    agent: Agent
    reward: RewardFunction | None
    decode: Callable[[Tokens], str]
    params: SamplingParams
    n: int
    seed: int
    limits: Limits = NO_LIMITS
    overlong: OverlongBuffer | None = None
    """The penalty to add to every score."""
    greedy_baseline: bool = False
    """Draw one more response, at temperature 0."""
    lengths: DrawnLengths | None = None
    """The distribution that sets the length of each response, if any."""
    whole_group: bool = False
    """Score all trajectories of a sample, the greedy one last, in one call."""
    retries: int = 0
    """How often a failed episode begins again before its sample fails."""
    teachers_of: Callable[[Prompt], Mapping[str, Teacher]] = lambda prompt: _NOBODY
    """Return the teachers outside of the trainer that read the trajectories of a prompt."""
    window: int = 0
    """The most tokens that one sample draws of its only response. 0 is the whole response."""

    @property
    def num_responses(self) -> int:
        """Return the number of trajectories of each sample: n, plus the greedy one."""
        return self.n + self.greedy_baseline

    async def roll(
        self,
        draw: Draw,
        prompt: Prompt,
        version: PolicyVersion,
        *,
        progress: tuple[Trajectory, ...] = (),
        on_progress: Progress | None = None,
        on_drawn: Callable[[], None] | None = None,
    ) -> Sample:
        """Return the finished sample, continued from `progress`.

        Raises SampleError if one of its trajectories fails or has no score. `on_progress` gets all
        trajectories, the greedy one last, whenever one of them changes. `on_drawn` is called when
        the last token of a trajectory is drawn, before its score is known.
        """
        count = self.num_responses
        trajectories = [*progress[:count], *[_UNDRAWN] * (count - len(progress))]

        def update(i: int, trajectory: Trajectory) -> None:
            trajectories[i] = trajectory
            if on_progress is not None:
                on_progress(tuple(trajectories))

        async def one(i: int) -> Trajectory:
            finished = trajectories[i]
            try:
                if not finished.finished:
                    finished = await run_episode(
                        draw,
                        self.agent,
                        prompt,
                        self._params(prompt, i),
                        f"{prompt.index}/{i}",
                        limits=self.limits,
                        so_far=finished,
                        on_progress=lambda t: update(i, t),
                        retries=self.retries,
                    )
                    if self.window and finished.stop is Stop.LENGTH:
                        finished = self._in_window(prompt, i, finished)
            finally:
                if on_drawn is not None:
                    on_drawn()
            update(i, finished)
            teachers = self.teachers_of(prompt) if i < self.n else _NOBODY
            if not teachers:
                return await self._scored_alone(prompt, finished)
            score, read = await _all_of(
                self._scored_alone(prompt, finished), _taught(prompt, finished, teachers)
            )
            return replace(score, teachers=read.teachers)

        drawn = tuple(await _all_of(*(one(i) for i in range(count))))
        if self.whole_group:
            drawn = tuple(await self._scored(prompt, drawn))
        return Sample(
            prompt, drawn[: self.n], version, drawn[self.n] if self.greedy_baseline else None
        )

    def _params(self, prompt: Prompt, i: int) -> SamplingParams:
        params = self.params.with_seed(request_seed(self.seed, prompt.index, i))
        if self.lengths is not None:
            params = replace(params, ignore_eos=True)
        if self.lengths is not None or self.window:
            left = self._left(prompt, i)
            params = replace(params, max_tokens=min(self.window or left, left))
        return params if i < self.n else replace(params, temperature=0.0)

    def _left(self, prompt: Prompt, i: int) -> int:
        """Return how many tokens the response may still have."""
        most, first = self.params.max_tokens, prompt.first
        if self.lengths is not None:
            most = self.lengths.of(request_seed(self.seed, first, i))
        return most - len(prompt.response_before)

    def _in_window(self, prompt: Prompt, i: int, cut: Trajectory) -> Trajectory:
        """Return a cut trajectory, which goes on if its window ended before its response."""
        goes_on = cut.num_tokens == self.window < self._left(prompt, i)
        return replace(cut, ended=WINDOW) if goes_on else cut

    async def _scored_alone(self, prompt: Prompt, finished: Trajectory) -> Trajectory:
        """Return the trajectory with its score, unless all trajectories are scored at once."""
        if self.whole_group:
            return finished
        return (await self._scored(prompt, [finished]))[0]

    async def _scored(self, prompt: Prompt, drawn: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with their scores. A response that goes on has none."""
        if any(t.goes_on for t in drawn):
            return [*drawn]
        whole = [whole_response(prompt, t) for t in drawn]
        ended = [trajectory for _, trajectory in whole]
        done = self._shaped(await scored(whole[0][0], ended, self.reward, self.decode))
        if prompt.continues is None:
            return done
        return [replace(t, score=of.score) for t, of in zip(drawn, done, strict=True)]

    def _shaped(self, done: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the overlong penalty in their scores, if there is one."""
        if self.overlong is None:
            return done
        return [t.with_score(self.overlong.shape(t.score, t)) for t in done if t.score is not None]


async def _taught(
    prompt: Prompt, finished: Trajectory, teachers: Mapping[str, Teacher]
) -> Trajectory:
    """Return the trajectory with the log-probs of its teachers. Those that it has are kept."""
    asked = {name: one for name, one in teachers.items() if name not in finished.teachers}
    given = await _all_of(*(one.log_probs(prompt, finished) for one in asked.values()))
    return replace(finished, teachers=finished.teachers | dict(zip(asked, given, strict=True)))


async def _all_of(*work: Awaitable[T]) -> list[T]:
    """Return all results. All work ends before the first failure is raised.

    So nothing runs for a dropped sample.
    """
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    failures = [o for o in outcomes if isinstance(o, BaseException)]
    if failures:  # Any other error, such as a dead worker, comes before a failed sample.
        raise min(failures, key=lambda error: isinstance(error, SampleError))
    return [o for o in outcomes if not isinstance(o, BaseException)]
