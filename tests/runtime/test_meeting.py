"""The address where ranks meet: who may reach it, and how long ranks wait there."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from millrace.runtime.address import listening_at
from millrace.runtime.worker import Worker
from tests.listening import other_addresses, reachable


@pytest.mark.parametrize("wait_s", [1800.0, 7.5])
def test_ranks_wait_for_each_other_as_long_as_any_wait_may_take(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    monkeypatch.setenv("MILLRACE_HOST", "127.0.0.1")
    first, other = Worker(), Worker()
    address = asyncio.run(first.listen())
    for worker in (first, other):
        assert worker._meet(address, wait_s).timeout == timedelta(seconds=wait_s)


def test_the_store_is_reached_at_the_address_in_use_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, *others in (["127.0.0.1", *other_addresses()], ["127.0.0.2", "127.0.0.1"]):
        monkeypatch.setenv("MILLRACE_HOST", host)
        worker = Worker()
        found, port = asyncio.run(worker.listen())
        assert found == host and reachable(host, port)
        assert not [other for other in others if reachable(other, port)]


def test_a_worker_without_a_runtime_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_HOST", raising=False)
    assert asyncio.run(Worker().listen())[0] == "127.0.0.1"


def test_the_environment_names_the_interface_of_the_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    lo = {"MILLRACE_HOST": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert listening_at("127.0.0.1") == lo
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                want = {"MILLRACE_HOST": found.address, "GLOO_SOCKET_IFNAME": name}
                assert listening_at(found.address) == want, "NCCL chooses among a node's interfaces"
    assert listening_at("203.0.113.7") == {"MILLRACE_HOST": "203.0.113.7"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert listening_at("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "mine"
