"""OpenAI's /v1/chat/completions: bodies to requests, turns to answers and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.agents.request import ChatRequest, ChatTurn
from millrace.agents.wire import (
    Asked,
    Body,
    Drawn,
    Reader,
    Refusal,
    call_of,
    calls_of,
    event,
    head_of,
    log_prob,
    openai_problem,
    text_of,
    tool_of,
    wrong,
)
from millrace.types import Message, tokens_of

ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}


def read(reader: Reader, max_n: int = 64) -> Asked:
    """Return what a body of /v1/chat/completions asks for."""
    messages = tuple(
        message_of(message, f"messages[{k}]")
        for k, message in enumerate(reader.objects("messages", required=True))
    )
    _hints(reader)
    return Asked(
        ChatRequest(
            messages=messages,
            tools=tuple(
                _tool(tool, f"tools[{k}]") for k, tool in enumerate(reader.objects("tools"))
            ),
            max_tokens=_smallest(reader.count("max_tokens"), reader.count("max_completion_tokens")),
            stop=reader.stops(),
            model=reader.text("model"),
            parallel_tool_calls=reader.flag("parallel_tool_calls", True),
        ),
        n=reader.count("n", max_n) or 1,
        stream=reader.flag("stream"),
        usage=bool(reader.object("stream_options").get("include_usage")),
        logprobs=reader.flag("logprobs"),
        token_ids=reader.flag("return_token_ids"),
        ignored=tuple(reader.ignored),
    )


def message_of(message: Body, where: str) -> Message:
    """Return one message with the known fields alone."""
    role = message.get("role")
    if role == "assistant":
        return _assistant(message, where)
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join((*ROLES, "assistant"))
        raise wrong(f"{where}.role", role, f"must be one of {known}")
    found: Message = {
        "role": ROLES[role],
        "content": text_of(message.get("content"), f"{where}.content"),
    }
    if role == "tool":
        found["tool_call_id"] = message.get("tool_call_id")
        if not isinstance(found["tool_call_id"], str):
            raise wrong(f"{where}.tool_call_id", found["tool_call_id"], "must be a string")
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    return found


def _assistant(message: Body, where: str) -> Message:
    if message.get("function_call") is not None:
        raise wrong(f"{where}.function_call", "...", "is obsolete. Fix: send tool_calls")
    content = text_of(message.get("content"), f"{where}.content", ("text", "refusal"))
    found: Message = {"role": "assistant", "content": content}
    calls = []
    for k, call in enumerate(Reader(message).objects("tool_calls")):
        at = f"{where}.tool_calls[{k}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise wrong(at, call, "must be a call of a function")
        calls.append(call_of(call.get("id"), function.get("name"), function.get("arguments"), at))
    if calls:
        found["tool_calls"] = calls
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        found["reasoning_content"] = reasoning
    return found


def _tool(tool: Body, where: str) -> Body:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise wrong(where, tool.get("type"), "must be a function")
    return tool_of(
        function.get("name"), function.get("description"), function.get("parameters"), where
    )


def _hints(reader: Reader) -> None:
    """Note what cannot be honoured without another distribution."""
    reader.ignore_sampling()
    if reader.body.get("tool_choice") not in (None, "auto"):
        reader.ignore("tool_choice", "let the policy choose")
    if reader.object("response_format").get("type", "text") != "text":
        reader.ignore("response_format", "ask for JSON in the prompt")
    if reader.body.get("top_logprobs"):
        reader.ignore("top_logprobs", "ask for logprobs alone")
    for name in ("functions", "audio", "modalities", "prediction", "web_search_options"):
        if reader.body.get(name) not in (None, ["text"]):
            raise wrong(name, "...", "is not served. Fix: leave it out")


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def answer(asked: Asked, drawn: Drawn) -> Body:
    """Return a chat.completion."""
    found: Body = {
        **head_of(drawn, "chatcmpl", "chat.completion"),
        "choices": [
            {
                "index": k,
                "message": _message(turn),
                "finish_reason": turn.finish,
                "logprobs": _logprobs(turn, drawn) if asked.logprobs else None,
                **({"token_ids": list(turn.tokens)} if asked.token_ids else {}),
            }
            for k, turn in enumerate(drawn.turns)
        ],
        "usage": usage_of(drawn),
    }
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
    content = []
    for token, value in zip(turn.tokens, turn.log_probs, strict=True):
        text = drawn.text(tokens_of((token,)))
        content.append(
            {
                "token": text,
                "logprob": log_prob(value),
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}


def usage_of(drawn: Drawn) -> Body:
    """Return the usage in the form of chat and completions."""
    read_, written = drawn.usage
    return {
        "prompt_tokens": read_,
        "completion_tokens": written,
        "total_tokens": read_ + written,
    }


def events(asked: Asked, drawn: Drawn) -> Iterator[str]:
    """Yield the chunks of a stream, up to [DONE]."""
    head = head_of(drawn, "chatcmpl", "chat.completion.chunk")
    if asked.usage:
        head["usage"] = None

    def chunk(index: int, delta: Body, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return event({**head, "choices": [choice]})

    for k, turn in enumerate(drawn.turns):
        yield chunk(k, {"role": "assistant", "content": ""})
        message = _message(turn)
        if message.get("reasoning_content"):
            yield chunk(k, {"reasoning_content": message["reasoning_content"]})
        more: Body = {"logprobs": _logprobs(turn, drawn)} if asked.logprobs else {}
        if message["content"] or more:
            yield chunk(k, {"content": message["content"] or ""}, **more)
        for at, (number, name, arguments) in enumerate(calls_of(turn.message)):
            function = {"name": name, "arguments": ""}
            call = {"index": at, "id": number, "type": "function", "function": function}
            yield chunk(k, {"tool_calls": [call]})
            for piece in pieces(arguments):
                call = {"index": at, "function": {"arguments": piece}}
                yield chunk(k, {"tool_calls": [call]})
        ids = {"token_ids": list(turn.tokens)} if asked.token_ids else {}
        yield chunk(k, {}, finish_reason=turn.finish, **ids)
    if asked.usage:
        yield event({**head, "choices": [], "usage": usage_of(drawn)})
    yield "data: [DONE]\n\n"


def pieces(text: str) -> Iterator[str]:
    """Yield a text in two pieces, so that clients join them as they would elsewhere."""
    middle = len(text) // 2
    yield from (piece for piece in (text[:middle], text[middle:]) if piece)


def problem(refusal: Refusal) -> Body:
    """Return an error in OpenAI's shape."""
    return openai_problem(refusal)


def trouble(refusal: Refusal) -> str:
    """Return the event of an error in a stream."""
    return event(openai_problem(refusal))
