"""A policy for tests: each token depends on the seed, its place and the context, as on an engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.types import SamplingParams, Segment, Stop, Tokens, floats_of, tokens_of

EOS = 0


@dataclass
class Stream:
    """Draws tokens up to EOS, and interrupts itself after the tokens that `cuts` says."""

    cuts: Callable[[int], bool] = lambda drawn: False
    """Whether an interruption comes after this number of tokens in all."""
    calls: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    drawn: int = 0
    version: int = 0

    async def __call__(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self.calls.append((tokens.tolist(), params))
        await asyncio.sleep(0)
        out: list[int] = []
        stop: Stop | None = None
        while stop is None:
            at = f"{params.seed}/{params.offset + len(out)}/{[*tokens.tolist(), *out]}"
            out.append(hashlib.blake2b(at.encode(), digest_size=1).digest()[0] % 7)
            self.drawn += 1
            if out[-1] == EOS:
                stop = Stop.EOS
            elif len(out) == params.max_tokens:
                stop = Stop.LENGTH
            elif self.cuts(self.drawn):
                stop = Stop.INTERRUPTED
        segment = Segment(
            tokens_of(out), version=self.version, log_probs=floats_of([-1.0] * len(out)), stop=stop
        )
        self.version += stop is Stop.INTERRUPTED
        return (segment,)
