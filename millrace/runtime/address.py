"""The address at which a worker listens: one address, not every interface of its machine."""

from __future__ import annotations

import asyncio
import ipaddress
import os

import psutil

_CONNECT_DEADLINE_S = 10.0


def listening_at(host: str) -> dict[str, str]:
    """Return the environment of a worker that listens at `host`. A user's own settings stay.

    gloo uses the interface of `host`. NCCL uses it only where `host` is loopback. Between nodes,
    NCCL picks the fastest network by itself.
    """
    variables = {"MILLRACE_HOST": host}
    if interface := _interface(host):
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
        if ipaddress.ip_address(host).is_loopback:
            # "=" makes NCCL match the whole name. Without it, NCCL matches a prefix.
            variables["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}")
    return variables


def _interface(host: str) -> str | None:
    """Return the name of the interface that has this address, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if host in [one.address for one in own]), None)


async def check_reachable(address: str) -> None:
    """Raise OSError or TimeoutError if nothing listens at HOST:PORT.

    Ray itself would retry for many minutes.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host, int(port)), _CONNECT_DEADLINE_S
        )
        writer.close()
