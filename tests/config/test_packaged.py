"""Recipes inside the package.

They work from any folder by name. The command line lists, prints and copies them. A file with the
same name hides a packaged recipe.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.config import recipe
from millrace.config.packaged import FOLDER, find, named, packaged, summary
from millrace.errors import ConfigError
from millrace.schedule.modes import MODES
from tests.e2e.runs import millrace
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]


def cli(*arguments: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.mark.parametrize("name", packaged())
def test_every_recipe_has_a_name_a_short_name_and_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = packaged()[name]
    short = name.rpartition("/")[2]
    assert find(Path(name), Path()) == find(Path(short), Path()) == named(f"{name}.yaml") == path
    assert len(summary(path)) > 20 and not summary(path).startswith("#")
    assert recipe.load(short) == recipe.load(path)


@pytest.mark.parametrize("name", packaged())
def test_a_copy_of_a_recipe_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "my.yaml"
    shutil.copy(packaged()[name], copy)
    assert recipe.load(copy) == recipe.load(packaged()[name])


STALE = [
    mode for mode in MODES if recipe.load("quickstart", [f"mode={mode}"]).schedule.lag_bound > 1
]


@pytest.mark.parametrize("name", [name for name in packaged() if name.startswith("algorithms/")])
def test_a_recipe_of_an_algorithm_runs_in_every_mode_and_bounds_stale_tokens(name: str) -> None:
    for mode in MODES:
        assert recipe.load(name, [f"mode={mode}"]).name == name.rpartition("/")[2]
    assert len(STALE) > 3
    corrected = recipe.load(name).algorithm.rollout_correction.rollout_is
    for mode in STALE:  # The loss bounds nothing that a ratio to the trainer's own policy hides.
        overrides = [f"mode={mode}", "async_training.use_rollout_log_probs=false"]
        if corrected:
            recipe.load(name, overrides)
            continue
        with pytest.raises(ConfigError, match=r"Fix: .*rollout_correction\.rollout_is"):
            recipe.load(name, overrides)


def test_a_file_wins_over_a_packaged_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dapo.yaml").write_text("name: mine\n")
    (tmp_path / "quickstart").mkdir()  # a folder is not a recipe
    assert recipe.load("dapo.yaml").name == "mine"
    with pytest.raises(ConfigError, match=r"no such file.*without \.yaml\. Fix: algorithms/grpo\."):
        recipe.load("grpo.yaml")
    assert recipe.load("dapo").name == "dapo"
    assert recipe.load("quickstart").name == "quickstart"
    (tmp_path / "dapo").write_text("name: [")
    with pytest.raises(ConfigError, match="this file hides the packaged recipe algorithms/dapo"):
        recipe.load("dapo")


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("dappo", "Fix: algorithms/dapo"),
        ("quikstart.yaml", "Fix: quickstart"),
        ("algorithms/gspoo", "Fix: algorithms/gspo"),
        (
            "nothing-like-it",
            "Fix: the path of a YAML file, or a name that `millrace recipes` lists",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_ones(
    given: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no packaged recipe has this name") as refused:
        recipe.load(given)
    assert str(refused.value).startswith(f"RECIPE = {given!r}: no such file") and fix in str(
        refused.value
    )


def test_a_short_name_that_two_recipes_have_is_refused_with_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from millrace.config import packaged as module

    table = {"a/same": tmp_path / "1", "b/same": tmp_path / "2"}
    monkeypatch.setattr(module, "packaged", lambda: table)
    assert find(Path("a/same"), tmp_path) == tmp_path / "1"
    with pytest.raises(ConfigError, match=r"several packaged recipes\. Fix: a/same or b/same"):
        find(Path("same"), tmp_path)


def test_recipes_are_listed_and_printed() -> None:
    listed = millrace("recipes").out.splitlines()
    assert [line.split()[0] for line in listed] == list(packaged())
    assert millrace("recipes", "--json").json["quickstart"]
    assert millrace("recipes", "dapo").out == (FOLDER / "algorithms" / "dapo.yaml").read_text()
    refused = millrace("recipes", "dappo")
    assert refused.code == 2 and "Fix: algorithms/dapo" in refused.err


@pytest.mark.slow
def test_an_installed_millrace_has_every_recipe_in_any_folder(tmp_path: Path) -> None:
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "millrace", source / "millrace")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*pip, *build], check=True, capture_output=True, timeout=HANG_S)
    (wheel,) = wheels.glob("*.whl")
    install = [
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run([*pip, *install], check=True, capture_output=True, timeout=HANG_S)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = [sys.executable, "-c", "import millrace; print(millrace.__file__)"]
    found = subprocess.run(
        where, cwd=elsewhere, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True
    )
    assert str(site) in found.stdout.decode()
    assert (
        json.loads(cli("recipes", "--json", cwd=elsewhere, path=site).stdout).keys()
        == packaged().keys()
    )
    done = cli("train", "quickstart", "--dry-run", "--json", cwd=elsewhere, path=site)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["derived"]["window"] == 64
    (elsewhere / "my.yaml").write_text(cli("recipes", "dapo", cwd=elsewhere, path=site).stdout)
    copied = cli("train", "my.yaml", "--dry-run", "--json", cwd=elsewhere, path=site)
    assert copied.returncode == 0, copied.stderr
