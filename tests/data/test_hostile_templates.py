"""Chat templates of strangers: each attack ends in a clear error within seconds."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.agents.template import check_template
from millrace.data import template
from millrace.data.chat import Chat
from millrace.data.rows import Problem
from millrace.data.tokenizer import TEMPLATES, make_tokenizer
from millrace.errors import ConfigError, DataError, MillraceError
from tests.agents.families import FAMILIES, tokenizer_of

MESSAGES = [{"role": "user", "content": "hello"}]
SAYS = "{{ messages[0].content }}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
END = "{% endfor %}{% endfor %}"
DOUBLE = "{% set n = namespace(x='x') %}{% for i in range(60) %}"

STOPPED = {
    "a loop without an end": (f"{LOOP}{END}", "seconds|processor"),
    "a power": ("{% set n = 9 %}{{ n ** (n ** n) }}", "processor"),
    "a power of constants": ("{{ 9 ** (9 ** 9) }}", "processor"),
    "text without an end": (f"{LOOP}abcdefghij{END}", "processor|memory"),
    "a long product": ("{{ 'x' * 10 ** 10 }}", "memory"),
    "a wide filter": ("{{ 'x' | center(10 ** 10) }}", "memory"),
    "a wide format": ("{{ '%10000000000d' % 1 }}", "memory|overflow|too (big|large)"),
    "doubled text": (DOUBLE + "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}", "memory|processor"),
    "a doubled list": (
        DOUBLE + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
        "processor|memory",
    ),
    "an equal list": (
        "{% set n = namespace(x=1, y=1) %}{% for i in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
        "processor",
    ),
    "much text": (
        "{% for a in range(50) %}{{ 'x' * 10 ** 6 }}{% endfor %}",
        "characters|processor",
    ),
    "a macro in itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself"),
    "brackets in brackets": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "nested|ended"),
    "random text": ("{{ lipsum(n=10 ** 7) }}", "processor|memory"),
}
"""Attacks on time and memory, and a word of the error."""

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


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each text half a second, so that the tests are quick."""
    template._host.close()
    monkeypatch.setattr(template, "SECONDS", 0.5)
    yield
    template._host.close()


@pytest.mark.parametrize("name", STOPPED)
def test_an_attack_on_time_or_memory_is_stopped(name: str, hurried: None) -> None:
    source, word = STOPPED[name]
    with pytest.raises(MillraceError, match=rf"chat.template.*({word}).*Fix: "):
        chat_with(source).render(Problem(MESSAGES, "x"), "row 3")
    text, _ = chat_with("{{ messages[0]['content'] }}").render(Problem(MESSAGES, "x"))
    assert text == "hello"  # the next template is rendered


@pytest.mark.parametrize("name", REFUSED)
def test_an_attack_on_objects_or_files_is_refused(name: str) -> None:
    source, word = REFUSED[name]
    with pytest.raises(DataError, match=rf"row 3: .*chat template refuses.*({word}).*Fix: "):
        chat_with(source).render(Problem(MESSAGES, "x"), "row 3")


@pytest.mark.parametrize("name", EMPTY)
def test_the_name_of_an_object_is_empty_text(name: str) -> None:
    assert chat_with(f"ok{EMPTY[name]}").render(Problem(MESSAGES, "x"))[0] == "ok"


@pytest.mark.parametrize("name", ["a macro in itself", "a long product", "classes", "a file"])
def test_the_check_of_agents_refuses_a_hostile_template(name: str) -> None:
    source, word = (STOPPED | REFUSED)[name]
    with pytest.raises(ConfigError, match=rf"chat.template.*({word}).*Fix: "):
        check_template(chat_with(source).tokenizer)


def test_an_attack_may_wait_for_a_message() -> None:
    chat = chat_with("{% if 'now' in messages[0].content %}" + f"{LOOP}{END}" + "{% endif %}ok")
    assert chat.render(Problem(MESSAGES, "x"))[0] == "ok"
    with pytest.raises(ConfigError, match="needs more than 2 s of a processor"):
        chat.render(Problem([{"role": "user", "content": "now"}], "x"))
    assert chat.render(Problem(MESSAGES, "x"))[0] == "ok"


