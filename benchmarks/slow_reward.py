"""The exact-match reward with a delay of 0.2 s to 0.5 s, like graders and tools.

The text decides the delay.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any


def delay_s(text: str) -> float:
    """Return a delay from 0.2 to 0.5 s, uniform, as a pure function of the text."""
    share = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32
    return 0.2 + 0.3 * share


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    await asyncio.sleep(delay_s(f"{ground_truth}/{solution_str}"))
    return float(solution_str.strip() == str(ground_truth).strip())
