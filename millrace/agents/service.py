"""The endpoint without sockets: (method, path, headers, body) to an answer, for any transport."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from millrace.agents.conversation import Conversation
from millrace.agents.live import Draw, LiveEpisode, ServiceOptions, episode_over
from millrace.agents.request import RequestError, wrong
from millrace.agents.wire import Body, Reader, Wire, bearer_of, openai_problem
from millrace.agents.wire_chat import CHAT, COMPLETIONS
from millrace.agents.wire_messages import MESSAGES
from millrace.agents.wire_responses import RESPONSES
from millrace.ports import PolicySession

DEAD_KEYS = 65_536
"""The keys of so many finished episodes are still known. An older one is answered 401."""

WIRES: dict[str, Wire] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
}
"""The wire format of each route that has one."""

POSTS = {*WIRES, "/reward", "/v1/reward"}


def _nothing(_: bool) -> None:
    pass


@dataclass(slots=True)
class HttpReply:
    """An HTTP answer. Call `settle` once: True if all its bytes left for the client."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: AsyncIterator[bytes] | None = None
    """The body of a stream."""
    settle: Callable[[bool], None] = _nothing


class Claims(Protocol):
    """The routes by which remote workers claim episodes, under /episodes/."""

    def authorise(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError unless the request has the run's token."""
        ...

    async def answer(self, route: str, body: Body, headers: Mapping[str, str]) -> Body: ...

    def settle(self, answer: Body, delivered: bool) -> None:
        """Note whether a worker got an answer."""
        ...


class Service:
    """The keys of all live episodes, and the routes."""

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self.claims: Claims | None = None
        self._secret = secrets.token_bytes(32)
        self._live: dict[bytes, tuple[bytes, LiveEpisode]] = {}
        self._dead: OrderedDict[bytes, None] = OrderedDict()

    @property
    def live(self) -> int:
        """Return the number of live episodes."""
        return len(self._live)

    def open(self, talk: Conversation, session: PolicySession) -> LiveEpisode:
        """Issue a key for one episode."""
        episode = LiveEpisode(talk, session, self.options)
        digest = self._digest(episode.key)
        self._live[digest[:8]] = digest, episode
        return episode

    async def end(self, episode: LiveEpisode) -> None:
        """Retire the key of an episode and end its draws. Call it before the session ends."""
        digest = self._digest(episode.key)
        self._live.pop(digest[:8], None)
        self._dead[digest] = None
        while len(self._dead) > DEAD_KEYS:
            self._dead.popitem(last=False)
        await episode.close()

    async def close(self) -> None:
        """End every live episode."""
        for _, episode in list(self._live.values()):
            await self.end(episode)

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> HttpReply:
        """Answer one request. `headers` has lower-case names. `path` has no query.

        If the caller is cancelled, the client is gone: its draw waits for a retry.
        """
        path_key, route = _split(path)
        try:
            if self.claims is not None and route.startswith("/episodes/"):
                self.claims.authorise(headers)
                _post(method)
                answer = await self.claims.answer(route, self._json(headers, body), headers)
                return _answer(200, answer, partial(self.claims.settle, answer))
            episode = self._episode(path_key, headers)
            _known(method, route)
            if method == "GET":
                return self._models(route)
            given = self._json(headers, body)
            if route.endswith("/reward"):
                episode.post_reward(given)
                return _answer(200, {"ok": True})
            digest = blake2b(route.encode() + b"\0" + body, digest_size=16).digest()
            return await self._draw(episode, route, given, digest, headers)
        except RequestError as error:
            return refused(error, route)

    def _digest(self, key: str) -> bytes:
        """Return the keyed hash by which a key is found, so that no timing tells about keys."""
        return blake2b(key.encode("utf-8", "replace"), key=self._secret, digest_size=32).digest()

    def _episode(self, path_key: str | None, headers: Mapping[str, str]) -> LiveEpisode:
        own = headers.get("x-api-key") or bearer_of(headers)
        digest = self._digest(own if path_key is None else path_key)
        known, episode = self._live.get(digest[:8], (b"", None))
        if episode is not None and hmac.compare_digest(known, digest):
            return episode
        if digest in self._dead:
            raise episode_over()
        raise RequestError("the API key is not valid", status=401, code="invalid_api_key")

    def _models(self, route: str) -> HttpReply:
        model = {
            "id": self.options.model,
            "object": "model",
            "created": 0,
            "owned_by": "millrace",
            "max_model_len": self.options.max_model_len,
        }
        if route == "/v1/models":
            return _answer(200, {"object": "list", "data": [model], "has_more": False})
        if route.removeprefix("/v1/models/") != self.options.model:
            raise RequestError(
                f"the model is {self.options.model!r}", status=404, code="model_not_found"
            )
        return _answer(200, model)

    def _json(self, headers: Mapping[str, str], body: bytes) -> Body:
        if len(body) > self.options.max_body:
            raise too_large(self.options.max_body)
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError(
                "the body must not be compressed", status=415, code="unsupported_encoding"
            )
        try:
            given = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise RequestError(f"the body is no JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise _too_deep(self.options.max_depth) from None
        if not isinstance(given, dict):
            raise RequestError("the body must be a JSON object", code="invalid_json")
        deepest = self.options.max_depth
        if body.count(b"{") + body.count(b"[") > deepest and _deeper_than(given, deepest):
            raise _too_deep(deepest)
        return given

    async def _draw(
        self,
        episode: LiveEpisode,
        route: str,
        body: Body,
        digest: bytes,
        headers: Mapping[str, str],
    ) -> HttpReply:
        options, wire = self.options, WIRES[route]
        counting = route.endswith("count_tokens")
        earlier = episode.responses
        asked = wire.read(
            Reader(body, options.temperature, options.strict, counting=counting, earlier=earlier)
        )
        if asked.n > options.max_in_flight:
            raise wrong("n", asked.n, f"must be at most {options.max_in_flight}")
        if counting:
            return _answer(200, {"input_tokens": episode.talk.count(asked)})
        retries = headers.get("x-stainless-retry-count", "0")
        draw = episode.join(digest, retries.isdecimal() and retries.strip("0") != "", asked)
        try:
            patience = options.keepalive_s if asked.stream else None
            await asyncio.wait({draw.task}, timeout=patience)
            settle = partial(episode.leave, draw)
            if not asked.stream:
                return _answer(200, wire.answer(episode.result(draw)), settle)
            if draw.task.done():
                episode.result(draw)  # A failure that is known by now has a status of its own.
            kind = {"content-type": "text/event-stream", "cache-control": "no-store"}
            chunks = self._chunks(episode, wire, draw)
            return HttpReply(200, headers=kind, chunks=chunks, settle=settle)
        except BaseException:
            episode.leave(draw, False)
            raise

    async def _chunks(self, episode: LiveEpisode, wire: Wire, draw: Draw) -> AsyncIterator[bytes]:
        """Yield comments while the turn is drawn, and then all its events."""
        while not draw.task.done():
            await asyncio.wait({draw.task}, timeout=self.options.keepalive_s)
            if not draw.task.done():
                yield b": keepalive\n\n"
        try:
            drawn = episode.result(draw)
        except RequestError as error:
            yield wire.trouble(error).encode()
            return
        for event in wire.events(drawn):
            yield event.encode()


def _split(path: str) -> tuple[str | None, str]:
    """Return the key in a path /e/KEY/..., if any, and the route."""
    if not path.startswith("/e/"):
        return None, path
    key, slash, route = path[3:].partition("/")
    return key, slash + route


def _known(method: str, route: str) -> None:
    """Raise RequestError unless the route exists. Paths are compared as they are, never normalised."""
    gets = route == "/v1/models" or route.startswith("/v1/models/")
    if route not in POSTS and not gets:
        raise RequestError("no such route", status=404, code="not_found")
    _post(method, "GET" if gets else "POST")


def _post(method: str, wanted: str = "POST") -> None:
    if method != wanted:
        raise RequestError("no such method here", status=405, code="method_not_allowed")


def _deeper_than(value: Any, limit: int) -> bool:
    """Return whether JSON nests more objects and lists than `limit`."""
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for one in level:
            values = one.values() if isinstance(one, dict) else one
            inner += [v for v in values if isinstance(v, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def _too_deep(limit: int) -> RequestError:
    return RequestError(f"the body nests over {limit} levels of JSON", code="too_deep")


def too_large(limit: int) -> RequestError:
    """Return the refusal of a body with too many bytes."""
    return RequestError(f"the body has over {limit} bytes", status=413, code="body_too_large")


def _answer(status: int, body: Body, settle: Callable[[bool], None] = _nothing) -> HttpReply:
    kind = {"content-type": "application/json"}
    return HttpReply(status, msgspec.json.encode(body), kind, settle=settle)


def refused(error: RequestError, route: str) -> HttpReply:
    """Return an error in the shape of the route. No client should try it again."""
    problem = WIRES[route].problem if route in WIRES else openai_problem
    answer = _answer(error.status, problem(error))
    answer.headers["x-should-retry"] = "false"
    return answer
