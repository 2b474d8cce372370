"""Chat templates of strangers reach no object of Python and no file."""

from __future__ import annotations

import pytest

from millrace.agents.template import check_template
from millrace.data.chat import Chat
from millrace.data.rows import Problem
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import ConfigError, DataError, MillraceError

MESSAGES = [{"role": "user", "content": "hello"}]

STOPPED = {
    "a macro in itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a product beyond any memory": "{{ 'x' * 10 ** 18 }}",
}
"""Attacks that Python itself ends."""

REFUSED = {
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals of a function": ("{{ raise_exception.__globals__.os }}", "unsafe"),
    "globals of a class": ("{{ cycler.__init__.__globals__.os.environ }}", "unsafe"),
    "classes by a format": ("{{ '{0.__class__.__mro__}'.format(0) }}", "unsafe"),
    "classes by a filter": (
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
        "unsafe|undefined",
    ),
    "changed messages": ("{{ messages.append(1) }}", "unsafe"),
    "a file": ("{% include '/etc/hostname' %}", "no loader"),
    "an import": ("{% import 'os' as os %}{{ os }}", "no loader"),
    "wrong syntax": ("{% if %}", "expected|Expected"),
    "an error of jinja's own": ("{{ cycler() }}", "at least one item"),
    "an assertion of jinja's own": ("{{ ('x' * 99) | truncate(1) }}", "expected length"),
    "a refusal": ("{{ raise_exception('no such role') }}", "no such role"),
}
"""Attacks on Python's objects and on files."""

EMPTY = {
    "a class": "{{ messages.__class__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "a class by a map": "{{ '{a.__class__}'.format_map({'a': 0}) }}",
    "a class by a filter": "{{ (messages | map(attribute='__class__') | list)[0] }}",
}
"""Names of Python's objects. A template may write them, and nothing stands in their place."""


def chat_with(source: str) -> Chat:
    tokenizer = make_tokenizer("bpe", ["hello"], 300)
    tokenizer.chat_template = source
    return Chat(tokenizer)


@pytest.mark.parametrize("name", STOPPED)
def test_an_attack_without_an_end_is_stopped(name: str) -> None:
    with pytest.raises(MillraceError, match=r"chat_template = .*stopped.*Fix: "):
        chat_with(STOPPED[name]).render(Problem(MESSAGES, "x"), "row 3")


@pytest.mark.parametrize("name", REFUSED)
def test_an_attack_on_objects_or_files_is_refused(name: str) -> None:
    source, word = REFUSED[name]
    with pytest.raises(DataError, match=rf"row 3: .*chat template refuses.*({word}).*Fix: "):
        chat_with(source).render(Problem(MESSAGES, "x"), "row 3")


@pytest.mark.parametrize("name", EMPTY)
def test_the_name_of_an_object_is_empty_text(name: str) -> None:
    source = f"{{{{ messages[0].content }}}}{EMPTY[name]}"
    assert chat_with(source).render(Problem(MESSAGES, "x"))[0] == MESSAGES[0]["content"]


@pytest.mark.parametrize("source", [STOPPED["a macro in itself"], REFUSED["a file"][0]])
def test_the_check_of_agents_refuses_a_hostile_template(source: str) -> None:
    with pytest.raises(ConfigError, match=r"chat.template.*Fix: "):
        check_template(chat_with(source).tokenizer)


def test_a_block_of_an_answer_is_plain_text() -> None:
    """Templates for training mark the answers of the policy."""
    source = (
        "{% for m in messages %}{% set x = m.content %}{% generation %}{{ x }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}"
    )
    chat = chat_with(source)
    expected = chat.tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert chat.render(Problem(MESSAGES, "x"))[0] == expected == "hello"
