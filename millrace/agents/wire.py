"""What the wire formats share: the words of a request, refusals, and readers of JSON values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from millrace.agents.request import ChatRequest, ChatTurn
from millrace.types import Message, Tokens

Body = dict[str, Any]
"""One JSON object."""

MAX_STOPS = 16

NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "logit_bias": {},
    "ignore_eos": False,
    "seed": None,
}
"""The fields of sampling that a run leaves alone, with the values that change nothing."""


class Refusal(Exception):
    """An answer that is an error. Each wire format writes it in its own shape."""

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_value", param: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for, in any wire format."""

    request: ChatRequest
    """The conversation and its limits. /v1/completions has no messages: see `prompt`."""
    prompt: Tokens | str | None = None
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


@dataclass(frozen=True, slots=True)
class Drawn:
    """The turns of one request, and what an answer shows about them."""

    nonce: str
    """Unique part of the ids in the answer."""
    created: int
    model: str
    turns: tuple[ChatTurn, ...]
    prompt: Callable[[ChatTurn], Tokens]
    """Return the tokens that the policy read before a turn."""
    text: Callable[[Tokens], str]
    """Return the text of tokens."""

    @property
    def usage(self) -> tuple[int, int]:
        """Return the tokens read and drawn. The choices of a request share its context."""
        drawn = sum(len(turn.tokens) for turn in self.turns)
        return max(turn.prompt_tokens for turn in self.turns), drawn


class Wire(Protocol):
    """One wire format. Its module has these functions."""

    def answer(self, asked: Asked, drawn: Drawn) -> Body:
        """Return the body of the answer."""
        ...

    def events(self, asked: Asked, drawn: Drawn) -> Iterator[str]:
        """Yield the server-sent events of the answer."""
        ...

    def problem(self, refusal: Refusal) -> Body:
        """Return the body of an error."""
        ...

    def trouble(self, refusal: Refusal) -> str:
        """Return the event that ends a stream with an error."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution of the run. A client cannot change it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader of one body. It notes the fields that have no effect."""

    body: Mapping[str, Any]
    sampling: Sampling = field(default_factory=Sampling)
    strict: bool = False
    ignored: list[str] = field(default_factory=list)

    def ignore(self, name: str, fix: str = "leave it out") -> None:
        """Note that `name` has no effect. Raises Refusal in strict mode."""
        if self.strict:
            raise Refusal(
                f"{name} would change what the policy draws, and agents.strict is set. Fix: {fix}.",
                code="unsupported_parameter",
                param=name,
            )
        if name not in self.ignored:
            self.ignored.append(name)

    def ignore_sampling(self) -> None:
        """Note every sampling field that differs from the run's distribution."""
        own = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            **NEUTRAL,
        }
        for name, value in own.items():
            asked = self.body.get(name)
            if asked is not None and asked != value and not (name == "top_k" and asked == -1):
                self.ignore(name, f"the run's own value is {value!r}; leave it out")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "must be true or false")
        return value

    def count(self, name: str, largest: int | None = None) -> int | None:
        """Return a whole number of at least 1, or None if the field is missing."""
        value = self.body.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong(name, value, "must be a whole number of at least 1")
        if largest is not None and value > largest:
            raise wrong(name, value, f"must be at most {largest}")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong(name, value, "must be a string")
        return value

    def objects(self, name: str, required: bool = False) -> list[Body]:
        """Return a list of JSON objects."""
        value = self.body.get(name)
        if value is None and not required:
            return []
        if not isinstance(value, list) or any(not isinstance(one, dict) for one in value):
            raise wrong(name, value, "must be a list of objects")
        if required and not value:
            raise wrong(name, value, "must not be empty")
        return value

    def object(self, name: str) -> Body:
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong(name, value, "must be an object")
        return value

    def stops(self, name: str = "stop") -> tuple[str, ...]:
        """Return the stop strings."""
        value = self.body.get(name)
        if value is None:
            return ()
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or any(not isinstance(s, str) or not s for s in stops):
            raise wrong(name, value, "must be a string or a list of strings, none empty")
        if len(stops) > MAX_STOPS:
            raise wrong(name, f"{len(stops)} strings", f"must have at most {MAX_STOPS}")
        return tuple(stops)


def wrong(name: str, value: object, rule: str) -> Refusal:
    """Return the refusal of a field's value."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return Refusal(f"{name} = {shown}: {name} {rule}.", param=name)


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content: a string, null, or parts of text.

    Raises Refusal for images, audio and files. Nothing is ever fetched.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "must be a string, null or a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
        if not isinstance(text, str):
            raise Refusal(
                f"{where} has a part of type {kind!r}: the policy reads text alone, and no URL is "
                f"fetched. Fix: send parts of type {kinds[0]!r}.",
                code="unsupported_content",
                param=where,
            )
        parts.append(text)
    return "".join(parts)


def call_of(number: Any, name: Any, arguments: Any, where: str) -> Body:
    """Return a tool call in OpenAI's form."""
    if not isinstance(name, str) or not isinstance(arguments, str) or not isinstance(number, str):
        raise wrong(where, (number, name, arguments), "needs an id, a name and arguments as text")
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_of(name: Any, description: Any, parameters: Any, where: str) -> Body:
    """Return a tool in OpenAI's form."""
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.name", name, "must be a string that is not empty")
    function: Body = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = {} if parameters is None else parameters
    if not isinstance(function["parameters"], dict):
        raise wrong(f"{where}.parameters", parameters, "must be an object")
    return {"type": "function", "function": function}


def own_tools(reader: Reader, kind: str, parameters: str) -> tuple[Body, ...]:
    """Return the tools of `kind`, with their schema in `parameters`. Others are ignored."""
    tools = []
    for k, tool in enumerate(reader.objects("tools")):
        if (tool.get("type") or kind) != kind:
            reader.ignore("hosted_tools", f"give the tool with {parameters}, and run it yourself")
            continue
        name, about = tool.get("name"), tool.get("description")
        tools.append(tool_of(name, about, tool.get(parameters), f"tools[{k}]"))
    return tuple(tools)


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Return (id, name, arguments) of every tool call of the policy's message."""
    return [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]


def json_text(value: Any) -> str:
    """Return a value as compact JSON."""
    return msgspec.json.encode(value).decode()


def head_of(drawn: Drawn, prefix: str, kind: str) -> Body:
    """Return the first fields of an answer or chunk of chat and completions."""
    return {
        "id": f"{prefix}-{drawn.nonce}",
        "object": kind,
        "created": drawn.created,
        "model": drawn.model,
    }


def event(body: Body, name: str = "") -> str:
    """Return one server-sent event."""
    first = f"event: {name}\n" if name else ""
    return f"{first}data: {json_text(body)}\n\n"


def log_prob(value: float) -> float:
    """Return a log-prob that JSON can hold. OpenAI writes -9999 for an impossible token."""
    return value if math.isfinite(value) else -9999.0


def openai_problem(refusal: Refusal) -> Body:
    """Return an error in OpenAI's shape."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": refusal.message,
            "type": kind,
            "param": refusal.param or None,
            "code": refusal.code,
        }
    }
