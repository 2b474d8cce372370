"""Programs that play at a real endpoint, over a session with a small deterministic engine."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.agents.conversation import Conversation
from millrace.agents.endpoint import Endpoint
from millrace.agents.parse import tool_format
from millrace.agents.programs import Program, ProgramAgent
from millrace.agents.render import Renderer
from millrace.agents.service import Service
from millrace.errors import EpisodeError
from millrace.ports import PolicySession
from millrace.rollout.episode import run_episode
from millrace.rollout.scoring import scored
from millrace.rollout.session import Limits
from millrace.types import Prompt, SamplingParams, Segment, Tokens, Trajectory, tokens_of
from tests.agents.adversary import Engine, tokenizer
from tests.agents.talks import options
from tests.waiting import HANG_S

ASK = """
import json, os, sys, time, urllib.error, urllib.request

def ask(text="hello", route="/chat/completions", **more):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]} | more
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + route
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)

task = json.load(open(os.environ["MILLRACE_TASK"]))
"""
"""What each program begins with. It needs nothing but Python."""


def program(folder: Path, source: str, name: str = "agent.py") -> str:
    """Write a program, and return its command."""
    (folder / name).write_text(ASK + textwrap.dedent(source))
    return f"{sys.executable} -S {folder / name}"


@dataclass
class Table:
    """One program, and the episodes that it plays."""

    program: Program
    service: Service
    endpoint: Endpoint
    limits: Limits
    engine: Engine = field(default_factory=lambda: Engine(calls=0))
    draw: Any = None

    async def play(
        self, number: int = 0, *, retries: int = 0, deadline_s: float = HANG_S
    ) -> Trajectory:
        """Play one episode, and score it as a run without a reward function does."""
        start = tokens_of(tokenizer().encode("hello", add_special_tokens=False))
        prompt = Prompt(number, start, "hello", "test", columns={"extra": number})
        done = await run_episode(
            self.draw or self._drawn,
            ProgramAgent(self.program, self.service, _conversation, deadline_s),
            prompt,
            SamplingParams(max_tokens=64, seed=number),
            f"{number}/0",
            limits=self.limits,
            retries=retries,
        )
        (done,) = await scored(prompt, [done], None, str)
        return done

    async def _drawn(
        self, tokens: Tokens, params: SamplingParams, name: str
    ) -> tuple[Segment, ...]:
        if not params.offset:  # Another try draws the same turn again.
            self.engine.log.get(name, {}).pop(params.seed, None)
        return await self.engine.draw(tokens, params, name)

    async def fails(self, number: int = 0, *, deadline_s: float = HANG_S) -> str:
        """Play one episode, and return the reason of its error with the text."""
        with pytest.raises(EpisodeError) as caught:
            await self.play(number, deadline_s=deadline_s)
        return str(caught.value)


def _conversation(session: PolicySession) -> Conversation:
    return Conversation(session, Renderer(tokenizer()), tool_format("hermes"))


@asynccontextmanager
async def table(
    make: Callable[[Service, Endpoint], Program],
    *,
    max_turns: int = 4,
    **changes: Any,
) -> AsyncIterator[Table]:
    """Serve the program that `make` returns."""
    service = Service(options(**changes))
    endpoint = Endpoint(service, "127.0.0.1", 0)
    await endpoint.start()
    one = make(service, endpoint)
    limits = Limits(max_len=4000, max_turns=max_turns, max_tokens_per_turn=64)
    try:
        await one.start()
        yield Table(one, service, endpoint, limits)
        assert not service.live
    finally:
        await one.close()
        await endpoint.close()


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Check that the block leaves no process, file, socket or folder. `folder` is for both."""
    me, before = psutil.Process(), os.getpid()
    files, mark, ours = me.num_fds(), str(folder), set(me.children(recursive=True))
    temporary, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
        assert os.getpid() == before
        assert not list(folder.glob("millrace-agents-*"))
        assert not running(mark) and set(me.children(recursive=True)) <= ours
        assert me.num_fds() <= files
    finally:
        tempfile.tempdir = temporary


def running(mark: str) -> list[str]:
    """Return the commands of live processes that name `mark`, without the watcher's."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        watches = any("end_after_input" in word for word in words)
        if process.pid != os.getpid() and not watches and any(mark in word for word in words):
            found.append(" ".join(words))
    return found


def plays(work: Callable[[], Awaitable[None]], folder: Path) -> None:
    """Run the work of a test in a loop of its own. It must leave nothing."""

    async def checked() -> None:
        await asyncio.wait_for(work(), HANG_S)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    with nothing_left(folder):
        asyncio.run(checked())
