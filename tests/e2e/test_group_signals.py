"""Signals to all processes of a run at once, as from systemd, Slurm or a terminal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from millrace.pipeline.checkpoint import Checkpoints
from tests.e2e import runs
from tests.e2e.test_failures import Chain, history

pytestmark = pytest.mark.timeout(300)


def signal_all(chain: Chain, number: signal.Signals) -> list[psutil.Process]:
    """Signal the process group and every process under the driver.

    Returns the processes under the driver.
    """
    assert chain.process is not None
    under = psutil.Process(chain.process.pid).children(recursive=True)
    assert len(under) >= 3, "a rank, a replica and a reward worker"
    for process in under:
        process.send_signal(number)
    os.killpg(chain.process.pid, number)
    return under


def test_a_signal_to_every_process_saves_a_checkpoint_that_resumes(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    try:
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            chain.start()
            under = signal_all(chain, number)
            assert chain.end(30) == code, "\n".join(chain.said())
            cut = history(chain.folder)[-1]
            assert cut["event"] == "end"
            name = f"version-{cut['version']:06d}"
            assert (chain.folder / "checkpoints" / name / "manifest.json").is_file()
            _, left = psutil.wait_procs(under, timeout=5)
            assert not left
        chain.start("rollout.total_rollout_steps=400", versions=0)
        assert chain.end(90) == 0, "\n".join(chain.said())
    finally:
        if chain.process is not None and chain.process.poll() is None:
            chain.kill_tree()
    found = runs.audit(chain.folder)
    assert found["complete"] and found["trained"] == 400 and found["attempts"] == 3
    assert (found["lost"], found["trained_twice"], found["in_flight"]) == (0, 0, 0)
    assert found["dropped"] == {}, "no signal costs a sample"


def test_a_signal_to_every_process_of_a_cluster_that_the_run_started_saves_too(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray")
    chain = Chain(tmp_path)
    try:
        chain.start("trainer.runtime=ray")
        under = signal_all(chain, signal.SIGTERM)
        assert chain.end(60) == 143, "\n".join(chain.said())
        _, left = psutil.wait_procs(under, timeout=10)
        assert not left
    finally:
        if chain.process is not None and chain.process.poll() is None:
            chain.kill_tree()
    assert Checkpoints(chain.folder, keep=2).newest()[0] is not None
    said = runs.audit(chain.folder)
    assert (said["lost"], said["trained_twice"], said["dropped"]) == (0, 0, {})
