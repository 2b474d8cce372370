"""A second try after a failure: how long it waits, and a reward that is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

from millrace.errors import RewardError
from millrace.ports import RewardFunction
from millrace.types import Completion, Prompt, Score
from millrace.waits.registry import waiting

_FIRST_S = 0.25
_MOST_S = 30.0


def pause_s(name: str, failed: int) -> float:
    """Return the seconds to wait after the try `failed`, from 0.

    They double with each try. Each `name` has its own share of half to one and a half, so that
    those which fail together do not come back together.
    """
    share = blake2b(f"{name}/{failed}".encode(), digest_size=4).digest()
    jitter = 0.5 + int.from_bytes(share, "big") / 2**32
    return jitter * min(_MOST_S, _FIRST_S * 2.0 ** min(failed, 20))


async def pause(name: str, failed: int) -> None:
    """Wait before the next try."""
    with waiting("the clock", f"try {failed + 2} of {name}"):
        await asyncio.sleep(pause_s(name, failed))


class AskedAgain:
    """A reward that is asked again, up to `retries` times, for scores that failed."""

    def __init__(self, reward: RewardFunction, retries: int) -> None:
        self._reward, self._retries = reward, retries

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        for failed in range(self._retries):
            try:
                return await self._reward.score(prompt, completions)
            except RewardError:
                await pause(f"the score of prompt {prompt.index}", failed)
        return await self._reward.score(prompt, completions)

    async def close(self) -> None:
        await self._reward.close()
