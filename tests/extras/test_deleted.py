"""Each extra is deleted from a copy of the package, and quickstart trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.sweeps import sweep

PACKAGE = runs.ROOT / "millrace"
EXTRAS = sorted(p.parent.name for p in (PACKAGE / "extras").glob("*/__init__.py"))
REFUSED = {
    "bench": ["bench", "sync", "quickstart"],
    "environments": ["train", "quickstart", "agents.environment=mcp:true", "--dry-run"],
    "faults": ["simulate"],
    "megatron": ["train", "quickstart", "trainer.engine=megatron", "--dry-run"],
    "plan": ["plan", "quickstart", "--gpus", "2"],
    "sglang": ["train", "quickstart", "rollout.engine=sglang", "--dry-run"],
    "verl": ["train", "quickstart", "actor_rollout_ref.rollout.n=4", "--dry-run"],
}
"""A command that names each extra."""


def without(folder: Path, *extras: str) -> None:
    shutil.copytree(PACKAGE, folder / "millrace")
    for extra in extras:
        shutil.rmtree(folder / "millrace" / "extras" / extra)


def millrace(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the copy in `folder`. It has no metadata of its own."""
    return subprocess.run(
        [sys.executable, "-m", "millrace", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        timeout=runs.HANG_S,
    )


@pytest.mark.parametrize("extra", sweep(EXTRAS, "verl".__eq__))
def test_quickstart_trains_without_an_extra(extra: str, tmp_path: Path) -> None:
    without(tmp_path, extra)
    short = ["actor.ppo_mini_batch_size=4", "rollout.total_rollout_steps=8"]
    done = millrace(tmp_path, *runs.small(tmp_path / "run", *short))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "version-000001").is_dir()


def test_a_missing_extra_that_is_named_gives_the_fix(tmp_path: Path) -> None:
    assert REFUSED.keys() == set(EXTRAS)
    without(tmp_path, *EXTRAS)
    for extra, arguments in REFUSED.items():
        done = millrace(tmp_path, *arguments)
        assert done.returncode == 2, (extra, done.stderr)
        assert "Traceback" not in done.stderr
        assert "install millrace" in done.stderr.partition("Fix: ")[2], (extra, done.stderr)
    assert "import-verl" not in millrace(tmp_path, "--help").stdout
