"""The Python tool: with and without a state, and past its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millrace.environments.chat import ToolError
from millrace.tools.python_tool import PythonTool
from millrace.tools.sandbox import Limits, Sandbox
from tests.waiting import HANG_S

ENDLESS = "while True: pass"


def with_tool(work: Callable[[Any], Awaitable[None]], *, state: bool) -> None:
    """Only code that never ends has a short limit."""

    async def main() -> None:
        sandbox = Sandbox()
        tool = PythonTool(sandbox, state=state)

        async def call(code: Any) -> str:
            sandbox.limits = Limits(1 if code == ENDLESS else HANG_S, output=8000)
            return await tool.call({"code": code})

        try:
            await work(call)
        finally:
            await tool.close()

    asyncio.run(main())


def test_without_a_state_each_call_is_a_program() -> None:
    async def work(call: Any) -> None:
        assert await call("x = 41; print(x)") == "41\n"
        assert "NameError: name 'x' is not defined" in await call("print(x)")
        assert await call("raise SystemExit(3)") == "\n[exit code 3]"
        assert await call("print('\ud800')") == "?\n"  # half a character, as JSON may have it
        assert await call(ENDLESS) == "\n[stopped: it ran longer than 1 s]"
        assert (await call("print('y' * 10**6)")).endswith(
            "[stopped: it wrote more than 8000 bytes]"
        )

    with_tool(work, state=False)


def test_with_a_state_variables_stay_and_the_last_value_is_shown() -> None:
    async def work(call: Any) -> None:
        assert await call("import math\nx = 41") == ""
        assert await call("x + 1") == "42\n"
        assert await call("import os\nos.system('echo raw')\nprint('then')") == "raw\nthen\n"
        assert "ZeroDivisionError" in await call("y = 7\n1 / 0")
        assert await call("y") == "7\n"
        assert "SyntaxError" in await call("def")
        assert "EOFError" in await call("input()")
        long = await call("print('z' * 5000)")
        assert long == "z" * 1000 + "\n[... the output is longer]"
        assert await asyncio.gather(call("x += 1"), call("x")) == ["", "42\n"]

    with_tool(work, state=True)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (ENDLESS, "it ran longer than 1 s"),
        ("import os; os._exit(0)", "it ended the interpreter"),
        ("import os; os.write(3, b'x' * 100); os._exit(0)", "it ended the interpreter"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it ended the interpreter"),
    ],
)
def test_a_dead_interpreter_is_named_and_the_next_call_has_a_new_one(code: str, said: str) -> None:
    async def work(call: Any) -> None:
        await call("x = 1")
        assert await call(code) == f"[stopped: {said}; the variables are lost]"
        assert "NameError" in await call("x")

    with_tool(work, state=True)


def test_code_that_is_no_text_is_an_error_of_the_call() -> None:
    async def work(call: Any) -> None:
        with pytest.raises(ToolError, match="'code' must be a string"):
            await call(7)

    with_tool(work, state=False)
