"""Where a worker listens: at one address, not on every interface of its machine."""

from __future__ import annotations

import ipaddress
import os

import psutil


def listening_at(host: str) -> dict[str, str]:
    """Return the environment of a worker that listens at `host`. A user's own interfaces stay.

    gloo takes the interface of `host`. NCCL does so on loopback; between nodes it picks the
    fastest network by itself.
    """
    found = {"MILLRACE_HOST": host}
    if interface := _interface(host):
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
        if ipaddress.ip_address(host).is_loopback:
            # "=" asks NCCL for this very name, not for all names that begin with it.
            found["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}")
    return found


def _interface(host: str) -> str | None:
    """Return the name of the interface that has this address, if one has."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if host in [one.address for one in own]), None)
