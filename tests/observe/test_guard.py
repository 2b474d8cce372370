"""The guard on learning: the alarms that it raises, when, and how often."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import Config, GuardConfig
from millrace.errors import ConfigError
from millrace.observe.guard import CAUSES, Alarm, Guard

HEALTHY = {
    "train/zero_advantage_share": 0.5,
    "response_length/clip_ratio": 0.05,
    "actor/entropy": 0.4,
    "rollout_corr/rollout_is_eff_sample_size": 0.95,
    "actor/grad_norm": 1.0,
    "actor/log_prob_gap_same_version": 0.002,
    "actor/log_prob_gap_limit": 0.01,
    "reward/std": 0.4,
}
BAD = {
    "zero_variance": {"train/zero_advantage_share": 0.96},
    "truncation": {"response_length/clip_ratio": 0.51},
    "entropy_collapse": {"actor/entropy": 0.0079},  # a fiftieth of 0.4 is 0.008
    "low_ess": {"rollout_corr/rollout_is_eff_sample_size": 0.19},
    "gradient_spike": {"actor/grad_norm": 10.1},
    "log_prob_gap": {"actor/log_prob_gap_same_version": 0.011},
    "equal_rewards": {"reward/std": 0.0},
}


def fed(rows: int = 10) -> Guard:
    """Return a guard that has seen `rows` healthy rows, of versions 1 to `rows`."""
    guard = Guard(GuardConfig())
    for version in range(1, rows + 1):
        assert guard.check(version, HEALTHY) == []
    return guard


def names(alarms: list[Alarm]) -> list[str]:
    return [alarm.name for alarm in alarms]


def patience(name: str) -> int:
    return GuardConfig().equal_reward_versions if name == "equal_rewards" else 1


@pytest.mark.parametrize("name", BAD)
def test_each_alarm_holds_while_its_metric_is_bad_and_begins_and_ends_once(name: str) -> None:
    guard = fed()
    for version in range(11, 11 + patience(name) - 1):
        assert guard.check(version, HEALTHY | BAD[name]) == []
    begin = 10 + patience(name)
    for version in range(begin, begin + 4):
        assert names(guard.check(version, HEALTHY | BAD[name])) == [name]
        assert names(guard.began) == ([name] if version == begin else [])
        assert guard.ended == []
        assert guard.as_metrics() == {f"alarm/{other}": float(other == name) for other in CAUSES}
    assert guard.check(begin + 4, HEALTHY) == []
    assert guard.began == [] and names(guard.ended) == [name] and guard.ended[0].since == begin
    assert guard.check(begin + 5, HEALTHY) == [] and guard.ended == []
    assert not any(guard.as_metrics().values())


@pytest.mark.parametrize("name", BAD)
def test_an_alarm_says_its_value_its_limit_and_what_to_change(name: str) -> None:
    guard = fed()
    for version in range(11, 11 + patience(name)):
        alarms = guard.check(version, HEALTHY | BAD[name])
    (alarm,) = alarms
    assert alarm.value == (3.0 if name == "equal_rewards" else next(iter(BAD[name].values())))
    assert alarm.cause == CAUSES[name] and alarm.cause.count(".") > 1
    assert str(alarm).startswith(
        f"{name} since version {10 + patience(name)}: {alarm.value:.4g}, limit {alarm.limit:.4g}. "
    )


@pytest.mark.parametrize("name", BAD)
def test_the_keys_that_a_cause_names_exist(name: str) -> None:
    keys = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", CAUSES[name])
    assert keys
    for key in keys:
        section: type = Config
        for part in key.split("."):
            assert part in section.model_fields, key  # type: ignore[attr-defined]
            section = section.model_fields[part].annotation  # type: ignore[attr-defined]


def test_limits_are_exclusive_so_a_metric_at_its_limit_is_fine() -> None:
    o = GuardConfig()
    at = {
        "train/zero_advantage_share": o.max_zero_variance_share,
        "response_length/clip_ratio": o.max_clip_ratio,
        "rollout_corr/rollout_is_eff_sample_size": o.min_ess,
        "actor/log_prob_gap_same_version": 0.01,
        "actor/log_prob_gap_limit": 0.01,
        "actor/grad_norm": o.max_grad_spike,
        "actor/entropy": 0.5**7,
    }
    guard = Guard(GuardConfig(min_entropy_share=0.5**7))
    for version in range(6):
        guard.check(version, {"actor/entropy": 1.0, "actor/grad_norm": 1.0})
    assert guard.check(6, at) == []


def test_entropy_is_compared_with_its_first_rows_and_before_that_with_the_floor_alone() -> None:
    guard = Guard(GuardConfig(entropy_rows=2, min_entropy_share=0.5, min_entropy=0.1))
    falling = enumerate([3.0, 1.0, 0.9, 0.85, 1.1, 0.05])
    seen = [names(guard.check(version, {"actor/entropy": value})) for version, value in falling]
    assert seen == [[], [], ["entropy_collapse"], ["entropy_collapse"], [], ["entropy_collapse"]]
    early = Guard(GuardConfig(min_entropy=0.1))
    assert names(early.check(0, {"actor/entropy": 0.05})) == ["entropy_collapse"]


def test_a_spike_is_one_against_the_median_of_the_rows_before_it() -> None:
    guard = Guard(GuardConfig(max_grad_spike=3.0, grad_rows=4, min_grad_rows=2))
    # The first two have too few rows. Then the medians are 1, 1, 1, 5.5, 5.5, 1, 5.5 and 5.5.
    norms = enumerate([1.0, 1.0, 10.0, 1.0, 10.0, 1.0, 1.0, 10.0, 10.0, 10.0])
    seen = [bool(guard.check(version, {"actor/grad_norm": norm})) for version, norm in norms]
    assert seen == [False, False, True, False, True, False, False, True, False, False]


def test_a_median_of_0_tells_nothing_and_an_infinite_norm_is_a_spike() -> None:
    guard = Guard(GuardConfig())
    for version in range(10):
        guard.check(version, {"actor/grad_norm": 0.0})
    assert guard.check(10, {"actor/grad_norm": 1.0}) == []
    assert names(fed().check(11, {"actor/grad_norm": math.inf})) == ["gradient_spike"]


def test_equal_rewards_must_be_so_in_versions_in_a_row() -> None:
    guard = Guard(GuardConfig(equal_reward_versions=2))
    stds = enumerate([0.0, 0.1, 0.0, 0.0, 0.0, 0.1])
    seen = [len(guard.check(version, {"reward/std": std})) for version, std in stds]
    assert seen == [0, 0, 0, 1, 1, 0]


CLIP = "response_length/clip_ratio"


@pytest.mark.parametrize("row", [{}, {"val/x/greedy": 1.0}, {CLIP: math.nan}, {CLIP: None}])
def test_a_row_without_the_metric_neither_ends_an_alarm_nor_begins_one(
    row: dict[str, float | None],
) -> None:
    guard = fed()
    assert guard.check(11, row) == []
    guard.check(12, HEALTHY | BAD["truncation"])
    assert names(guard.check(13, row)) == ["truncation"] and guard.began == guard.ended == []
    assert guard.as_metrics()["alarm/truncation"] == 1.0


@given(
    st.lists(
        st.dictionaries(st.sampled_from(sorted(HEALTHY)), st.floats(0, 2) | st.just(math.nan)),
        max_size=30,
    )
)
def test_what_began_and_ended_accounts_for_what_holds(rows: list[dict[str, float]]) -> None:
    guard = Guard(GuardConfig())
    holding: set[str] = set()
    for version, row in enumerate(rows):
        now = set(names(guard.check(version, row)))
        assert holding | set(names(guard.began)) - set(names(guard.ended)) >= now
        assert now == (holding | set(names(guard.began))) - set(names(guard.ended))
        assert not holding & set(names(guard.began)) and set(names(guard.ended)) <= holding
        active = {name for name, value in guard.as_metrics().items() if value}
        assert active == {f"alarm/{name}" for name in now}
        holding = now


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=60), st.floats(0.5, 2.0))
def test_a_run_that_learns_raises_none(entropies: list[float], scale: float) -> None:
    """Entropy falls at most to a twentieth, and gradients vary at most threefold.

    85% of the samples have no advantage, as near the end of a run.
    """
    guard = Guard(GuardConfig())
    for version, entropy in enumerate(sorted(entropies, reverse=True)):
        row = HEALTHY | {
            "actor/entropy": entropy,
            "actor/grad_norm": scale * (0.5 + entropy),
            "train/zero_advantage_share": 0.85,
        }
        assert guard.check(version, row) == []


def test_options_that_could_never_act_are_refused() -> None:
    for options in ({"entropy_rows": 0}, {"equal_reward_versions": 0}):
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            GuardConfig(**options)
    with pytest.raises(ConfigError, match=r"guard.min_grad_rows = 21: .* guard.grad_rows = 20"):
        Config(guard={"min_grad_rows": 21})


def test_an_alarm_whose_metric_hovers_at_its_limit_begins_once_and_ends_once() -> None:
    """Such a metric occurs at the end of the quickstart, where nearly every problem is solved."""
    guard, began, ended = Guard(GuardConfig()), 0, 0
    shares = [0.90, 0.96, 0.94, 0.97, 0.93, 0.95, 0.86, 0.85, 0.94]
    for version, share in enumerate(shares, start=1):
        guard.check(version, {"train/zero_advantage_share": share})
        began, ended = began + len(guard.began), ended + len(guard.ended)
        assert bool(guard.as_metrics()["alarm/zero_variance"]) == (2 <= version <= 7)
    assert (began, ended) == (1, 1)
