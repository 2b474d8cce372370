"""Hangs of real processes: the side threads and the kernel say who it is."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.config import ModelShape, RewardConfig, recipe
from millrace.environments.tools import CallLimits, FunctionTool, run_calls
from millrace.replicas.replica import RemoteRolloutEngine
from millrace.rewards.pool import RewardPool
from millrace.runtime.local import LocalRuntime
from millrace.testing import joined
from millrace.types import Completion, Prompt, SamplingParams, Segment, tokens_of
from millrace.waits import ask as asking
from millrace.waits.ask import ask
from millrace.waits.registry import PROCESS, acting, as_actor, waiting
from millrace.waits.verdict import Verdict, judge
from millrace.waits.wait_server import FOLDER, NAME, VARIABLE, WaitServer
from tests.random_models import write_random
from tests.waiting import HANG_S, until_async
from tests.workers import keys_of, without_engine


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "DEADLINE_S", 0.3)


@contextmanager
def driver(run: Path) -> Iterator[WaitServer]:
    side = WaitServer("driver")
    side.loop = asyncio.get_running_loop()
    side.start(run / FOLDER)
    try:
        yield side
    finally:
        side.close()
        PROCESS.counts.clear()


async def named(run: Path, side: WaitServer, culprit: str, says: str = "") -> Verdict:
    """Ask until the verdict names the culprit and says something. Return the last one.

    On a busy machine, the first answers may come too late.
    """
    end = time.monotonic() + HANG_S
    while True:
        verdict = await asyncio.to_thread(lambda: judge(ask(run, [side.answer()]), 0.5))
        found = culprit in verdict.culprit and says in verdict.sentence
        if (verdict.state == "still" and found) or time.monotonic() > end:
            return verdict
        await asyncio.sleep(0.1)


def test_a_rollout_worker_that_a_signal_stopped(tmp_path: Path) -> None:
    """VERL-Agent's and ROLL#253's: a process that is there and does nothing."""

    async def run() -> Verdict:
        (tmp_path / "logs").mkdir()
        runtime = LocalRuntime(tmp_path / "logs", without_engine(), gpus=[])
        with driver(tmp_path) as side:
            try:
                peer = await runtime.start("rollout-0", "rollout", 0)
                pid = next(a.pid for a in ask(tmp_path) if a.name == "rollout-0")
                os.kill(pid, signal.SIGSTOP)
                pinging = asyncio.create_task(as_actor("trainer", peer.call("ping")))
                verdict = await named(tmp_path, side, "rollout-0", "state T")
                os.kill(pid, signal.SIGCONT)
                await pinging
                return verdict
            finally:
                await runtime.close()

    verdict = asyncio.run(run())
    assert verdict.kind == "stopped" and "state T" in verdict.sentence, verdict.sentence
    assert f"kill -CONT {verdict.answers[-1].pid}" in verdict.next


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_process_of_a_serving_engine_that_a_signal_stopped_under_load(
    tmp_path: Path, engine: str
) -> None:
    """The worker, and then the process with the model: each is named, and no token is lost."""
    shape = ModelShape(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    write_random(tmp_path / "model", shape, vocab_size=24, eos_token_id=1)
    length = "rollout.max_response_length=256"
    config = recipe.load("quickstart", [*keys_of(engine), length, "rollout.max_num_seqs=8"])

    names = "rollout-0", "rollout-0-core-0"

    async def run() -> list[Verdict]:
        (tmp_path / "logs").mkdir()
        runtime = LocalRuntime(tmp_path / "logs", config.sides, gpus=[])
        verdicts = []

        async def draw(name: str, k: int) -> tuple[Segment, ...]:
            params = SamplingParams(256, seed=k, ignore_eos=True)
            return await replica.generate(tokens_of([3, 4]), params, f"{name}/{k}")

        with driver(tmp_path) as side:
            try:
                peer = await runtime.start("rollout-0", "rollout", 0)
                await peer.call("build", (config.model_dump(mode="json"), str(tmp_path / "model")))
                replica = RemoteRolloutEngine(peer)
                for name in names:
                    before = (await replica.stats()).tokens
                    drawing = [
                        asyncio.create_task(as_actor(f"sample {k}", draw(name, k)))
                        for k in range(8)
                    ]
                    while (await replica.stats()).tokens == before:  # noqa: ASYNC110 - no event
                        await asyncio.sleep(0.01)
                    pid = next(a.pid for a in ask(tmp_path) if a.name == name)
                    os.kill(pid, signal.SIGSTOP)
                    # The others may be done already.
                    drawing.append(asyncio.create_task(as_actor("sample 8", draw(name, 8))))
                    verdicts.append(await named(tmp_path, side, name, "state T"))
                    os.kill(pid, signal.SIGCONT)
                    done = await asyncio.gather(*drawing)
                    assert [len(joined(segments)) for segments in done] == [256] * 9
            finally:
                await runtime.close()
        return verdicts

    for name, verdict in zip(names, asyncio.run(run()), strict=True):
        assert (verdict.culprit, verdict.kind) == (name, "stopped"), verdict.sentence
        stopped = next(a.pid for a in verdict.answers if a.name == name)
        assert f"kill -CONT {stopped}" in verdict.next


def test_ranks_in_an_all_reduce_whose_partner_sleeps(tmp_path: Path) -> None:
    """verl#3873's: rank 1 does not come, and its stack says where it is."""

    async def run() -> Verdict:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with driver(tmp_path) as side:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.why.ranks", str(r), str(port)],
                    env=os.environ | {VARIABLE: str(tmp_path / FOLDER), NAME: f"trainer-{r}"},
                )
                for r in range(2)
            ]
            try:
                each = waiting("trainer-0", "engine.step"), waiting("trainer-1", "engine.step")
                with acting("trainer"), each[0], each[1]:
                    await until_async(
                        lambda: (
                            [a.progress.get("passes", (0, 0))[0] for a in ask(tmp_path)[1:]]
                            == [6, 6]
                        )
                    )
                    return await named(tmp_path, side, "trainer-1/engine.step", "all_reduce")
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()

    verdict = asyncio.run(run())
    assert verdict.culprit == "trainer-1/engine.step", verdict.sentence
    assert verdict.sentence.startswith("trainer rank 1 has been in backward of micro-batch 7")
    assert (
        "wait for its all_reduce" in verdict.sentence
        or "waits for its all_reduce" in verdict.sentence
    )
    culprit = next(a for a in verdict.answers if a.name == "trainer-1")
    assert any("ranks.py" in line for stack in culprit.stacks.values() for line in stack)


