"""Responses that are trained in windows, in a real train engine in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from millrace.schedule.continuation import next_prompt
from millrace.train.fsdp.engine import FsdpTrainEngine
from millrace.types import WINDOW, Sample, Score, Segment, Thread, Trajectory, floats_of
from tests.train.algorithm_cases import config_of, engine_of, sample, step, trajectory, weights
from tests.train.cases import OPTIM

DRAWN = [-2.0, -2.4, -1.9, -2.2, -2.1, -2.3, -2.0]
"""The log-probs of a response of seven tokens."""


def engine(folder: str, window: int, **keys: Any) -> FsdpTrainEngine:
    tppo = {"window": window} | keys.pop("tppo", {})
    algorithm = {"adv_estimator": "gae", "gamma": 0.9, "lam": 1.0, "tppo": tppo} | keys
    critic = {"optim": OPTIM.model_dump(), "cliprange_value": 0.01}
    made = engine_of(folder, config_of(algorithm=algorithm, critic=critic))
    assert made.critic is not None
    with torch.no_grad():
        made.critic.module.head.weight.fill_(0.1)  # type: ignore[union-attr,operator]
    return made


def critic(engine: FsdpTrainEngine) -> dict[str, torch.Tensor]:
    assert engine.critic is not None
    return weights(engine.critic.module)


def part_of(whole: Trajectory, a: int, b: int) -> Trajectory:
    """Return the tokens a to b of a response. It goes on if it has more."""
    (segment,) = whole.segments
    tokens, log_probs = segment.tokens[a:b], segment.log_probs[a:b]
    if b < len(segment.tokens):
        return Trajectory((Thread((Segment(tokens, log_probs=log_probs),)),), ended=WINDOW)
    own = Segment(tokens, log_probs=log_probs, stop=segment.stop)
    return Trajectory.of((own,), whole.score)


def test_a_window_of_the_whole_response_is_ppo_with_gae(folder: str) -> None:
    """The policy is equal bit for bit. With lambda 1, GAE's targets are the rewards to go, but for
    the last bit of a float64.
    """
    batch = tuple(
        sample(i, trajectory(*DRAWN[: 2 + i], score=float(i % 2), version=2)) for i in range(5)
    )
    whole, windows = engine(folder, 0), engine(folder, 100)
    for _ in range(3):
        first, second = step(whole, batch), step(windows, batch)
        assert first.optimizer_steps == second.optimizer_steps == 2 and second.values == ()
        assert first.totals == second.totals
        assert first.metrics == pytest.approx(second.metrics, rel=1e-12, abs=1e-15)
    for name, weight in critic(whole).items():
        torch.testing.assert_close(critic(windows)[name], weight, rtol=1e-12, atol=1e-15)
    own, other = weights(whole.policy), weights(windows.policy)
    assert all(torch.equal(a, other[name]) for name, a in own.items())


def test_a_critic_learns_at_the_end_from_all_windows_and_the_values_of_their_steps(
    folder: str,
) -> None:
    made = engine(folder, 3)
    whole = trajectory(*DRAWN, score=1.0, version=2)
    first = sample(0, part_of(whole, 0, 3))
    report = step(made, (first,))
    assert [len(v) for v in report.values] == [3] and report.metrics["critic/vf_loss"] == 0
    assert report.metrics["critic/returns"] == 0 and report.totals["train/rejected_tokens"] == 0
    second = replace(first, trajectories=(part_of(whole, 3, 6),))
    second = replace(second, prompt=next_prompt(first, report.values[0]))
    assert second.prompt.tokens == first.prompt.tokens + whole.tokens[:3]
    again = step(made, (second,))
    last = replace(second, trajectories=(part_of(whole, 6, 7),))
    last = replace(last, prompt=next_prompt(second, again.values[0]))
    assert last.prompt.continues is not None and last.prompt.continues.number == 2
    assert last.prompt.continues.values == report.values[0] + again.values[0]
    before = critic(made)
    end = step(made, (last,))
    assert end.values == () and any(not torch.equal(before[n], w) for n, w in critic(made).items())
    # Rewards to go of all seven tokens, and the values as each window was trained.
    returns = [0.9 ** (6 - t) for t in range(7)]
    assert end.metrics["critic/returns"] == pytest.approx(sum(returns) / 7)
    known = [*last.prompt.continues.values]
    assert len(known) == 6 and end.metrics["critic/values"] == pytest.approx(
        (sum(known) + known[-1]) / 7, abs=0.05
    )
    # The policy has trained each token once: 3 + 3 + 1 of them, and no token of a prompt.
    trained = [r.metrics["train/trained_token_share"] for r in (report, again, end)]
    assert trained == [1.0, 1.0, 1.0]


def test_the_split_of_a_response_does_not_change_what_its_critic_learns(folder: str) -> None:
    """With values that no step moves, the critic's step at the end is that of the whole response."""
    whole, cut = engine(folder, 100), engine(folder, 4)
    response = trajectory(*DRAWN, score=1.0, version=2)
    all_at_once = step(whole, (sample(0, response),))
    first = sample(0, part_of(response, 0, 4))
    values = floats_of(v for v in step(engine(folder, 4), (first,)).values[0])
    last = replace(
        first, prompt=next_prompt(first, values), trajectories=(part_of(response, 4, 7),)
    )
    end = step(cut, (last,))
    for name in ("critic/vf_loss", "critic/returns", "critic/values", "critic/grad_norm"):
        assert end.metrics[name] == pytest.approx(all_at_once.metrics[name], rel=1e-6), name
    assert isinstance(last, Sample) and last.trajectories[0].score == Score(1.0)
