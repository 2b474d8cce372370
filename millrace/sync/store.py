"""The store at which processes meet, open to one address alone.

torch's own store listens on every interface of the machine and requires no token.
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import TCPStore


def bound_store(
    host_name: str, port: int = 0, *, is_master: bool = True, **options: Any
) -> TCPStore:
    """Return torch's TCPStore. Its master listens at `host_name`; port 0 picks a free one."""
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
