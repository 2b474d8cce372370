"""Code with hidden tests, judged in the sandbox."""

from __future__ import annotations

import pytest

from millrace.agents.chat_agent import ChatAgent
from millrace.data.rows import problem
from millrace.data.sources import load_source
from millrace.environments.code_tests import CodeTests
from millrace.errors import DataError
from millrace.tools.python_tool import PythonTool
from millrace.tools.sandbox import Limits, Sandbox
from millrace.types import Prompt
from tests.agents.scripts import agent_of, play, prompt_of
from tests.agents.test_chat_agent import call, results
from tests.waiting import HANG_S

TESTS = {"tests": [["f(2)", "4"], ["f(5)", "25"], ["f('x')", "'no'"]]}


def agent(wall_s: float = HANG_S) -> ChatAgent:
    def make(prompt: Prompt) -> CodeTests:
        sandbox = Sandbox(limits=Limits(wall_s))
        return CodeTests(sandbox, [PythonTool(sandbox)])

    return agent_of(make, None, "hermes")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("def f(x): return x * x if x != 'x' else 'no'", 1.0),
        ("Here:\n```python\ndef f(x): return x * x\n```\nDone.", 2 / 3),
        ("def f(x): return", 0.0),
        ("def f(x):", 0.0),
        ("while True: pass", 0.0),
        ('import os\nprint(\'["4", "25"]\', flush=True)\nos._exit(0)', 2 / 3),
        ("print('[[[')\nraise SystemExit", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_the_share_of_tests_that_pass(answer: str, score: float) -> None:
    """Code that knows the right values may print them: then it has solved these tests."""
    endless = answer.startswith("while")
    done = play(agent(2.0 if endless else HANG_S), prompt_of("x", extra_info=TESTS), [answer])
    assert done.score.value == pytest.approx(score)
    assert done.score.extra == {"solved": float(score == 1)}


def test_the_policy_may_try_its_code() -> None:
    said = [call("python", code="print(2 ** 10)"), "def f(x): return x * x"]
    done = play(agent(), prompt_of("x", extra_info=TESTS), said)
    assert results(done) == ["1024\n"] and done.score.value == pytest.approx(2 / 3)


def test_the_task_fill_in_is_solved_by_its_answers_alone() -> None:
    rows = load_source("task:fill_in?size=6", seed=1)
    for i in range(6):
        entry = problem(rows, i)
        prompt = prompt_of(entry.text, extra_info=entry.extra_info)
        done = play(agent(), prompt, [entry.answer])
        assert done.score.value == 1


def test_a_row_without_tests_is_refused() -> None:
    with pytest.raises(DataError, match=r"extra_info.tests: .*must be a list of \[expression"):
        play(agent(), prompt_of("x"), ["def f(x): return x"])
