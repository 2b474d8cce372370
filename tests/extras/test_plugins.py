"""Parts of other packages: found by entry points, imported when named, refused by name.

`examples/plugin` is installed and trains. Small packages are broken on purpose.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.config import Config, plugins, recipe
from millrace.environments.named import check_environment
from millrace.errors import ConfigError
from millrace.run.machine import check_machine
from tests.e2e import runs

Give = Callable[..., None]
SHORT = ["sft.steps=10", "actor.ppo_mini_batch_size=4", "rollout.total_rollout_steps=16"]


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Give:
    """Return a function that installs a package with entry points and a module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.installed.cache_clear()
    monkeypatch.setattr(plugins, "installed", plugins.installed.__wrapped__)

    def install(name: str, module: str, **groups: str) -> None:
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        lines = (f"[millrace.{group}]\n{entry}\n" for group, entry in groups.items())
        (info / "entry_points.txt").write_text("".join(lines))
        (tmp_path / f"{name}.py").write_text(module)

    return install


def test_a_list_of_names_imports_nothing(give: Give) -> None:
    give("loud", "raise SystemExit('imported')", trackers="shout = loud:T", commands="cry = loud:f")
    assert "shout" in plugins.names("trackers")
    kinds = {key: kind for key, kind, *_ in recipe.describe()}
    assert "shout" in kinds["trainer.logger"]
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0 and "From loud." in shown.stdout


def test_two_packages_with_one_name_are_refused(give: Give) -> None:
    give(
        "one",
        "",
        trackers="csv = one:T",
        train_engines="megatron = one:build",
        commands="train = one:f",
    )
    give("two", "", trackers="csv = two:T", environments="chase = two:Chase")
    for override, givers in (
        ("trainer.logger=[csv]", ("one", "two")),
        ("trainer.engine=megatron", ("millrace", "one")),
    ):
        with pytest.raises(ConfigError, match=override.partition("=")[0]) as caught:
            recipe.load("quickstart", [override])
        assert all(giver in str(caught.value) for giver in (*givers, "Fix: pip uninstall"))
    with pytest.raises(ConfigError, match="millrace and two"):
        check_environment("chase")
    refused = CliRunner().invoke(app, ["train", "quickstart"])
    assert isinstance(refused.exception, ConfigError) and "one" in str(refused.exception)


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit", "SystemExit"),
        ("", "no attribute 'Game'"),
    ],
)
def test_a_broken_package_is_refused_by_its_name(give: Give, module: str, cause: str) -> None:
    part = "game = broken:Game"
    give("broken", module, environments=part, rollout_engines=part, train_engines=part)
    for key, check in (
        ("agents.environment", lambda: check_environment("game")),
        ("rollout.engine", lambda: check_machine(Config(rollout={"engine": "game"}))),
        ("trainer.engine", lambda: check_machine(Config(trainer={"engine": "game"}))),
    ):
        with pytest.raises(ConfigError) as caught:
            check()
        text = str(caught.value)
        assert text.startswith(f"{key} = 'game': the package broken ")
        assert cause in text and "Fix: " in text


def test_a_factory_with_another_signature_is_refused(give: Give) -> None:
    module = "def build(config): ...\nnumber = 5"
    for name in ("build", "number"):
        part = f"{name} = wrong:{name}"
        give(f"wrong_{name}", "", rollout_engines=part, train_engines=part)
    give("wrong", module)
    for key, argument in (("rollout.engine", "model_folder"), ("trainer.engine", "world_size")):
        section = key.partition(".")[0]
        for name in ("build", "number"):
            with pytest.raises(ConfigError) as caught:
                check_machine(Config(**{section: {"engine": name}}))
            text = str(caught.value)
            assert text.startswith(f"{key} = '{name}'") and f"wrong:{name}" in text
            assert argument in text.partition("Fix: ")[2]


def test_a_malformed_entry_point_is_refused_where_it_is_named(give: Give) -> None:
    part = "bad = not a module!"
    give("broken", "", trackers=part, commands=part, environments=part, train_engines=part)
    for override in ("trainer.logger=[bad]", "trainer.engine=bad", "agents.environment=bad"):
        with pytest.raises(ConfigError) as caught:
            recipe.load("quickstart", [override])
            check_environment("bad")
        text = str(caught.value)
        assert text.startswith(override.partition("=")[0])
        assert "package broken" in text and "'not a module!'" in text and "Fix: " in text
    recipe.load("quickstart", [])
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0 and "broken" in shown.stdout
    typed = CliRunner().invoke(app, ["bad"])
    assert isinstance(typed.exception, ConfigError) and "broken" in str(typed.exception)


