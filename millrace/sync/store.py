"""The store through which processes find each other. It listens at one address only.

torch's own store listens on every interface of the machine and requires no token.
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import TCPStore


def bound_store(
    host_name: str, port: int = 0, *, is_master: bool = True, **options: Any
) -> TCPStore:
    """Return torch's TCPStore. Its master listens at `host_name`. Port 0 selects a free port."""
    if is_master:
        family, kind, _, _, address = socket.getaddrinfo(
            host_name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as listener:
            listener.bind(address)
            listener.listen()
            port = listener.getsockname()[1]
            # From now on, torch owns the socket and closes it.
            options |= {"master_listen_fd": listener.detach(), "use_libuv": True}
    return TCPStore(host_name, port, is_master=is_master, **options)
