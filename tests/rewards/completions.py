"""Completions of single-turn episodes, for tests of rewards."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.types import Completion


def completed(texts: Sequence[str]) -> list[Completion]:
    return [Completion(text) for text in texts]
