"""The fit finds the costs of synthetic versions, and its interval holds new ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.extras.plan.costs import (
    SEPARATE,
    Costs,
    Term,
    band,
    constant,
    decode_term,
    fit,
    load,
    non_negative,
    save,
)
from millrace.extras.plan.simulation import measured_lengths
from tests.pipeline.simulated import schedule_of


def draws() -> np.random.Generator:
    """Return the same numbers for a test in any order of the tests."""
    return np.random.default_rng(3)


def test_a_fit_finds_known_costs_and_leaves_out_what_costs_nothing() -> None:
    x = draws().uniform(1, 50, (40, 3))
    term = fit(["a", "b", "c"], x, x @ np.array([0.2, 0.0, 3.0]))
    assert term.values == pytest.approx({"a": 0.2, "b": 0.0, "c": 3.0}, abs=1e-6)
    assert (term.low, term.high, term.held_out) == pytest.approx((0, 0, 1), abs=0.2)


def test_no_cost_is_negative() -> None:
    x = np.stack([np.arange(1.0, 21), np.arange(20.0, 0, -1)], axis=1)
    found = non_negative(x, x @ np.array([1.0, -0.02]))
    assert found.min() >= 0 and found[0] > 0.9


def test_nine_in_ten_new_versions_fall_into_the_interval() -> None:
    draw = draws()
    x = draw.uniform(1, 50, (2000, 2))
    y = x @ np.array([0.5, 1.0]) * draw.lognormal(0, 0.1, 2000)
    term = fit(["a", "b"], x[:1000], y[:1000])
    ratios = y[1000:] / (x[1000:] @ np.array(list(term.values.values())))
    inside = np.mean((ratios > 1 + term.low) & (ratios < 1 + term.high))
    assert 0.86 < inside < 0.94 and 0.86 < term.held_out < 0.94
    assert constant(list(draw.lognormal(0, 0.1, 300))).held_out == pytest.approx(0.9, abs=0.05)


def test_few_ratios_give_their_ends() -> None:
    assert band(np.array([1.1, 0.8, 1.0])) == pytest.approx((-0.2, 0.1))
    assert band(np.array([])) == (0, 0)


def test_decode_costs_of_synthetic_engines_are_found() -> None:
    """Engines draw with several loads, read and begin meanwhile, and lose time while requests wait."""
    draw = draws()
    step, each, read, start, queue = 0.01, 0.0004, 0.0001, 0.002, 0.4
    loads, tokens, reads, responses = [], [], [], []
    for _ in range(60):
        bins = [
            (float(draw.uniform(1, 5)), float(load), False) for load in draw.integers(1, 200, 4)
        ]
        bins.append((float(draw.uniform(0, 8)), 200.0, True))
        seconds, amount = sum(s for s, *_ in bins), float(draw.uniform(0, 30000))
        begun = float(draw.uniform(0, 2000))
        alone = sum(s * b / (step + each * b) * (1 - queue * waits) for s, b, waits in bins)
        loads.append(bins)
        tokens.append(alone * (1 - (read * amount + start * begun) / seconds))
        reads.append(amount)
        responses.append(begun)
    term = decode_term(loads, np.array(tokens), np.array(reads), np.array(responses))
    # The fit leaves out that an engine loses a share of less time while it reads.
    assert term.values["step_s"] == pytest.approx(step, rel=0.06)
    assert term.values["request_s"] == pytest.approx(each, rel=0.06)
    assert term.values["read_s"] == pytest.approx(read, rel=0.15)
    assert term.values["start_s"] == pytest.approx(start, rel=0.15)
    assert term.values["queue"] == pytest.approx(queue, abs=0.06)


def test_versions_that_the_trainer_paces_leave_the_cost_of_a_token() -> None:
    """Their seconds and responses hardly vary, so a cost of a response alone would fit best."""
    draw = draws()
    loads = [[(4.0, float(load), False)] for load in draw.uniform(40, 64, 40)]
    tokens = np.array([4.0 * load / (0.01 + 0.0004 * load) for ((_, load, _),) in loads])
    tokens *= draw.lognormal(0, 0.05, 40)
    responses = np.full(40, 256.0)
    values = decode_term(loads, tokens, 100 * responses, responses).values
    assert values["step_s"] + 50 * values["request_s"] == pytest.approx(0.03, rel=0.1)


def test_equal_loads_leave_open_how_a_step_grows() -> None:
    """The likely ends then differ, and without a reason no time is lost by waiting."""
    draw = draws()
    loads, reads = [[(4.0, 64.0, False)]] * 30, np.zeros(30)
    tokens = 20_000 * draw.lognormal(0, 0.05, 30)
    flat, steep = (decode_term(loads, tokens, reads, reads, end).values for end in (-1, 1))
    assert flat["request_s"] == 0 and steep["request_s"] * 64 > 10 * steep["step_s"]
    assert flat["queue"] == steep["queue"] == 0


def test_versions_that_nothing_explains_have_costs_too() -> None:
    """Advice at the end of a run must not fail, however much its versions scatter."""
    tokens = np.array([1.0] * 29 + [1e6])
    loads = [[(4.0, 64.0, False)]] * 30
    for end in (-1, 0, 1):
        values = decode_term(loads, tokens, np.zeros(30), np.full(30, 512.0), end).values
        assert values["step_s"] > 0


def test_the_sum_of_scattered_versions_is_kept() -> None:
    """Relative errors alone would prefer the small ones, and promise steps that are too fast."""
    draw = draws()
    x = draw.uniform(1, 50, (400, 1))
    y = x[:, 0] * draw.lognormal(0, 0.6, 400)
    assert (x * fit(["a"], x, y, True).values["a"]).sum() == pytest.approx(y.sum())


def test_lengths_follow_the_quantiles() -> None:
    lengths = measured_lengths([(0.0, 2), (0.5, 100), (0.9, 400), (1.0, 900)], 800)
    drawn = np.array([lengths.of(seed * 7919) for seed in range(4000)])
    assert np.median(drawn) == pytest.approx(100, rel=0.1)
    assert np.quantile(drawn, 0.9) == pytest.approx(400, rel=0.1) and drawn.max() == 800


def test_an_engine_of_an_older_file_that_loses_more_than_its_time_still_draws() -> None:
    """Files of before had such figures, of noise."""
    zero = {SEPARATE: Term({"s": 0.0})}
    decode = {SEPARATE: Term({"step_s": 0.01, "request_s": 0.0, "read_s": 0.0, "queue": 1.04})}
    nothing = Term({"s": 0.0})
    costs = Costs("m", "x", "e", ["r"], decode, zero, zero, zero, nothing, nothing, [], 2.0)
    model = costs.model_of(schedule_of("async_partial"), n=4, trainers=1, read=1)
    assert model.queue == 0.9 and model.start_s == 0


def test_a_file_of_costs_comes_back_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    nothing = Term({"s": 0.0})
    costs = Costs("m", "x", "e", ["r"], {}, {}, {}, {}, nothing, nothing, [(0.5, 3.0)], 2.0)
    save(costs, tmp_path / "costs.json")
    assert load(tmp_path / "costs.json") == costs
    (tmp_path / "costs.json").write_text("{}")
    for path in (tmp_path / "costs.json", tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=r"--costs.*Fix: millrace calibrate"):
            load(path)
