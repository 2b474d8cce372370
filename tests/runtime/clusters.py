"""Clusters of Ray on this machine, with no more processes than the tests need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from millrace.runtime import ray_token
from millrace.runtime.ray import started
from tests.waiting import HANG_S

NODE: dict[str, Any] = {"object_store_memory": 80 << 20, "include_log_monitor": False}
"""The options of every node. No driver here wants the logs of its workers."""


@contextmanager
def open_cluster(**head: Any) -> Iterator[Cluster]:
    """Start a cluster of one node, without a token and without an autoscaler."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "disabled")
            ray_token._read_environment()
            head |= {"include_dashboard": False, "no_monitor": True, **NODE}
            cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head), HANG_S)
            try:
                yield cluster
            finally:
                ray.shutdown()
                cluster.shutdown()
    finally:
        ray_token.forget_token()
