"""The smoke of `make test` on real weights: a text, its log-probs, and those of the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millrace.decode.engine import build as build_rollout
from millrace.train.fsdp.engine import build as build_trainer
from millrace.types import Prompt, Sample, SamplingParams, Score, Trajectory
from tests.real.model import EXACT, Reference
from tests.real.step import config_of


def test_a_greedy_answer_is_that_of_transformers_and_both_engines_agree_on_it(
    reference: Reference, smollm2: Path
) -> None:
    config, prompt = config_of("rollout"), reference.prompts[1]

    async def main() -> tuple[Trajectory, list[list[float]]]:
        params = SamplingParams(12, temperature=0.0)
        rollout = build_rollout(config.sides, config.model, str(smollm2))
        drawn = Trajectory.of(await rollout.generate(prompt, params, "s"), Score(1.0))
        trainer = build_trainer(config, str(smollm2), rank=0, world_size=1)
        await trainer.begin("rl", 1)
        return drawn, await trainer.log_probs((Sample(Prompt(0, prompt, "", "t"), (drawn,)),))

    drawn, (trained,) = asyncio.run(main())
    (segment,) = drawn.segments
    assert reference.text(segment.tokens) == "The capital of France is Paris.<|im_end|>"
    assert reference.error(prompt, segment) < EXACT
    exact = reference.log_probs(prompt, segment.tokens, config.rollout.temperature)
    assert max(abs(a - b) for a, b in zip(trained, exact.tolist(), strict=True)) < EXACT
