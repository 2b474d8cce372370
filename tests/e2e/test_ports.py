"""A run listens on loopback alone and opens nothing to the network."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.e2e.test_failures import Chain
from tests.listening import listeners, other_addresses, outside, reachable

pytestmark = pytest.mark.timeout(300)


def test_a_run_listens_on_loopback_alone_and_refuses_every_other_address(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    try:
        process = psutil.Process(chain.start("trainer.n_gpus_per_node=2").pid)
        found = listeners([process, *process.children(recursive=True)])
        assert len(found) >= 5, "a store, and gloo in two ranks and a replica"
        assert outside(found) == []
        assert all(reachable("127.0.0.1", port) for _, port, _ in found)
        others = other_addresses()
        assert others
        assert not [(to, one) for to in others for one in found if reachable(to, one[1])]
    finally:
        if chain.process is not None and chain.process.poll() is None:
            chain.kill_tree()
