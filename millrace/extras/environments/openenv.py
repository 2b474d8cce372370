"""OpenEnv environments over their websocket protocol: one socket is one episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from millrace.environments.chat import Start, Step, ToolError
from millrace.environments.named import Environments
from millrace.environments.prompts import opening, seed_of
from millrace.errors import ConfigError, EpisodeError, bad_value, needed
from millrace.extras.environments.mcp import ServerTool, check_url
from millrace.types import Message, Prompt, Score

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


class _Part(msgspec.Struct):
    properties: dict[str, dict[str, Any]] = {}

    @property
    def fields(self) -> set[str]:
        return self.properties.keys() - {"metadata", "reward", "done"}

    @property
    def texts(self) -> list[str]:
        return [name for name in self.fields if self.properties[name].get("type") == "string"]


class _Schema(msgspec.Struct):
    action: _Part = msgspec.field(default_factory=_Part)
    observation: _Part = msgspec.field(default_factory=_Part)

    def fields(self, options: OpenEnvOptions) -> _Fields:
        """Return the fields that the options name, or those that the schema leaves no doubt of."""
        observation = options.observation
        if observation is None and len(self.observation.texts) == 1:
            observation = self.observation.texts[0]
        if options.action is not None:
            return _Fields(options.action, observation)
        if self.action.fields >= {"tool_name", "arguments"}:
            return _Fields(None, options.observation)
        if len(self.action.texts) != 1:
            raise ConfigError(
                f"agents.environment = 'openenv:{options.url}': its actions have the fields "
                f"{sorted(self.action.fields)}, and no single one is a string. "
                f"Fix: name the field of the policy's text: openenv:{options.url}?action=FIELD."
            )
        return _Fields(self.action.texts[0], observation)


class _Observed(msgspec.Struct):
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class _Tools(msgspec.Struct):
    tools: list[dict[str, Any]]


class _Listed(msgspec.Struct):
    result: _Tools


class _Fields(msgspec.Struct, frozen=True):
    """The fields that carry text. `action` is None if the actions are tool calls."""

    action: str | None
    observation: str | None


class OpenEnvServer(Environments):
    """A server with environments. It makes one for each episode."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self.options = options
        self._fields: _Fields | None = None

    def make(self) -> OpenEnvironment:
        return OpenEnvironment(self)

    async def reach(self) -> None:
        """Open a socket once. Raise EpisodeError if that fails."""
        async with self.options.answering("connect"), web().ClientSession() as http:
            await self.fields(http)
            await (await OpenEnvSocket.open(self.options, http)).close()

    async def fields(self, http: Any) -> _Fields:
        """Return the fields of the server. The first episode reads its schema."""
        if self._fields is None:
            options, schema = self.options, _Schema()
            if options.action is None or options.observation is None:
                schema = options.read("/schema", await options.get(http, "/schema"), _Schema)
            self._fields = schema.fields(options)
        return self._fields


class OpenEnvironment:
    """One episode on an OpenEnv server.

    The score is the sum of the rewards that the server gave. If it gave none, the run's reward
    function scores the conversation.
    """

    _socket: OpenEnvSocket
    _fields: _Fields

    def __init__(self, server: OpenEnvServer) -> None:
        self._options = server.options
        self._server = server
        self._open = contextlib.AsyncExitStack()
        self._reward: float | None = None
        self._done = False

    async def reset(self, task: Prompt) -> Start:
        # Without a limit: each step has its own deadline.
        session = web().ClientSession(timeout=web().ClientTimeout(total=None))
        http = await self._open.enter_async_context(session)
        async with self._options.answering("connect"):
            self._fields = await self._server.fields(http)
            self._socket = await OpenEnvSocket.open(self._options, http)
        self._open.push_async_callback(self._socket.close)
        wanted = task.extra_info.get("reset")
        data = {"seed": seed_of(task), **(wanted if isinstance(wanted, dict) else {})}
        text = self._observed(await self._socket.request("reset", data))
        tools: tuple[ServerTool, ...] = ()
        if self._fields.action is None:
            ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            listed = self._options.read("mcp", await self._socket.request("mcp", ask), _Listed)
            tools = tuple(ServerTool(entry, self.call) for entry in listed.result.tools)
        return Start(opening(task, text), tools)

    async def step(self, message: Message) -> Step:
        if self._fields.action is None or self._done:
            return Step(done=True)
        action = {self._fields.action: message.get("content") or ""}
        try:
            text = self._observed(await self._socket.request("step", action))
        except ToolError as refusal:  # the policy's action is wrong, and the policy may try again
            return Step(({"role": "user", "content": str(refusal)},))
        said = ({"role": "user", "content": text},) if text and not self._done else ()
        return Step(said, done=self._done)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the environment. Its rewards count like those of a step."""
        if self._done:
            raise ToolError("the episode is over")
        action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        data = await self._socket.request("step", action)
        self._observed(data)
        seen = data["observation"]
        if error := seen.get("error"):
            raise ToolError(str(error["message"] if isinstance(error, dict) else error))
        return _result_text(seen.get("result"))

    async def score(self) -> Score | None:
        return None if self._reward is None else Score(self._reward)

    async def state(self) -> dict[str, Any]:
        """Return the server's own description of the episode's state."""
        return await self._socket.request("state")

    async def close(self) -> None:
        await self._open.aclose()

    def _observed(self, data: dict[str, Any]) -> str:
        """Record reward and end, and return the text of an observation."""
        given = self._options.read("no observation", data, _Observed)
        seen, field = given.observation, self._fields.observation
        if field is not None and field not in seen:
            raise self._options.failure("garbage", f"no field {field!r}: {shown(seen)}")
        if given.reward is not None:
            self._reward = (self._reward or 0.0) + given.reward
        self._done = self._done or given.done
        value = seen[field] if field is not None else seen or ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _result_text(result: Any) -> str:
    """Return a tool's result as text. It is MCP content, or the value itself."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        parts = result["content"]
        texts = [str(p["text"]) for p in parts if isinstance(p, dict) and "text" in p]
        if len(texts) == len(parts):
            return "\n".join(texts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def check(value: str) -> OpenEnvOptions:
    """Return what a value of agents.environment says about a server. Raises ConfigError."""
    rest = value.partition(":")[2]
    check_url(value, rest)
    url, _, query = rest.partition("?")
    options = parse_qs(query, keep_blank_values=True)
    if unknown := sorted(options.keys() - {"action", "observation"}):
        rule = f"{unknown[0]!r} is not an option of openenv"
        fix = "action=FIELD or observation=FIELD, the fields with the text"
        raise bad_value("agents.environment", value, rule, fix)
    action, observation = (options.get(k, [None])[-1] for k in ("action", "observation"))
    return OpenEnvOptions(url, action or None, observation or None)


def open_environments(value: str, deadline_s: float) -> OpenEnvServer:
    """Return the environments of a server. `deadline_s` bounds each step."""
    return OpenEnvServer(replace(check(value), deadline_s=deadline_s))
