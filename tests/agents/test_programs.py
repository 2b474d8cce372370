"""Functions in the driver, and what programs return."""

from __future__ import annotations

import asyncio
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.agents import function
from millrace.agents.endpoint import Endpoint
from millrace.agents.function import FunctionProgram
from millrace.agents.programs import data_of, score_of
from millrace.agents.service import Service
from millrace.errors import ConfigError, EpisodeError
from millrace.types import Prompt, tokens_of
from tests.agents.programs_at_work import Table, plays, table
from tests.waiting import HANG_S, until_async

pytest.importorskip("openai", reason="the extra agents is not installed")


def one(
    folder: Path, body: str, check: Any, notes: list[str] | None = None, **options: Any
) -> None:
    """Play with one function, and check the outcome at its table."""
    source = "import asyncio, math, sys, time\nimport openai\n\nasync def play(client, task):\n"
    source += "    async def ask(text='hello', **more):\n"
    source += "        said = [{'role': 'user', 'content': text}]\n"
    source += "        return await client.chat.completions.create("
    source += "model=task['model'], messages=said, **more)\n"
    path = folder / "agent.py"
    path.write_text(source + textwrap.indent(textwrap.dedent(body), "    "))
    said: list[str] = [] if notes is None else notes

    def make(service: Service, endpoint: Endpoint) -> FunctionProgram:
        return FunctionProgram(f"{path}:play", service, said.append)

    async def work() -> None:
        async with table(make, **options) as at:
            await check(at)

    plays(work, folder)


def test_a_function_plays_many_episodes_at_once(tmp_path: Path) -> None:
    async def check(at: Table) -> None:
        many = await asyncio.gather(*(at.play(k) for k in range(20)))
        for k, done in enumerate(many):
            assert done.score is not None and done.score.value == k
            assert done.counts["turns"] == 2 and len(done.threads) == 2

    one(tmp_path, "await ask()\nawait ask('more')\nreturn task['extra']\n", check)


FAILURES = {
    "raises": (
        "await ask(); raise ValueError('no luck')",
        "agent_raised: 0/0: ValueError: no luck",
    ),
    "exits": ("await ask(); sys.exit(0)", "agent_raised: 0/0: SystemExit"),
    "times out": ("await ask(); raise TimeoutError('own')", "agent_raised: 0/0: TimeoutError: own"),
    "cancels itself": ("raise asyncio.CancelledError", "agent_raised"),
    "silent": ("return 1.0", "no_turns"),
    "nothing": ("await ask()", "no_reward"),
    "nan": ("await ask(); return math.nan", "bad_reward"),
    "text": (
        "await ask(); return '1'",
        "bad_reward: the program returned a str: '1'. Fix: return a number",
    ),
    "dict": ("await ask(); return {'score': 1}", 'without "reward"'),
    "list": ("await ask(); return [1.0]", "bad_reward"),
    "endless": ("while True: await asyncio.sleep(0.01)", "agent_deadline"),
    "unstoppable": (
        """
        while True:
            try: await asyncio.sleep(100)
            except asyncio.CancelledError: break
        await asyncio.sleep(0.5)
        """,
        "agent_deadline",
    ),
    "ignores a limit": (
        """
        while True:
            try: await ask()
            except openai.BadRequestError: pass
        """,
        "limit_ignored",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_each_failure_has_a_reason(tmp_path: Path, kind: str) -> None:
    source, wanted = FAILURES[kind]

    async def check(at: Table) -> None:
        assert wanted in await at.fails(deadline_s=1.0 if "deadline" in wanted else HANG_S)

    one(tmp_path, source, check)


def test_a_function_that_raises_at_a_limit_is_scored_by_what_it_posted(tmp_path: Path) -> None:
    async def check(at: Table) -> None:
        done = await at.play()
        assert done.ended == "turns" and done.score is not None and done.score.value == 0.5
        assert done.counts["turns"] + done.counts["dead_turns"] == 4

    source = """
    await client.post("/reward", body={"reward": 0.5}, cast_to=object)
    while True: await ask()
    """
    one(tmp_path, source, check)


def test_the_return_value_wins_over_a_posted_reward(tmp_path: Path) -> None:
    async def check(at: Table) -> None:
        done = await at.play()
        assert done.score is not None and done.score.value == 2 and done.score.extra == {"a": 3}

    source = """
    await client.post("/reward", body={"reward": 0.5}, cast_to=object)
    await ask()
    return {"reward": 2, "a": 3, "text": "left out"}
    """
    one(tmp_path, source, check)


def test_a_function_that_blocks_the_loop_is_named_while_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "STALL_S", HANG_S)
    notes: list[str] = []

    async def check(at: Table) -> None:
        await at.play()
        assert len(notes) == 1 and "agent.py:play" in notes[0]

    # It goes on only when the warning is there: the warning cannot come from the event loop. A busy
    # machine stops the event loop for a while too, so the limit is low in the function alone.
    source = """
    import builtins
    from millrace.agents import function
    function.STALL_S = 0.3
    while not builtins.notes: time.sleep(0.01)
    await ask()
    return 1
    """
    import builtins

    monkeypatch.setattr(builtins, "notes", notes, raising=False)
    one(tmp_path, source, check, notes)


def test_a_function_that_ignores_its_cancellation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "_GRACE_S", 0.2)
    monkeypatch.setattr(function, "STALL_S", HANG_S)
    notes: list[str] = []
    go = tmp_path / "go"

    async def check(at: Table) -> None:
        assert "agent_deadline" in await at.fails(deadline_s=0.3)
        assert "still runs" in notes[0]
        go.touch()
        await until_async(lambda: not any("play" in t.get_name() for t in asyncio.all_tasks()))

    source = f"""
    import os
    while not os.path.exists({str(go)!r}):
        try: await asyncio.sleep(0.01)
        except asyncio.CancelledError: pass
    """
    one(tmp_path, source, check, notes)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def play(client, task): return 1", "must be `async def`"),
        ("play = 3", "'play' of .*agent.py is not a function"),
        ("x =", "SyntaxError"),
        ("async def play(client): return 1", "cannot be called: too many positional arguments"),
        ("async def play(client, task, more): return 1", "cannot be called: missing .*'more'"),
    ],
)
def test_a_wrong_function_is_refused(tmp_path: Path, source: str, rule: str) -> None:
    (tmp_path / "agent.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"agents\.program = .*{rule}"):
        FunctionProgram(f"{tmp_path / 'agent.py'}:play", None, print)  # type: ignore[arg-type]


def test_numbers_of_other_packages_are_rewards() -> None:
    for value in (1, True, 1.0, np.float32(1), np.int64(1), torch.tensor(1.0), {"reward": 1}):
        score = score_of(value)
        assert score is not None and score.value == 1 and type(score.value) is float
    assert score_of(None) is None and score_of({"reward": None}) is None


@pytest.mark.parametrize(
    "value", ["1", b"1", math.inf, 10**400, torch.ones(2), {}, {"reward": "1"}, object(), [1]]
)
def test_anything_else_is_no_reward(value: Any) -> None:
    with pytest.raises(EpisodeError, match="bad_reward"):
        score_of(value)


def test_columns_do_not_replace_the_names_of_an_episode() -> None:
    columns = {"model": "theirs", "episode": 9, "own": 1, "prompt": "hi"}
    prompt = Prompt(0, tokens_of([1]), "text", "source", 5, {"a": 1}, columns)
    data = data_of(prompt, "0/1", "policy")
    assert data["model"] == "policy" and data["episode"] == "0/1" and data["own"] == 1
    assert data["ground_truth"] == 5 and data["messages"] == [{"role": "user", "content": "text"}]
