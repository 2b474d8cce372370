"""A train state is data: nothing in its files can run code, or name files outside of its folder."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from millrace.errors import CheckpointError
from millrace.train.state_reader import INDEX, load_state
from millrace.train.state_writer import expect_one_process


class Evil:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def state(**more: Any) -> dict[str, Any]:
    groups = {"lr": 1e-3, "betas": (0.9, 0.95), "fused": None, "params": ["a", "b"]}
    return {
        "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
        "optimizer": {"groups": [groups], "step": 7},
        **more,
    }


def written(folder: Path, **more: Any) -> Path:
    expect_one_process()
    save(state(**more), checkpoint_id=str(folder), no_dist=True)
    return folder


def empty(**more: Any) -> dict[str, Any]:
    made = state(**more)
    made["model"] = {name: torch.zeros_like(t) for name, t in made["model"].items()}
    made["optimizer"] = {
        "groups": [{"lr": 0.0, "betas": None, "fused": 1, "params": []}],
        "step": 0,
    }
    return made


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder, found = written(tmp_path / "engine"), empty()
    load_state(found, str(folder), no_dist=True)
    wanted = state()
    assert all(torch.equal(found["model"][name], t) for name, t in wanted["model"].items())
    assert found["optimizer"] == wanted["optimizer"]


def test_an_index_that_runs_code_is_refused_before_it_runs(tmp_path: Path) -> None:
    folder = written(tmp_path / "engine")
    (folder / INDEX).write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"\.metadata is refused: it names .*system"):
        load_state(empty(), str(folder), no_dist=True)
    (folder / "__0.metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    (folder / INDEX).unlink()
    with pytest.raises(OSError, match=r"\.metadata"):
        load_state(empty(), str(folder), no_dist=True)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_runs_code_is_refused_before_it_runs(tmp_path: Path) -> None:
    folder = written(tmp_path / "engine", value=Evil(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"value is refused: "):
        load_state(empty(value=None), str(folder), no_dist=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../__0_0.distcp", "/etc/passwd", "..", "a/b"])
def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "engine")
    index = pickle.loads((folder / INDEX).read_bytes())
    for info in index.storage_data.values():
        info.relative_path = name
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="is refused: it names"):
        load_state(empty(), str(folder), no_dist=True)


@pytest.mark.parametrize("data", [b"", b"\x80", pickle.dumps({}), pickle.dumps(None)])
def test_rubbish_is_no_index(tmp_path: Path, data: bytes) -> None:
    folder = written(tmp_path / "engine")
    (folder / INDEX).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\.metadata is refused"):
        load_state(empty(), str(folder), no_dist=True)
