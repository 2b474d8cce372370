"""Whole runs with agents: environments elsewhere, a sandbox, and programs that outlive nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.config import recipe
from millrace.errors import ConfigError
from millrace.pipeline.checkpoint import Checkpoints
from millrace.run.signals import StopRequest
from millrace.run.train import Outcome, train
from millrace.tools.sandbox import Sandbox
from tests.agents.programs_at_work import ASK, running
from tests.e2e.runs import ROOT, audit, millrace, progress, rows, start_command
from tests.environments.servers import PEERS, needs_peers, nothing_left, wire_server
from tests.waiting import HANG_S, until

TINY = [
    "sft.steps=0",
    "actor.ppo_mini_batch_size=2",
    "async_training.trigger_parameter_sync_step=5",
    "rollout.n=2",
    "rollout.test_freq=0",
    f"rollout.heartbeat_s={HANG_S}",
    f"rollout.stall_s={HANG_S}",
    "rollout.max_num_seqs=16",
    "trainer.save_freq=0",
    "trainer.val_before_train=false",
    "trainer.threads=1",
    "report.enable=false",
    "guard.enable=false",
    "reward.max_error_share=1",
    "data.val_files=[]",
]


def trained(
    folder: Path, *overrides: str, name: str = "agents_quickstart", steps: int = 20
) -> Outcome:
    """Train `steps` optimizer steps. The run leaves nothing."""

    async def work() -> Outcome:
        return await run(folder, *overrides, name=name, steps=steps)

    with nothing_left():
        return asyncio.run(work())


async def run(
    folder: Path, *overrides: str, name: str = "agents_quickstart", steps: int = 20
) -> Outcome:
    said = [*TINY, f"rollout.total_rollout_steps={2 * steps}", f"trainer.run_dir={folder / 'run'}"]
    outcome = await train(recipe.load(name, [*said, *overrides]), progress(), StopRequest())
    assert outcome.complete and outcome.optimizer_steps == steps
    return outcome


def data(folder: Path, **columns: Any) -> str:
    """Write a data file with digits in its prompts, and return the override."""
    lines = [
        json.dumps({
            "prompt": [{"role": "user", "content": f"say {k % 10}>"}],
            "answer": f"?{k % 10}.\n={k % 10}",
            "ground_truth": str(k % 10),
            "extra_info": {"seed": k},
            **columns,
        })
        for k in range(40)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return f"data.train_files=[{folder / 'rows.jsonl'}]"


@pytest.mark.slow
def test_an_environment_of_openenv_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    seen: list[str] = []

    async def step(ws: Any, action: dict[str, Any]) -> None:
        seen.append(action["text"])
        reward = sum(c.isdigit() for c in action["text"]) / 10
        hint = {"hint": "more", "guesses": len(seen)}
        found = {"observation": hint, "reward": reward, "done": len(seen) % 2 == 0}
        await ws.send_json({"type": "observation", "data": found})

    async def work() -> Outcome:
        async with wire_server(step) as url:
            rules = [f"agents.environment=openenv:{url}", "agents.max_turns=3", data(tmp_path)]
            return await run(tmp_path, *rules, "rollout.max_response_length=24")

    with nothing_left():
        asyncio.run(work())
    assert len(seen) >= 80
    last = rows(tmp_path / "run")[-1]
    assert last["agents/turns/mean"] >= 1 and last["reward/mean"] >= 0


MCP_SERVER = """
from mcp.server import MCPServer

server = MCPServer("table")


@server.tool()
def lookup(position: int) -> str:
    "Return an entry of the table."
    open(__file__ + ".calls", "a").write("x")
    return str(position)


server.run("stdio")
"""
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == f"={ground_truth}")
"""


