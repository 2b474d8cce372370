"""The messages of an OpenEnv server: over one websocket in order, and by HTTP before it opens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from millrace.environments.chat import ToolError
from millrace.errors import EpisodeError, needed

_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_WANTED = {"state": "state", "mcp": "mcp"}
"""The type of the answer to a request. All others are answered by an observation."""


class _Answer(msgspec.Struct):
    type: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OpenEnvOptions:
    """An address of an OpenEnv server, and the texts of its actions and observations."""

    url: str
    """The address of the server, such as http://127.0.0.1:8000."""
    action: str | None = None
    """The field of an action that takes the policy's text. None finds it in the server's schema."""
    observation: str | None = None
    """The field of an observation that the policy reads.

    None finds it in the server's schema. If there is no single one, the policy reads JSON.
    """
    deadline_s: float = 60.0
    """The most seconds for one answer of the server."""
    max_bytes: int = 1 << 20
    """The largest answer of the server."""

    def at(self, path: str) -> str:
        return self.url.rstrip("/") + path

    def failure(self, reason: str, detail: str) -> EpisodeError:
        return EpisodeError(f"environment_{reason}", f"{self.url}: {detail}")

    def read(self, what: str, raw: Any, kind: type[_Kind]) -> _Kind:
        """Return JSON, as text or as a value, as a Struct. Raise EpisodeError if it is none."""
        try:
            if isinstance(raw, str | bytes):
                return msgspec.json.decode(raw, type=kind)
            return msgspec.convert(raw, kind)
        except (ValueError, RecursionError) as error:
            raise self.failure("garbage", f"{what}: {error}: {shown(raw)}") from None

    @contextlib.asynccontextmanager
    async def answering(self, doing: str) -> AsyncIterator[None]:
        """Give the block the deadline of one answer, and turn its failures into EpisodeErrors."""
        aiohttp = web()
        try:
            async with asyncio.timeout(self.deadline_s):
                yield
        except TimeoutError:
            late = f"{doing}: no answer within {self.deadline_s:g} s"
            raise self.failure("deadline", late) from None
        except aiohttp.ClientResponseError as error:  # an HTTP status in place of the protocol
            text = f"{doing}: HTTP {error.status} {error.message}"
            raise self.failure("error", text) from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"{doing}: {type(error).__name__}: {error}"
            raise self.failure("lost", text) from error

    async def get(self, http: Any, path: str) -> bytes:
        raw = b""
        async with http.get(self.at(path)) as response:
            response.raise_for_status()
            async for piece in response.content.iter_any():
                if len(raw := raw + piece) > self.max_bytes:
                    rule = f"an answer has over {self.max_bytes} bytes"
                    raise self.failure("garbage", f"{path}: {rule}")
        return raw


class OpenEnvSocket:
    """One websocket. Its requests queue. Once one of them fails, all later ones fail alike."""

    def __init__(self, options: OpenEnvOptions, socket: Any) -> None:
        self._options = options
        self._socket = socket
        self._turn = asyncio.Lock()
        self._broken: EpisodeError | None = None

    @classmethod
    async def open(cls, options: OpenEnvOptions, http: Any) -> OpenEnvSocket:
        """Connect. Call it within `answering`."""
        timeout = web().ClientWSTimeout(ws_close=1.0)
        size = options.max_bytes
        return cls(
            options, await http.ws_connect(options.at("/ws"), max_msg_size=size, timeout=timeout)
        )

    async def request(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one message and return the data of the answer.

        Raise ToolError if the server refuses the policy's action as invalid.
        """
        options = self._options
        async with self._turn:
            if self._broken is not None:
                raise self._broken
            # If this call is cancelled, its answer is still to come: the socket is unusable.
            self._broken = options.failure("lost", f"a cancelled {kind} left the socket")
            try:
                async with options.answering(kind):
                    body = {"type": kind} | ({} if data is None else {"data": data})
                    await self._socket.send_json(body)
                    message = await self._socket.receive()
                answer = options.read(kind, self._payload(kind, message), _Answer)
            except EpisodeError as error:
                self._broken = error
                raise
            self._broken = None
        return self._data(kind, answer)

    async def close(self) -> None:
        if self._broken is None:
            # A server that is gone by now does no harm: the episode has its score.
            with contextlib.suppress(TimeoutError, OSError, web().ClientError):
                async with asyncio.timeout(1.0):
                    await self._socket.send_json({"type": "close"})
        await self._socket.close()

    def _payload(self, kind: str, message: Any) -> Any:
        """Return the content of one message of the socket."""
        types, options = web().WSMsgType, self._options
        if message.type in (types.TEXT, types.BINARY):
            return message.data
        own = message.data if isinstance(message.data, int) else None
        code = getattr(message.data, "code", own)
        reason = "garbage" if message.type is types.ERROR or code == 1009 else "lost"
        rule = f"code {code}; an answer has {options.max_bytes} bytes at most"
        raise options.failure(reason, f"{kind}: the socket ended: {message.data} ({rule})")

    def _data(self, kind: str, answer: _Answer) -> dict[str, Any]:
        """Return the data of an answer of the right type."""
        wanted, data, failure = _WANTED.get(kind, "observation"), answer.data, self._options.failure
        if answer.type == wanted:
            return data
        if answer.type != "error":
            raise failure("garbage", f"{kind}: no {wanted}: {answer.type}: {shown(data)}")
        code, text = data.get("code"), str(data.get("message", ""))
        if code == "VALIDATION_ERROR" and kind == "step":
            raise ToolError(f"Invalid action: {shown(data.get('errors') or text)}")
        if code == "CAPACITY_REACHED":
            fix = "a larger max_concurrent_envs of the server, or a lower agents.max_concurrent"
            raise failure("full", f"{kind}: {text}. Fix: {fix}.")
        raise failure("error", f"{kind}: {code}: {shown(text)}")


def web() -> Any:
    return needed("aiohttp", "an environment on a server")


def shown(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."
