"""A tool that runs Python in the sandbox, in a new interpreter for each call or one an episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from millrace.environments.chat import ToolError
from millrace.errors import EpisodeError
from millrace.tools.sandbox import Result, Sandbox
from millrace.tools.start import Limits, Running

_LOOP = """
import ast, json, os, sys, traceback
replies, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
log = os.open(".output", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
for fd in (1, 2):
    os.dup2(log, fd)
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
space = {"__name__": "__main__"}
def run(code):
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
            if value is not None:
                print(repr(value))
    except BaseException:
        kind, error, trace = sys.exc_info()
        traceback.print_exception(kind, error, trace.tb_next)
    sys.stdout.flush()
    sys.stderr.flush()
while line := requests.readline():
    os.ftruncate(log, 0)
    run(json.loads(line))
    size = os.lseek(log, 0, os.SEEK_END)
    text = os.pread(log, MOST, 0).decode(errors="replace")
    if size > MOST:
        text += "\\n[... the output is longer]"
    replies.write(json.dumps(text).encode() + b"\\n")
    replies.flush()
"""
_EPISODE_S = 24 * 3600
_NOTES = {
    "wall": "it ran longer than {wall_s:g} s",
    "cpu": "it used more than {cpu_s} s of CPU time",
    "memory": "it used more than {memory} bytes of memory",
    "processes": "it started more than {processes} processes",
    "output": "it wrote more than {output} bytes",
}


class PythonTool:
    """Runs Python that the policy wrote.

    With `state`, one interpreter lives from the first call to `close`, and prints the value of a
    last expression. Make one tool for each episode then. A call past a limit ends the interpreter.
    """

    def __init__(self, sandbox: Sandbox, *, state: bool = False, name: str = "python") -> None:
        self.name = name
        self._sandbox = sandbox
        self._state = state
        self._running: Running | None = None
        self._turn = asyncio.Lock()
        kept = "Variables stay from call to call." if state else "Each call starts anew: use print."
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Run Python code and return what it prints. {kept}",
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": "Python source"}},
                    "required": ["code"],
                },
            },
        }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ToolError("the argument 'code' must be a string of Python source")
        if not self._state:
            return describe(await self._sandbox.run(code), self._sandbox.limits)
        async with self._turn:
            return await self._cell(code)

    async def close(self) -> None:
        """End the interpreter, if one lives."""
        if self._running is not None:
            running, self._running = self._running, None
            await running.end()

    async def _cell(self, code: str) -> str:
        limits = self._sandbox.limits
        if self._running is None:
            self._running = await self._open(limits)
        try:
            return await asyncio.wait_for(_exchange(self._running, code), limits.wall_s)
        except TimeoutError:
            reason = "wall"
        except (ConnectionError, ValueError):
            reason = ""
        except BaseException:  # cancelled: the interpreter is in the middle of a cell
            self._running.release()
            raise
        running, self._running = self._running, None
        words = await running.end()
        if "failed" in words:
            raise EpisodeError("sandbox", words["failed"])
        reason = reason or words.get("reason", "")
        why = _note(reason, limits) or "it ended the interpreter"
        return f"[stopped: {why}; the variables are lost]"

    async def _open(self, limits: Limits) -> Running:
        source = _LOOP.replace("MOST", str(limits.output // 8))
        command = [self._sandbox.python, "-I", "-B", "loop.py"]
        long = replace(limits, wall_s=_EPISODE_S, cpu_s=_EPISODE_S)
        return await self._sandbox.open(command, long, files={"loop.py": source})


async def _exchange(running: Running, code: str) -> str:
    process = running.process
    assert process.stdin and process.stdout
    sendable = code.encode(errors="replace").decode()
    process.stdin.write(json.dumps(sendable).encode() + b"\n")
    await process.stdin.drain()
    text = json.loads(await process.stdout.readline())
    if not isinstance(text, str):
        raise ValueError("not an answer of the loop")
    return text


def describe(result: Result, limits: Limits) -> str:
    """Return a program's output as the policy reads it, with a line for how it was stopped."""
    text = result.stdout
    if result.stderr:
        text += ("\n" if text and not text.endswith("\n") else "") + result.stderr
    if note := _note(result.reason, limits):
        text += f"\n[stopped: {note}]"
    elif result.reason == "signal":
        text += f"\n[stopped: signal {-result.status}]"
    elif result.status and not result.stderr:
        text += f"\n[exit code {result.status}]"
    return text


def _note(reason: str, limits: Limits) -> str:
    return _NOTES.get(reason, "").format(**asdict(limits))
