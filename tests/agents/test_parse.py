"""Formats of tool calls: good calls, broken ones that stay text, and thinking."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.agents.conversation import Conversation
from millrace.agents.parse import FORMATS, split_thinking, tool_format
from millrace.agents.render import Renderer
from millrace.agents.request import ChatRequest
from millrace.agents.template import check_template
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import ConfigError
from millrace.rollout.session import Session
from millrace.types import Prompt, SamplingParams, Segment, Stop, Tokens, floats_of, tokens_of


def tool(name: str, **types: Any) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CHASE = tool("follow", key="integer")
MANY = (CHASE, tool("add", a="number", b="number"), tool("now"), tool("put", x="object"))


def function(name: str, **values: str) -> str:
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", {})]),
        ("hermes", 'so\n<tool_call>{"name":"now"}</tool_call>\n<tool_call>{"name":"add",'
         '"arguments":"{\\"a\\": 1}"}</tool_call>', "so", [("now", {}), ("add", {"a": 1})]),
        ("json", '{"name": "now", "parameters": {"x": "é"}}', "", [("now", {"x": "é"})]),
        ("json", ' [{"name": "now"}, {"name": "now"}]', "", [("now", {}), ("now", {})]),
        ("json", 'so [TOOL_CALLS] [{"name": "now", "arguments": {}}]', "so", [("now", {})]),
        ("json", '<|python_tag|>{"name": "a"}; {"name": "b"}', "", [("a", {}), ("b", {})]),
        ("qwen", "so\n" + function("follow", key="7"), "so", [("follow", {"key": 7})]),
        ("qwen", function("add", a="1.5", b="2") + function("now"), "",
         [("add", {"a": 1.5, "b": 2.0}), ("now", {})]),
        ("qwen", function("put", x='{"y": [1]}'), "", [("put", {"x": {"y": [1]}})]),
        ("qwen", function("other", x="\n two\nlines"), "", [("other", {"x": "\n two\nlines"})]),
        ("line", "?follow 7.", "", [("follow", {"key": 7})]),
        ("line", "so ?add 1 2.?now.", "so", [("add", {"a": 1.0, "b": 2.0}), ("now", {})]),
    ],
)  # fmt: skip
def test_calls(form: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    parsed = tool_format(form).parse(text, MANY)
    assert parsed.content == content and not parsed.broken
    assert [(c.name, json.loads(c.arguments)) for c in parsed.calls] == calls


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>{</tool_call>"),
        ("hermes", '<tool_call>{"name": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "args": {"x": 1}}</tool_call>'),
        ("json", '{"name": "Ada", "age": 36}'),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a"'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("json", '{"name": "a", '),
        ("json", "[TOOL_CALLS] no"),
        ("qwen", "<tool_call>now</tool_call>"),
        ("qwen", function("follow", key="seven")),
        ("qwen", "<tool_call><function=follow>\n<parameter=key>\n"),
        ("qwen", function("put", x="{1, 2}")),
        ("qwen", function("put", x="1j")),
        ("qwen", function("put", x="(" * 5000)),
        ("line", "?7."),  # four tools, and none is named
        ("line", "?follow seven."),
        ("line", "?add 1."),
        ("line", "?add 1 2"),
    ],
)
def test_a_broken_call_stays_text(form: str, text: str) -> None:
    parsed = tool_format(form).parse(text, MANY)
    assert (parsed.content, parsed.calls, parsed.broken) == (text, (), 1)


def test_a_good_call_next_to_a_broken_one_is_a_call() -> None:
    text = 'x<tool_call>{</tool_call><tool_call>{"name": "now"}</tool_call>'
    parsed = tool_format("hermes").parse(text, MANY)
    assert parsed.content == "x<tool_call>{</tool_call>"
    assert [c.name for c in parsed.calls] == ["now"] and parsed.broken == 1


@pytest.mark.parametrize("text", ["7.", "=1", "[1, 2]", "{}", '{"a": 1}', "is it so", ""])
@pytest.mark.parametrize("form", FORMATS)
def test_text_without_a_call_is_text(form: str, text: str) -> None:
    parsed = tool_format(form).parse(text, (CHASE,))
    assert (parsed.content, parsed.calls, parsed.broken) == (text, (), 0)


def test_a_line_needs_no_name_where_there_is_one_tool() -> None:
    (call,) = tool_format("line").parse("?7.", (CHASE,)).calls
    assert (call.name, call.arguments) == ("follow", '{"key": 7}')


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "a"', ', "arguments": {}}', "?", "7", ".", "é", "\n",
     "<function=now>", "</function>", "<parameter=x>", "</parameter>", "[TOOL_CALLS]", "[", "]"]
)  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@given(parts=st.lists(PIECES, max_size=12))
def test_any_text_is_parsed_to_json(form: str, parts: list[str]) -> None:
    parsed = tool_format(form).parse("".join(parts), (CHASE,))
    assert all(isinstance(json.loads(c.arguments), dict) for c in parsed.calls)
    if not parsed.calls:
        assert parsed.content == "".join(parts)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nso\n</think>\n\nyes", False, ("so", "yes")),
        ("\n<think>so", False, ("so", "")),
        ("so\n</think>\nyes", True, ("so", "yes")),
        ("<think>so</think>yes", True, ("so", "yes")),
        ("so", True, ("so", "")),
        ("yes </think>", False, ("", "yes </think>")),
    ],
)
def test_thinking(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split_thinking(text, opened=opened) == expected


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agents.tool_format = 'xml'.*hermes, json, qwen, line"):
        tool_format("xml")


def test_a_made_model_chases_through_the_line_format() -> None:
    """The quickstart's conversation: prompt, three calls, an answer."""
    table = [Random(0).randrange(10) for _ in range(10)]
    tokenizer = make_tokenizer("chars", ["c:>?.=;"], 0, roles=True)
    texts = iter(("?7.", f"?{table[7]}.", f"?{table[table[7]]}.", "=1"))

    async def draw(tokens: Tokens, params: SamplingParams, session: str) -> tuple[Segment, ...]:
        drawn = tokens_of([*tokenizer.encode(next(texts)), tokenizer.eos_token_id])
        return (Segment(drawn, log_probs=floats_of([0.0] * len(drawn)), stop=Stop.EOS),)

    async def play() -> str:
        opening = tokens_of(tokenizer.encode("<user>c3:7><assistant>"))
        session = Session(draw, Prompt(0, opening, "", "t"), SamplingParams(40), "0/0")
        talk = Conversation(session, Renderer(tokenizer), tool_format("line"))
        messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": "c3:7>"},)
        while True:
            turn = await talk.chat(ChatRequest(messages, tools=(CHASE,)))
            calls = turn.message.get("tool_calls", ())
            if not calls:
                (thread,) = session.trajectory().threads
                assert thread.opening is None and turn.message["content"] == "=1"
                whole = opening + tokens_of(t for s in thread.segments for t in s.tokens)
                return str(tokenizer.decode(whole.tolist()))
            key = json.loads(calls[0]["function"]["arguments"])["key"]
            result = {"role": "tool", "content": f"{table[key]};", "tool_call_id": calls[0]["id"]}
            messages = (*messages, turn.message, result)

    a, b = table[7], table[table[7]]
    assert asyncio.run(play()) == (
        f"<user>c3:7><assistant>?7.<eos><tool>{a};<assistant>?{a}.<eos><tool>{b};"
        f"<assistant>?{b}.<eos><tool>{table[b]};<assistant>=1<eos>"
    )
    report = check_template(tokenizer)
    assert report.tool_results and report.parallel_calls and report.user_bridge == "exact"
    assert not report.tools


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("boolean", "True", True),
        ("boolean", " false ", False),
        ("integer", "null", None),
        ("string", "null", None),
        ("string", "None", "None"),
        (["string", "null"], "null", None),
        (["integer", "string"], "three", "three"),
        ("integer", "3.0", 3),
        ("number", "5", 5),
        (None, "5", "5"),
        (["null", "integer"], "3", 3),
        ("array", "['a', True, None]", ["a", True, None]),
        ("object", '{"a": true}', {"a": True}),
        ("str", "hello", "hello"),
        ("str", "5", "5"),
        ("int", "5", 5),
        ("float", "1", 1),
        ("bool", "True", True),
        (["list", "null"], "[1]", [1]),
        ("dict", "{'a': 1}", {"a": 1}),
    ],
)
def test_qwen_values_as_models_write_them(kind: Any, text: str, value: Any) -> None:
    (call,) = tool_format("qwen").parse(function("f", x=text), (tool("f", x=kind),)).calls
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize(
    "text",
    [
        "<function=add><parameter=a>\n1\n<parameter=b>\n2\n</parameter></function>",
        "<function=add><parameter=a>1</parameter><parameter=b>2</function>",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n",
        '<function="add">I add.<parameter=a>1</parameter><parameter= b >2</parameter></function>',
    ],
)
@pytest.mark.parametrize("block", ["<tool_call>{}</tool_call>", "<tool_call>{}", "{}</tool_call>"])
def test_qwen_calls_without_a_tag(text: str, block: str) -> None:
    parsed = tool_format("qwen").parse(block.format(text), MANY)
    (call,) = parsed.calls
    assert json.loads(call.arguments) == {"a": 1.0, "b": 2.0}
    assert (parsed.content, parsed.broken) == ("", 0)


