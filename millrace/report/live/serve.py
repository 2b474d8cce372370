"""The local page of `millrace serve`: one run's report on loopback, behind a token.

| request | answer |
|---|---|
| GET /TOKEN | a frame with a line of live figures above the report |
| GET /TOKEN/report | the report |
| GET /TOKEN/state | the line of live figures, and the number of the report |
| without the token, or with another Host | 403 |
| another method | 405 |
"""

from __future__ import annotations

import asyncio
import html
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.middleware.base import RequestResponseEndpoint

from millrace.errors import ConfigError, bad_value
from millrace.observe.panel import sentence
from millrace.persist.run_reader import RunReader, load
from millrace.report.advice import advise
from millrace.report.live.look import look_at

LOOPBACK = "127.0.0.1"
HOSTS = {LOOPBACK, "localhost", "[::1]"}
"""The names in the Host header of a browser here, or at the other end of `ssh -L`.

Another name is a web page that made its own name point here.
"""
REST = 5.0
"""Seconds between two reports. A report that takes longer than one second waits longer: REST times
its own time. So at most a sixth of a core makes reports."""

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'"
)
"""The report is one file: it loads nothing and sends nothing. Its own policy may be narrower."""


def render(folder: Path) -> str:
    """Return the report of a run as a page, without a change of the run's own report."""
    from millrace.report.page.write import page_of

    return page_of([load(folder)], live=True)


class Pages:
    """The report of a run, made again in one thread while its files change and somebody asks."""

    def __init__(self, folder: Path, render: Callable[[Path], str] = render) -> None:
        self._folder, self._render, self._run = folder, render, RunReader(folder)
        self._asked = threading.Event()
        self._made_of: object = None
        self._due = 0.0
        self.number = 0
        """How many reports were made."""
        self.page = ""
        self.line = ""
        """The live figures in words."""
        self.ended = False
        threading.Thread(target=self._work, name="report", daemon=True).start()

    def ask(self) -> None:
        """Have the figures and the report made again if they are old. Returns at once."""
        self._asked.set()

    async def ready(self) -> None:
        """Wait for the first report."""
        while not self.number:
            self.ask()
            await asyncio.sleep(0.05)

    def _work(self) -> None:
        while self._asked.wait():
            self._asked.clear()
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the page outlives a folder that is damaged
                self.line = f"the folder cannot be read: {type(error).__name__}: {error}"

    def _look(self) -> None:
        look = look_at(self._run)
        self.line, self.ended = sentence(look), look.ended
        begin, made_of = time.monotonic(), self._files()
        if made_of != self._made_of and begin >= self._due:
            self.page, self._made_of = self._made(), made_of
            self.number += 1
            now = time.monotonic()
            self._due = now + REST * max(1.0, now - begin)

    def _files(self) -> object:
        """Return what changes whenever a file of the run, or its advice, does."""
        found = []
        for path in (*self._run.files(), self._folder / "config.yaml"):
            with suppress(OSError):
                stat = path.stat()
                found.append((str(path), stat.st_mtime_ns, stat.st_size))
        return sorted(found), advise(self._run, wait=False)

    def _made(self) -> str:
        try:
            return self._render(self._folder)
        except ConfigError as error:  # for example, the run has not trained yet
            reason = f"No report. {error}"
        except Exception as error:  # noqa: BLE001 - the server outlives a report that fails
            reason = f"The report failed. {type(error).__name__}: {error}"
        return f"<!doctype html><title>millrace</title><p>{html.escape(reason)}</p>"


def make_app(pages: Pages, token: str) -> FastAPI:
    """Return the server's application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    read = ["GET", "HEAD"]

    @app.middleware("http")
    async def guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
        code = refusal(request, token)
        answer = Response(status_code=code) if code else await call_next(request)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        answer.headers.setdefault("X-Frame-Options", "DENY")
        answer.headers.setdefault("Content-Security-Policy", "default-src 'none'")
        return answer

    @app.api_route("/{token}", methods=read)
    async def frame() -> Response:
        nonce = secrets.token_urlsafe(16)
        text = files("millrace.report.live").joinpath("frame.html").read_text()
        page = text.replace("NONCE", nonce).replace("TOKEN", token)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.api_route("/{token}/report", methods=read)
    async def report() -> Response:
        await pages.ready()
        headers = {"Content-Security-Policy": REPORT_POLICY, "X-Frame-Options": "SAMEORIGIN"}
        return HTMLResponse(pages.page, headers=headers)

    @app.api_route("/{token}/state", methods=read)
    async def state() -> Response:
        pages.ask()
        return JSONResponse({"line": pages.line, "report": pages.number, "ended": pages.ended})

    return app


def refusal(request: Request, token: str) -> int:
    """Return the status that refuses a request. 0 lets it pass."""
    host = request.headers.get("host", "").lower()
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    given = request.scope["path"].split("/")[1:2]
    right = secrets.compare_digest("".join(given).encode(), token.encode())
    if name not in HOSTS or not right:
        return 403
    return 0 if request.method in ("GET", "HEAD") else 405


def listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback. Port 0 takes a free one.

    Raises ConfigError if the port cannot be used.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((LOOPBACK, port))
        found.listen(128)
    except OSError as error:
        found.close()
        rule = f"cannot listen on {LOOPBACK}: {error.strerror}"
        raise bad_value("--port", port, rule, "--port 0 for a free one") from None
    return found


def server_of(app: FastAPI) -> uvicorn.Server:
    """Return a server that ends within a second, also while it answers."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # the paths have the token
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)
