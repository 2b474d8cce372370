"""The conversations of one episode: a request for a message becomes a turn of the session.

A conversation keeps the tokens of each turn. A later request extends them and never renders them
again, unless the template or the client rewrites history.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Literal

from millrace.agents.history import History, HistoryMatch, Node
from millrace.agents.memo import Memo
from millrace.agents.parse import ToolFormat, split_thinking
from millrace.agents.render import Renderer
from millrace.agents.request import (
    ChatRequest,
    ChatTurn,
    Finish,
    RequestError,
    ToolSchema,
    call_of,
    normal,
)
from millrace.ports import PolicySession
from millrace.types import Floats, Message, Stop, Tokens, Turn, floats_of

_LONG = 32_000
"""Characters of new messages that are encoded in a thread, so that they stall no other episode."""
_APART = Lock()


class Conversation:
    """Every conversation that the policy has in one episode, with all agents of a program.

    `history="template"` opens a new thread where the chat template rewrites history. "keep" extends
    the tokens as they are. Requests for a model that is not in `main_models` are served and never
    trained. Empty `main_models` trains all.

    Call `end_dead_turns` when the episode is over.
    """

    def __init__(
        self,
        session: PolicySession,
        renderer: Renderer,
        tool_format: ToolFormat,
        *,
        history: Literal["keep", "template"] = "keep",
        main_models: Collection[str] = (),
    ) -> None:
        self._session = session
        self._renderer = renderer
        self._format = tool_format
        self._keep = history == "keep"
        self._main_models = frozenset(main_models)
        self._history = History()
        self._ended: dict[int, str | None] = {}  # turn -> text of the token that ended it
        self._said: dict[int, _Said] = {}
        self._main: Hashable = None
        self._auxiliary: set[int] = set()
        self._twins: Counter[str] = Counter()  # digest of a thread's tokens -> how often

    async def chat(self, request: ChatRequest) -> ChatTurn:
        """Draw the policy's next message. The same request again is a genuine second sample.

        Raise RequestError if the request cannot be served. LimitReached passes through.
        """
        messages = [normal(m) for m in request.messages]
        model, main_models = request.model, self._main_models
        auxiliary = bool(main_models) and bool(model) and model not in main_models
        scope = (model if auxiliary else None, _digest_of_tools(request.tools))
        place = self._history.attach(messages, scope)
        kind = (scope, tuple(m["content"] for m in messages if m["role"] == "system"))
        if not auxiliary:
            self._main = self._main or kind
        after, context, cause = await self._context(place, request.tools)
        if cause is not None:
            self._session.count(cause)
        turn = await self._session.draw(
            context, after=after, max_tokens=request.max_tokens, stop=request.stop
        )
        answer = self._answer(turn, request)
        message = normal(answer.message)
        self._history.add(place, turn.number, message, (after, _digest(context.tobytes())))
        self._said[turn.number] = _Said(place.end, message, kind)
        if auxiliary:  # It is kept out of training.
            self._auxiliary.add(turn.number)
            self._session.count("auxiliary_turns")
            self._session.kill(turn.number)
        return answer

    async def complete(
        self, tokens: Tokens, *, max_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> ChatTurn:
        """Draw what follows `tokens`. They continue the thread that is their longest prefix.

        Raise RequestError if the vocabulary lacks one of them.
        """
        most = len(self._renderer.tokenizer) - 1
        if tokens and not 0 <= min(tokens) <= max(tokens) <= most:
            raise RequestError(f"token {max(tokens)} is unknown: ids are from 0 to {most}")
        after, held = None, 0
        for turn in self._session.turns:
            known = self._session.tokens(turn.number)
            if held <= len(known) <= len(tokens) and tokens[: len(known)] == known:
                after, held = turn.number, len(known)
        if after is not None:
            self._history.extend(after)
        context = tokens[held:]
        turn = await self._session.draw(context, after=after, max_tokens=max_tokens, stop=stop)
        text, stopped_by = self._text(turn, stop, ())
        self._history.join(turn.number, (after, _digest(context.tobytes())))
        self._ended[turn.number] = self._end(turn)
        message = {"role": "assistant", "content": text}
        return self._made(turn, message, stopped_by)

    def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request, rendered as the opening of a thread."""
        messages = [normal(m) for m in request.messages]
        return len(self._renderer.opening(messages, request.tools))

    def encode(self, text: str) -> Tokens:
        """Return the tokens of plain text."""
        return self._renderer.encode(text)

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens, that of special ones too."""
        decode = self._renderer.tokenizer.decode
        return str(decode(list(tokens), clean_up_tokenization_spaces=False))

    def delivered(self, number: int) -> None:
        """Note that the answer of a turn left our hands. `chat` itself counts as delivery."""
        self._history.delivered(number)

    def undelivered(self, number: int) -> None:
        """Note that nobody received a turn. It is dead unless a later request extends it."""
        self._history.undelivered(number)

    def end_dead_turns(self) -> None:
        """Kill the dead turns. The episode is over."""
        for turn in self._history.dead():
            if turn not in self._auxiliary:
                self._session.kill(turn)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the conversation up to the last living turn of the main thread.

        The main thread has the system message and the tools of the first request.
        """
        dead = {*self._history.dead(), *self._auxiliary}
        alive = [t for t in self._said if t not in dead]
        main = [t for t in alive if self._said[t].kind == self._main] or alive
        if not main:
            return ()
        last = self._said[max(main)]
        return (*(n.message for n in last.end.path() if n.message), last.answer)

    async def _context(
        self, place: HistoryMatch, tools: tuple[ToolSchema, ...]
    ) -> tuple[int | None, Tokens, str | None]:
        """Return the turn that a request continues, the tokens after it, and what is counted.

        The turn is None if the tokens open a thread. Long messages are encoded in a thread.
        """
        if sum(len(m["content"]) for m in place.new) < _LONG:
            return self._rendered(self._renderer, place, tools)

        def apart() -> tuple[int | None, Tokens, str | None]:
            with _APART:
                return self._rendered(self._renderer.twin, place, tools)

        return await asyncio.to_thread(apart)

    def _rendered(
        self, renderer: Renderer, place: HistoryMatch, tools: tuple[ToolSchema, ...]
    ) -> tuple[int | None, Tokens, str | None]:
        whole = (*place.known, *place.new)
        cause = place.cause and f"forks/{place.cause}"
        if place.anchor is None:
            return None, renderer.opening(whole, tools), cause
        bridge = partial(
            renderer.bridge, place.known, place.new, tools, ended=self._ended[place.anchor]
        )
        found = bridge(keep=self._keep)
        if found is None:
            try:
                return None, renderer.opening(whole, tools), "forks/template"
            except RequestError:
                if (found := bridge(keep=True)) is None:
                    raise
        return place.anchor, found.tokens, cause or (None if found.exact else "kept_history")

    def _answer(self, turn: Turn, request: ChatRequest) -> ChatTurn:
        """Return a drawn turn as the client reads it."""
        marks = self._format.marks if request.tools else ()
        text, stopped_by = self._text(turn, request.stop, marks)
        thinking = ""
        if self._renderer.thinks:
            thinking, text = split_thinking(text, opened=self._renderer.opens_thinking)
        message: Message = {"role": "assistant", "content": text}
        if request.tools:
            parsed = self._format.parse(text, request.tools)
            message["content"] = parsed.content
            if parsed.broken:
                self._session.count("invalid_calls", parsed.broken)
            if parsed.calls:
                self._session.count("tool_calls", len(parsed.calls))
                ids = self._call_ids(turn, len(parsed.calls))
                message["content"] = parsed.content or None
                calls = zip(ids, parsed.calls, strict=True)
                message["tool_calls"] = [call_of(i, c.name, c.arguments) for i, c in calls]
            if len(parsed.calls) > 1 and not request.parallel_tool_calls:
                self._session.count("ignored/parallel_tool_calls")
        if thinking:
            message["reasoning_content"] = thinking
        self._ended[turn.number] = self._end(turn)
        return self._made(turn, message, stopped_by)

    def _text(
        self, turn: Turn, stop: tuple[str, ...], marks: tuple[str, ...]
    ) -> tuple[str, str | None]:
        """Return a turn's text before its stop string, and the stop string."""
        tokens = turn.tokens
        if turn.stop is Stop.EOS:
            tokens = tokens[:-1]
        text = self._renderer.decode(tokens, marks)
        if turn.stop is Stop.STRING:
            found = sorted((text.find(s), -len(s), s) for s in stop if s in text)
            if found:
                return text[: found[0][0]], found[0][2]
        return text, None

    def _end(self, turn: Turn) -> str | None:
        return self._renderer.mark(turn.tokens[-1]) if turn.stop is Stop.EOS else None

    def _made(self, turn: Turn, message: Message, stopped_by: str | None) -> ChatTurn:
        drawn = turn.tokens
        log_probs: Floats = floats_of()
        for segment in turn.segments:
            log_probs.extend(segment.log_probs)
        finish: Finish = "tool_calls" if message.get("tool_calls") else "stop"
        if turn.stop is Stop.LENGTH:
            finish = "length"
        read = len(self._session.tokens(turn.number)) - len(drawn)
        return ChatTurn(turn.number, message, finish, read, drawn, log_probs, stopped_by)

    def _call_ids(self, turn: Turn, count: int) -> list[str]:
        """Return ids of nine letters and digits, as Mistral's templates require.

        They depend on the thread's tokens, so that the order of parallel requests changes nothing.
        """
        seed = _digest(self._session.tokens(turn.number).tobytes())
        self._twins[seed] += 1
        names = (f"{seed}/{self._twins[seed] - 1}/{n}" for n in range(count))
        digests = (hashlib.blake2b(name.encode()).digest() for name in names)
        return [base64.b32encode(digest)[:9].decode().lower() for digest in digests]


@dataclass(frozen=True, slots=True)
class _Said:
    """One answer: the node of its request, its message, and the kind of conversation."""

    end: Node
    answer: Message
    kind: Hashable


def _digest(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


_digest_of_tools = Memo(_digest)