def test_the_process_of_templates_has_no_variable_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    template._host.close()
    chat_with("ok").render(Problem(MESSAGES, "x"))
    process = template._host._process
    assert process is not None
    assert b"canary" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"canary" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_of_templates_is_started_anew(number: signal.Signals) -> None:
    """A signal to every process of a run must not end the run."""
    chat = chat_with("ok")
    chat.render(Problem(MESSAGES, "x"))
    first = template._host._process
    assert first is not None
    first.send_signal(number)
    first.wait()
    assert chat.render(Problem(MESSAGES, "x"))[0] == "ok"
    assert template._host._process is not first


def test_an_interrupted_request_leaves_no_answer_for_the_next_one() -> None:
    slow = "{% for a in range(9999) %}{% for b in range(900) %}{% endfor %}{% endfor %}"
    chat = chat_with("{% if messages[0].content == 'first' %}" + slow + "{% endif %}" + SAYS)
    assert chat.render(Problem(MESSAGES, "x"))[0] == "hello"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            chat.render(Problem([{"role": "user", "content": "first"}], "x"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert chat.render(Problem(MESSAGES, "x"))[0] == "hello"


def test_a_fork_has_a_process_of_templates_of_its_own() -> None:
    """A fork shares sockets: it would read the parent's answers, and the parent those of it."""
    chat = chat_with(SAYS)
    chat.render(Problem(MESSAGES, "x"))

    def same(text: str) -> bool:
        talk = [{"role": "user", "content": text}]
        return all(chat.render(Problem(talk, "x"))[0] == text for _ in range(200))

    with template._host._lock:  # as another thread may hold it
        child = os.fork()
    if child == 0:
        right = False
        try:
            right = same("the child")
        finally:
            os._exit(0 if right else 1)
    assert same("the parent")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_path_of_python_need_be_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template._host.close()
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert chat_with(SAYS).render(Problem(MESSAGES, "x"))[0] == "hello"


def test_the_process_of_templates_ends_with_its_driver() -> None:
    chat_with("ok").render(Problem(MESSAGES, "x"))
    process = template._host._process
    assert process is not None
    template._host.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "a <b> & 'c' \"d\" \U0001f600 é\n"}],
    [*MESSAGES, {"role": "assistant", "content": " yes "}, {"role": "user", "content": ""}],
    [{"role": "system", "content": "s"}, *MESSAGES],
    [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "abcdefghi",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"n": 1.5, "t": None, "é": [True]}},
                }
            ],
        },
        {"role": "tool", "name": "f", "content": "3", "tool_call_id": "abcdefghi"},
    ],
]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Do <it>.",
        "parameters": {"type": "object", "properties": {"n": {"type": "number"}}},
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_the_one_of_transformers(name: str) -> None:
    from jinja2 import TemplateError

    tokenizer, same = tokenizer_of(name), 0
    for talk in TALKS:
        for tools in ((), (TOOL,)):
            for head in (False, True):
                try:
                    expected = tokenizer.apply_chat_template(
                        talk, tools=list(tools) or None, tokenize=False, add_generation_prompt=head
                    )
                except (TemplateError, TypeError) as error:
                    with pytest.raises(template.Refused) as refusal:
                        template.render(tokenizer, talk, tools, head=head)
                    assert str(refusal.value) == str(error)
                    continue
                assert template.render(tokenizer, talk, tools, head=head) == expected
                same += 1
    assert same >= 4


def test_a_block_of_an_answer_is_plain_text() -> None:
    """Templates for training mark the answers of the policy."""
    source = (
        "{% for m in messages %}{% set x = m.content %}{% generation %}{{ x }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}"
    )
    chat = chat_with(source)
    expected = chat.tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert chat.render(Problem(MESSAGES, "x"))[0] == expected == "hello"


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_of_millrace_needs_no_process(source: str) -> None:
    template._host.close()
    assert "hello" in chat_with(source).render(Problem(MESSAGES, "x"))[0]
    assert template._host._process is None
