"""The sockets that processes listen on, and the addresses that reach them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil


def listeners(processes: Iterable[psutil.Process]) -> list[tuple[str, int, str]]:
    """Return (address, port, command) of every network socket that listens."""
    found = []
    for process in processes:
        for one in process.net_connections(kind="inet"):
            if one.status == psutil.CONN_LISTEN or (
                one.type == socket.SOCK_DGRAM and not one.raddr
            ):
                found.append((one.laddr.ip, one.laddr.port, " ".join(process.cmdline())[:120]))
    return found


def unix_sockets(processes: Iterable[psutil.Process]) -> list[Path]:
    """Return the Unix sockets of processes that have a name in the file system."""
    names = {one.laddr for p in processes for one in p.net_connections(kind="unix")}
    return [Path(name) for name in names if str(name).startswith("/") and Path(name).is_socket()]


def outside(found: Iterable[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Return the sockets that another machine can reach."""
    return [one for one in found if not ipaddress.ip_address(one[0]).is_loopback]


def other_addresses() -> list[str]:
    """Return the addresses of this machine, except 127.0.0.1."""
    own = [a.address for each in psutil.net_if_addrs().values() for a in each]
    valid = []
    for address in [*own, "127.0.0.2"]:
        try:
            kind = ipaddress.ip_address(address)
        except ValueError:
            continue  # a hardware address
        if not kind.is_link_local and address != "127.0.0.1":
            valid.append(address)
    return valid


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True
