"""A tool server that fails on order: it returns what it gets, unless told otherwise."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Tools(ThreadingHTTPServer):
    """The server. The next `left` requests obey `order`."""

    daemon_threads = True
    order, left, obeyed = "", 0, 0

    def take(self) -> str:
        with self.lock:
            if not self.left:
                return ""
            self.left -= 1
            self.obeyed += 1
            return self.order

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a client that gave up is what some orders want."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Tools)
        body, order = self.rfile.read(int(self.headers["Content-Length"])), self.server.take()
        if order == "slow":
            time.sleep(1.0)
        elif order == "hangs":
            time.sleep(60)
        elif order == "drops":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        elif order == "10 MB":
            body = b"7" * 10_000_000
        elif order == "garbage":
            body = bytes(range(256))
        self.send_response(500 if order == "500" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@contextmanager
def serving() -> Iterator[Tools]:
    server = Tools()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
