"""The conformance checks: no finding on the package's own, and each planted fault by its property."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from millrace.algorithms.advantage import AdvantageBatch, Advantages, as_estimator, estimator
from millrace.algorithms.conformance import findings
from millrace.algorithms.estimators import ESTIMATORS
from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.policy_loss import LossInput, LossOptions, as_policy_loss, policy_loss
from tests.algorithms.options import advantage_options

LEVELS = [
    (name, level)
    for name, loss in POLICY_LOSSES.items()
    for level in (("token", "sequence") if loss.sequence_level else ("token",))
]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_the_losses_of_the_package_break_nothing(name: str, level: Any) -> None:
    loss = POLICY_LOSSES[name]
    assert findings(loss, loss.options(importance_sampling_level=level)) == []


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_estimators_of_the_package_break_nothing(name: str) -> None:
    assert findings(ESTIMATORS[name], advantage_options()) == []


def pg(x: LossInput) -> Any:
    return -x.advantages * x.log_probs


def mean_of_the_micro_batch(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return pg(x) / x.mask.sum().clamp(min=1)


def padded_tokens_in_a_mean(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return pg(x) - inputs.advantages.nan_to_num().mean() * x.log_probs * 0.1


def mask_ignored(inputs: Any, options: Any) -> Any:
    return -inputs.advantages * inputs.log_probs


def half_precision(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return (pg(x).half()).to(x.log_probs.dtype)


def counts_trajectories(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return pg(x) / x.num_sequences


def detached(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return -x.advantages * x.log_probs.detach()


def wrong_sign(inputs: Any, options: Any) -> Any:
    return -pg(inputs.trained())


@policy_loss(reads_old=False, bounds_stale=False)
def reads_what_it_denies(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return -x.advantages * x.log_ratio().exp()


def infinite(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return -x.advantages * (x.log_probs - x.old_log_probs).exp()


def by_position(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return pg(x) * torch.linspace(1, 2, len(x.mask), dtype=x.log_probs.dtype)


def half_of_the_gradient(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    ratio = x.log_ratio().exp()
    return -x.advantages * (0.5 * ratio + 0.5 * ratio.detach())


@policy_loss()
def unbounded(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return -x.advantages * x.log_ratio().exp()


def random(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return pg(x) * torch.rand_like(x.log_probs)


def in_place(inputs: Any, options: Any) -> Any:
    inputs.advantages.masked_fill_(~inputs.mask, 0.0)
    inputs.advantages.mul_(1.5)
    return pg(inputs.trained())


@policy_loss(bounds_stale=False)
def joins(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return -x.advantages * x.sequence_log_ratio().exp()


def one_number(inputs: Any, options: Any) -> Any:
    return pg(inputs.trained()).mean()


def unknown_statistic(inputs: Any, options: Any) -> Any:
    x = inputs.trained()
    return pg(x), {"entropy": x.log_probs}


FAULTS = {
    mean_of_the_micro_batch: "micro-batches",
    padded_tokens_in_a_mean: "mask",
    mask_ignored: "mask",
    half_precision: "dtype",
    counts_trajectories: "ranks",
    detached: "gradient",
    wrong_sign: "gradient",
    reads_what_it_denies: "facts",
    infinite: "extremes",
    by_position: "order",
    half_of_the_gradient: "slope",
    unbounded: "facts",
    random: "repeats",
    in_place: "repeats",
    joins: "micro-batches",
    one_number: "the function fails",
    unknown_statistic: "the function fails",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: getattr(f, "__name__", "") or f.name)
def test_a_planted_fault_is_found_by_its_property(fault: Any) -> None:
    found = findings(as_policy_loss("mine.py:mine", fault), LossOptions())
    assert FAULTS[fault] in {f.name for f in found}, found
    assert all(f.seen and f.fix for f in found)


def test_a_plain_function_and_one_with_facts_are_clean() -> None:
    def plain(inputs: Any, options: Any) -> Any:
        return pg(inputs.trained())

    assert findings(as_policy_loss("mine.py:plain", plain), LossOptions()) == []
    facts = policy_loss(reads_old=False, bounds_stale=False)(plain)
    assert findings(replace(facts, name="facts"), LossOptions()) == []


def raw(batch: Any, options: Any) -> Any:
    return batch.scores


def first_of_the_batch(batch: Any, options: Any) -> Any:
    return batch.scores - batch.scores[:1]


def of_tokens(batch: Any, options: Any) -> Any:
    return batch.each_token(batch.scores)


def reads_values(batch: Any, options: Any) -> Any:
    base = 0.0 if batch.values is None else batch.values.sum()
    return batch.scores - base


def needs_values(batch: Any, options: Any) -> Any:
    return batch.scores - batch.values.sum()


@estimator("not_relative", group_relative=True)
def not_relative(batch: Any, options: Any) -> Any:
    return batch.scores


def divides_by_zero(batch: Any, options: Any) -> Any:
    return (batch.scores - batch.scores) / (batch.scores - batch.scores)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (first_of_the_batch, "order"),
        (of_tokens, "the function fails"),
        (reads_values, "facts"),
        (needs_values, "the function fails"),
        (not_relative, "facts"),
        (divides_by_zero, "the function fails"),
    ],
)
def test_a_fault_of_an_estimator_is_found(fault: Any, name: str) -> None:
    found = findings(as_estimator("mine.py:mine", fault), advantage_options())
    assert name in {f.name for f in found}, found


def test_an_estimator_of_trajectories_gives_its_number_to_each_token() -> None:
    # As many tokens as trajectories, but not one for each: the shape alone does not say which.
    batch = AdvantageBatch(
        scores=torch.tensor([1.0, 5.0]), groups=torch.tensor([0, 0]), lengths=torch.tensor([2, 0])
    )
    got = as_estimator("raw", raw)(batch, advantage_options())
    assert isinstance(got, Advantages) and got.tokens.tolist() == [1.0, 1.0]
