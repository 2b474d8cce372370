"""The HTTP server of the endpoint. It listens on loopback unless another host is named."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
from typing import TYPE_CHECKING

from millrace.agents.request import RequestError
from millrace.agents.service import HttpReply, Service, refused, too_large
from millrace.errors import bad_value, needed

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

MAX_LINE = 8190
"""Largest size of a request line or of one header, in bytes."""
MAX_HEADERS = 64


class Endpoint:
    """Serves a Service over HTTP. Port 0 takes a free port."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        self.service = service
        self._host = host
        self._port = port
        self._runner: web.ServerRunner | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError, or MissingDependency without aiohttp."""
        needed("aiohttp", "an agent program over HTTP")
        from aiohttp import web

        if not _loopback(self._host):
            logger.warning(
                "agents.host = %s: prompts, answers and keys travel as plain HTTP. "
                "Fix: use a private network, or agents.host=127.0.0.1.",
                self._host,
            )
        server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
        )
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            key, value = ("port", self._port) if taken else ("host", self._host)
            fix = "agents.port=0 takes a free port" if taken else "an address of this machine"
            rule = f"the endpoint cannot listen there: {error.strerror}"
            raise bad_value(f"agents.{key}", value, rule, fix) from error
        self._port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        """Return the address without a path. An OpenAI client wants /v1 after it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def close(self) -> None:
        """End every episode, then close the port."""
        await self.service.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        try:
            body = await self._body(request)
        except RequestError as error:
            answer = refused(error, path)
            answer.headers["connection"] = "close"
        else:
            headers = {name.lower(): value for name, value in request.headers.items()}
            answer = await self.service.handle(request.method, path, headers, body)
        sent = False
        try:
            response = await self._send(request, answer)
            sent = request.transport is not None and not request.transport.is_closing()
            return response
        finally:
            answer.settle(sent)

    async def _body(self, request: web.BaseRequest) -> bytes:
        limit = self.service.options.max_body
        if (request.content_length or 0) > limit:
            raise too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self.service.options.body_deadline_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > limit:
                        raise too_large(limit)
        except TimeoutError:
            seconds = self.service.options.body_deadline_s
            raise RequestError(
                f"the body took over {seconds:g} s", status=408, code="body_deadline"
            ) from None
        return bytes(body)

    async def _send(self, request: web.BaseRequest, answer: HttpReply) -> web.StreamResponse:
        """Write the whole answer. Raises if the client is gone."""
        from aiohttp import web

        if answer.chunks is None:
            response = web.Response(status=answer.status, headers=answer.headers, body=answer.body)
            if answer.headers.get("connection") == "close":
                response.force_close()
            await response.prepare(request)
            await response.write_eof()
            return response
        stream = web.StreamResponse(status=answer.status, headers=answer.headers)
        await stream.prepare(request)
        async for chunk in answer.chunks:
            await stream.write(chunk)
        await stream.write_eof()
        return stream


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