@pytest.mark.slow
def test_tools_of_a_real_mcp_server_are_trained(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(MCP_SERVER)
    (tmp_path / "reward.py").write_text(REWARD)
    trained(
        tmp_path,
        f"agents.environment=mcp-shared:{sys.executable} {tmp_path / 'server.py'}",
        f"reward.function={tmp_path / 'reward.py'}:score",
        "sft.steps=40",
        "sft.batch_size=16",
        "sft.messiness=0",
        "agents.max_turns=3",
        data(tmp_path),
    )
    last = rows(tmp_path / "run")[-1]
    assert last["agents/tool_calls"] > 0 and last["agents/turns/max"] > 1
    assert (tmp_path / "server.py.calls").stat().st_size > 20


@pytest.mark.slow
def test_a_program_of_python_runs_in_the_sandbox(tmp_path: Path) -> None:
    trained(tmp_path, name="agents_code", steps=4)
    assert "reward/mean" in rows(tmp_path / "run")[-1]


def test_a_machine_without_isolation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Sandbox.__init__

    def broken(self: Sandbox, *given: Any, **more: Any) -> None:
        original(self, *given, **{**more, "python": "/no/such/python"})

    monkeypatch.setattr(Sandbox, "__init__", broken)
    with pytest.raises(ConfigError, match=r"agents\.sandbox = 'namespaces': .*fill_in cannot run"):
        trained(tmp_path, name="agents_code", steps=4)
    assert not (tmp_path / "run").exists()


@needs_peers
@pytest.mark.slow
def test_a_taskset_of_verifiers_is_trained(tmp_path: Path) -> None:
    program = ROOT / "examples" / "verifiers" / "verifiers_agent.py"
    lines = subprocess.run(
        [str(PEERS), str(program), "rows", "chase_taskset", "4"],
        capture_output=True, text=True, check=True, cwd=program.parent,
    ).stdout  # fmt: skip
    found = [json.loads(line) for line in lines.splitlines()]
    assert [row["extra_info"]["verifiers"]["index"] for row in found] == [0, 1, 2, 3]
    assert found[1]["prompt"].startswith("Look up 2 times in table 1")
    (tmp_path / "rows.jsonl").write_text(lines)
    trained(
        tmp_path,
        "agents.environment=",
        f"agents.command={PEERS} {program} play",
        "rollout.max_prompt_length=512",
        "rollout.max_response_length=16",
        f"data.train_files=[{tmp_path / 'rows.jsonl'}]",
        "actor.ppo_mini_batch_size=1",
        "rollout.total_rollout_steps=1",
        steps=1,
    )


SLEEPER = (
    ASK
    + """
import subprocess
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(10_000)", task["mark"]])
ask(text=task["messages"][0]["content"])
time.sleep(10_000)
"""
)


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a run whose programs live for ever."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "agent.py").write_text(SLEEPER)
    said = [
        *TINY,
        "agents.environment=",
        f"agents.command={sys.executable} -S {tmp_path / 'agent.py'}",
        "agents.max_concurrent=3",
        "rollout.total_rollout_steps=2000",
        f"trainer.run_dir={tmp_path / 'run'}",
        "trainer.stop_grace_s=1",
        data(tmp_path, mark=str(tmp_path)),
    ]
    output = tmp_path / "output.txt"
    process = start_command("train", "agents_quickstart", *said, output=output)
    try:
        until(lambda: len(programs(tmp_path)) >= 3, process, output)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    until(lambda: not programs(tmp_path))


def programs(folder: Path) -> list[str]:
    """Return the live programs of a run, and their children."""
    return [c for c in running(str(folder)) if "millrace" not in c]


@pytest.mark.slow
def test_a_stop_saves_and_leaves_no_program(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    live.send_signal(signal.SIGTERM)
    assert live.wait(timeout=HANG_S) == 143, (tmp_path / "output.txt").read_text()
    assert not programs(tmp_path)
    assert list(Checkpoints(tmp_path / "run", keep=9).all())
    assert not list(tmp_path.glob("millrace-agents-*"))
    found = audit(tmp_path / "run")
    assert (found["lost"], found["trained_twice"], found["dropped"]) == (0, 0, {})


def test_a_dry_run_says_who_plays() -> None:
    done = millrace("train", "agents_quickstart", "--dry-run")
    assert done.code == 0, done.err
    assert re.search(r"agents\.environment\s+chase", done.out)
    assert re.search(r"max_turns\s+7", done.out)
