"""Programs that play many episodes in one process: what they get, how they fail, what they leave."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the endpoint listens with aiohttp")
from millrace.agents import command as programs
from millrace.agents.command import WorkerProgram
from millrace.agents.endpoint import Endpoint
from millrace.agents.process import Launcher
from millrace.agents.service import Service
from millrace.errors import EpisodeError
from tests.agents.programs_at_work import Table, plays, program, running, table
from tests.waiting import HANG_S, until_async

LOOP = """
import threading

def play(task):
    {body}

def one(task):
    os.environ["OPENAI_API_KEY"] = task["api_key"]
    answer = play(task)
    print(json.dumps({{"api_key": task["api_key"], **answer}}), flush=True)

for line in sys.stdin:
    task = json.loads(line)
    {start}
"""


def one(
    folder: Path,
    body: str,
    check: Any,
    *,
    count: int = 1,
    concurrent: int = 1,
    threads: bool = False,
    **options: Any,
) -> None:
    """Play with workers that do `body` for each task, and check the outcome at the table."""
    start = (
        "threading.Thread(target=one, args=(task,), daemon=True).start()"
        if threads
        else "one(task)"
    )
    text = LOOP.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip(), start=start)

    def make(service: Service, endpoint: Endpoint) -> WorkerProgram:
        launcher = Launcher(command, lambda: endpoint.url)
        return WorkerProgram(launcher, count, concurrent)

    command = program(folder, text)
    agent = folder / "agent.py"  # A worker has no MILLRACE_TASK.
    agent.write_text(
        agent.read_text().replace('task = json.load(open(os.environ["MILLRACE_TASK"]))', "")
    )

    async def work() -> None:
        async with table(make, **options) as at:
            await check(at)

    plays(work, folder)


def test_two_workers_play_all_episodes_and_get_nothing_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")

    async def check(at: Table) -> None:
        many = await asyncio.gather(*(at.play(k) for k in range(8)))
        found = {done.score.extra["pid"] for done in many if done.score}
        assert [done.score and done.score.value for done in many] == list(range(8))
        assert len(found) == 2 and len(running(str(tmp_path))) == 2

    body = """
    assert "HF_TOKEN" not in os.environ and "MILLRACE_TASK" not in os.environ
    print("a line of the log")
    ask()
    return {"reward": task["extra"], "pid": os.getpid()}
    """
    one(tmp_path, body, check, count=2, concurrent=2)


FAILURES = {
    "error": ('return {"error": "no luck"}', "agent_raised: 0/0: no luck"),
    "no reward": ("ask(); return {}", "no_reward"),
    "text": ('ask(); return {"reward": "1"}', "bad_reward"),
    "exit": ("print('bye'); sys.exit(3)", "exit code 3: bye"),
    "quiet exit": ("os._exit(0)", "agent_exit"),
    "signal": ("os.kill(os.getpid(), 9)", "signal 9"),
    "closed input": ("os.close(0); os.close(1); time.sleep(10_000)", "agent_deadline"),
    "endless": ("while True: pass", "agent_deadline"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_each_failure_has_a_reason_and_the_next_episode_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(programs, "GRACE_S", 0.0)
    body, wanted = FAILURES[kind]

    async def check(at: Table) -> None:
        late = "deadline" in wanted
        assert wanted in await at.fails(deadline_s=1.0 if late else HANG_S)
        if late:
            await until_async(lambda: not running(str(tmp_path)))
        done = await at.play(1)
        assert done.score is not None and done.score.value == 1

    body = f'if task["extra"]: ask(); return {{"reward": 1}}\n{body}'
    one(tmp_path, body, check)


def test_a_late_episode_that_ends_itself_keeps_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "GRACE_S", HANG_S)
    go = tmp_path / "go"

    async def check(at: Table) -> None:
        assert isinstance(at.program, WorkerProgram)
        late, good = await asyncio.gather(at.fails(0, deadline_s=1.0), at.play(1))
        assert late.startswith("agent_deadline")
        (worker,) = at.program._workers
        assert worker.load == 1, "it still plays the late episode"
        go.touch()
        await until_async(lambda: worker.load == 0)
        again = await at.play(2)
        assert good.score and again.score and good.score.extra == again.score.extra

    body = f"""
    while task["extra"] == 0 and not os.path.exists({str(go)!r}): time.sleep(0.01)
    if task["extra"]: ask()
    return {{"reward": 1, "pid": os.getpid()}}
    """
    one(tmp_path, body, check, concurrent=2, threads=True)


def test_the_end_of_a_worker_fails_its_other_episodes_once(tmp_path: Path) -> None:
    async def check(at: Table) -> None:
        many = await asyncio.gather(
            *(at.play(k, retries=1) for k in range(3)), return_exceptions=True
        )
        assert [isinstance(done, EpisodeError) for done in many] == [True, False, False]

    body = """
    if task["extra"] == 0: time.sleep(0.2); os._exit(1)
    ask()
    time.sleep(0.4)
    return {"reward": 1}
    """
    one(tmp_path, body, check, count=2, concurrent=3, threads=True)
