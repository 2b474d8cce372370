"""Advantages and the critic's targets of windows, against plain NumPy in float64.

The reference follows T-PPO (arXiv 2506.15050, section 3). It reads lists, one token at a time.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.train.responses import ended_responses
from millrace.train.rows import rows_of_samples
from millrace.types import (
    WINDOW,
    Continuation,
    Sample,
    Score,
    Stop,
    Trajectory,
    floats_of,
    tokens_of,
)
from tests.train.algorithm_cases import config_of, engine_of, experience, sample, trajectory

WINDOW_TOKENS, GAMMA, LAM = 4, 0.9, 0.7


@dataclass
class Window:
    """The newest window of a response."""

    before: list[float]
    """Values of the windows before it."""
    size: int
    score: float | None
    """None if the response goes on."""
    cut: bool = False
    """Whether the length limit ended it."""


def windows_of(seed: int) -> list[Window]:
    """Draw first, middle and last windows, and whole responses."""
    dice, found = random.Random(seed), list[Window]()
    for before in (0, 0, 4, 8, 4, 0, 12, 8):
        goes_on = dice.random() < 0.4
        size = WINDOW_TOKENS if goes_on else dice.randint(1, WINDOW_TOKENS)
        values = [dice.uniform(-1, 1) for _ in range(before)]
        score = None if goes_on else dice.uniform(-1, 1)
        found.append(Window(values, size, score, not goes_on and dice.random() < 0.4))
    return found


def sample_of(i: int, window: Window) -> Sample:
    drawn = [-2.0 - 0.1 * k for k in range(window.size)]
    stop = Stop.LENGTH if window.cut else Stop.EOS
    one = sample(i, trajectory(*drawn, score=window.score, version=2, stop=stop))
    if window.score is None:
        (thread,) = one.trajectories[0].threads
        (segment,) = thread.segments
        open_ = replace(thread, segments=(replace(segment, stop=None),))
        one = replace(one, trajectories=(Trajectory((open_,), ended=WINDOW),))
    if size := len(window.before):
        number = size // WINDOW_TOKENS
        before = Continuation(0, number, len(one.prompt.tokens), floats_of(window.before))
        tokens = one.prompt.tokens + tokens_of([4] * size)
        one = replace(one, prompt=replace(one.prompt, index=9 + i, tokens=tokens, continues=before))
    return one


def plain_advantages(
    window: Window, values: list[float], lam: float, bootstrap: bool
) -> list[float]:
    """delta_t = r_t + gamma V_{t+1} - V_t, and A_t = delta_t + gamma lambda A_{t+1}.

    V after an end is 0. V after a window that goes on is that of its last state.
    """
    ends = window.score is not None and not (window.cut and bootstrap)
    after, advantage, found = (0.0 if ends else values[-1]), 0.0, list[float]()
    for t in reversed(range(window.size)):
        reward = window.score if ends and t == window.size - 1 else 0.0
        assert reward is not None
        advantage = reward + GAMMA * after - values[t] + GAMMA * lam * advantage
        after = values[t]
        found.insert(0, advantage)
    return found


def plain_targets(window: Window, values: list[float], bootstrap: bool) -> list[float]:
    """Rewards to go of the whole response: the critic's lambda is 1."""
    size = len(window.before) + window.size
    last, start = window.score, size - 1
    if window.cut and bootstrap:
        last, start = values[-1], size
    assert last is not None
    return [GAMMA ** (start - t) * last for t in range(size)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("keys", "tppo"),
    [
        ({}, {}),
        ({}, {"adaptive_lam": True, "ignore_last_k": 2}),
        ({"bootstrap_truncated": True}, {"ignore_last_k": 1}),
        ({"bootstrap_truncated": True, "overlong_filtering": True}, {"adaptive_lam": True}),
    ],
)
def test_advantages_and_targets_are_those_of_the_reference(
    folder: str, seed: int, keys: dict[str, Any], tppo: dict[str, Any]
) -> None:
    algorithm = {"adv_estimator": "gae", "gamma": GAMMA, "lam": LAM} | keys
    algorithm["tppo"] = {"window": WINDOW_TOKENS} | tppo
    engine = engine_of(folder, config_of(algorithm=algorithm))
    assert engine.critic is not None
    torch.manual_seed(seed)
    with torch.no_grad():
        engine.critic.module.head.weight.normal_()  # type: ignore[union-attr,operator]
    windows = windows_of(seed)
    batch = tuple(sample_of(i, w) for i, w in enumerate(windows))
    data = experience(engine, batch)
    assert data.values is not None
    own = data.values.split([w.size for w in windows])
    bootstrap, filters = (bool(keys.get(k)) for k in ("bootstrap_truncated", "overlong_filtering"))

    raw, trained = list[float](), list[bool]()
    for window, values in zip(windows, own, strict=True):
        lam, length = LAM, len(window.before) + window.size
        if tppo.get("adaptive_lam"):
            length += WINDOW_TOKENS // 2 if window.score is None else 0
            lam = max(1 - 1 / (0.05 * length), LAM)
        raw += plain_advantages(window, values.tolist(), lam, bootstrap)
        left_out = tppo.get("ignore_last_k", 0) if window.score is None else 0
        if filters and window.cut:
            left_out = window.size
        trained += [t < window.size - left_out for t in range(window.size)]
    mask, expected = np.array(trained), np.array(raw)
    assert data.include.tolist() == trained
    mean, spread = expected[mask].mean(), expected[mask].var(ddof=1)
    whitened = (expected - mean) / np.sqrt(spread + 1e-8)
    np.testing.assert_allclose(data.advantages[mask], whitened[mask], rtol=1e-6, atol=1e-7)

    scores = torch.tensor([w.score or 0.0 for w in windows], dtype=torch.float64)
    responses = ended_responses(batch, scores, own, engine.options.algorithm)
    ended = [
        (w, v)
        for w, v in zip(windows, own, strict=True)
        if w.score is not None and not (filters and w.cut)
    ]
    targets = [x for w, v in ended for x in plain_targets(w, v.tolist(), bootstrap)]
    known = [x for w, v in ended for x in (*w.before, *v.tolist())]
    np.testing.assert_allclose(responses.returns, targets, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(responses.values, known, rtol=1e-6)
    assert responses.rows.trained_tokens.tolist() == [len(w.before) + w.size for w, _ in ended]


def test_responses_of_several_windows_have_no_experts_to_replay() -> None:
    """With R3, each window has the experts of its own pass. Other responses of the batch have all."""

    def routed(one: Sample) -> Sample:
        (segment,) = one.trajectories[0].segments
        read = len(one.prompt.tokens) + len(segment.tokens) - 1
        segment = replace(segment, experts=array("B", [1] * read))
        return replace(one, trajectories=(Trajectory.of((segment,), Score(1.0)),))

    windows = Window([], 3, 1.0), Window([0.5] * 4, 2, 1.0)
    batch = tuple(routed(sample_of(i, w)) for i, w in enumerate(windows))
    assert rows_of_samples(batch).experts is not None
    scores, values = torch.ones(2, dtype=torch.float64), [torch.zeros(3), torch.zeros(2)]
    algorithm = config_of(algorithm={"adv_estimator": "gae"}).algorithm
    found = ended_responses(batch, scores, [v.double() for v in values], algorithm)
    assert found.rows.experts is None and found.rows.trained_tokens.tolist() == [3, 6]
