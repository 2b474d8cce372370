"""Tests of each serving engine, in the environment of that engine (`make test-vllm test-sglang`).

Other environments do not collect these tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.engine import ENGINE

collect_ignore_glob = [] if ENGINE else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run whole runs first, then what needs no shared engine, and test_syncs.py last.

    test_orphans.py looks at modules that an engine in this process would import. test_start.py
    looks at ports, and the trainers of `replica` and `mixture` listen. test_syncs.py changes
    weights of a shared engine, and its last test kills it.

    Two processes of pytest-xdist then end at about the same time: one has the group `engines`,
    whose tests import the engine, and the other has test_e2e.py and test_ray.py.
    """
    order = {"test_e2e": 0, "test_ray": 1, "test_orphans": 2, "test_signals": 3}
    here = Path(__file__).parent

    def key(item: pytest.Item) -> tuple[int, bool, str]:
        if item.path.parent not in (here, here.parent / ENGINE):
            return -1, False, ""
        fixtures = getattr(item, "fixturenames", ())
        shared, engine = "replica" in fixtures, {"replica", "mixture"} & {*fixtures}
        return order.get(item.path.stem, 4), shared, item.path.stem if engine else ""

    items.sort(key=key)
