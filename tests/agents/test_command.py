"""Programs with a process of their own: what they get, how they fail, and what they leave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.agents.command import CommandProgram
from millrace.agents.endpoint import Endpoint
from millrace.agents.process import Launcher
from millrace.agents.programs import Task
from millrace.agents.service import Service
from millrace.errors import ConfigError
from tests.agents.programs_at_work import Table, nothing_left, plays, program, running, table
from tests.waiting import HANG_S, until, until_async


def made(command: str, **options: Any) -> Any:
    def make(service: Service, endpoint: Endpoint) -> CommandProgram:
        launcher = Launcher(command, lambda: endpoint.url, options.get("env", ()))
        return CommandProgram(launcher, options.get("concurrent", 2))

    return make


def one(folder: Path, source: str, check: Any, **options: Any) -> None:
    """Play with one program, and check the outcome at its table."""
    own = {k: options.pop(k) for k in ("concurrent", "env") if k in options}

    async def work() -> None:
        async with table(made(program(folder, source), **own), **options) as at:
            await check(at)

    plays(work, folder)


def reason(folder: Path, source: str, deadline_s: float = HANG_S) -> str:
    """Return the error of an episode of the program."""
    found = []

    async def check(at: Table) -> None:
        found.append(await at.fails(deadline_s=deadline_s))

    one(folder, source, check)
    return str(found[0])


def test_a_program_gets_its_episode_and_nothing_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("WANTED", "yes")

    async def check(at: Table) -> None:
        many = await asyncio.gather(*(at.play(k) for k in range(5)))
        for k, done in enumerate(many):
            assert done.score is not None and done.score.value == k
            assert done.score.extra == {"turns": 1.0}
            assert done.counts["turns"] == 1 and done.ended == "done"

    one(
        tmp_path,
        """
        assert "HF_TOKEN" not in os.environ and os.environ["WANTED"] == "yes"
        for name in ("OPENAI", "ANTHROPIC"):
            assert os.environ[name + "_API_KEY"] and os.environ[name + "_BASE_URL"]
        assert task["episode"] == f"{task['extra']}/0" and task["model"] == "policy"
        assert task["messages"] == [{"role": "user", "content": "hello"}]
        ask()
        print("a word of its own")
        print(json.dumps({"reward": task["extra"], "turns": 1}))
        """,
        check,
        env=["WANTED"],
    )


FAILURES = {
    "exit": ("ask(); sys.exit(3)", "agent_exit: 0/0: exit code 3"),
    "raises": ("ask(); raise ValueError('no luck')", "ValueError: no luck"),
    "killed": ("ask(); os.kill(os.getpid(), 9)", "agent_exit: 0/0: signal 9"),
    "silent": ("print(json.dumps({'reward': 1}))", "no_turns"),
    "no reward": ("ask()", "no_reward"),
    "nan": ("ask(); print('{\"reward\": NaN}')", "bad_reward"),
    "infinite": ("ask(); print('{\"reward\": 1e999}')", "bad_reward"),
    "huge": ("ask(); print('{\"reward\": 1' + '0' * 400 + '}')", "bad_reward"),
    "text": ('ask(); print(\'{"reward": "1.0"}\')', "bad_reward"),
    "list": ("ask(); print('{\"reward\": [1]}')", "bad_reward"),
    "component": ('ask(); print(\'{"reward": 1, "a": NaN}\')', "bad_reward"),
    "not last": ("ask(); print('{\"reward\": 1}'); print('bye')", "bad_reward"),
    "no json": ("ask(); print('{\"reward\": 1')", "no_reward"),
    "long line": ("ask(); print('x' * 10**7 + '{\"reward\": 1}')", "no_reward"),
    "garbage": ("ask(); sys.stdout.buffer.write(os.urandom(10**7)); sys.exit(1)", "agent_exit"),
    "wrong key": ("os.environ['OPENAI_API_KEY'] = 'x' * 32; ask()", "HTTP Error 401"),
    "ignores a limit": (
        """
        while True:
            try: ask()
            except urllib.error.HTTPError: pass
        """,
        "limit_ignored",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_each_failure_has_a_reason(tmp_path: Path, kind: str) -> None:
    source, wanted = FAILURES[kind]
    assert wanted in reason(tmp_path, source)


def test_an_endless_loop_meets_its_deadline(tmp_path: Path) -> None:
    source = "ask()\nwhile True: pass"
    assert reason(tmp_path, source, deadline_s=1.0).startswith("agent_deadline")


def test_a_deadline_after_a_limit_is_a_failure(tmp_path: Path) -> None:
    source = """
    try:
        while True: ask()
    except urllib.error.HTTPError:
        time.sleep(10_000)
    """
    assert reason(tmp_path, source, deadline_s=1.0).startswith("agent_deadline")


def test_a_program_that_raises_after_a_limit_is_scored(tmp_path: Path) -> None:
    async def check(at: Table) -> None:
        done = await at.play()
        assert done.ended == "turns"
        assert done.counts["turns"] + done.counts["dead_turns"] == 4
        assert done.score is not None and done.score.value == 0.25

    source = """
    ask(route="/reward", reward=0.25)
    while True: ask()
    """
    one(tmp_path, source, check)


def test_a_dead_engine_ends_the_program_at_once(tmp_path: Path) -> None:
    class Dead(Exception): ...

    async def dead(*_: object) -> Any:
        raise Dead

    async def check(at: Table) -> None:
        at.draw = dead
        with pytest.raises(Dead):
            await at.play()

    source = """
    while True:
        try: ask()
        except urllib.error.HTTPError as error: assert error.code in (400, 500)
    """
    one(tmp_path, source, check)


def test_a_reward_before_other_lines_is_not_lost_without_a_word(tmp_path: Path) -> None:
    source = """ask(); print('{"reward": 1}'); print("bye")"""
    said = reason(tmp_path, source)
    assert said.startswith("bad_reward") and "The last one is 'bye'. Fix: print" in said


def test_ten_megabytes_of_lines_before_the_reward_are_read(tmp_path: Path) -> None:
    async def check(at: Table) -> None:
        done = await at.play()
        assert done.score is not None and done.score.value == 1

    source = """
    ask()
    for _ in range(100): print("x" * 10**5)
    print('{"reward": 1}', end="")
    """
    one(tmp_path, source, check)


CHILDREN = {
    "in the group": "subprocess.Popen(line)",
    "in the group, with the pipe": "subprocess.Popen(line, stdout=None)",
    "in another session": "subprocess.Popen(line, start_new_session=True)",
    "in another session, without the pipe": (
        "subprocess.Popen(line, start_new_session=True, stdout=-3, stderr=-3)"
    ),
}


@pytest.mark.parametrize("how", CHILDREN)
def test_children_do_not_outlive_the_run(tmp_path: Path, how: str) -> None:
    async def check(at: Table) -> None:
        done = await at.play()
        assert done.score is not None and done.score.value == 1

    source = f"""
    import subprocess
    line = [sys.executable, "-S", "-c", "import time; time.sleep(10_000)", {str(tmp_path)!r}]
    {CHILDREN[how]}
    ask()
    print(json.dumps({{"reward": 1}}))
    """
    one(tmp_path, source, check)


def test_a_cancelled_episode_leaves_nothing(tmp_path: Path) -> None:
    async def check(at: Table) -> None:
        playing = asyncio.create_task(at.play())
        await until_async(lambda: running(str(tmp_path)))
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert not running(str(tmp_path))

    one(tmp_path, "ask(); time.sleep(10_000)", check)


def test_the_wait_for_a_place_is_not_in_the_deadline(tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting, begun = list[str](), list[str]()

    async def check(at: Table) -> None:
        run = at.program.run

        async def noted(task: Task) -> Any:
            def begin() -> None:
                begun.append(task.name)
                task.begin()

            waiting.append(task.name)
            return await run(replace(task, begin=begin))

        at.program.run = noted  # type: ignore[method-assign]
        many = [asyncio.create_task(at.play(k)) for k in range(2)]
        await until_async(lambda: len(waiting) == 2 and running(str(tmp_path)))
        assert len(begun) == 1, "the deadline of the one that waits has not begun"
        go.touch()
        assert all([(await one).ended == "done" for one in many]) and len(begun) == 2

    source = f"""
    ask()
    while not os.path.exists({str(go)!r}): time.sleep(0.01)
    print(json.dumps({{"reward": 1}}))
    """
    one(tmp_path, source, check, concurrent=1)


def test_a_failed_try_begins_again(tmp_path: Path) -> None:
    async def check(at: Table) -> None:
        done = await at.play(retries=2)
        assert done.counts["retries"] == 1 and done.dead_tokens == done.num_policy_tokens

    source = f"""
    ask()
    first = not os.path.exists({str(tmp_path / "tried")!r})
    open({str(tmp_path / "tried")!r}, "w").close()
    if first: os.kill(os.getpid(), 9)
    print(json.dumps({{"reward": 1}}))
    """
    one(tmp_path, source, check)


@pytest.mark.parametrize("command", ["", "no-such-program x", "python 'a"])
def test_a_command_that_cannot_start_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match=r"agents\.command"):
        Launcher(command, str)


def test_a_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agents\.env.*NOT_THERE"):
        Launcher(sys.executable, str, ["NOT_THERE"])


DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.agents.programs_at_work import table, program
from tests.agents.test_command import made

async def work():
    folder = Path(sys.argv[1])
    async with table(made(program(folder, sys.argv[2]))) as at:
        await asyncio.gather(at.play(0), at.play(1))

asyncio.run(work())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show environments")
def test_the_kill_of_the_driver_leaves_no_program(tmp_path: Path) -> None:
    source = f"""
    import subprocess
    line = [sys.executable, "-S", "-c", "import time; time.sleep(10_000)", {str(tmp_path)!r}]
    subprocess.Popen(line, start_new_session=True)
    subprocess.Popen(line)
    ask()
    time.sleep(10_000)
    """
    with nothing_left(tmp_path):
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), source],
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        try:
            until(lambda: len(running(str(tmp_path))) == 7)
        finally:
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
        until(lambda: not running(str(tmp_path)))
        until(lambda: not list(tmp_path.glob("millrace-agents-*")))
