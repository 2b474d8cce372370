"""The reward pool, with real processes.

Every call is answered once, whatever its function does to the worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.config import RewardConfig
from millrace.config.reward_keys import FormatConfig
from millrace.errors import ConfigError, RewardError, WorkerError
from millrace.rewards.pool import RewardPool
from millrace.types import Prompt, Score, tokens_of
from tests.rewards.completions import completed
from tests.waiting import HANG_S, at_some_pace, until

CODE = """
import asyncio, ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
from collections import Counter
from millrace.errors import RewardError

def act(text):
    verb, _, rest = text.partition(" ")
    if verb == "sleep": time.sleep(float(rest))
    if verb == "exit": os._exit(3)
    if verb == "sysexit": sys.exit(3)
    if verb == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if verb == "raise": raise KeyError(rest)
    if verb == "garble": raise ValueError("\\ud800")
    if verb == "print": print("noise" * 1000, flush=True); os.write(1, b"noise")
    if verb == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    if verb == "main": assert threading.current_thread() is threading.main_thread()
    if verb == "pid": return os.getpid()
    if verb == "torch": return "torch" in sys.modules
    if verb == "child": return subprocess.Popen(["sleep", "10000"]).pid
    if verb == "none": return None
    if verb == "cancel": raise asyncio.CancelledError
    if verb == "reason": raise RewardError(rest.replace("?", "\\ud800"), "why")
    if verb == "key": return {"score": 5, "\\ud800": 1.0}
    if verb == "signal":
        for number in (signal.SIGTERM, signal.SIGINT): os.kill(os.getpid(), number)
        time.sleep(0.05)
    if verb == "terminate":
        started = subprocess.Popen(["sleep", "10000"])
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10000,))
        forked.start()
        started.terminate(); forked.terminate()
        started.wait(300); forked.join(300)
        return -started.returncode if started.returncode == forked.exitcode else -1
    return len(text)

def score(data_source, solution_str, ground_truth, extra_info): return act(solution_str)

async def group(completions, **columns):
    scores = [await ascore("d", text, "", {}) for text in completions[:1]]
    return [scores[0] + 100 * len(completions)] * len(completions)

group.whole_group = True

running, most = Counter(), Counter()

async def ascore(data_source, solution_str, ground_truth, extra_info):
    verb, _, rest = solution_str.partition(" ")
    if verb == "wait": await asyncio.sleep(float(rest)); return 7
    if verb == "crowd":  # all stay until there are as many as its first word says
        running[rest] += 1
        most[rest] = max(most[rest], running[rest])
        while most[rest] < int(rest.split()[0]): await asyncio.sleep(0.01)
        running[rest] -= 1
        return running[rest] + 1
    return act(solution_str)
