"""Reward functions in the sandbox: what they reach, and what one response can do to another."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.config import recipe
from millrace.errors import ConfigError, RewardError
from millrace.rewards.mix import RunReward
from millrace.run.rewards import make_reward
from millrace.tools.sandbox import Sandbox, SandboxRefused
from millrace.types import Prompt, tokens_of
from tests.rewards.completions import completed
from tests.waiting import at_some_pace

CODE = """
import asyncio, os, signal, socket, subprocess, sys, time
import helper

calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    space = dict(globals(), truth=ground_truth)
    exec(solution_str, space)
    return float(space.get("out", -1))

async def ascore(data_source, solution_str, ground_truth, extra_info):
    return compute_score(data_source, solution_str, ground_truth, extra_info)
"""


def folder_of(tmp_path: Path) -> Path:
    """Make the folder of a function and its helper, which every user may read."""
    folder = tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "helper.py").write_text("ANSWER = 42.0\n")
    (folder / "fn.py").write_text(CODE)
    folder.chmod(0o755)
    return folder


@asynccontextmanager
async def reward_of(
    tmp_path: Path, *overrides: str, name: str = "compute_score", where: str = ""
) -> Any:
    spec = f"reward.function={where or folder_of(tmp_path) / 'fn.py'}:{name}"
    config = recipe.load("quickstart", ["reward.sandbox=true", spec, *overrides])
    reward = make_reward(config.reward, config.agents, config.sides)
    try:
        await reward.start()
        yield reward
    finally:
        await reward.close()


async def ends(reward: RunReward, *sources: str) -> list[Any]:
    """Return the score of each response, or the reason why it has none."""
    found: list[Any] = []
    for source in sources:
        prompt = Prompt(0, tokens_of([1]), "p", "d", "4")
        try:
            (score,) = await reward.score(prompt, completed([source]))
            found.append(score.value)
        except RewardError as error:
            found.append(error.reason)
    return found


FORGES = r"""
for fd in map(int, os.listdir("/proc/self/fd")):
    if fd > 2:
        try:
            os.write(fd, b"\x01" + bytes(7) + b"\xc1")
        except OSError:
            pass
"""
"""Writes to every pipe what is no answer."""

REACHES = {
    "a file": "out = os.path.exists({secret!r})",
    "the variables": "out = 'MILLRACE_SECRET' in os.environ or 'HOME' not in os.environ",
    "the network": "socket.create_connection(('127.0.0.1', {port}), 1)",
    "the driver": "os.kill({driver}, 9)",
    "the worker's memory": "out = len(open(f'/proc/{os.getppid()}/mem', 'rb').read(0)) + 1",
    "its own folder, to write": "open(helper.__file__, 'a')",
    "a private /tmp": "open('/tmp/x' if os.access('/tmp', 2) else os.environ['TMPDIR'] + '/x', 'w')"
    "; out = 2",
    "its helper": "out = helper.ANSWER",
}


def test_a_function_reaches_its_own_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLRACE_SECRET", "xyzzy")
    secret = tmp_path / "answers.json"
    secret.write_text("secret")
    secret.chmod(0o644)

    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        facts = {"secret": str(secret), "port": server.sockets[0].getsockname()[1]}
        filled = [
            text.replace("{secret!r}", repr(facts["secret"]))
            .replace("{port}", str(facts["port"]))
            .replace("{driver}", "999999")
            for text in REACHES.values()
        ]
        async with reward_of(tmp_path) as reward:
            found = dict(zip(REACHES, await ends(reward, *filled), strict=True))
            assert found == {
                "a file": 0,
                "the variables": 0,
                "the network": "exception",
                "the driver": "exception",
                "the worker's memory": "exception",
                "its own folder, to write": "exception",
                "a private /tmp": 2,
                "its helper": 42,
            }
            assert await ends(reward, "print('hello', flush=True); out = 1") == [1]
        server.close()

    asyncio.run(run())
    captured = capfd.readouterr()
    assert "hello" in captured.err and captured.out == ""


@pytest.mark.parametrize("where", ["alone.py", "alone"])
def test_a_file_or_module_of_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(folder_of(tmp_path))
    Path("alone.py").write_text("def compute_score(solution_str): return 0.5")

    async def run() -> None:
        async with reward_of(tmp_path, where=where) as reward:
            assert await ends(reward, "any") == [0.5]

    asyncio.run(run())


@pytest.mark.parametrize("name", ["compute_score", "ascore"])
def test_no_response_changes_the_score_of_another(tmp_path: Path, name: str) -> None:
    async def run() -> None:
        async with reward_of(tmp_path, name=name) as reward:
            (worker,) = await ends(reward, "out = os.getppid()")
            patch = (
                "helper.ANSWER = 0; sys.modules['fn'] = None; __builtins__['float'] = str; out = 1"
            )
            stays = "subprocess.Popen(['sleep', '10000'], start_new_session=True); out = 1"
            left = "while (out := sum(map(str.isdigit, os.listdir('/proc')))) > 3: time.sleep(0.05)"
            texts = [patch, "out = helper.ANSWER + calls", stays, left, "os._exit(3)", FORGES]
            found = await ends(reward, *texts, "out = os.getppid()")
            assert found[1:] == [43, 1, 3, "worker_died", "garbled", worker]

    asyncio.run(run())


def test_limits_end_a_call_and_the_next_one_is_answered(tmp_path: Path) -> None:
    async def run(seconds: float) -> None:
        keys = ("reward.memory_mb=300", f"reward.timeout_s={seconds}")
        async with reward_of(tmp_path, *keys) as reward:
            leak = "x = bytearray(10**9); out = 1"
            forks = "for _ in '12345': os.fork() or (bytearray(9*10**7), time.sleep(10**4))"
            assert await ends(reward, leak, "out = 1") == ["out_of_memory", 1]
            assert await ends(reward, f"{forks}\ntime.sleep(10**4)", "out = 1") == [
                "worker_died",
                1,
            ]
            assert await ends(reward, "while True: pass", "out = 1") == ["timeout", 1]

    at_some_pace(lambda seconds: asyncio.run(run(seconds)), 3.0)


def test_a_machine_without_isolation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused() -> str:
        with pytest.raises(ConfigError) as caught:
            async with reward_of(tmp_path):
                pass
        return str(caught.value)

    command = [sys.executable, "-c", "raise OSError('unshare: not permitted')"]
    monkeypatch.setattr("millrace.tools.start.isolated", lambda *arguments: command)
    text = asyncio.run(refused())
    assert text.startswith("reward.sandbox = True: the reward cannot run: sandbox level namespaces")
    assert "allow unprivileged user namespaces" in text and "reward.sandbox=false" in text
    with pytest.raises(SandboxRefused) as agents:
        asyncio.run(Sandbox().check())
    assert text.partition(": sandbox level")[2].partition("Fix:")[0] in str(agents.value)


def test_what_protects_is_never_ignored(tmp_path: Path) -> None:
    judge = "reward.judge={model: m, base_url: 'http://localhost:1/v1'}"
    with pytest.raises(ConfigError, match=r"reward\.sandbox = True: .*reward\.judge is none"):
        recipe.load("quickstart", ["reward.sandbox=true", judge])
    with pytest.raises(ConfigError, match=r"reward\.memory_mb = 5: reward\.mix already names"):
        recipe.load("quickstart", ["reward.memory_mb=5", "reward.mix={a: {function: exact}}"])
