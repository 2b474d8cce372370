"""The parts that the wire formats share: request, drawn answer, and the reader of a body."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from millrace.agents.request import ChatRequest, ChatTurn, RequestError, normal, short, wrong
from millrace.types import Message, Tokens, tokens_of

Body = dict[str, Any]
"""One JSON object."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Objects = Annotated[list[Body], msgspec.Meta(min_length=1)]
Stops = Text | Annotated[list[Text], msgspec.Meta(max_length=16)]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "seed": (),
}
"""The fields of sampling that a run leaves alone, with the values that change nothing."""

_Kind = TypeVar("_Kind", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Asked(ChatRequest):
    """A client's request, in any wire format."""

    prompt: Tokens | str | None = None
    """What /v1/completions continues. It has no messages."""
    n: int = 1
    stream: bool = False
    usage: bool = False
    """Whether a stream of chat or completion chunks ends with the usage."""
    logprobs: bool = False
    token_ids: bool = False
    """Whether the answer has the token ids, as vLLM's `return_token_ids` gives them."""
    echo: bool = False
    ignored: tuple[str, ...] = ()
    """The fields that have no effect. They are counted as ignored/NAME."""
    continued: tuple[Message, ...] = ()
    """The messages that a later `previous_response_id` continues, without the answer."""


@dataclass(slots=True, eq=False)
class Drawn:
    """The turns of one request, and what an answer shows about them."""

    asked: Asked
    nonce: str
    """Unique part of the ids in the answer."""
    created: int
    prompt: Callable[[ChatTurn], Tokens]
    """Return the tokens that the policy read before a turn."""
    text: Callable[[Tokens], str]
    """Return the text of tokens."""
    turns: list[ChatTurn] = field(default_factory=list)

    @property
    def usage(self) -> tuple[int, int]:
        """Return the tokens read and drawn. The choices of a request share its context."""
        drawn = sum(len(turn.tokens) for turn in self.turns)
        return max(turn.prompt_tokens for turn in self.turns), drawn

    def words(self, turn: ChatTurn) -> list[tuple[str, float]]:
        """Return the text and the log-prob of each token. -9999 is OpenAI's impossible token."""
        pairs = zip(turn.tokens, turn.log_probs, strict=True)
        return [(self.text(tokens_of((t,))), p if math.isfinite(p) else -9999.0) for t, p in pairs]


def pieces(text: str) -> Iterator[str]:
    """Yield a text in two pieces, so that clients join them as they would elsewhere."""
    middle = len(text) // 2
    yield from (piece for piece in (text[:middle], text[middle:]) if piece)


def event(body: Body, name: str = "") -> str:
    """Return one server-sent event."""
    first = f"event: {name}\n" if name else ""
    return f"{first}data: {json_text(body)}\n\n"


def openai_problem(error: RequestError) -> Body:
    """Return an error in OpenAI's shape."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": error.param or None, "code": error.code}
    return {"error": body}


def _openai_trouble(error: RequestError) -> str:
    return event(openai_problem(error))


class Wire(NamedTuple):
    """One wire format."""

    read: Callable[[Reader], Asked]
    """Return what a body asks for. Raises RequestError."""
    answer: Callable[[Drawn], Body]
    """Return the body of the answer."""
    events: Callable[[Drawn], Iterator[str]]
    """Yield the server-sent events of the answer."""
    problem: Callable[[RequestError], Body] = openai_problem
    """Return the body of an error."""
    trouble: Callable[[RequestError], str] = _openai_trouble
    """Return the event that ends a stream with an error."""


class Reader:
    """The reader of one body. It notes the fields that have no effect."""

    def __init__(
        self,
        body: Body,
        temperature: float = 1.0,
        strict: bool = False,
        *,
        counting: bool = False,
        earlier: Mapping[str, tuple[Message, ...]] | None = None,
    ) -> None:
        """`counting` draws nothing. `earlier` has the messages behind each response's id."""
        self.body = {name: value for name, value in body.items() if value is not None}
        self.counting = counting
        self.earlier = earlier or {}
        self.ignored: list[str] = []
        self._neutral = {"temperature": (temperature,), **NEUTRAL}
        self._strict = strict

    def into(self, kind: type[_Kind]) -> _Kind:
        """Return the body as a Struct, which says what each field must be. Raises RequestError."""
        return converted(self.body, kind)

    def asked(self, body: Any, stop: str | list[str], **more: Any) -> Asked:
        """Return the request of a body. Call it once all that has no effect is noted."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        given = {"model": body.model, "stream": body.stream, "ignored": tuple(self.ignored)}
        return Asked(stop=stops, **given, **more)

    def ignore(self, name: str, fix: str = "leave it out") -> None:
        """Note that `name` has no effect. Raises RequestError in strict mode."""
        if self._strict:
            raise RequestError(
                f"{name} would change what the policy draws, and agents.strict is set. Fix: {fix}.",
                code="unsupported_parameter",
                param=name,
            )
        if name not in self.ignored:
            self.ignored.append(name)

    def ignore_unless(self, name: str, value: Any, neutral: str, fix: str) -> None:
        """Note a field whose value, or whose type if it is an object, is not `neutral`."""
        kind = value.get("type") if isinstance(value, dict) else value
        if kind is not None and kind != neutral:
            self.ignore(name, fix)

    def ignore_hints(self, response_format: Any = None) -> None:
        """Note what cannot be honoured without another distribution than the run's."""
        for name, values in self._neutral.items():
            if name in self.body and self.body[name] not in values:
                self.ignore(name, "leave it out: the run's own value counts")

        choice, fix = self.body.get("tool_choice"), "let the policy choose"
        self.ignore_unless("tool_choice", choice, "auto", fix)
        fix = "ask for JSON in the prompt"
        self.ignore_unless("response_format", response_format, "text", fix)
        if self.body.get("top_logprobs"):
            self.ignore("top_logprobs", "ask for log-probs alone, at /v1/chat/completions")

    def refuse(self, *names: str) -> None:
        """Raise RequestError if a field is used that nothing here serves."""
        for name in names:
            if self.body.get(name) not in (None, False, "", [], {}, ["text"]):
                rule = "is not served. Fix: leave it out"
                raise RequestError(f"{name} {rule}.", code="invalid_value", param=name)

    def tools(self, kind: str, parameters: str) -> tuple[Body, ...]:
        """Return the tools of `kind`, with their schema in `parameters`. Others are ignored."""
        found = []
        for k, tool in enumerate(self.body.get("tools", ())):
            if (tool.get("type") or kind) != kind:
                fix = f"give the tool with {parameters}, and run it yourself"
                self.ignore("hosted_tools", fix)
                continue
            function = {**tool, "parameters": tool.get(parameters)}
            found.append(tool_of(converted(function, Function, f"tools[{k}].")))
        return tuple(found)


class Function(msgspec.Struct):
    """A function that the policy may call."""

    name: Text
    description: str | None = None
    parameters: Body | None = None


def tool_of(function: Function) -> Body:
    """Return a tool in OpenAI's form."""
    made: Body = {"name": function.name}
    if function.description is not None:
        made["description"] = function.description
    return {"type": "function", "function": {**made, "parameters": function.parameters or {}}}


def converted(value: Any, kind: type[_Kind], where: str = "") -> _Kind:
    """Return JSON as a Struct. Raises RequestError with the field that is wrong."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        rule, _, path = str(error).partition(" - at `$")
        name = (where + path.strip("`.")).strip(".")
        given = f" = {short(value[name])}" if name in value else ""
        text = f"{name}{given}: {rule}" if name else rule
        raise RequestError(f"{text}.", code="invalid_value", param=name) from None


def message_of(message: Message, where: str) -> Message:
    """Return a client's message in the normal form. Raises RequestError.

    A tool's answer without the id of its call would be rendered as the answer to another one.
    """
    answered = message.get("tool_call_id")
    if message.get("role") == "tool" and not isinstance(answered, str):
        raise wrong(f"{where}.tool_call_id", answered, "must be a string")
    return normal(message, where)


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Return (id, name, arguments) of every tool call of the policy's message."""
    return [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]


def bearer_of(headers: Mapping[str, str]) -> str:
    """Return the key of the header `authorization`, or nothing."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def json_text(value: Any) -> str:
    """Return a value as compact JSON."""
    return msgspec.json.encode(value).decode()
