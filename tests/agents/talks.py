"""A conversation and a session with scripted answers, for tests of the endpoint alone."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from millrace.agents.conversation import Conversation
from millrace.agents.live import LiveEpisode, ServiceOptions
from millrace.agents.request import ChatRequest, ChatTurn, Finish
from millrace.agents.service import HttpReply, Service
from millrace.agents.wire import json_text
from millrace.ports import PolicySession
from millrace.simulate import clock
from millrace.types import Message, Tokens, Turn, floats_of, tokens_of
from tests.waiting import HANG_S


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), HANG_S))

    return run


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test without sockets on the virtual clock."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        clock.run(test(*args, **kwargs))

    return run


def options(**changes: Any) -> ServiceOptions:
    """Return options for tests, without a wait that ends."""
    given: dict[str, Any] = {
        "model": "policy",
        "max_model_len": 4096,
        "temperature": 1.0,
        "strict": False,
        "turn_deadline_s": HANG_S,
        "retry_grace_s": HANG_S,
        "body_deadline_s": HANG_S,
    }
    return ServiceOptions(**{**given, **changes})


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def called(*calls: tuple[str, str, str], text: str = "") -> Message:
    """Return a message with calls (id, name, arguments)."""
    made = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, arguments in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


class ScriptedSession:
    """The parts of a session that the endpoint uses itself."""

    name = "0/0"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rewards: list[tuple[float, int | None]] = []
        self.whole: dict[int, Tokens] = {}

    @property
    def turns(self) -> Sequence[Turn]:
        return []

    def tokens(self, turn: int) -> Tokens:
        return self.whole[turn]

    def reward(self, value: float, turn: int | None = None) -> None:
        self.rewards.append((value, turn))

    def count(self, name: str, value: float = 1.0) -> None:
        self.counts[name] += int(value)


class ScriptedTalk:
    """Answers each request with what `script` returns. A character is a token.

    A script that returns an exception raises it. `gate` holds back every draw while it is clear.
    """

    def __init__(self, script: Callable[[ChatRequest], Message | Exception]) -> None:
        self.script = script
        self.session = ScriptedSession()
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[ChatRequest] = []
        self.cancelled = 0
        self.sent: list[int] = []
        self.lost: list[int] = []
        self.finish: Finish | None = None
        self.stopped_by: str | None = None

    async def chat(self, request: ChatRequest) -> ChatTurn:
        number = len(self.requests)
        self.requests.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        message = self.script(request)
        if isinstance(message, Exception):
            raise message
        prompt = self.encode(json_text([request.messages, request.tools]))
        return self._turn(number, message, prompt)

    async def complete(
        self, tokens: Tokens, *, max_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> ChatTurn:
        request = ChatRequest((said(self.decode(tokens)),), max_tokens=max_tokens, stop=stop)
        number = len(self.requests)
        self.requests.append(request)
        message = self.script(request)
        assert not isinstance(message, Exception)
        return self._turn(number, message, tokens)

    def _turn(self, number: int, message: Message, prompt: Tokens) -> ChatTurn:
        drawn = self.encode(message["content"] + "".join(map(str, message.get("tool_calls", ()))))
        self.session.whole[number] = prompt + drawn
        finish: Finish = "tool_calls" if message.get("tool_calls") else "stop"
        log_probs = floats_of(-0.5 for _ in drawn)
        return ChatTurn(
            number,
            message,
            self.finish or finish,
            len(prompt),
            drawn,
            log_probs,
            self.stopped_by,
        )

    def delivered(self, number: int) -> None:
        self.sent.append(number)

    def undelivered(self, number: int) -> None:
        self.lost.append(number)

    def count(self, request: ChatRequest) -> int:
        return len(json_text([request.messages, request.tools]))

    def encode(self, text: str) -> Tokens:
        return tokens_of(map(ord, text))

    def decode(self, tokens: Tokens) -> str:
        return "".join(map(chr, tokens))


class Desk:
    """A service with one live episode, called without a socket."""

    def __init__(
        self, script: Callable[[ChatRequest], Message | Exception], **changes: Any
    ) -> None:
        self.service = Service(options(**changes))
        self.talk = ScriptedTalk(script)
        self.session = self.talk.session
        self.episode = self.open()

    def open(self) -> LiveEpisode:
        return self.service.open(cast(Conversation, self.talk), cast(PolicySession, self.session))

    async def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> HttpReply:
        given = {"authorization": f"Bearer {self.episode.key if key is None else key}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        raw = body if isinstance(body, bytes) else json_text(body).encode()
        return await self.service.handle("POST", path, given, raw)


USER: Message = {"role": "user", "content": "hello"}
CHAT = "/v1/chat/completions"
