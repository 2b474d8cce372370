"""The figures of a run come from its folder, whatever else is in it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from millrace.config import recipe
from millrace.persist.accounts import FILE
from millrace.persist.run_reader import RunReader
from millrace.ports import RolloutStats
from millrace.report.accounts.pace import LoadAccount, Loads, StepCost, step_costs
from millrace.report.advice.advise import Advice, advise_run, checked
from millrace.report.advice.measure import measure
from millrace.simulate import clock
from millrace.waits.stream import Event, Phase
from tests.report.simulated import Case, run, simulated_run
from tests.report.test_advice import MEASURED

CASE = Case(versions=16)
KEYS = [
    "mode=async_partial",
    "actor.ppo_mini_batch_size=16",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=2",
    "rollout.n=8",
    "rollout.max_num_seqs=64",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a simulated run."""
    rows = clock.run(simulated_run(CASE, tmp_path))
    lines = [json.dumps({"version": k, **row}) for k, row in enumerate(rows, 1)]
    lines.insert(3, json.dumps({"version": 3, "val/greedy": 1.0}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.yaml").write_text(recipe.dump(recipe.load("quickstart", KEYS)))
    return tmp_path


def test_a_folder_gives_the_figures_of_its_run(folder: Path) -> None:
    """They are those of the versions that `bench modes` counts."""
    measured = measure(RunReader(folder).read())
    assert measured is not None and measured.setup.test_key == "rollout.test_freq"
    other = run(CASE.but(workers=1, test_freq=20, save_freq=20))
    setup = replace(other.setup, test_key="rollout.test_freq")
    assert measured.setup == setup and replace(measured, setup=CASE.setup) == run(CASE)
    assert [one.overrides for one in advise_run(RunReader(folder).read())]


def test_a_run_that_goes_on_counts_its_versions_up_to_now(folder: Path) -> None:
    """The samples under way say that the run does not drain, so its last version counts."""
    accounts = (folder / FILE).read_text().splitlines()
    (folder / FILE).write_text("\n".join(accounts[:9]) + "\n")
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(rows[:9]) + "\n" + rows[9][:40])
    measured = measure(RunReader(folder).read())
    assert measured is not None and measured.versions == 8 - 3
    assert measured.samples == 16 * measured.versions


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (FILE, None),
        (FILE, ""),
        (FILE, "[1, 2]\n{half"),
        ("metrics.jsonl", None),
        ("metrics.jsonl", "7\n[]\n{}\n"),
        ("metrics.jsonl", '{"version": 1, "perf/time_per_version": null}\n'),
        ("config.yaml", None),
        ("config.yaml", "- a list\n"),
        ("config.yaml", "mode: [unclosed\n"),
        ("config.yaml", "no_such_key: 1\n"),
        ("config.yaml", "\x00\xff"),
    ],
)
def test_a_folder_without_whole_files_gives_no_advice(
    folder: Path, name: str, text: str | None
) -> None:
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text, encoding="latin-1")
    assert measure(RunReader(folder).read()) is None and advise_run(RunReader(folder).read()) == []


def test_a_value_that_the_configuration_refuses_comes_with_its_reason() -> None:
    """GPG's loss has no ratio, so it may be one version old."""
    config = recipe.load("quickstart", [*KEYS, "async_training.staleness_threshold=0.5"])
    tree = config.model_dump(mode="json")
    tree["actor"]["policy_loss"]["loss_mode"] = "gpg"
    tree["async_training"]["staleness_threshold"] = 0.0
    older = Advice("Older.", ("async_training.staleness_threshold=3",), 0.1)
    newer = Advice("Newer.", ("async_training.trigger_parameter_sync_step=2",), 0.1)
    first, second = checked([older, newer], tree)
    assert "Change another key too: async_training.staleness_threshold = 3" in first.text
    assert "the lag bound" in first.text and second == newer


def test_advice_of_every_kind_passes_the_checks_of_a_recipe() -> None:
    """Keys and values exist as they are written."""
    tree = recipe.load("quickstart", KEYS).model_dump(mode="json")
    overrides = [
        ("mode=async_partial", "trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=3"),
        ("mode=colocate_sync", "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2"),
        ("async_training.staleness_threshold=3.1",),
        ("async_training.lookahead=16",),
        ("async_training.overlap_sync=true",),
        ("async_training.trigger_parameter_sync_step=4",),
        ("rollout.max_num_seqs=176",),
        ("reward.num_workers=17",),
        ("rollout.test_freq=100",),
        ("trainer.save_freq=20",),
        ("trainer.async_save=true",),
    ]
    advice = [Advice("Do it.", keys, 0.1) for keys in overrides]
    assert checked(advice, tree) == advice


