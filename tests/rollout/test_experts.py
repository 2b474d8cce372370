"""The experts of the tokens of an episode, from an engine to the rows that training reads."""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace import codec
from millrace.errors import MillraceError
from millrace.rollout.requests import Start, cut_by_version
from millrace.rollout.session import Session
from millrace.train.rows import rows_of_samples
from millrace.types import (
    Ending,
    Prompt,
    Sample,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)

PROMPT = Prompt(3, tokens_of([7, 8, 9]), "p", "d")
WIDTH = 4


def experts(tokens: Tokens) -> list[int]:
    """Return the experts of the last token. They depend on all tokens before it."""
    return list(zlib.crc32(tokens.tobytes()).to_bytes(WIDTH, "big"))


class Engine:
    """Draws random tokens with their experts, sometimes interrupted, and by up to two versions."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    async def __call__(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        rng, first = self.rng, params.experts_from
        assert first is not None
        count = rng.randint(0, 4)
        ends = count > 0 and rng.random() < 0.6
        drawn = tokens_of(rng.randrange(50) for _ in range(count))
        whole, last = tokens + drawn, len(tokens) + count - 1
        routed = array("B", [e for at in range(first, last) for e in experts(whole[: at + 1])])
        cut = rng.randint(0, count)
        starts = [Start(0, 0, 0), Start(cut, 1, 1)]
        stop = Stop.EOS if ends else Stop.INTERRUPTED
        said = floats_of([-1.0] * count)
        context = len(tokens) - 1 - first
        return cut_by_version(drawn, said, starts, stop, routed, context)


async def play(session: Session, rng: random.Random) -> Trajectory:
    """Draw a random tree of turns: continued, forked, killed, and threads of their own."""
    turns: list[Any] = []
    for _ in range(rng.randint(1, 6)):
        after = rng.choice([None, *turns])
        context = PROMPT.tokens if not turns else tokens_of([60 + len(turns), 61])
        turns.append((await session.draw(context, after=after)).number)
        if rng.random() < 0.1:
            session.kill(turns[-1])
    return session.trajectory(Ending())


@pytest.mark.parametrize("seed", range(20))
def test_every_token_that_training_reads_has_the_experts_that_the_engine_chose(seed: int) -> None:
    params = SamplingParams(200, seed=1, experts_from=0)
    session = Session(Engine(seed), PROMPT, params, "3/0")
    trajectory = asyncio.run(play(session, random.Random(seed)))
    sent = codec.decoder(Trajectory).decode(codec.pack(trajectory))
    assert sent == trajectory == codec.from_json(codec.to_json(trajectory), Trajectory)
    rows = rows_of_samples([Sample(PROMPT, (sent,))])
    if rows.experts is None:
        assert not rows.inputs.any()
        return
    assert rows.experts.dtype == np.uint8
    for start, read in zip(rows.starts, rows.inputs, strict=True):
        tokens = tokens_of(rows.tokens[start : start + read])
        want = [experts(tokens[: at + 1]) for at in range(read)]
        assert rows.experts[start : start + read].tolist() == want


def test_a_batch_with_experts_for_some_of_its_tokens_is_refused() -> None:
    drawn = Segment(tokens_of([1, 2]), log_probs=floats_of([-1, -1]), stop=Stop.EOS)
    whole = replace(drawn, experts=array("B", [0] * 4 * WIDTH))
    short = replace(drawn, experts=array("B", [0] * 3 * WIDTH))
    for other in (drawn, short):
        one, two = (Sample(PROMPT, (Trajectory.of((s,)),)) for s in (whole, other))
        with pytest.raises(MillraceError, match=r"experts of sample 3 .*router_replay=disabled"):
            rows_of_samples([one, two])
