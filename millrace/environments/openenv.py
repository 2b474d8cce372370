"""OpenEnv environments over their websocket protocol: one socket is one episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.environments.chat import Start, Step, Tool, ToolError
from millrace.environments.mcp_tools import function_schema
from millrace.environments.prompts import opening, seed_of
from millrace.errors import INSTALL, ConfigError, EpisodeError, MissingDependency
from millrace.types import Message, Prompt, Score


@dataclass(frozen=True, slots=True)
class OpenEnvOptions:
    """Where the server is, and how its actions and observations become text."""

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


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields that carry text. `action` is None if the actions are tool calls."""

    action: str | None
    observation: str | None


class OpenEnvServer:
    """A server with environments. It makes one for each episode."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self.options = options
        self._fields: _Fields | None = None

    def make(self) -> OpenEnvironment:
        return OpenEnvironment(self)

    async def close(self) -> None:
        return None

    async def reach(self) -> None:
        """Open a socket once. Raise EpisodeError if that fails."""
        async with _failures(self.options, "connect"), _aiohttp().ClientSession() as http:
            await self.fields(http)
            async with http.ws_connect(self.options.url.rstrip("/") + "/ws"):
                pass

    async def fields(self, http: Any) -> _Fields:
        """Return the fields of the server. The first episode reads its schema."""
        if self._fields is None:
            schema = {}
            if self.options.action is None or self.options.observation is None:
                schema = await _get_json(http, self.options, "/schema")
            self._fields = _fields(self.options, schema)
        return self._fields


class OpenEnvironment:
    """One episode on an OpenEnv server.

    The score is the sum of the rewards that the server gave. If it gave none, the run's reward
    function scores the conversation.
    """

    def __init__(self, server: OpenEnvServer) -> None:
        self.options = server.options
        self._server = server
        self._http: Any = None
        self._socket: Any = None
        self._fields = _Fields(None, None)
        self._requests = asyncio.Lock()
        self._broken: EpisodeError | None = None
        self._reward: float | None = None
        self._done = False

    async def reset(self, task: Prompt) -> Start:
        aiohttp = _aiohttp()
        # Without a limit: each step has its own deadline.
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        async with _failures(self.options, "connect"):
            self._fields = await self._server.fields(self._http)
            self._socket = await self._http.ws_connect(
                self.options.url.rstrip("/") + "/ws",
                max_msg_size=self.options.max_bytes,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            )
        wanted = task.extra_info.get("reset")
        data = {"seed": seed_of(task), **(wanted if isinstance(wanted, dict) else {})}
        text = self._observed(await self._request("reset", data))
        tools: list[Tool] = []
        if self._fields.action is None:
            listed = await self._request("mcp", _rpc("tools/list", {}))
            tools = [OpenEnvTool(self, entry) for entry in _tools(self.options, listed)]
        return Start(opening(task, text), tuple(tools))

    async def step(self, message: Message) -> Step:
        if self._fields.action is None or self._done:
            return Step(done=True)
        action = {self._fields.action: message.get("content") or ""}
        try:
            text = self._observed(await self._request("step", action))
        except _Refused as refusal:  # the policy's action is wrong, and the policy may try again
            return Step(({"role": "user", "content": str(refusal)},))
        said = ({"role": "user", "content": text},) if text and not self._done else ()
        return Step(said, done=self._done)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the environment. Its rewards count like those of a step."""
        if self._done:
            raise ToolError("the episode is over")
        action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        try:
            data = await self._request("step", action)
        except _Refused as refusal:
            raise ToolError(str(refusal)) from None
        self._observed(data)
        seen = data["observation"]
        error = seen.get("error")
        if error:
            raise ToolError(str(error["message"] if isinstance(error, dict) else error))
        return _result_text(seen.get("result"))

    async def score(self) -> Score | None:
        return None if self._reward is None else Score(self._reward)

    async def state(self) -> dict[str, Any]:
        """Return the server's own description of the episode's state."""
        return await self._request("state", None)

    async def close(self) -> None:
        if self._socket is not None and self._broken is None:
            aiohttp = _aiohttp()
            # A server that is gone by now does no harm: the episode has its score.
            with contextlib.suppress(TimeoutError, OSError, aiohttp.ClientError):
                async with asyncio.timeout(1.0):
                    await self._socket.send_json({"type": "close"})
        if self._http is not None:
            if self._socket is not None:
                await self._socket.close()
            await self._http.close()
            self._socket = self._http = None

    def _observed(self, data: dict[str, Any]) -> str:
        """Record reward and end, and return the text of an observation."""
        seen, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
        if not isinstance(seen, dict) or not isinstance(done, bool):
            raise self._failure("environment_garbage", f"no observation: {_shown(data)}")
        number = isinstance(reward, int | float) and math.isfinite(reward)
        if reward is not None and not number:
            raise self._failure("environment_garbage", f"the reward is {reward!r}")
        field = self._fields.observation
        if field is not None and field not in seen:
            raise self._failure("environment_garbage", f"no field {field!r}: {_shown(seen)}")
        if reward is not None:
            self._reward = (self._reward or 0.0) + float(reward)
        self._done = self._done or done
        if field is None:
            return json.dumps(seen, ensure_ascii=False) if seen else ""
        value = seen[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    async def _request(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send one message and return the data of the answer. Requests of one socket queue."""
        async with self._requests:
            if self._broken is not None:
                raise self._broken
            # If this call is cancelled, its answer is still to come: the socket is unusable.
            self._broken = EpisodeError("environment_lost", f"a cancelled {kind} left the socket")
            try:
                async with _failures(self.options, kind):
                    body = {"type": kind} | ({} if data is None else {"data": data})
                    await self._socket.send_json(body)
                    answer = _message(self.options, kind, await self._socket.receive())
            except EpisodeError as error:
                self._broken = error
                raise
            self._broken = None
        return _data(self.options, kind, answer)

    def _failure(self, reason: str, detail: str) -> EpisodeError:
        return EpisodeError(reason, f"{self.options.url}: {detail}")


class OpenEnvTool:
    """A tool of an OpenEnv environment."""

    def __init__(self, environment: OpenEnvironment, entry: Mapping[str, Any]) -> None:
        self._environment = environment
        self.name = str(entry["name"])
        self.schema = function_schema(entry)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._environment.call(self.name, arguments)


class _Refused(Exception):
    """The server refused an action as invalid."""


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        rule = "environments on a server need the package aiohttp, which is missing"
        raise MissingDependency(f"{rule}. Fix: {INSTALL['aiohttp']}") from error
    return aiohttp


@contextlib.asynccontextmanager
async def _failures(options: OpenEnvOptions, doing: str) -> AsyncIterator[None]:
    """Give the block the deadline of one answer, and turn its failures into EpisodeErrors."""
    aiohttp = _aiohttp()
    where = f"{options.url}, {doing}"
    try:
        async with asyncio.timeout(options.deadline_s):
            yield
    except TimeoutError:
        detail = f"{where}: no answer within {options.deadline_s:g} s"
        raise EpisodeError("environment_deadline", detail) from None
    except aiohttp.ClientResponseError as error:  # an HTTP status in place of the protocol
        detail = f"{where}: HTTP {error.status} {error.message}"
        raise EpisodeError("environment_error", detail) from error
    except (aiohttp.ClientError, OSError) as error:
        detail = f"{where}: {type(error).__name__}: {error}"
        raise EpisodeError("environment_lost", detail) from error


async def _get_json(http: Any, options: OpenEnvOptions, path: str) -> dict[str, Any]:
    async with http.get(options.url.rstrip("/") + path) as response:
        response.raise_for_status()
        raw = await response.content.read(options.max_bytes + 1)
        while len(raw) <= options.max_bytes and not response.content.at_eof():
            raw += await response.content.read(options.max_bytes + 1 - len(raw))
    return _object(options, path, raw)


def _message(options: OpenEnvOptions, kind: str, message: Any) -> dict[str, Any]:
    """Return one message of the socket as an object."""
    types = _aiohttp().WSMsgType
    if message.type in (types.TEXT, types.BINARY):
        return _object(options, kind, message.data)
    close = message.data if isinstance(message.data, int) else None
    if close == 1009 or (message.type is types.ERROR and getattr(message.data, "code", 0) == 1009):
        rule = f"an answer has over {options.max_bytes} bytes"
        raise EpisodeError("environment_garbage", f"{options.url}, {kind}: {rule}")
    if message.type is types.ERROR:
        detail = f"{options.url}, {kind}: {message.data}"
        raise EpisodeError("environment_garbage", detail)
    detail = f"{options.url}, {kind}: the server closed the socket (code {close})"
    raise EpisodeError("environment_lost", detail)


def _object(options: OpenEnvOptions, what: str, raw: str | bytes) -> dict[str, Any]:
    try:
        if len(raw) > options.max_bytes:
            raise ValueError(f"over {options.max_bytes} bytes")
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        detail = f"{options.url}, {what}: {error}: {_shown(raw)}"
        raise EpisodeError("environment_garbage", detail) from None
    if not isinstance(value, dict):
        detail = f"{options.url}, {what}: not an object: {_shown(value)}"
        raise EpisodeError("environment_garbage", detail)
    return value


def _data(options: OpenEnvOptions, kind: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of an answer of the right type."""
    wanted = {"state": "state", "mcp": "mcp"}.get(kind, "observation")
    data, said = answer.get("data"), answer.get("type")
    if said == wanted and isinstance(data, dict):
        return data
    where = f"{options.url}, {kind}"
    if said != "error" or not isinstance(data, dict):
        raise EpisodeError("environment_garbage", f"{where}: no {wanted}: {_shown(answer)}")
    code, text = data.get("code"), str(data.get("message", ""))
    if code == "VALIDATION_ERROR" and kind == "step":
        raise _Refused(f"Invalid action: {_shown(data.get('errors') or text)}")
    if code == "CAPACITY_REACHED":
        fix = "Fix: a larger max_concurrent_envs of the server, or a lower agents.max_concurrent"
        raise EpisodeError("environment_full", f"{where}: {text}. {fix}.")
    raise EpisodeError("environment_error", f"{where}: {code}: {_shown(text)}")


def _fields(options: OpenEnvOptions, schema: Mapping[str, Any]) -> _Fields:
    """Return the fields that the options name, or else those that the schema leaves no doubt of."""

    def properties(part: str) -> dict[str, Any]:
        value = schema.get(part)
        found = value.get("properties") if isinstance(value, dict) else None
        own = found if isinstance(found, dict) else {}
        return {k: v for k, v in own.items() if k not in ("metadata", "reward", "done")}

    def text(part: str) -> list[str]:
        found = properties(part).items()
        return [k for k, v in found if isinstance(v, dict) and v.get("type") == "string"]

    observation = options.observation
    if observation is None and len(text("observation")) == 1:
        observation = text("observation")[0]
    if options.action is not None:
        return _Fields(options.action, observation)
    if {"tool_name", "arguments"} <= properties("action").keys():
        return _Fields(None, options.observation)
    if len(text("action")) != 1:
        raise ConfigError(
            f"agents.environment = 'openenv:{options.url}': its actions have the fields "
            f"{sorted(properties('action'))}, and no single one is a string. "
            f"Fix: name the field of the policy's text: openenv:{options.url}?action=FIELD."
        )
    return _Fields(text("action")[0], observation)


def _rpc(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": dict(params)}


def _tools(options: OpenEnvOptions, answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    result = answer.get("result")
    entries = result.get("tools") if isinstance(result, dict) else None
    if isinstance(entries, list) and all(isinstance(e, dict) and e.get("name") for e in entries):
        return entries
    detail = f"{options.url}: no list of tools: {_shown(answer.get('error') or answer)}"
    raise EpisodeError("environment_error", detail)


def _result_text(result: Any) -> str:
    """Return a tool's result as text. It is MCP content, or the value itself."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        parts = result["content"]
        texts = [str(p["text"]) for p in parts if isinstance(p, dict) and "text" in p]
        if len(texts) == len(parts):
            return "\n".join(texts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _shown(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."