def test_qwen_calls_several_functions_in_a_block_or_in_none() -> None:
    both = "<function=now></function>\n<function=follow><parameter=key>7</parameter></function>"
    for text in (f"so\n<tool_call>\n{both}\n</tool_call>", f"so\n{both}"):
        parsed = tool_format("qwen").parse(text, MANY)
        assert [c.name for c in parsed.calls] == ["now", "follow"]
        assert (parsed.content, parsed.broken) == ("so", 0)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
    ],
)
def test_qwen_values_of_a_schema_without_a_type(schema: Any, text: str, value: Any) -> None:
    one = {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    (call,) = tool_format("qwen").parse(function("f", x=text), (one,)).calls
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize("value", ["{[1]: 2}", "{{}}", "{1, [2]}"])
def test_a_value_that_python_cannot_hash_is_a_broken_call(value: str) -> None:
    text = function("put", x=value)
    parsed = tool_format("qwen").parse(text, MANY)
    assert (parsed.calls, parsed.broken, parsed.content) == ((), 1, text)


@pytest.mark.parametrize("form", ["qwen", "hermes"])
@pytest.mark.parametrize("piece", ["<tool_call>", "<function=", "<function=now><parameter="])
def test_endless_repeats_of_a_tag_take_no_quadratic_time(form: str, piece: str) -> None:
    text = piece * 100_000  # A search from each tag to the end would take hours.
    tool_format(form).parse(text, MANY)
