"""The learning rate of each optimizer step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.config import Config, OptimConfig, recipe
from millrace.errors import ConfigError
from millrace.train.optim import lr_at
from millrace.train.options import optim_of
from tests.train.cases import HORIZON


def test_the_learning_rate_follows_its_formula() -> None:
    def rates(**kwargs: Any) -> Any:
        optim = OptimConfig(lr=2.0, lr_warmup_steps=4, min_lr_ratio=0.1, **kwargs)
        return [lr_at(optim, 24, step) for step in (0, 3, 4, 14, 23, 24, 99)]

    assert rates(lr_scheduler_type="constant") == [0.5] + [2.0] * 6
    assert rates(lr_scheduler_type="linear") == pytest.approx(
        [0.5, 2, 2, 1.1, 0.2 + 1.8 / 20, 0.2, 0.2]
    )
    last = 0.2 + 1.8 * (1 + np.cos(np.pi * 19 / 20)) / 2
    assert rates(lr_scheduler_type="cosine") == pytest.approx([0.5, 2, 2, 1.1, last, 0.2, 0.2])
    assert lr_at(OptimConfig(lr=1.0), 0, 0) == 1.0
    assert (
        lr_at(
            OptimConfig(lr=1.0, lr_warmup_steps=HORIZON, lr_scheduler_type="linear"),
            HORIZON,
            HORIZON - 1,
        )
        == 1.0
    )


@pytest.mark.parametrize(
    ("ratio", "horizon", "steps"),
    [(0.1, 60, 6), (0.1, 59, 5), (0.29, 100, 29), (0.01, 60, 0), (1.0, 60, 60), (0.5, 1, 0)],
)
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_share_of_the_run_is_its_number_of_steps_rounded_down(
    ratio: float, horizon: int, steps: int, kind: Any
) -> None:
    share = OptimConfig(lr=2.0, lr_warmup_steps_ratio=ratio, lr_scheduler_type=kind)
    count = OptimConfig(lr=2.0, lr_warmup_steps=steps, lr_scheduler_type=kind)
    assert share.warmup_steps(horizon) == steps
    every = range(horizon + 1)
    assert [lr_at(share, horizon, k) for k in every] == [lr_at(count, horizon, k) for k in every]


@pytest.mark.parametrize("section", ["actor", "critic"])
def test_a_share_and_a_number_of_warm_up_steps_contradict_each_other(section: str) -> None:
    both = {"lr_warmup_steps": 5, "lr_warmup_steps_ratio": 0.1}
    with pytest.raises(
        ConfigError, match=rf"{section}\.optim\.lr_warmup_steps_ratio = 0\.1: .* 5,"
    ):
        recipe.parse({section: {"optim": both}})


def test_the_supervised_warm_up_has_its_own_number_of_steps() -> None:
    config = Config(actor={"optim": {"lr_warmup_steps_ratio": 0.5}}, sft={"lr_warmup_steps": 0})
    assert optim_of(config.actor.optim, config.sft, "sft").warmup_steps(100) == 0
    assert optim_of(config.actor.optim, config.sft, "rl").warmup_steps(100) == 50
