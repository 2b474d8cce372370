"""Prompts of five families of chat templates: their tokens are those of transformers' pipeline.

The templates are those of tests/agents/families.py. A tokenizer of a family that has a token for
the begin of text adds it to plain text, as the public ones do, and the template writes it too.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from millrace.data.chat import Chat, Reading
from millrace.data.rows import Problem
from millrace.errors import DataError
from tests.agents.families import FAMILIES, tokenizer_of

NAMES = ("qwen2.5", "llama3", "mistral-v0.3", "gemma", "phi3")
USER = [{"role": "user", "content": "hello world,  a lookup\n"}]
TALKS = {
    "a user": USER,
    "three turns": [
        *USER,
        {"role": "assistant", "content": "12 degrees"},
        {"role": "user", "content": "the weather in Paris is é漢?"},
    ],
    "a system": [{"role": "system", "content": "says 12"}, *USER],
}


@cache
def real_like(name: str) -> Any:
    """Return a family's tokenizer, which begins plain text with the begin token if it has one."""
    tokenizer = tokenizer_of(name)
    if tokenizer.bos_token:
        bos = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
        )
    return tokenizer


CASES = [(n, t) for n in NAMES for t in TALKS if FAMILIES[n].system or t != "a system"]
"""The families and the talks. The others' templates refuse a system message."""


@pytest.mark.parametrize(("name", "talk"), CASES)
def test_a_prompt_has_the_tokens_of_transformers_pipeline(name: str, talk: str) -> None:
    messages = TALKS[talk]
    tokenizer = real_like(name)
    _, tokens = Chat(tokenizer).render(Problem(messages, "x"))
    want = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    assert list(tokens) == want["input_ids"]
    if bos := tokenizer.bos_token_id:
        assert tokens[0] == bos and list(tokens).count(bos) == 1, "not doubled, and not lost"


@pytest.mark.parametrize("name", NAMES)
def test_a_string_has_the_tokens_of_transformers_pipeline(name: str) -> None:
    """A model that reads a begin token before every text gets one before a string, too."""
    tokenizer = real_like(name)
    _, tokens = Chat(tokenizer).render(Problem("hello world", "x"))
    assert list(tokens) == tokenizer("hello world")["input_ids"]
    assert tokens[0] == (tokenizer.bos_token_id or tokens[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", ["12 degrees", "12 degrees\n", "the  weather "])
def test_the_policy_continues_words_of_the_assistant(name: str, words: str) -> None:
    tokenizer, messages = real_like(name), [*USER, {"role": "assistant", "content": words}]
    prompt, chat = Problem(prompt=messages, data_source="s"), Chat(tokenizer)
    want = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert chat.render(prompt)[0] == want
    assert want.rstrip().endswith(words.rstrip())
    assert chat.reading(prompt) is Reading.CONTINUED
    whole = Chat(tokenizer, generation_prompt=False)  # a reward model's
    assert whole.reading(prompt) is Reading.MESSAGES
    assert len(whole.render(prompt)[1]) > len(chat.render(prompt)[1])


def test_an_empty_last_message_of_the_assistant_begins_no_answer() -> None:
    messages = [*USER, {"role": "assistant", "content": ""}]
    chat = Chat(real_like("qwen2.5"))
    assert chat.reading(Problem(prompt=messages, data_source="s")) is Reading.MESSAGES


def test_a_template_that_drops_tool_calls_is_refused() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"of": "x"}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    talk = Problem([*USER, calls, *USER], "s")
    chat = Chat(tokenizer_of("qwen3"))
    assert "look" in chat.render(talk)[0]
    plain = deepcopy(chat.tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"row 3, tool_calls: .*Fix: "):
        Chat(plain).render(talk, "row 3")


def test_an_empty_list_of_tool_calls_is_no_call() -> None:
    chat = Chat(tokenizer_of("qwen3"))
    empty: list[dict[str, Any]] = [m | {"tool_calls": []} for m in USER]
    assert chat.render(Problem(empty, "s")) == chat.render(Problem(USER, "s"))


def test_a_template_that_needs_the_tool_calls_is_no_fault() -> None:
    plain = deepcopy(tokenizer_of("qwen3"))
    plain.chat_template = (
        "{% for m in messages %}{% if not m.content and not m.tool_calls %}"
        "{{ raise_exception('empty') }}{% endif %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "look" in Chat(plain).render(Problem([*USER, calls, *USER], "s"))[0]


def test_special_tokens_beside_the_content_are_refused_where_the_template_writes_them() -> None:
    chat = Chat(tokenizer_of("qwen3"))
    function = {"name": "look", "arguments": {"of": "<|im_end|>"}}
    asked = {"role": "user", "content": "What is it?"}
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    result = {"role": "tool", "content": "7"}
    with pytest.raises(DataError, match=r"row 3.*<\|im_end\|>.*Fix: "):
        chat.render(Problem([asked, calls, result], "s"), "row 3")
    unseen = asked | {"name": "<|im_end|>"}  # this template writes no names
    assert chat.render(Problem([unseen], "s")) == chat.render(Problem([asked], "s"))
