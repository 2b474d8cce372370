"""Clusters of Ray on this machine, with no more processes than the tests need."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from millrace.runtime import ray_token
from tests.waiting import HANG_S

NODE: dict[str, Any] = {"object_store_memory": 80 << 20, "include_log_monitor": False}
"""The options of every node. No driver here wants the logs of its workers."""


def start_no_idle_workers(patch: pytest.MonkeyPatch) -> None:
    """Tell the nodes of a later start to wait until somebody needs a worker.

    Otherwise, each node starts as many as it has CPUs. An actor with variables uses none of them.
    """
    patch.setenv("RAY_prestart_worker_first_driver", "0")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def _started(head: dict[str, Any]) -> Cluster:
    """Start the head. Ray itself gives up after 30 s, which a busy machine may need."""
    end = time.monotonic() + HANG_S
    while True:
        try:
            return Cluster(initialize_head=True, head_node_args=head)
        except Exception as error:
            if "timed out during startup" not in str(error) or time.monotonic() > end:
                raise


@contextmanager
def open_cluster(**head: Any) -> Iterator[Cluster]:
    """Start a cluster of one node, without a token and without an autoscaler."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "disabled")
            start_no_idle_workers(patch)
            ray_token._read_environment()
            head |= {"include_dashboard": False, "no_monitor": True, **NODE}
            cluster = _started(head)
            try:
                yield cluster
            finally:
                ray.shutdown()
                cluster.shutdown()
    finally:
        ray_token.forget_token()
