"""The environment of code tasks: the policy may try its code, and hidden tests judge the last."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from millrace.environments.chat import OneAnswer, Start, Tool
from millrace.environments.prompts import messages_of
from millrace.errors import bad_row
from millrace.types import Prompt, Score

_BLOCK = re.compile(r"```(?:python)?\s*\n(.*?)```", re.DOTALL)
_HARNESS = """
import json
space = {{"__name__": "answer"}}
found = []
exec(compile(open("answer.py").read(), "answer.py", "exec"), space)
for expression in {expressions!r}:
    try:
        found.append(repr(eval(expression, space)))
    except Exception as error:
        found.append(None)
print("\\n" + json.dumps(found))
"""
"""The sandbox sees the expressions alone. The values are compared here, where no answer can lie."""


class Outcome(Protocol):
    """How a program ended: its output, and a reason such as "exit" or "wall"."""

    @property
    def stdout(self) -> str: ...
    @property
    def reason(self) -> str: ...


class Runner(Protocol):
    """Runs Python source apart from this machine, as tools.sandbox.Sandbox does."""

    async def run(self, program: str, *, files: dict[str, str]) -> Outcome: ...


class CodeTests(OneAnswer):
    """One problem. Its row has extra_info.tests: pairs of an expression and its value's repr.

    `try_it` are tools for the policy, such as the sandboxed Python tool. The first message without
    a call is the answer: a block of Python, or the whole text.
    """

    def __init__(self, runner: Runner, try_it: Sequence[Tool] = ()) -> None:
        self._runner = runner
        self._tools = tuple(try_it)
        self._tests: list[list[str]] = []
        self._prefix = ""

    async def reset(self, task: Prompt) -> Start:
        tests: Any = task.extra_info.get("tests")
        where = f"row of prompt {task.index}, extra_info.tests"
        if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
            rule = "must be a list of [expression, repr of its value]"
            raise bad_row(where, tests, rule, 'such as [["f(3)", "7"]]')
        self._tests = tests
        self._prefix = str(task.extra_info.get("prefix", ""))
        return Start(messages_of(task), self._tools)

    async def score(self) -> Score | None:
        """Return the share of tests that pass. `solved` is 1 if all of them do."""
        answer = self.answer or ""
        if not answer.strip():
            return Score(0.0, {"solved": 0.0}, answer="")
        found = _BLOCK.search(answer)
        code = self._prefix + (found[1] if found else answer)
        harness = _HARNESS.format(expressions=[expression for expression, _ in self._tests])
        outcome = await self._runner.run(harness, files={"answer.py": code})
        values = _values(outcome.stdout)
        wanted = [value for _, value in self._tests]
        share = sum(a == b for a, b in zip(values, wanted, strict=False)) / len(wanted)
        return Score(share, {"solved": float(share == 1)}, answer=code)


def _is_test(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)


def _values(stdout: str) -> list[Any]:
    """Return the values in the last line. Code that ends the process early has none."""
    last = stdout.rstrip("\n").rpartition("\n")[2]
    try:
        values = json.loads(last)
    except (ValueError, RecursionError):
        return []
    return values if isinstance(values, list) else []
