"""OpenAI's client without a socket: its requests go to a Service in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from millrace.agents.service import Answer, Service
from millrace.errors import INSTALL, MissingDependency

if TYPE_CHECKING:
    import openai


def client_of(service: Service, key: str) -> openai.AsyncOpenAI:
    """Return a client of the episode that has `key`. It needs no close."""
    try:
        import httpx2
        import openai
    except ImportError:
        raise MissingDependency(
            f"agents.program needs openai's client. Fix: {INSTALL['openai']}."
        ) from None

    class Stream(httpx2.AsyncByteStream):
        """The body of a stream. The answer is delivered when it was read to its end."""

        def __init__(self, answer: Answer) -> None:
            self._answer = answer
            self._settled = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            assert self._answer.chunks is not None
            async for chunk in self._answer.chunks:
                yield chunk
            self._settle(True)

        async def aclose(self) -> None:
            self._settle(False)

        def _settle(self, delivered: bool) -> None:
            if not self._settled:
                self._settled = True
                self._answer.settle(delivered)

    class Transport(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            headers = {name.lower(): value for name, value in request.headers.items()}
            path = request.url.raw_path.decode("ascii").partition("?")[0]
            body = await request.aread()
            answer = await service.handle(request.method, path, headers, body)
            if answer.status >= 400:  # A program that ignores errors must not stop the event loop.
                await asyncio.sleep(0)
            if answer.chunks is not None:
                stream = Stream(answer)
                return httpx2.Response(answer.status, headers=answer.headers, stream=stream)
            answer.settle(True)
            return httpx2.Response(answer.status, headers=answer.headers, content=answer.body)

    return openai.AsyncOpenAI(
        api_key=key,
        base_url="http://millrace.invalid/v1",
        http_client=httpx2.AsyncClient(transport=Transport()),
    )
