"""The folder of a run: the checkpoints that a run may resume from, and the files they bring."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millrace.cli.main import app
from millrace.config import Config, recipe
from millrace.errors import ConfigError
from millrace.pipeline.checkpoint import Checkpoints
from millrace.run.folder import open_eval_dir, open_run_dir, release
from millrace.runtime.local import check_devices, visible_gpus
from millrace.schedule.ledger import Ledger, Slot

RECIPE = Path(__file__).parents[2] / "millrace" / "recipes" / "quickstart.yaml"


class Engine:
    """A train engine that writes one file."""

    async def save(self, folder: str, staged: bool) -> None:
        (Path(folder) / "weights").write_text("1")

    async def saved(self) -> None: ...


def config_of(*overrides: str) -> Config:
    return recipe.load(RECIPE, list(overrides))


def checkpoint_of(folder: Path, *overrides: str, slots: Sequence[Slot] = ()) -> Path:
    """Return a checkpoint of a run with these settings, slots and a tokenizer of its own."""
    run = open_run_dir(config_of(f"trainer.run_dir={folder}", *overrides))
    run.model.mkdir()
    (run.model / "tokenizer.json").write_text("its own")
    snapshot = replace(Ledger(config_of().schedule).snapshot(), slots=list(enumerate(slots)))
    return asyncio.run(Checkpoints(run.path, keep=1).save(snapshot, Engine()))  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoint_of(tmp_path / "first")


def test_a_folder_that_goes_on_from_a_checkpoint_takes_its_tokenizer(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in (
        open_run_dir(
            config_of(f"trainer.run_dir={tmp_path / 'second'}", f"trainer.resume={checkpoint}")
        ),
        open_eval_dir(config_of(f"trainer.resume={checkpoint}")),
    ):
        assert (
            run.resume_from == checkpoint
            and (run.model / "tokenizer.json").read_text() == "its own"
        )


def test_an_evaluation_says_what_has_no_effect_and_what_it_skips(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = f"trainer.run_dir={checkpoint.parents[1]}"
    run = open_eval_dir(config_of(where))
    assert run.resume_from is None
    assert any("trainer.run_dir" in n and "trainer.resume=auto" in n for n in run.notes)
    damaged = checkpoint.with_name("version-000009")
    shutil.copytree(checkpoint, damaged)
    next(damaged.rglob("weights")).write_text("2")
    run = open_eval_dir(config_of(where, "trainer.resume=auto"))
    assert run.resume_from == checkpoint
    assert any(damaged.name in note for note in run.notes)


@pytest.mark.parametrize(
    "change",
    ["trainer.seed=3", "rollout.n=4", "data.shuffle=false", "data.train_files=['task:copy']"],
)
def test_a_run_goes_on_with_the_problems_it_began_with(checkpoint: Path, change: str) -> None:
    with pytest.raises(ConfigError, match=rf"{change.split('=')[0]} = .* was made with"):
        open_run_dir(config_of(f"trainer.resume={checkpoint}", change))


KL_IN_REWARD = "algorithm.use_kl_in_reward=true"
KL_IN_LOSS = "actor.use_kl_loss=true"


@pytest.mark.parametrize(
    ("before", "now"),
    [("grpo", "remax"), ("remax", "rloo"), ("grpo", "gae"), ("gae", "grpo"), ("gae", "remax")],
)
def test_a_run_goes_on_with_what_its_estimator_needs(tmp_path: Path, before: str, now: str) -> None:
    key = "algorithm.adv_estimator"
    found = checkpoint_of(tmp_path / "run", f"{key}={before}")
    with pytest.raises(
        ConfigError,
        match=rf"{key} = '{now}': .* was made with {before}.*Fix: {key}={before}, or a new run",
    ):
        open_run_dir(config_of(f"trainer.resume={found}", f"{key}={now}"))


@pytest.mark.parametrize("kl", [KL_IN_REWARD, KL_IN_LOSS])
def test_a_run_goes_on_with_or_without_a_reference_as_it_began(tmp_path: Path, kl: str) -> None:
    without, with_ = checkpoint_of(tmp_path / "without"), checkpoint_of(tmp_path / "with", kl)
    with pytest.raises(ConfigError, match="was made without a reference policy"):
        open_run_dir(config_of(f"trainer.resume={without}", kl))
    with pytest.raises(ConfigError, match="was made with a reference policy"):
        open_run_dir(config_of(f"trainer.resume={with_}"))


def test_estimators_and_kls_that_need_the_same_models_may_change(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path / "run", KL_IN_LOSS)
    assert (
        open_run_dir(
            config_of(f"trainer.resume={found}", KL_IN_REWARD, "algorithm.adv_estimator=rloo")
        ).resume_from
        == found
    )


def test_gpus_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_more_devices_than_the_machine_has_are_refused_with_the_arithmetic() -> None:
    check_devices(config_of().sides, ["0", "1"])
    check_devices(config_of("mode=colocate_sync").sides, ["0"])
    check_devices(
        config_of("trainer.nnodes=9", "trainer.n_gpus_per_node=8").sides, []
    )  # the devices are CPU processes, so the number of GPUs does not matter
    with pytest.raises(
        ConfigError, match="trainer 1 and rollout 1 devices need 2 GPUs, and this machine has 1"
    ):
        check_devices(config_of().sides, ["0"])
    with pytest.raises(ConfigError, match="the run needs 2 nodes"):
        check_devices(config_of("trainer.n_gpus_per_node=8").sides, [str(i) for i in range(16)])


def test_two_workers_on_one_gpu_need_gloo() -> None:
    sides = config_of("rollout.n_gpus_per_node=2").sides
    check_devices(sides, ["0", "0", "0"], nccl=False)
    with pytest.raises(ConfigError, match=r"NCCL refuses that.*sync.backend=gloo"):
        check_devices(sides, ["0", "1", "1"])
    two = config_of("trainer.n_gpus_per_node=2").sides
    with pytest.raises(ConfigError, match=r"two workers would use one GPU"):
        check_devices(two, ["0", "0", "1"], nccl=False)


def test_auto_goes_on_with_the_last_run_that_has_a_checkpoint(tmp_path: Path) -> None:
    """Skip a run that was stopped while it started, and a folder with only a warm-up."""
    checkpoint_of(tmp_path / "quickstart-1")
    newest = checkpoint_of(tmp_path / "quickstart-2")
    (tmp_path / "quickstart-3" / "logs").mkdir(parents=True)
    run = open_run_dir(config_of("trainer.resume=auto"), tmp_path)
    assert (run.path, run.resume_from) == (tmp_path / "quickstart-2", newest)
    assert run.notes == (f"{tmp_path / 'quickstart-3'} has no checkpoint",)


def test_auto_says_so_where_it_begins_from_the_start(tmp_path: Path) -> None:
    run = open_run_dir(config_of("trainer.resume=auto"), tmp_path)
    assert (
        run.resume_from is None
        and run.notes[-1]
        == f"no run of quickstart in {tmp_path} has a checkpoint, so a new run starts"
    )
    again = open_run_dir(config_of("trainer.resume=auto", f"trainer.run_dir={run.path}"), tmp_path)
    assert again.path == run.path and again.notes == (
        f"{run.path} has no checkpoint, so the run starts from the beginning",
    )


HOLDS = """
import sys, time
from pathlib import Path
from millrace.config import recipe
from millrace.run.folder import open_run_dir
open_run_dir(recipe.load(sys.argv[1], [f"trainer.run_dir={sys.argv[2]}"]))
print("open", flush=True)
time.sleep(10_000)
"""


def test_two_processes_never_train_in_one_folder(tmp_path: Path) -> None:
    """Two processes in one folder could lose samples. A killed process keeps no lock."""
    folder = tmp_path / "run"
    mine = config_of("trainer.resume=auto", f"trainer.run_dir={folder}")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(RECIPE), str(folder)], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        with pytest.raises(
            ConfigError,
            match=rf"trainer.run_dir = '{folder}': process {other.pid} on .* is writing to this folder. Fix: wait",
        ):
            open_run_dir(mine)
    finally:
        other.kill()
        other.communicate()
    assert open_run_dir(mine).path == folder
    assert open_run_dir(mine).path == folder, "the same process goes on in it"
    release(folder)


def test_where_a_folder_cannot_be_locked_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    folder = tmp_path / "run"
    (note,) = open_run_dir(config_of(f"trainer.run_dir={folder}")).notes
    assert (
        note
        == f"{folder} cannot be locked (No locks available). Make sure that no other process trains in it"
    )


@pytest.mark.parametrize("key", ["trainer.run_dir", "trainer.resume"])
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_path_that_cannot_be_looked_at_is_refused_by_its_key(
    tmp_path: Path, key: str, resume: str
) -> None:
    """The path is too long. A folder that this user may not enter gives the same error."""
    path = tmp_path / ("x" * 300)
    with pytest.raises(ConfigError, match=f"{key} = "):
        open_run_dir(config_of(f"trainer.resume={resume}", f"{key}={path}"))


def test_an_evaluation_of_no_run_asks_for_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.resume = 'auto'.*Fix: trainer.run_dir="):
        open_eval_dir(config_of("trainer.resume=auto"), tmp_path / "runs")


def test_a_dry_run_says_what_the_resume_would_refuse(checkpoint: Path, tmp_path: Path) -> None:
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}

    def dry(command: str, *overrides: str) -> Result:
        return CliRunner().invoke(app, [command, str(RECIPE), *overrides, "--dry-run"])

    resume = f"trainer.run_dir={tmp_path / 'first'}", "trainer.resume=auto"
    assert f"resumes from {checkpoint}" in dry("train", *resume).stderr
    assert "sft.steps = 5: no effect" in dry("train", *resume, "sft.steps=5").stderr
    refused = dry("train", *resume, "rollout.n=4", "trainer.seed=9")
    assert isinstance(refused.exception, ConfigError)
    first, second = sorted(str(refused.exception).splitlines())
    assert first.startswith("rollout.n = 4: the checkpoint")
    assert second.startswith("trainer.seed = 9: the checkpoint")
    assert dry("eval", *resume, "rollout.n=4").exit_code == 0
    assert "no digests of its rows" in dry("train", *resume).stderr  # this checkpoint has none
    assert files == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "retired": 64}))
    short = dry("train", *resume, "rollout.total_rollout_steps=8")
    assert str(short.exception).startswith("rollout.total_rollout_steps = 8: the run would end")
