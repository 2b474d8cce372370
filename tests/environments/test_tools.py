"""Functions as tools: schemas, arguments, texts and cuts."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Literal

import pytest

from millrace.environments.chat import ToolError
from millrace.environments.tools import Cut, FunctionTool, check_arguments, text_of
from millrace.errors import ConfigError


def search(query: str, top: int = 3, mode: Literal["fast", "exact"] = "fast") -> list[str]:
    """Search the archive.

    Args:
        query: what to look for
        top: how many results
        mode: how to look
    """
    return [f"{query}-{mode}"] * top


def test_the_schema_is_that_of_the_signature_and_the_docstring() -> None:
    function = FunctionTool(search).schema["function"]
    assert function["name"] == "search" and function["description"] == "Search the archive."
    properties = function["parameters"]["properties"]
    assert properties["top"] == {"type": "integer", "description": "how many results"}
    assert properties["mode"]["enum"] == ["fast", "exact"]
    assert function["parameters"]["required"] == ["query"]


def test_a_function_that_is_not_described_is_refused() -> None:
    def untyped(a) -> str:  # type: ignore[no-untyped-def]
        """Do.

        Args:
            a: it
        """
        return str(a)

    def undescribed(a: int) -> str:
        return str(a)

    for function in (untyped, undescribed):
        with pytest.raises(ConfigError, match=r"agents.tools = .*Fix: def f\(x: int\)"):
            FunctionTool(function)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "the argument 'query' is missing"),
        ({"query": "a", "max": 2}, "unknown argument 'max'; known are query, top, mode"),
        ({"query": 1}, "the argument 'query' must be of type string"),
        ({"query": "a", "top": True}, "the argument 'top' must be of type integer"),
        ({"query": "a", "top": 1.5}, "the argument 'top' must be of type integer"),
        ({"query": "a", "mode": "slow"}, "the argument 'mode' must be one of fast, exact"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ToolError) as caught:
        asyncio.run(FunctionTool(search).call(arguments))
    assert str(caught.value) == error


def test_right_arguments_call_the_function_and_results_become_text() -> None:
    assert (
        asyncio.run(FunctionTool(search).call({"query": "a", "top": 2})) == '["a-fast", "a-fast"]'
    )
    assert text_of("as it is") == "as it is"
    assert text_of({"ü": 1}) == '{"ü": 1}'
    assert text_of({1}) == "{1}"


def test_types_that_a_schema_leaves_open_are_not_refused() -> None:
    schema = {"function": {"parameters": {"properties": {"a": {}, "b": {"type": "new"}}}}}
    check_arguments(schema, {"a": None, "b": object()})


def test_a_cut_keeps_both_ends_and_its_promise() -> None:
    def encode(text: str) -> list[int]:
        assert len(text) <= 32 * 50
        return [ord(c) for c in text]

    cut = Cut(encode, lambda tokens: "".join(map(chr, tokens)), 50)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices("abcde\n", k=rng.choice([0, 10, 49, 50, 51, 500, 5000])))
        short, was_cut = cut(text)
        assert was_cut == (len(text) > 50)
        if was_cut:
            assert short == f"{text[:25]}[... {len(text) - 50} characters cut ...]{text[-25:]}"
        else:
            assert short == text
    assert Cut(encode, lambda tokens: "", 0)("abc")[0] == "[... 3 characters cut ...]"
