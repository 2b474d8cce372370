"""A real HTTP server on loopback that reads prompts with a real causal model, as vLLM or OpenAI's did."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.waiting import HANG_S


class ModelServer:
    """The server's state. A test may change each field while the server runs."""

    def __init__(self, folder: Path, form: Literal["vllm", "echo", "none"]) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.form = form
        self.name = "served"
        self.max_model_len = 1 << 20
        self.refused = range(0)
        """The numbers of the requests for log-probs that get no answer."""
        self.requests = 0
        self.wait_s = 0.0
        self.tokenizes = True
        self.shift = 0
        """Added to each id of the tokenizer."""
        self.asked: list[list[int]] = []
        self.most = 0
        self.url = ""
        self._running = 0
        self._lock, self._count = threading.Lock(), threading.Lock()

    def log_probs(self, ids: list[int]) -> list[float]:
        """Return log p of each token but the first."""
        with self._lock, torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        values: list[float] = logits.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1))[:, 0].tolist()
        return values

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": self.name}]}
        if path == "/tokenize" and self.tokenizes:
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=False)
            return 200, {"tokens": [i + self.shift for i in ids], "count": len(ids)}
        if path != "/v1/completions":
            return 404, {"error": {"message": "Not Found"}}
        if body["model"] != self.name:
            message = f"The model `{body['model']}` does not exist."
            return 404, {"error": {"message": message}}
        ids = body["prompt"]
        if len(ids) + body["max_tokens"] > self.max_model_len:
            message = f"maximum context length is {self.max_model_len} tokens"
            return 400, {"error": {"message": message}}
        self.asked.append(ids)
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
        if self.form == "vllm" and body.get("prompt_logprobs") is not None:
            pairs = zip(ids[1:], self.log_probs(ids), strict=True)
            given = [{str(i): {"logprob": v, "rank": 1, "decoded_token": "x"}} for i, v in pairs]
            choice["prompt_logprobs"] = [None, *given]
        if self.form == "echo" and body.get("echo"):
            choice["logprobs"] = {"token_logprobs": [None, *self.log_probs(ids), -0.5]}
        return 200, {"id": "c", "choices": [choice]}

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer one request. Raise ConnectionError if it gets no answer."""
        with self._count:
            number = self.requests
            self.requests += path == "/v1/completions"
            self._running += 1
            self.most = max(self.most, self._running)
        try:
            if number in self.refused:
                raise ConnectionError
            time.sleep(self.wait_s)
            return self.answer(path, body)
        finally:
            with self._count:
                self._running -= 1


@contextmanager
def model_server(
    folder: Path, form: Literal["vllm", "echo", "none"] = "vllm"
) -> Iterator[ModelServer]:
    state = ModelServer(folder, form)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            try:
                status, answer = state.handle(self.path, body)
            except ConnectionError:
                self.close_connection = True
                return
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            return  # a client that gives up closes its connection

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(HANG_S)