def test_a_reward_that_loops(tmp_path: Path) -> None:
    """compose-rl#87's and SvS#3's: a score that computes for ever."""
    (tmp_path / "loops.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    while True:\n        pass\n"
    )

    async def run() -> Verdict:
        config = RewardConfig(
            function=f"{tmp_path}/loops.py:score", num_workers=1, timeout_s=10_000
        )
        pool = RewardPool(config)
        await pool.start()
        prompt = Prompt(17, tokens_of([1]), "p", "d", "4", {}, {})
        with driver(tmp_path) as side:
            scoring = asyncio.create_task(
                as_actor("sample 17", pool.score(prompt, [Completion("x")]))
            )
            try:
                verdict = await named(tmp_path, side, "reward worker", "it computes")
            finally:
                scoring.cancel()
                await pool.close()
                await asyncio.wait([scoring])
            return verdict

    verdict = asyncio.run(run())
    assert "has not finished the score of prompt 17" in verdict.sentence
    assert "it computes" in verdict.sentence and "reward.timeout_s" in verdict.next


def test_a_tool_server_that_never_answers(tmp_path: Path) -> None:
    """verl#2987's: a tool waits for the answer of a server."""

    async def run() -> Verdict:
        async def silent(reader: Any, writer: Any) -> None:
            await asyncio.Event().wait()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def search(query: str) -> str:
            """Search.

            Args:
                query: what to look for.
            """
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(query.encode())
            return (await reader.read()).decode()

        tools = {"search": FunctionTool(search)}
        call = {"id": "1", "function": {"name": "search", "arguments": '{"query": "x"}'}}
        calls = run_calls(tools, [call], CallLimits(), None, lambda name, value: None)
        with driver(tmp_path) as side:
            playing = asyncio.create_task(as_actor("session 3/1", calls))
            verdict = await named(tmp_path, side, "tool search")
            playing.cancel()
            await asyncio.wait([playing])
            return verdict

    verdict = asyncio.run(run())
    assert verdict.sentence.startswith("tool search has not finished a call for"), verdict.sentence
    assert "session 3/1" in verdict.sentence and "agents.tool_deadline_s" in verdict.next


def test_a_disk_that_blocks_the_drivers_event_loop(tmp_path: Path) -> None:
    """slime#1888's and prime-rl#1713's: the event loop is late, and nothing is logged."""

    def blocked(verdict: Verdict) -> bool:
        return verdict.kind == "loop" and "catch_up (the metrics row" in verdict.sentence

    process = subprocess.Popen([sys.executable, "-m", "tests.why.full_disk", str(tmp_path)])
    try:
        end = time.monotonic() + HANG_S
        verdict = Verdict("", "")
        # On a busy machine, the loop may be late before the pipe is full.
        while not blocked(verdict) and time.monotonic() < end:
            time.sleep(0.2)
            verdict = judge(ask(tmp_path), 0.5)
    finally:
        process.kill()
        process.wait()
    assert verdict.culprit == "driver" and blocked(verdict), verdict.sentence
    assert "event loop has stood still" in verdict.sentence
    gone: Callable[[], Verdict] = lambda: judge(ask(tmp_path), 0.5)  # noqa: E731
    assert gone().kind == "dead"
