"""millrace never writes to a folder that it did not make, and deletes nothing in it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.persist import ownership
from millrace.pipeline.checkpoint import Checkpoints
from millrace.run.export import export
from millrace.run.folder import open_eval_dir, open_run_dir
from millrace.run.start import run_sft
from millrace.schedule.ledger import Ledger
from tests.run.test_folder import Engine, checkpoint_of, config_of


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a user's folder: a recipe, and the model that it starts from."""
    folder = tmp_path / "home"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_text("seven billion")
    (folder / "config.yaml").write_text("name: mine\n")
    return folder


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_users_folder_is_refused_untouched(home: Path, resume: str) -> None:
    before = contents(home)
    with pytest.raises(
        ConfigError, match=r"trainer.run_dir = .*no run of millrace made it.*Fix: a new or an empty"
    ):
        open_run_dir(config_of(f"trainer.run_dir={home}", f"trainer.resume={resume}"))
    assert contents(home) == before


def test_a_users_folder_is_refused_for_a_checkpoint_too(home: Path, tmp_path: Path) -> None:
    found, before = checkpoint_of(tmp_path / "run"), contents(home)
    with pytest.raises(ConfigError, match="no run of millrace made it"):
        open_run_dir(config_of(f"trainer.run_dir={home}", f"trainer.resume={found}"))
    assert contents(home) == before


@pytest.mark.parametrize("where", ["version-000000", "checkpoints/version-000000"])
def test_a_checkpoint_that_was_copied_out_starts_a_run_of_its_own(
    home: Path, tmp_path: Path, where: str
) -> None:
    """The folder above the copy is the user's, even if it has the name of a run's folder."""
    copy = home / where
    shutil.copytree(checkpoint_of(tmp_path / "run"), copy)
    before = contents(home)
    run = open_run_dir(config_of(f"trainer.resume={copy}"), tmp_path / "runs")
    assert (run.path, run.resume_from) == (tmp_path / "runs" / "quickstart-1", copy)
    assert "trainer.run_dir=FOLDER" in run.notes[-1] and str(run.path) in run.notes[-1]
    assert (run.model / "tokenizer.json").read_text() == "its own"
    assert contents(home) == before


def test_a_checkpoint_in_its_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checkpoint_of(tmp_path / "run")
    assert open_run_dir(config_of(f"trainer.resume={found}")).path == tmp_path / "run"
    monkeypatch.chdir(found.parent)
    again = open_run_dir(config_of(f"trainer.resume={found.name}"))
    assert again.path.resolve() == tmp_path / "run"


def test_a_run_that_never_began_is_made_again(tmp_path: Path) -> None:
    """Its model may belong to other data. A link in its place is deleted, and its target stays."""
    said = config_of(f"trainer.run_dir={tmp_path / 'run'}")
    run, elsewhere = open_run_dir(said), tmp_path / "elsewhere"
    run.model.mkdir()
    assert not open_run_dir(said).model.exists()
    elsewhere.mkdir()
    (elsewhere / "weights").touch()
    run.model.symlink_to(elsewhere)
    assert not open_run_dir(said).model.is_symlink() and (elsewhere / "weights").exists()


def test_a_model_that_the_run_starts_from_is_not_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = open_run_dir(config_of(f"trainer.run_dir={folder}"))
    run.model.mkdir()
    (run.model / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"model.path = .* is the run's own model folder"):
        open_run_dir(config_of(f"trainer.run_dir={folder}", f"model.path={run.model}"))
    assert (run.model / "model.safetensors").exists()


def test_links_are_not_written_through(tmp_path: Path) -> None:
    said = config_of(f"trainer.run_dir={tmp_path / 'run'}")
    run, mine = open_run_dir(said), tmp_path / "mine.yaml"
    mine.write_text("name: mine\n")
    (run.path / "config.yaml").unlink()
    (run.path / "config.yaml").symlink_to(mine)
    assert open_run_dir(said).path == run.path
    assert mine.read_text() == "name: mine\n"


def test_an_evaluations_folder_is_ours(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path / "run")
    run = open_eval_dir(config_of(f"trainer.resume={found}"), tmp_path / "runs")
    assert ownership.is_ours(run.path)


def test_a_checkpoint_that_lies_elsewhere_is_unlinked_not_deleted(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path / "run")
    elsewhere = found.rename(tmp_path / "large disk")
    found.symlink_to(elsewhere)
    ledger = Ledger(config_of().schedule)
    ledger.version = 1
    again = asyncio.run(
        Checkpoints(tmp_path / "run", keep=1).save(ledger.snapshot(), Engine())  # type: ignore[arg-type]
    )
    assert Checkpoints(tmp_path / "run", keep=1).all() == [again]
    assert not found.is_symlink() and (elsewhere / "manifest.json").is_file()


def test_an_export_never_writes_over_anything(home: Path, tmp_path: Path) -> None:
    found, before = checkpoint_of(tmp_path / "run"), contents(home)
    for folder in (home, home / "config.yaml"):
        with pytest.raises(ConfigError, match=r"FOLDER = .*Fix: a new folder"):
            export(found, folder)
    assert contents(home) == before


def test_a_supervised_model_is_not_written_over(tmp_path: Path) -> None:
    """The supervised model may be the very model that this warm-up reads."""
    said = config_of(f"trainer.run_dir={tmp_path / 'run'}")
    run = open_run_dir(said)
    (run.path / "sft").mkdir()
    (run.path / "sft" / "model.safetensors").write_text("of the last time")
    with pytest.raises(ConfigError, match=r"trainer.run_dir = .*has a supervised model"):
        asyncio.run(run_sft(said, None))  # type: ignore[arg-type]
    assert (run.path / "sft" / "model.safetensors").read_text() == "of the last time"
