"""OpenAI's /v1/chat/completions and /v1/completions: bodies to requests, turns to answers and chunks.

Chat has messages and goes through the chat template. A completion continues a string or token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec

from millrace.agents import wire
from millrace.agents.request import ChatTurn, wrong
from millrace.agents.wire import Asked, Body, Count, Drawn, Reader, Wire
from millrace.types import Tokens, tokens_of

_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Options(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Tool(msgspec.Struct):
    function: wire.Function
    type: Literal["function"] = "function"


class _Both(msgspec.Struct, kw_only=True):
    """The fields of chat and completions."""

    model: str = ""
    stream: bool = False
    n: Count = 1
    max_tokens: Count | None = None
    stop: wire.Stops = []
    stream_options: _Options = _Options()
    return_token_ids: bool = False


class _Chat(_Both, kw_only=True):
    messages: wire.Objects
    tools: list[_Tool] = []
    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False


class _Text(_Both, kw_only=True):
    prompt: str | list[_Id | str | list[_Id]]
    logprobs: int | None = None
    echo: bool = False
    best_of: Count = 1


def _asked(reader: Reader, body: _Both, **more: Any) -> Asked:
    usage = bool(body.stream_options.include_usage)
    ids = body.return_token_ids
    return reader.asked(body, body.stop, n=body.n, usage=usage, token_ids=ids, **more)


def _read_chat(reader: Reader) -> Asked:
    body = reader.into(_Chat)
    messages = tuple(wire.message_of(m, f"messages[{k}]") for k, m in enumerate(body.messages))
    reader.refuse("functions", "audio", "modalities", "prediction", "web_search_options")
    reader.ignore_hints(reader.body.get("response_format"))
    limits = [n for n in (body.max_tokens, body.max_completion_tokens) if n is not None]
    return _asked(
        reader,
        body,
        messages=messages,
        tools=tuple(wire.tool_of(tool.function) for tool in body.tools),
        max_tokens=min(limits, default=None),
        parallel_tool_calls=body.parallel_tool_calls,
        logprobs=body.logprobs,
    )


def _read_text(reader: Reader) -> Asked:
    body = reader.into(_Text)
    reader.ignore_hints()
    reader.refuse("suffix", "prompt_embeds")
    if body.echo and body.logprobs is not None:
        raise wrong("echo", True, "has no log-probs of the prompt. Fix: leave echo or logprobs out")
    if body.best_of > 1:
        reader.ignore("best_of", "ask for n")
    return _asked(
        reader,
        body,
        messages=(),
        max_tokens=body.max_tokens,
        prompt=_prompt(body.prompt),
        logprobs=body.logprobs is not None,
        echo=body.echo,
    )


def _prompt(value: str | list[int | str | list[int]]) -> Tokens | str:
    """Return one prompt. A list of prompts is a batch, which is refused."""
    one = value[0] if len(value) == 1 and isinstance(value[0], str | list) else value
    if not one:
        raise wrong("prompt", value, "must not be empty")
    if isinstance(one, str):
        return one
    tokens = [token for token in one if isinstance(token, int)]
    if len(tokens) < len(one):
        raise wrong("prompt", f"{len(one)} prompts", "must be one. Fix: send a request for each")
    return tokens_of(tokens)


def _head(drawn: Drawn, prefix: str, kind: str) -> Body:
    """Return the first fields of an answer or chunk."""
    model = drawn.asked.model
    number = f"{prefix}-{drawn.nonce}"
    return {"id": number, "object": kind, "created": drawn.created, "model": model}


def _answer(drawn: Drawn, head: Body, choices: list[Body]) -> Body:
    """Return an answer, or the last chunk, which has no choices."""
    read, drew = drawn.usage
    usage = {"prompt_tokens": read, "completion_tokens": drew, "total_tokens": read + drew}
    return {**head, "choices": choices, "usage": usage}


def _ends(drawn: Drawn, head: Body) -> Iterator[str]:
    """Yield the end of a stream."""
    if drawn.asked.usage:
        yield wire.event(_answer(drawn, head, []))
    yield "data: [DONE]\n\n"


def _answer_chat(drawn: Drawn) -> Body:
    asked = drawn.asked
    choices = [
        {
            "index": k,
            "message": _message(turn),
            "finish_reason": turn.finish,
            "logprobs": _logprobs(turn, drawn) if asked.logprobs else None,
            **({"token_ids": list(turn.tokens)} if asked.token_ids else {}),
        }
        for k, turn in enumerate(drawn.turns)
    ]
    found = _answer(drawn, _head(drawn, "chatcmpl", "chat.completion"), choices)
    if asked.token_ids:
        found["prompt_token_ids"] = list(drawn.prompt(drawn.turns[0]))
    return found


def _message(turn: ChatTurn) -> Body:
    calls = turn.message.get("tool_calls")
    content = turn.message.get("content") or ""
    found: Body = {"role": "assistant", "content": content or (None if calls else "")}
    if turn.message.get("reasoning_content"):
        found["reasoning_content"] = turn.message["reasoning_content"]
    if calls:
        found["tool_calls"] = calls
    return found


def _logprobs(turn: ChatTurn, drawn: Drawn) -> Body:
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in drawn.words(turn)
    ]
    return {"content": content, "refusal": None}


def _chat_events(drawn: Drawn) -> Iterator[str]:
    asked, head = drawn.asked, _head(drawn, "chatcmpl", "chat.completion.chunk")
    if asked.usage:
        head["usage"] = None

    def chunk(index: int, delta: Body, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return wire.event({**head, "choices": [choice]})

    for k, turn in enumerate(drawn.turns):
        yield chunk(k, {"role": "assistant", "content": ""})
        message = _message(turn)
        if message.get("reasoning_content"):
            yield chunk(k, {"reasoning_content": message["reasoning_content"]})
        more: Body = {"logprobs": _logprobs(turn, drawn)} if asked.logprobs else {}
        if message["content"] or more:
            yield chunk(k, {"content": message["content"] or ""}, **more)
        for at, (number, name, arguments) in enumerate(wire.calls_of(turn.message)):
            function = {"name": name, "arguments": ""}
            call = {"index": at, "id": number, "type": "function", "function": function}
            yield chunk(k, {"tool_calls": [call]})
            for piece in wire.pieces(arguments):
                call = {"index": at, "function": {"arguments": piece}}
                yield chunk(k, {"tool_calls": [call]})
        ids = {"token_ids": list(turn.tokens)} if asked.token_ids else {}
        yield chunk(k, {}, finish_reason=turn.finish, **ids)
    yield from _ends(drawn, head)


def _answer_text(drawn: Drawn) -> Body:
    choices = [_choice(drawn, k, turn) for k, turn in enumerate(drawn.turns)]
    return _answer(drawn, _head(drawn, "cmpl", "text_completion"), choices)


def _choice(drawn: Drawn, index: int, turn: ChatTurn) -> Body:
    asked, text = drawn.asked, turn.message.get("content") or ""
    if asked.echo:
        whole = asked.prompt if isinstance(asked.prompt, str) else drawn.text(drawn.prompt(turn))
        text = whole + text
    found: Body = {
        "index": index,
        "text": text,
        "finish_reason": "length" if turn.finish == "length" else "stop",
        "logprobs": _text_logprobs(turn, drawn) if asked.logprobs else None,
    }
    if turn.stopped_by is not None:
        found["stop_reason"] = turn.stopped_by
    if asked.token_ids:
        found["token_ids"] = list(turn.tokens)
        found["prompt_token_ids"] = list(drawn.prompt(turn))
    return found


def _text_logprobs(turn: ChatTurn, drawn: Drawn) -> Body:
    words = drawn.words(turn)
    return {
        "tokens": [text for text, _ in words],
        "token_logprobs": [value for _, value in words],
        "top_logprobs": None,
        "text_offset": list(accumulate((len(text) for text, _ in words), initial=0))[:-1],
    }


def _text_events(drawn: Drawn) -> Iterator[str]:
    """Yield the chunks of a stream. Each choice comes in one chunk."""
    head = _head(drawn, "cmpl", "text_completion")
    for k, turn in enumerate(drawn.turns):
        yield wire.event({**head, "choices": [_choice(drawn, k, turn)]})
    yield from _ends(drawn, head)


CHAT = Wire(_read_chat, _answer_chat, _chat_events)
COMPLETIONS = Wire(_read_text, _answer_text, _text_events)
