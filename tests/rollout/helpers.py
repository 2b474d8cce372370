"""The segments that a replica returns, in a short notation for tests."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.types import Segment, Stop, floats_of, tokens_of


def said(tokens: Sequence[int], stop: Stop | None = Stop.EOS, version: int = 0) -> Segment:
    return Segment(
        tokens_of(tokens), version=version, log_probs=floats_of([-1.0] * len(tokens)), stop=stop
    )
