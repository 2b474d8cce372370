"""The folder of a run: what may go on from what, and what a checkpoint brings along."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace import recipe
from millrace.errors import ConfigError
from millrace.pipeline.checkpoint import Checkpoints
from millrace.run_dir import open_eval_dir, open_run_dir
from millrace.runtime.local import check_devices, visible_gpus
from millrace.schedule.ledger import Ledger

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"


class Engine:
    """Writes one file, as a train engine would."""

    async def save(self, folder: str) -> None:
        (Path(folder) / "weights").write_text("1")


def config_of(*overrides: str) -> recipe.Config:
    return recipe.load(RECIPE, list(overrides))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a run with a tokenizer of its own."""
    run = open_run_dir(config_of(f"trainer.run_dir={tmp_path / 'first'}"))
    run.model.mkdir()
    (run.model / "tokenizer.json").write_text("its own")
    ledger = Ledger(config_of().schedule)
    return asyncio.run(Checkpoints(run.path, keep=1).save(ledger.snapshot(), Engine()))  # type: ignore[arg-type]


def test_a_folder_that_goes_on_from_a_checkpoint_takes_its_tokenizer(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in (
        open_run_dir(config_of(f"trainer.run_dir={tmp_path / 'second'}", f"trainer.resume={checkpoint}")),
        open_eval_dir(config_of(f"trainer.resume={checkpoint}")),
    ):
        assert run.resume_from == checkpoint and (run.model / "tokenizer.json").read_text() == "its own"


@pytest.mark.parametrize("change", ["trainer.seed=3", "rollout.n=4", "data.shuffle=false", "data.train_files=['task:copy']"])
def test_a_run_goes_on_with_the_problems_it_began_with(checkpoint: Path, change: str) -> None:
    with pytest.raises(ConfigError, match=rf"{change.split('=')[0]} = .* was made with"):
        open_run_dir(config_of(f"trainer.resume={checkpoint}", change))


def test_gpus_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_more_devices_than_the_machine_has_are_refused_with_the_arithmetic() -> None:
    check_devices(config_of(), ["0", "1"])
    check_devices(config_of("mode=colocate_sync"), ["0"])
    check_devices(config_of("trainer.nnodes=9", "trainer.n_gpus_per_node=8"), [])  # processes of a CPU
    with pytest.raises(ConfigError, match="trainer 1 and rollout 1 devices need 2 GPUs, and this machine offers 1"):
        check_devices(config_of(), ["0"])
    with pytest.raises(ConfigError, match="2 nodes are needed"):
        check_devices(config_of("trainer.n_gpus_per_node=8"), [str(i) for i in range(16)])
