"""One sample: n trajectories of one prompt, each scored the moment it is finished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.errors import RewardError
from millrace.ports import Environment, RewardFunction
from millrace.rollout.episode import Draw, request_seed, run_episode
from millrace.types import PolicyVersion, Prompt, Sample, SamplingParams, Tokens, Trajectory

Progress = Callable[[tuple[Trajectory, ...]], None]


@dataclass(frozen=True, slots=True)
class SampleRoller:
    """Rolls out samples: the environments, the rewards and the sampling that all of them share."""

    make_environment: Callable[[Prompt], Environment]
    reward: RewardFunction
    decode: Callable[[Tokens], str]
    params: SamplingParams
    n: int
    seed: int

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
        """The finished sample, continued from `progress`. Raises RewardError if one of its trajectories has no score.

        `on_progress` sees all n trajectories whenever one of them changes; `on_drawn` is called as the last token of each
        trajectory is drawn, before its score is known.
        """
        trajectories = [*progress, *[Trajectory()] * (self.n - len(progress))]

        def update(i: int, trajectory: Trajectory) -> None:
            trajectories[i] = trajectory
            if on_progress is not None:
                on_progress(tuple(trajectories))

        async def one(i: int) -> Trajectory:
            finished = await run_episode(
                draw,
                self.make_environment(prompt),
                prompt,
                replace(self.params, seed=request_seed(self.seed, prompt.index, i)),
                f"{prompt.index}/{i}",
                so_far=trajectories[i],
                on_progress=lambda t: update(i, t),
            )
            if on_drawn is not None:
                on_drawn()
            update(i, finished)
            (score,) = await self.reward.score(prompt, [self.decode(finished.tokens)])
            return replace(finished, score=score)

        # Siblings settle before the first failure is raised: none is left running for a sample that is gone.
        outcomes = await asyncio.gather(*(one(i) for i in range(self.n)), return_exceptions=True)
        failures = [o for o in outcomes if isinstance(o, BaseException)]
        if failures:  # a lost worker is no failed reward: it comes first
            raise min(failures, key=lambda error: isinstance(error, RewardError))
        return Sample(prompt, tuple(o for o in outcomes if isinstance(o, Trajectory)), version)
