"""The gap of two engines: figures, limits, kinds of tokens, and the causes that a pattern names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from millrace.errors import GapError
from millrace.observe import gap as gaps
from millrace.observe.gap import Drawn, judge

K = 2000


def drawn(
    error: np.ndarray | float = 0.0, *, noise: float = 0.02, kind: str = "", share: float = 0.5
) -> Drawn:
    """Return tokens of engines with `noise`, whose rollout engine has an `error` in one kind."""
    dice = np.random.default_rng(0)
    true = -dice.exponential(2.0, K)
    wrong = np.arange(K) < (K * share if kind else K)
    engine = true + noise * dice.standard_normal(K) + np.where(wrong, error, 0.0)
    kinds = {kind: wrong} if kind else {}
    return Drawn(engine, true + noise * dice.standard_normal(K), true, kinds)


def test_figures_are_those_of_the_formulas() -> None:
    a, b = np.array([-1.0, -2.0]), np.array([-1.5, -2.0])
    found = gaps.gap(a, b)
    assert (found.tokens, found.mean, found.worst) == (2, 0.25, 0.5)
    assert found.k3 == pytest.approx((np.exp(-0.5) - 1 + 0.5) / 2)


def test_a_log_prob_that_is_not_finite_is_over_every_limit() -> None:
    one = drawn()
    one.engine[7] = np.nan
    assert judge({gaps.TRUE: one}, dtype="bfloat16", least=1e-3).error() is not None


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_noise_of_both_engines_is_within_the_limit(dtype: str, noise: float) -> None:
    verdict = judge({gaps.TRUE: drawn(noise=noise)}, dtype=dtype, least=gaps.LEAST[dtype])
    assert verdict.error() is None and verdict.explained
    assert verdict.limit == max(gaps.LEAST[dtype], gaps.FACTOR * verdict.floor)


def test_without_an_independent_model_the_floor_is_assumed() -> None:
    one = drawn()
    blind = Drawn(one.engine, one.trainer, np.full(K, np.nan), {})
    verdict = judge({gaps.TRUE: blind}, dtype="bfloat16", least=1e-3)
    assert not verdict.explained and verdict.floor == gaps.ASSUMED["bfloat16"]


def eight_bits(error: float = 0.0, noise: float = 0.1) -> Drawn:
    """Return tokens of an engine in 8 bits, whose own noise is far above that of bfloat16."""
    one, dice = drawn(), np.random.default_rng(1)
    rounding = noise * dice.standard_normal(K)
    engine = one.engine + rounding + error * dice.standard_normal(K)
    return Drawn(engine, one.trainer, one.reference, {}, quantised=one.reference + rounding)


def test_the_floor_of_8_bits_is_that_of_a_model_which_rounds_alike() -> None:
    healthy = {gaps.TRUE: eight_bits()}
    verdict = judge(healthy, dtype="fp8", least=gaps.LEAST["fp8"])
    assert verdict.error() is None and verdict.explained
    assert verdict.floor == pytest.approx(0.8 * np.hypot(0.1, 0.02), rel=0.1)
    # The floor of bfloat16 knows nothing of that noise.
    blind = {gaps.TRUE: replace(healthy[gaps.TRUE], quantised=None)}
    assert judge(blind, dtype="bfloat16", least=1e-3).error() is not None


@pytest.mark.parametrize("error", [0.2, 0.4])
def test_an_engine_in_8_bits_stays_near_a_model_in_8_bits(error: float) -> None:
    """Twice the floor would allow an error of 0.17, which the rounding hides."""
    verdict = judge({gaps.TRUE: eight_bits(error=error)}, dtype="fp8", least=gaps.LEAST["fp8"])
    assert "an independent model in 8 bits" in {
        f.kind.partition(" to ")[2] for f in verdict.findings
    }


def test_an_engine_that_is_far_from_a_model_in_8_bits_with_all_weights_names_its_scales() -> None:
    rounds = {name: eight_bits(error=0.17) for name in (gaps.TRUE, gaps.DISPLACED)}
    verdict = judge(rounds, dtype="fp8", least=gaps.LEAST["fp8"])
    assert [f.where for f in verdict.findings] == ["any weights"]
    assert "a wrong scale" in verdict.causes[0]
    assert not any("only new weights" in cause for cause in verdict.causes)


@pytest.mark.parametrize(("noise", "stops"), [(0.05, False), (0.1, False), (0.15, True)])
def test_8_bits_alone_may_not_move_the_policy_too_far(noise: float, stops: bool) -> None:
    """The engine does what it should. The mean of normal noise is 0.8 times its deviation."""
    rounds = {gaps.TRUE: eight_bits(noise=noise)}
    verdict = judge(rounds, dtype="fp8", least=gaps.LEAST["fp8"], most_bits=0.1)
    assert verdict.bits == pytest.approx(0.8 * np.hypot(noise, 0.02), rel=0.1)
    assert [f.kind for f in verdict.findings] == ["the mean gap that 8 bits alone make"] * stops
    assert judge(rounds, dtype="fp8", least=gaps.LEAST["fp8"]).error() is None
    if stops:
        (cause,) = verdict.causes
        assert "rollout.quantization=null" in cause and "guard.max_quantization_gap" in cause
        ratio = np.exp(rounds[gaps.TRUE].trainer - rounds[gaps.TRUE].engine)
        assert f"{np.mean((ratio < 0.8) | (ratio > 1.2)):.0%} of its tokens" in cause


@pytest.mark.parametrize(("noise", "stops"), [(0.05, False), (0.2, True)])
def test_without_a_model_in_8_bits_the_whole_gap_counts(noise: float, stops: bool) -> None:
    """Whatever the assumed floor is, a run that is near enough goes on."""
    one, nothing = eight_bits(noise=noise), np.full(K, np.nan)
    blind = replace(one, reference=nothing, quantised=nothing)
    verdict = judge({gaps.TRUE: blind}, dtype="fp8", least=gaps.LEAST["fp8"], most_bits=0.1)
    assert not verdict.explained and bool(verdict.findings) == stops


def test_displaced_weights_do_not_say_how_far_8_bits_move_those_of_the_run() -> None:
    rounds = {gaps.TRUE: eight_bits(noise=0.05), gaps.DISPLACED: eight_bits(noise=0.3)}
    assert not judge(rounds, dtype="fp8", least=gaps.LEAST["fp8"], most_bits=0.1).findings


def test_what_8_bits_change_is_no_part_of_a_displacement() -> None:
    one = eight_bits()
    unchanged = one.reference + 0.3 * np.random.default_rng(2).standard_normal(K)
    part, error = replace(one, unchanged=unchanged).missing()
    assert abs(part) < 4 * error < 0.02
    lacks = replace(one, unchanged=unchanged, engine=one.engine + 0.2 * (unchanged - one.reference))
    assert lacks.missing()[0] == pytest.approx(0.2, abs=4 * error)


@pytest.mark.parametrize(("lacks", "found"), [(0.0, 0), (0.12, 20)])
def test_a_few_tokens_with_large_changes_do_not_decide_in_8_bits(lacks: float, found: int) -> None:
    """Errors grow with the change, as on a small model. A healthy engine passes each time."""
    over = 0
    for seed in range(20):
        rng, one = np.random.default_rng(seed), eight_bits(noise=0.04)
        change = 0.2 * rng.standard_t(2.5, K)
        error = 0.15 * np.abs(change) * rng.standard_normal(K) + lacks * change
        assert one.quantised is not None
        near = replace(one, unchanged=one.reference + change, engine=one.quantised + error)
        rounds = {gaps.DISPLACED: near}
        findings = judge(rounds, dtype="fp8", least=gaps.LEAST["fp8"]).findings
        over += any("share of a change" in f.kind for f in findings)
    assert over == found


def test_a_trainer_far_from_an_independent_model_is_wrong_although_engines_agree() -> None:
    one = drawn()
    apart = Drawn(one.trainer, one.trainer, one.trainer - 0.3, {})
    error = judge({gaps.TRUE: apart}, dtype="bfloat16", least=1e-3).error()
    assert isinstance(error, GapError) and "trainer.engine=fsdp" in str(error)


def test_a_kind_of_tokens_is_judged_by_itself() -> None:
    """4 % of the tokens are wrong by 0.11: the figures of all hide it."""
    verdict = judge(
        {gaps.TRUE: drawn(0.11, kind=gaps.LONG, share=0.04)}, dtype="bfloat16", least=1e-3
    )
    assert [f.kind for f in verdict.findings] == [gaps.LONG]


def test_large_errors_of_few_tokens_show_in_k3() -> None:
    """The shape of two exchanged heads in bfloat16: its mean is 1.7 limits, and its k3 over 4."""
    error = 0.08 * np.random.default_rng(1).standard_t(4, K)
    verdict = judge({gaps.TRUE: drawn(error, noise=0.024)}, dtype="bfloat16", least=1e-3)
    assert gaps.worst(verdict.findings).kind == "the k3 of all tokens"


@pytest.mark.parametrize(
    ("small", "large", "key"),
    [
        (gaps.FEW, gaps.MANY, "rollout.enforce_eager=true"),
        (gaps.ASKED_FIRST, gaps.ASKED_AGAIN, "rollout.enable_prefix_caching=false"),
        (gaps.STRAIGHT, gaps.CONTINUED, "rollout.kv_on_swap=recompute"),
        (gaps.EARLY, gaps.LATE, "rope"),
    ],
)
def test_the_first_cause_follows_the_kind_that_is_worse(small: str, large: str, key: str) -> None:
    one = drawn(np.random.default_rng(1).standard_normal(K), kind=large)
    one = Drawn(one.engine, one.trainer, one.reference, {**one.kinds, small: ~one.kinds[large]})
    verdict = judge({gaps.TRUE: one}, dtype="bfloat16", least=1e-3)
    assert key in verdict.causes[0]


def test_log_probs_that_differ_by_a_factor_name_the_temperature() -> None:
    one = drawn()
    scaled = Drawn(1.1 * one.trainer, one.trainer, one.reference, {})
    verdict = judge({gaps.TRUE: scaled}, dtype="bfloat16", least=1e-3)
    assert "rollout.temperature" in verdict.causes[0]


def test_a_request_that_is_right_alone_names_the_graphs() -> None:
    wrong = drawn(np.random.default_rng(1).standard_normal(K))
    verdict = judge({gaps.TRUE: wrong}, dtype="bfloat16", least=1e-3, alone=0.02)
    assert "rollout.enforce_eager=true" in verdict.causes[0]


def test_a_part_of_a_change_that_engines_lack_shows_below_the_noise_of_tokens() -> None:
    """The engine lacks 3 % of the change of the weights. The gap of its tokens is the noise."""
    dice = np.random.default_rng(2)
    noise, change = (scale * dice.standard_normal((3, 40_000)) for scale in (0.03, 1.0))
    moved, true = np.full(40_000, -2.0), np.full(40_000, -2.0) + change[0]

    def displaced(part: float) -> Drawn:
        engine = moved + part * change[0] + noise[0]
        return Drawn(engine, moved + noise[1], moved, {}, true + noise[2])

    for part, found in ((0.0, False), (0.03, True)):
        verdict = judge({gaps.DISPLACED: displaced(part)}, dtype="bfloat16", least=1e-3)
        assert bool(verdict.findings) == found, (part, verdict.findings)
    assert "sync" in verdict.causes[0]
