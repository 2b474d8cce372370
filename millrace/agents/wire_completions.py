"""OpenAI's /v1/completions: a string or token ids in, text and tokens out, no template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated

from msgspec import Meta

from millrace.agents import wire
from millrace.agents.request import ChatTurn, wrong
from millrace.agents.wire import Asked, Body, Count, Drawn, Reader
from millrace.agents.wire import openai_problem as problem
from millrace.agents.wire import openai_trouble as trouble
from millrace.agents.wire_chat import Common
from millrace.types import Tokens, tokens_of

__all__ = ["answer", "events", "problem", "read", "trouble"]

_Id = Annotated[int, Meta(ge=0, lt=2**31)]


class _Body(Common, kw_only=True):
    prompt: str | list[_Id | str | list[_Id]]
    logprobs: int | None = None
    echo: bool = False
    best_of: Count = 1


def read(reader: Reader) -> Asked:
    """Return what a body of /v1/completions asks for."""
    body = reader.into(_Body)
    reader.ignore_hints()
    reader.refuse("suffix", "prompt_embeds")
    if body.echo and body.logprobs is not None:
        raise wrong("echo", True, "has no log-probs of the prompt. Fix: leave echo or logprobs out")
    if body.best_of > 1:
        reader.ignore("best_of", "ask for n")
    return Asked(
        messages=(),
        max_tokens=body.max_tokens,
        stop=wire.stops_of(body.stop),
        model=body.model,
        prompt=_prompt(body.prompt),
        n=body.n,
        stream=body.stream,
        usage=bool(body.stream_options.include_usage),
        logprobs=body.logprobs is not None,
        token_ids=body.return_token_ids,
        echo=body.echo,
        ignored=tuple(reader.ignored),
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


def answer(drawn: Drawn) -> Body:
    """Return a text_completion."""
    choices = [_choice(drawn, k, turn) for k, turn in enumerate(drawn.turns)]
    head = wire.head_of(drawn, "cmpl", "text_completion")
    return {**head, "choices": choices, "usage": wire.usage_of(drawn)}


def _choice(drawn: Drawn, index: int, turn: ChatTurn) -> Body:
    asked, text = drawn.asked, turn.message.get("content") or ""
    if asked.echo:
        whole = asked.prompt if isinstance(asked.prompt, str) else drawn.text(drawn.prompt(turn))
        text = whole + text
    found: Body = {
        "index": index,
        "text": text,
        "finish_reason": "length" if turn.finish == "length" else "stop",
        "logprobs": _logprobs(turn, drawn) if asked.logprobs else None,
    }
    if turn.stopped_by is not None:
        found["stop_reason"] = turn.stopped_by
    if asked.token_ids:
        found["token_ids"] = list(turn.tokens)
        found["prompt_token_ids"] = list(drawn.prompt(turn))
    return found


def _logprobs(turn: ChatTurn, drawn: Drawn) -> Body:
    words = drawn.words(turn)
    return {
        "tokens": [text for text, _ in words],
        "token_logprobs": [value for _, value in words],
        "top_logprobs": None,
        "text_offset": list(accumulate((len(text) for text, _ in words), initial=0))[:-1],
    }


def events(drawn: Drawn) -> Iterator[str]:
    """Yield the chunks of a stream, up to [DONE]. Each choice comes in one chunk."""
    head = wire.head_of(drawn, "cmpl", "text_completion")
    for k, turn in enumerate(drawn.turns):
        yield wire.event({**head, "choices": [_choice(drawn, k, turn)]})
    if drawn.asked.usage:
        yield wire.event({**head, "choices": [], "usage": wire.usage_of(drawn)})
    yield "data: [DONE]\n\n"
