"""OpenAI's /v1/completions: a string or token ids in, text and tokens out, no template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.agents.request import ChatRequest, ChatTurn
from millrace.agents.wire import Asked, Body, Drawn, Reader, event, head_of, log_prob, wrong
from millrace.agents.wire_chat import problem as problem
from millrace.agents.wire_chat import trouble as trouble
from millrace.agents.wire_chat import usage_of
from millrace.types import Tokens, tokens_of


def read(reader: Reader, max_n: int = 64) -> Asked:
    """Return what a body of /v1/completions asks for."""
    reader.ignore_sampling()
    for name in ("suffix", "prompt_embeds"):
        if reader.body.get(name) is not None:
            raise wrong(name, "...", "is not served. Fix: leave it out")
    if reader.flag("echo") and reader.body.get("logprobs") is not None:
        raise wrong("echo", True, "has no log-probs of the prompt. Fix: leave echo or logprobs out")
    if (reader.count("best_of") or 1) > 1:
        reader.ignore("best_of", "ask for n")
    return Asked(
        ChatRequest(
            messages=(),
            max_tokens=reader.count("max_tokens"),
            stop=reader.stops(),
            model=reader.text("model"),
        ),
        prompt=_prompt(reader.body.get("prompt")),
        n=reader.count("n", max_n) or 1,
        stream=reader.flag("stream"),
        usage=bool(reader.object("stream_options").get("include_usage")),
        logprobs=reader.body.get("logprobs") is not None,
        token_ids=reader.flag("return_token_ids"),
        echo=reader.flag("echo"),
        ignored=tuple(reader.ignored),
    )


def _prompt(value: Any) -> Tokens | str:
    """Return one prompt. A list of prompts is a batch, which is refused."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise wrong("prompt", value, "must not be empty")
        return value
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, "must be a string or a list of token ids")
    if any(isinstance(token, str | list) for token in value):
        raise wrong("prompt", f"{len(value)} prompts", "must be one. Fix: send a request for each")
    if any(not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < 2**31 for t in value):
        raise wrong("prompt", value, "must be a string or a list of token ids")
    return tokens_of(value)


def answer(asked: Asked, drawn: Drawn) -> Body:
    """Return a text_completion."""
    return {
        **head_of(drawn, "cmpl", "text_completion"),
        "choices": [_choice(asked, drawn, k, turn) for k, turn in enumerate(drawn.turns)],
        "usage": usage_of(drawn),
    }


def _choice(asked: Asked, drawn: Drawn, index: int, turn: ChatTurn) -> Body:
    text = turn.message.get("content") or ""
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
    texts = [drawn.text(tokens_of((token,))) for token in turn.tokens]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [log_prob(value) for value in turn.log_probs],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def events(asked: Asked, drawn: Drawn) -> Iterator[str]:
    """Yield the chunks of a stream, up to [DONE]. Each choice comes in one chunk."""
    for k, turn in enumerate(drawn.turns):
        yield event(
            {
                **head_of(drawn, "cmpl", "text_completion"),
                "choices": [_choice(asked, drawn, k, turn)],
            }
        )
    if asked.usage:
        yield event(
            {**head_of(drawn, "cmpl", "text_completion"), "choices": [], "usage": usage_of(drawn)}
        )
    yield "data: [DONE]\n\n"
