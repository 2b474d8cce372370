"""A real HTTP server on loopback that answers like OpenAI, or not.

The last word of the judged response decides the answer, see `Endpoint.answer`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.waiting import HANG_S

Answer = tuple[int, dict[str, str], str]


def completion(content: str | None, finish_reason: str = "stop") -> str:
    """Return the body of a chat completion."""
    return json.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": finish_reason,
                    "message": {"role": "assistant", "content": content},
                }
            ],
            "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
        }
    )


class Endpoint:
    """The server's state: what it was asked, and how many requests ran at once."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.times: list[float] = []
        self.most = 0
        self.wait_s = 0.0
        self.url = ""
        self.crowd = 0
        """No answer comes before so many requests have run at once."""
        self.over = threading.Event()
        """Ends the answers that never come."""
        self.piece, self.piece_s = 0, 0.0
        """Bytes of an answer that are sent every `piece_s`, or 0 to send it at once."""
        self._running = 0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def handle(self, body: dict[str, Any], authorization: str) -> Answer:
        with self._lock:
            self.requests.append(body)
            self.times.append(time.monotonic())
            self.keys.add(authorization)
            self._running += 1
            self.most = max(self.most, self._running)
            message = body["messages"][0]["content"]
            self._seen[message] += 1
            count = self._seen[message]
        try:
            time.sleep(self.wait_s)
            while self.most < self.crowd:
                time.sleep(0.005)
            return self.answer(message, count, authorization)
        finally:
            with self._lock:
                self._running -= 1

    def answer(self, message: str, count: int, authorization: str) -> Answer:
        """Return status, headers and body for the `count`-th request with this message."""
        word = message.split()[-1]
        ok = 200, {"Content-Type": "application/json"}
        answers: dict[str, Answer] = {
            "limited": (429, {"Retry-After": "0"}, '{"error": {"message": "slow down"}}'),
            "later": (429, {"Retry-After": "3600"}, "{}"),
            "down": (503, {}, "no"),
            "forbidden": (401, {}, json.dumps({"error": {"message": f"bad key {authorization}"}})),
            "html": (200, {"Content-Type": "text/html"}, "<html>hello</html>"),
            "broken": (*ok, '{"choices": ['),
            "nothing": (*ok, '{"choices": []}'),
            "null": (*ok, completion(None)),
            "silent": (*ok, completion("I would rather not say")),
            "huge": (*ok, completion("SCORE: 11")),
            "json": (*ok, completion('```json\n{"why": "so", "grade": 4.5}\n```')),
            "cut": (*ok, completion("SCORE: 1", "length")),
            "free": (*ok, completion("SCORE: 7").replace(": 10", ": null")),
            "digits": (*ok, completion(json.dumps({"grade": 10**400}))),
            "deep": (*ok, completion('{"grade": ' + "[" * 100_000)),
            "truth": (*ok, completion('{"grade": true}')),
        }
        if word == "slow":
            self.over.wait()
        if word == "once":
            return (
                (429, {"Retry-After": "0.4"}, "{}")
                if count == 1
                else (*ok, completion("SCORE: 3\nSCORE: 6"))
            )
        return answers.get(word) or (*ok, completion(f"fine. SCORE: {word.count('9')}"))


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers, text = state.handle(body, self.headers.get("Authorization", ""))
            payload = text.encode()
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(payload))}).items():
                self.send_header(name, value)
            self.end_headers()
            for at in range(0, len(payload), state.piece or len(payload) or 1):
                self.wfile.write(payload[at : at + (state.piece or len(payload))])
                time.sleep(state.piece_s)

        def log_message(self, *_: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            return  # a judge that gives up closes its connection

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        state.over.set()
        server.shutdown()
        server.server_close()
        thread.join(HANG_S)