CODE = """
class Thing: ...
class Game:
    def reset(self, **row): ...
def act(): ...
"""


@pytest.mark.parametrize("part", ["parts", "parts:Thing", "parts:act"])
def test_a_part_of_another_form_is_refused_with_the_form(give: Give, part: str) -> None:
    groups = ["environments", "rollout_engines", "train_engines", "trackers"]
    groups += [] if part == "parts:act" else ["commands"]  # a function is a command
    give("parts", CODE, **dict.fromkeys(groups, f"thing = {part}"))
    for group in groups:
        with pytest.raises(ConfigError) as caught:
            plugins.load("KEY", "thing", group)
        text = str(caught.value)
        assert text.startswith(f"KEY = 'thing': the package parts gives {part}")
        assert plugins.FORMS[group][1] in text.partition("Fix: ")[2]


def test_a_name_of_another_group_is_refused_with_both_groups(give: Give) -> None:
    give("parts", CODE, tracker="csv = parts:Thing", train_engines="big = parts:act")
    for override, given in (
        ("trainer.logger=[csv]", "tracker"),
        ("rollout.engine=big", "train_engines"),
        ("agents.environment=big", "train_engines"),
    ):
        with pytest.raises(ConfigError) as caught:
            recipe.load("quickstart", [override])
            check_environment(override.partition("=")[2])
        rule, _, fix = str(caught.value).partition("Fix: ")
        assert rule.startswith(override.partition("=")[0])
        assert re.search(rf"millrace\.{given}\b", rule) and "millrace." in fix
    refused = CliRunner().invoke(app, ["big"])
    assert "millrace.commands" in str(refused.exception)


def test_a_class_takes_no_value(give: Give) -> None:
    give("parts", CODE, environments="game = parts:Game")
    check_environment("game")
    with pytest.raises(ConfigError, match=r"'game:hard'.*Fix: agents.environment=game\b"):
        check_environment("game:hard")


def test_keys_of_an_engine_are_left_to_it(give: Give) -> None:
    give("mine", "", rollout_engines="mine = mine:build")
    keys = ["rollout.enforce_eager=true", "rollout.engine_kwargs.depth=3"]
    recipe.load("quickstart", ["rollout.engine=mine", *keys])
    with pytest.raises(ConfigError, match="engine=torch"):
        recipe.load("quickstart", keys)


def test_the_example_is_installed_and_trains_with_each_of_its_parts(tmp_path: Path) -> None:
    source, site, run = tmp_path / "source", tmp_path / "site", tmp_path / "run"
    shutil.copytree(runs.ROOT / "examples" / "plugin", source)  # pip builds in the folder
    environment = {**os.environ, "PYTHONPATH": f"{runs.ROOT}{os.pathsep}{site}"}

    def python(*arguments: str) -> str:
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=runs.HANG_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "--target", str(site)]
    python("pip", "install", *options, str(source))
    parts = ["rollout.engine=counting", "trainer.engine=measured", "trainer.logger=[csv]"]
    parts += ["agents.environment=partly_sorted"]
    python("millrace", *runs.small(run, *SHORT, *parts))

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    norms = [row["actor/weight_norm"] for row in rows if "actor/weight_norm" in row]
    assert len(norms) == 2 and min(norms) > 0
    with (run / "figures.csv").open(newline="") as file:
        written = {(version, name): float(value) for version, name, value in csv.reader(file)}
    assert written["2", "actor/weight_norm"] == norms[-1]
    log = (run / "logs" / "rollout-0.log").read_text()
    assert len([line for line in log.splitlines() if line.startswith("request ")]) >= 16 * 4
    means = [
        float(line.split()[1]) for line in python("millrace", "rewards", str(run)).splitlines()
    ]
    assert len(means) == 2 and 0 < max(means) < 1  # the task's own score is 0 or 1


@pytest.mark.parametrize(("typed", "meant"), [("benhc", "bench"), ("trian", "train")])
def test_a_mistyped_command_of_the_core_or_an_extra_is_suggested(typed: str, meant: str) -> None:
    assert f"Did you mean '{meant}'?" in CliRunner().invoke(app, [typed]).output
