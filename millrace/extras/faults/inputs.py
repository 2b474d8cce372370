"""The problems and rewards of a simulated run, and progress that nobody looks at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from millrace.errors import RewardError
from millrace.extras.faults.checks import prompt_at, score_of, text_of
from millrace.observe.progress import State
from millrace.types import Completion, Prompt, Score


class NoView:
    """Progress that nobody looks at."""

    def open(self) -> None: ...

    def update(self, state: State, event: str) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Prompts:
    """The problems of a simulated run."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Prompt:
        return prompt_at(index)

    def where(self, index: int) -> str:
        return f"row {index}"


class Problems:
    """The problems and the tokenizer of a simulated run."""

    def __init__(self) -> None:
        self.train = Prompts()
        self.val = [prompt_at(10_000 + i) for i in range(3)]
        self.chat = self

    @staticmethod
    def decode(tokens: Any) -> str:
        return text_of(tokens)


class Reward:
    """The reward of a simulated run. It can fail and hang."""

    whole_group = False

    def __init__(self, seconds: float) -> None:
        self.failures = 0
        """How many of the next calls fail."""
        self.hangs_s = 0.0
        """The time that the next call takes before it fails at its deadline."""
        self.failed = False
        self._seconds = seconds

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        hangs, self.hangs_s = self.hangs_s, 0.0
        await asyncio.sleep(hangs or self._seconds)
        if hangs or self.failures:
            self.failures -= not hangs
            self.failed = True
            raise RewardError("timeout" if hangs else "raised", "a simulated fault")
        return [Score(score_of(prompt, one.text)) for one in completions]

    def take_figures(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        return None
