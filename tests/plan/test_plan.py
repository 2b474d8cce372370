"""Plans: the best of a grid, the lines that they print, the engines' reading, and refusals."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.extras.plan.costs import Costs, Term, save
from millrace.extras.plan.fit import machine_here
from millrace.extras.plan.search import Search
from millrace.extras.plan.simulation import Case, simulate
from millrace.rollout.lengths import DrawnLengths
from millrace.schedule.schedule import OnSync, Schedule
from millrace.simulate.cost import CostModel
from tests.e2e import runs

SMALL = ["rollout.n=2", "actor.ppo_mini_batch_size=4", "rollout.total_rollout_steps=8"]


def costs(**changes: Any) -> Costs:
    """Return costs of the quickstart's model: training takes 3 times as long as drawing."""
    decode = {"step_s": 0.01, "request_s": 1e-5, "read_s": 1e-6}
    both = ("colocated", "separate")
    known = Costs(
        machine=machine_here()[0],
        model="3 layers of 64, float32",
        engine="torch on 1, fsdp",
        runs=["synthetic"],
        decode={p: Term(decode, -0.1, 0.1) for p in both},
        train={p: Term({"row": 0.09}, -0.1, 0.1) for p in both},
        transfer={p: Term({"s": 0.001}) for p in both},
        pause={p: Term({"s": 0.001}) for p in both},
        switch=Term({"s": 0.0}),
        reward=Term({"s": 0.0}),
        lengths=[(0.0, 8.0), (1.0, 8.0)],
        prompt=6.0,
    )
    return msgspec.structs.replace(known, **changes)