def test_the_growth_of_a_decode_step_is_found_from_versions_with_other_loads() -> None:
    fixed, each, queue = run(MEASURED).step_cost or (0.0, 0.0, 0.0)
    assert fixed == pytest.approx(0.0023, rel=0.15)
    assert each == pytest.approx(36.4e-6, rel=0.05)
    assert queue == 0.0


def drawn(
    load: float, cost: StepCost, *, full: float = 0.0, error: float = 0.0
) -> tuple[Loads, float]:
    """Return what an engine of 256 slots draws in 4 s. Requests wait in the share `full` of them."""
    loads = {"0": [4 * (1 - full), 4 * (1 - full) * load], "full": [4 * full, 4 * full * 256]}
    rates = load / cost.step_s(load), 256 / cost.step_s(256) * (1 - cost.queue)
    tokens = 4 * ((1 - full) * rates[0] + full * rates[1])
    return loads, tokens * (1 + error)


def test_equal_loads_show_no_growth() -> None:
    cost = StepCost(0.002, 4e-5)
    assert step_costs([({"52": [10.0, 1500.0]}, 150_000.0)] * 8) is None
    other, fast = drawn(45, cost), drawn(150, cost)
    found = step_costs([other] * 4 + [fast] * 4)
    assert found is not None
    assert found[0] == pytest.approx(cost, rel=0.05)
    assert step_costs([other, other, fast]) is None, "too few versions"


@pytest.mark.parametrize("queue", [0.0, 0.4, 0.6, 0.7])
@pytest.mark.parametrize("loads", [(20, 100), (90, 230)])
@pytest.mark.parametrize("most", [0.4, 1.0])
def test_what_waiting_costs_is_told_from_a_growing_step(
    queue: float, loads: tuple[float, float], most: float
) -> None:
    random, cost = Random(5), StepCost(0.003, 1e-5, queue)
    versions = [
        drawn(
            random.uniform(*loads),
            cost,
            full=random.uniform(0, most),
            error=random.gauss(0, 0.01),
        )
        for _ in range(16)
    ]
    found = step_costs(versions)
    assert found is not None
    assert found[0].queue == pytest.approx(queue, abs=0.06)
    assert found[0].step_s(150) == pytest.approx(cost.step_s(150), rel=0.1)


def test_the_time_in_which_requests_wait_has_a_bin_of_its_own() -> None:
    account = LoadAccount()
    account(Event(0.0, "rollout-0", "stats", "at", facts={"stats": RolloutStats(0, 0, 0.0, 2)}))
    phases: list[Phase] = ["begin", "begin", "begin", "end", "end"]
    for time, phase in zip((1.0, 2.0, 4.0, 7.0, 8.0), phases, strict=True):
        account(Event(time, "rollout-0", "request", phase))
    assert account.bins == {"full": [3.0, 6.0], "0": [1.0, 1.0], "7": [3.0, 6.0]}


@pytest.mark.parametrize("error", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("least", [0.9, 0.97, 1.0])
def test_engines_that_are_always_full_do_not_show_what_waiting_costs(
    error: float, least: float
) -> None:
    """Each version has the same cause, so its share of the time explains any noise."""
    random, cost, found = Random(7), StepCost(0.003, 1e-5), []
    for _ in range(20):
        versions = [
            drawn(150, cost, full=random.uniform(least, 1), error=random.gauss(0, error))
            for _ in range(20)
        ]
        found += [one[0].queue for one in [step_costs(versions)] if one]
    assert sum(q > 0 for q in found) <= 1


def test_tokens_that_nobody_drew_show_nothing() -> None:
    loads = {"0": [4.0, 400.0], "full": [0.0, 0.0], "7": [4.0, 0.0]}
    assert step_costs([(loads, tokens) for tokens in (0.0, 1e-200, float("nan"), -1.0) * 3]) is None


def test_the_flattest_likely_line_has_no_shorter_steps_at_few_requests() -> None:
    """Tokens that scatter by 5 % leave f open, so one line would promise too fast small steps."""
    random, cost = Random(3), StepCost(0.0025, 3e-5)
    below, trials = [0, 0], 200
    for _ in range(trials):
        versions = [
            drawn(random.uniform(150, 245), cost, error=random.gauss(0, 0.05)) for _ in range(16)
        ]
        for k, found in enumerate(step_costs(versions) or ()):
            below[k] += found.step_s(40) < 0.95 * cost.step_s(40)
    assert below[0] > 0.2 * trials, "the best line often is too fast there"
    assert below[1] < 0.05 * trials


def test_the_versions_of_an_attempt_that_has_just_begun_are_too_few() -> None:
    with tempfile.TemporaryDirectory() as name:
        assert measure(RunReader(Path(name)).read()) is None