"""


def prompt(**columns: Any) -> Prompt:
    return Prompt(0, tokens_of([1]), "p", "d", "4", {}, columns)


@asynccontextmanager
async def pool_of(tmp_path: Path, name: str = "score", **changes: Any) -> Any:
    (tmp_path / "functions.py").write_text(CODE)
    pool = RewardPool(
        RewardConfig(
            **{"function": f"{tmp_path}/functions.py:{name}", "timeout_s": HANG_S} | changes
        )
    )
    try:
        yield pool
    finally:
        await pool.close()


async def outcomes(pool: Any, *texts: Any) -> Any:
    """Return for each call its score, or the reason of its error."""
    answers = await asyncio.gather(
        *(pool.score(prompt(), completed([text])) for text in texts), return_exceptions=True
    )
    ends = [a if isinstance(a, BaseException) else a[0].value for a in answers]
    return [a.reason if isinstance(a, RewardError) else a for a in ends]


def alive(pid: Any) -> Any:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{int(pid)}/status").read_text()
    except FileNotFoundError:
        return False


def hurry(pool: Any) -> None:
    """Give the calls of the present workers little time. The next workers have all the time."""
    for worker in pool.workers:
        worker.job = msgspec.structs.replace(worker.job, timeout_s=0.5)


def test_scores_come_back_in_order_over_several_workers(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool_of(tmp_path, num_workers=2) as pool:
            calls = (pool.score(prompt(), completed(["x" * i, "y"])) for i in range(200))
            answers = await asyncio.gather(*calls)
            assert answers == [[Score(float(i)), Score(1.0)] for i in range(200)]
            assert await pool.score(prompt(), completed([])) == []

    asyncio.run(run())


def test_what_functions_print_stays_out_of_the_protocol_and_they_run_in_the_main_thread(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with pool_of(tmp_path) as pool:
            assert await outcomes(pool, "print", "main", "torch") == [5, 4, 0]

    asyncio.run(run())
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "noise" in captured.err


@pytest.mark.parametrize("name", ["score", "ascore"])
def test_errors_of_a_function_fail_its_call_alone_and_say_why(tmp_path: Path, name: str) -> None:
    async def run() -> None:
        async with pool_of(tmp_path, name) as pool:
            ends = await outcomes(pool, "a", "raise x", "none", "sysexit", "bb")
            assert ends == [1, "exception", "not_a_number", "exception", 2]
            with pytest.raises(
                RewardError,
                match=r"exception: KeyError: 'x' \(functions\.py:\d+ in act: .*raise KeyError",
            ):
                await pool.score(prompt(), completed(["raise x"]))
            *ends, pid = await outcomes(pool, "cancel", "reason", "reason ?", "key", "pid")
            assert ends == ["exception", "exception", "\\ud800", 5]
            assert [pid] == await outcomes(pool, "pid")  # no worker died
            with pytest.raises(RewardError, match="not_sendable"):
                await pool.score(prompt(bad=object()), completed(["a"]))

    asyncio.run(run())


@pytest.mark.parametrize("name", ["score", "ascore"])
def test_an_error_whose_text_is_no_unicode_fails_its_call_alone(tmp_path: Path, name: str) -> None:
    """A function that reads JSON with a lone surrogate raises such an error."""

    async def run() -> None:
        async with pool_of(tmp_path, name) as pool:
            for _ in range(6):
                with pytest.raises(
                    RewardError, match=r"exception: ValueError: \\ud800 \(functions"
                ):
                    await pool.score(prompt(), completed(["garble"]))
            assert await outcomes(pool, "12") == [2]

    asyncio.run(run())


def test_a_call_past_its_deadline_is_killed_and_the_others_are_answered(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool_of(tmp_path) as pool:
            assert await outcomes(pool, "a") == [1]
            hurry(pool)
            ends = await outcomes(pool, "stubborn", "bb", "sleep 0.1", "ccc")
            assert ends == ["timeout", 2, 9, 3]

    asyncio.run(run())


def test_the_clock_of_a_queued_call_starts_when_it_runs(tmp_path: Path) -> None:
    def scenario(seconds: float) -> None:
        async def run() -> None:
            text = f"sleep {seconds / 3:.2f}"  # the last is answered after twice the deadline
            async with pool_of(tmp_path, timeout_s=seconds) as pool:
                assert await outcomes(pool, *[text] * 6) == [len(text)] * 6

        asyncio.run(run())

    at_some_pace(scenario, 1.5)


@pytest.mark.parametrize("name", ["score", "ascore"])
@pytest.mark.parametrize("verb", ["exit", "segfault"])
def test_a_worker_that_dies_fails_one_call_and_loses_none(
    tmp_path: Path, name: str, verb: str
) -> None:
    async def run() -> None:
        async with pool_of(tmp_path, name) as pool:
            texts = ["a"] * 10 + [verb] + ["bb"] * 10
            assert await outcomes(pool, *texts) == [1] * 10 + ["worker_died"] + [2] * 10
            assert await outcomes(pool, "a", verb, "bb") == [1, "worker_died", 2]

    asyncio.run(run())


def test_the_death_of_a_worker_says_how(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool_of(tmp_path) as pool:
            for verb, said in (("exit", "exit code 3"), ("segfault", "SIGSEGV")):
                with pytest.raises(RewardError, match=said):
                    await pool.score(prompt(), completed([verb]))

    asyncio.run(run())


def test_workers_that_only_die_end_the_pool(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool_of(tmp_path) as pool:
            ends = await outcomes(pool, *["exit"] * 8)
            assert ends.count("worker_died") == 5
            assert sum(isinstance(e, WorkerError) for e in ends) == 3
            with pytest.raises(WorkerError, match="5 reward workers in a row died"):
                await pool.score(prompt(), completed(["a"]))

    asyncio.run(run())


def test_coroutines_run_together_up_to_the_limit(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool_of(tmp_path, "ascore", max_concurrency=8) as pool:
            await pool.start()
            assert max(await outcomes(pool, *["crowd 8 first"] * 16)) == 8
            scores = await pool.score(prompt(), completed(["crowd 8 then"] * 20))
            assert {1, 8} <= {score.value for score in scores} <= {*range(1, 9)}

    asyncio.run(run())


def test_a_group_is_one_call_and_one_coroutine(tmp_path: Path) -> None:
    """Four groups of five run together where four coroutines may."""

    async def run() -> None:
        async with pool_of(tmp_path, "group", max_concurrency=4) as pool:
            await pool.start()
            assert pool.whole_group
            groups = await asyncio.gather(
                *(pool.score(prompt(), completed(["crowd 4"] * 5)) for _ in "1234")
            )
            assert all(scores == [scores[0]] * 5 for scores in groups)
            assert {scores[0].value for scores in groups} == {501, 502, 503, 504}

    asyncio.run(run())


def test_a_coroutine_past_its_deadline_is_cancelled_alone(tmp_path: Path) -> None:
    def scenario(seconds: float) -> None:
        async def run() -> None:
            async with pool_of(tmp_path, "ascore", timeout_s=seconds) as pool:
                (before,) = await outcomes(pool, "pid")
                texts = ("wait 10_000", "wait 0.2", "a")
                assert await outcomes(pool, *texts) == ["timeout", 7, 1]
                assert await outcomes(pool, "pid") == [before]

        asyncio.run(run())

    at_some_pace(scenario, 1.5)


def test_a_coroutine_that_blocks_its_event_loop_is_found_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.rewards.process.GRACE_S", 0.2)

    def scenario(seconds: float) -> None:
        async def run() -> None:
            async with pool_of(tmp_path, "ascore", timeout_s=seconds) as pool:
                texts = ("wait 0.1", "stubborn", "wait 0.2", "a")
                assert await outcomes(pool, *texts) == [7, "timeout", 7, 1]

        asyncio.run(run())

    at_some_pace(scenario, 1.5)


def test_a_cancelled_call_leaves_the_others_alone(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool_of(tmp_path) as pool:
            await pool.start()
            lost = [
                asyncio.create_task(pool.score(prompt(), completed(["sleep 0.1"])))
                for _ in range(3)
            ]
            await asyncio.sleep(0.02)
            for task in lost:
                task.cancel()
            assert await outcomes(pool, "a") == [1]

    asyncio.run(run())


def test_a_bad_function_is_a_config_error_before_the_first_call(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool_of(tmp_path, "scores") as pool:
            with pytest.raises(
                ConfigError, match=r"reward\.function = .*has no 'scores'.*functions\.py:score"
            ):
                await pool.start()
            with pytest.raises(ConfigError):
                await pool.score(prompt(), completed(["a"]))

    asyncio.run(run())


def test_the_built_in_scorers_run_in_workers() -> None:
    async def run() -> None:
        for function, right in (("exact", "4"), ("math", "\\boxed{8/2}"), ("format", "x4")):
            config = RewardConfig(function=function, format=FormatConfig(pattern="x."))
            pool = RewardPool(config)
            scores = await pool.score(prompt(), completed([right, "5"]))
            assert [score.value for score in scores] == [1.0, 0.0]
            await pool.close()

    asyncio.run(run())


def test_close_answers_waiting_calls_and_leaves_no_process(tmp_path: Path) -> None:
    async def run() -> Any:
        async with pool_of(tmp_path) as pool:
            worker, child = [int(p) for p in await outcomes(pool, "pid", "child")]
            waiting = asyncio.create_task(pool.score(prompt(), completed(["sleep 10000"])))
            await asyncio.sleep(0.1)
            await pool.close()
            with pytest.raises(WorkerError, match="closed"):
                await waiting
            return worker, child

    left = asyncio.run(run())
    until(lambda: not any(map(alive, left)))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("name", ["score", "ascore"])
def test_a_worker_outlasts_stop_signals_and_what_it_starts_does_not(
    tmp_path: Path, name: str
) -> None:
    async def run() -> None:
        async with pool_of(tmp_path, name) as pool:
            (worker,) = await outcomes(pool, "pid")
            assert await outcomes(pool, "signal", "terminate", "pid") == [6, 15, worker]

    asyncio.run(run())


def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(CODE)
    parent = f'''
import asyncio
from millrace.config import RewardConfig
from millrace.rewards.pool import RewardPool
from millrace.types import Completion, Prompt, tokens_of

async def main():
    pool = RewardPool(RewardConfig(function="{tmp_path}/functions.py:score"))
    prompt = Prompt(0, tokens_of([1]), "p", "d")
    print(int((await pool.score(prompt, [Completion("pid")]))[0].value), flush=True)
    await pool.score(prompt, [Completion("sleep 10000")])

asyncio.run(main())
'''
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        worker = int(process.stdout.readline())
        assert alive(worker)
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not alive(worker))