@pytest.fixture
def file(tmp_path: Path) -> str:
    save(costs(), tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def test_the_search_finds_the_best_split_of_every_case() -> None:
    """Every case of a tiny grid is simulated too."""
    fixed = [*SMALL, "mode=async_partial", "async_training.staleness_threshold=1"]
    fixed += ["rollout.max_num_seqs=8", "async_training.trigger_parameter_sync_step=1"]
    fixed += ["async_training.lookahead=4"]
    search = Search("quickstart", fixed, costs(), 4)
    plans = search.run(1, lambda done, of: None)
    grid = {}
    for t in (1, 2, 3):
        devices = (f"trainer.n_gpus_per_node={t}", f"rollout.n_gpus_per_node={4 - t}")
        grid[t] = simulate(search.case_of(devices)[0]).seconds
    best = min(grid, key=lambda t: grid[t])
    assert plans[0].choice.trainers == best == 3
    assert [p.outcome.seconds for p in plans] == sorted(grid.values())
    assert plans[0].low < plans[0].outcome.seconds < plans[0].high


def test_plan_prints_lines_that_train_accepts(run: Callable[..., Any], file: str) -> None:
    code, out, _ = run("plan", "quickstart", *SMALL, "--gpus", "2", "--costs", file, "--price", "2")
    assert code == 0 and "bound by" in out and "1,000 samples" in out
    lines = [line.strip() for line in out.splitlines() if "millrace train " in line]
    assert 1 <= len(lines) <= 3
    for line in lines:
        code, _, err = run(*shlex.split(line)[1:], "--dry-run")
        assert set(SMALL) <= set(shlex.split(line))  # what the user gave is in the command
        assert code == 0, err
    code, out, _ = run("plan", "quickstart", *SMALL, "--gpus", "2", "--costs", file, "--json")
    plans = json.loads(out)["plans"]
    assert plans[0]["gpu_s"] <= plans[-1]["gpu_s"] * 1.01


def test_it_says_that_synchronous_turns_are_best(run: Callable[..., Any], tmp_path: Path) -> None:
    """Two devices train a colocated window in half the time, and drawing costs nothing."""
    decode = {p: Term({"step_s": 1e-6, "request_s": 0.0}) for p in ("colocated", "separate")}
    save(costs(decode=decode), tmp_path / "c.json")
    _, out, _ = run(
        "plan", "quickstart", *SMALL, "--gpus", "2", "--costs", str(tmp_path / "c.json")
    )
    assert "Synchronous turns are best here" in out


def test_given_devices_are_kept_in_every_mode() -> None:
    given = ["trainer.nnodes=1", "rollout.nnodes=3", "trainer.n_gpus_per_node=2"]
    search = Search("quickstart", [*SMALL, *given], costs(), 8, 4)
    lines = [search.lines(choice) for choice in search.first()]
    assert lines and all({*given} <= {*line} for line in lines)
    assert not Search("quickstart", ["trainer.nnodes=3"], costs(), 2).first()


def test_a_given_staleness_of_0_is_not_replaced_by_the_default_of_the_mode() -> None:
    given = ["mode=async_partial", "async_training.staleness_threshold=0"]
    search = Search("quickstart", given, costs(), 2)
    assert {choice.staleness for choice in search.first()} == {0.0}


def test_a_given_trigger_leaves_out_the_modes_that_have_another() -> None:
    given = ["mode=async_partial", "async_training.trigger_parameter_sync_step=2"]
    choices = Search("quickstart", given[1:], costs(), 2).first()
    assert choices and {choice.trigger for choice in choices} == {2}
    assert Search("quickstart", given, costs(), 2).first()


def test_a_limit_of_the_lag_holds() -> None:
    search = Search("quickstart", SMALL, costs(), 2, max_lag=0)
    assert all(p.schedule.lag_bound == 0 for p in search.run(1, lambda done, of: None))


REFUSED = {
    "no gpus": (["quickstart", "--gpus", "0"], "--gpus"),
    "no recipe": (["--gpus", "2"], "RECIPE"),
    "an unknown recipe": (["nothing", "--gpus", "2", "--costs", "FILE"], "nothing"),
    "a file that is missing": (["quickstart", "--gpus", "2", "--costs", "no.json"], "no.json"),
    "another machine": (["quickstart", "--gpus", "2", "--costs", "FILE", "--machine", "H9"], "H9"),
    "another model": (
        ["quickstart", "model.shape.hidden_size=32", "--gpus", "2", "--costs", "FILE"],
        "3 layers of 32",
    ),
    "a remainder": (["quickstart", "--gpus", "3", "--nodes", "2", "--costs", "FILE"], "--gpus"),
    "an unknown key": (
        ["quickstart", "rollout.no=1", "--gpus", "2", "--costs", "FILE"],
        "rollout.no",
    ),
    "windows": (["tppo", "--gpus", "2", "--costs", "FILE"], "algorithm.tppo.window"),
    "a mode without a split": (
        ["quickstart", "mode=async_partial", "--gpus", "1", "--costs", "FILE"],
        "--gpus",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_is_refused_by_name(name: str, run: Callable[..., Any], file: str) -> None:
    arguments, named = REFUSED[name]
    code, _, err = run("plan", *[file if a == "FILE" else a for a in arguments])
    assert code == 2 and named in err


def test_memory_forbids_a_split(run: Callable[..., Any], tmp_path: Path) -> None:
    save(costs(device_bytes=1 << 20), tmp_path / "c.json")
    shape = [*SMALL, "model.shape.vocab_size=64"]
    code, _, err = run(
        "plan", "quickstart", *shape, "--gpus", "2", "--costs", str(tmp_path / "c.json")
    )
    assert code == 2 and "GiB on a device" in err and "Fix: " in err


def test_calibrate_reads_a_real_run_and_plan_uses_it(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = ["actor.ppo_mini_batch_size=2", "rollout.total_rollout_steps=64"]
    done = runs.millrace(*runs.small(folder, *more))
    assert done.code == 0, done.err
    code, out, err = run("calibrate", str(folder), "--out", "c.json")
    assert code == 0 and "of held-out versions" in out and "costs in c.json" in out, err
    (tmp_path / "mine.txt").write_text("mine")
    for file in (tmp_path / "mine.txt", tmp_path / "none" / "c.json", tmp_path):
        code, _, err = run("calibrate", str(folder), "--out", str(file))
        assert code == 2 and "--out" in err and "Fix: " in err
    assert (tmp_path / "mine.txt").read_text() == "mine"
    for wrong in (tmp_path / "none", tmp_path):
        code, _, err = run("calibrate", str(wrong))
        assert code == 2 and "RUN_FOLDER" in err and "Fix: " in err
    config = str(folder / "config.yaml")
    code, out, err = run("plan", config, "--gpus", "2", "--costs", "c.json")
    assert code == 0 and "samples/s" in out, err


def test_an_engine_that_reads_draws_nothing_meanwhile() -> None:
    """Eight contexts of 100 tokens are read one after the other, and then ten tokens are drawn."""
    cost = CostModel(token_s=0.1, request_s=1e-9, prefill_token_s=0.01, train_token_s=0, step_s=0)
    cost = replace(cost, transfer_s=0.0, pause_s=0.0)
    schedule = Schedule(ppo_mini_batch_size=4, on_sync=OnSync.DRAIN)
    case = Case(
        schedule=schedule,
        n=2,
        replicas=1,
        slots=64,
        cost=cost,
        lengths=DrawnLengths(10, 0.0, 10),
        prompt=100,
    )
    assert simulate(case).seconds == pytest.approx(1 + 1, rel=1e-3)
    serial = replace(case, cost=replace(cost, serial_reads=True))
    assert simulate(serial).seconds == pytest.approx(8 + 1, rel=1e-3)


def test_a_divided_window_takes_as_long() -> None:
    schedule = Schedule(ppo_mini_batch_size=64, staleness_threshold=1.0, on_sync=OnSync.SWAP)
    schedule = replace(schedule, lookahead=64)
    cost = CostModel(token_s=0.01, request_s=1e-3, train_token_s=2e-5, step_s=0.1)
    case = Case(
        schedule=schedule,
        n=16,
        replicas=4,
        slots=64,
        cost=cost,
        lengths=DrawnLengths(50, 0.5, 200),
        versions=4,
    )
    whole, small = simulate(replace(case, divide=False)), simulate(case)
    assert case.smaller().replicas < 4
    assert small.seconds == pytest.approx(whole.seconds, rel=0.1)


@pytest.mark.slow
def test_the_published_tables_are_printed_with_every_error(tmp_path: Path) -> None:
    script, out = runs.ROOT / "benchmarks" / "published_tables.py", tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, str(script), "--scale", "8", "--out", str(out)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 16 and all(("error" in r) == (r["published"] is not None) for r in rows)
    assert sum(r["published"] is None for r in rows) == 1 and "| blank |" in done.stdout
    assert all(r["predicted"] > 0 for r in rows)
