"""A reward model on a GPU gives the scores of the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.config import RewardConfig
from millrace.rewards.pool import RewardPool
from millrace.types import Completion
from tests.rewards.classifiers import random_classifier
from tests.rewards.test_model import PROMPT, RESPONSES

pytestmark = pytest.mark.gpu


async def scores(folder: Path, **keys: Any) -> list[float]:
    config = RewardConfig.model_validate({"model": {"path": str(folder), "batch_size": 8} | keys})
    pool = RewardPool(config)
    try:
        answers = await asyncio.gather(
            *(pool.score(PROMPT, [Completion(text)]) for text in RESPONSES)
        )
        return [score.value for (score,) in answers]
    finally:
        await pool.close()


def test_a_gpu_gives_the_scores_of_the_cpu(tmp_path: Path) -> None:
    folder = random_classifier(tmp_path)
    expected = asyncio.run(scores(folder, device="cpu"))
    assert asyncio.run(scores(folder, device="cuda")) == pytest.approx(expected, abs=1e-3)
    half = asyncio.run(scores(folder, device="cuda", dtype="bfloat16"))
    assert half == pytest.approx(expected, abs=0.1)
