"""vLLM's processes in a real run: they survive a signal to all, and listen on loopback and the user's sockets alone."""

from __future__ import annotations

import stat
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_failures import Chain
from tests.listening import listeners, outside, unix_sockets
from tests.vllm.test_e2e import VLLM

# The whole runs of two other tests keep the other process of pytest-xdist busy.
pytestmark = pytest.mark.xdist_group("engines")


@pytest.mark.slow
def test_vllm_listens_on_loopback_and_a_signal_to_every_process_saves(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    settings = [*VLLM[:3], "rollout.max_num_seqs=64"]
    try:
        process = psutil.Process(chain.start(*settings, versions=1).pid)
        found = listeners([process, *process.children(recursive=True)])
        assert any("VLLM::" in command for _, _, command in found), found
        assert outside(found) == []
        sockets = unix_sockets([process, *process.children(recursive=True)])
        assert sockets and {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in sockets} == {0}
        chain.saves_after_a_signal_to_all()
    finally:
        if chain.process is not None and chain.process.poll() is None:
            chain.kill_tree()
