"""Play episodes over HTTP while a run trains and syncs, and count what the clients see.

    python benchmarks/agents_syncs.py --episodes 1000

It starts `millrace train` with `agents.remote=true` and tiny windows, so that syncs come as often as
the machine can. Workers claim the episodes. Each one plays three turns with openai's client, half of
them as streams, and without retries: any error of a client counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import openai

N, SAMPLES = 4, 1
"""Trajectories of a sample, and samples of a version."""
TURNS = 3
RUN = [
    "agents_quickstart",
    "agents.environment=",
    "agents.remote=true",
    "agents.max_turns=0",
    "agents.max_tokens_per_turn=24",
    "sft.steps=0",
    f"actor.ppo_mini_batch_size={SAMPLES}",
    f"rollout.n={N}",
    "rollout.max_response_length=400",
    "rollout.ignore_eos=true",
    "rollout.test_freq=0",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=8",
    "trainer.save_freq=0",
    "trainer.val_before_train=false",
    "trainer.threads=1",
    "guard.enable=false",
    "data.val_files=[]",
]


async def play(client: openai.AsyncOpenAI, task: dict[str, Any], stream: bool) -> float:
    """Play three turns, whatever the policy says."""
    messages, said = list(task["messages"]), ""
    for turn in range(TURNS):
        asked: Any = {"model": task["model"], "messages": messages}
        if stream:
            chunks = await client.chat.completions.create(**asked, stream=True)
            parts = [c.choices[0].delta.content async for c in chunks if c.choices]
            said = "".join(part or "" for part in parts)
        else:
            answer = await client.chat.completions.create(**asked)
            said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": f"{turn}>"})
        await asyncio.sleep(random.expovariate(20))  # a tool, of 50 ms on average
    return float(len(said) % 2)


async def work(run: dict[str, str], number: int, seen: Counter[str]) -> None:
    """Claim and play episodes until the endpoint is gone. A client's start takes long: it has one."""
    base = openai.AsyncOpenAI(base_url=run["url"] + "/v1", api_key="none", max_retries=0)
    token = {"authorization": f"Bearer {run['token']}"}
    async with httpx2.AsyncClient(base_url=run["url"], headers=token, timeout=60) as http:
        while True:
            try:
                reply = await http.post("/episodes/claim", json={"wait_s": 5})
            except httpx2.HTTPError:
                return  # the run is over
            claim = reply.json()
            if not claim.get("episode"):
                continue
            body: dict[str, Any] = {"api_key": claim["api_key"]}
            try:
                client = base.with_options(api_key=claim["api_key"])
                body["reward"] = await play(client, claim["task"], stream=number % 2 == 0)
                seen["episodes"] += 1
            except (openai.OpenAIError, httpx2.HTTPError) as error:
                if getattr(error, "code", "") == "episode_over":
                    seen["over"] += 1  # the run needs no more of them
                    continue
                seen[f"error: {type(error).__name__}: {error}"[:200]] += 1
                body["error"] = type(error).__name__
            try:
                await http.post("/episodes/finish", json=body)
            except httpx2.HTTPError:
                return


async def measure(episodes: int, workers: int, folder: Path) -> None:
    steps = -(-episodes // N)
    overrides = [*RUN, f"rollout.total_rollout_steps={steps}", f"trainer.run_dir={folder}"]
    command = [sys.executable, "-m", "millrace.cli.main", "train", *overrides]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    file, seen, begin = folder / "agents.json", Counter[str](), time.monotonic()
    while not file.exists():
        assert process.returncode is None, "the run did not start"
        await asyncio.sleep(0.1)
    run = json.loads(file.read_text())
    await asyncio.gather(*(work(run, number, seen) for number in range(workers)))
    code = await process.wait()
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in found if "agents/turns/mean" in row]
    print(json.dumps({"exit code": code, "seconds": round(time.monotonic() - begin), **seen}))
    print(json.dumps(_syncs(rows)))


def _syncs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of syncs, the seconds between them, and what millrace counted."""
    names = {
        "trajectories of several versions": "fully_async/partial/total_partial_num",
        "dead turns": "agents/dead_turns",
        "retries": "agents/retries",
        "clients gone": "agents/clients_gone",
    }
    gaps = [row["perf/time_per_version"] for row in rows]
    return {
        "syncs": len(rows),
        "seconds between syncs, median": round(statistics.median(gaps), 2),
        "most": round(max(gaps), 2),
        "share of 0.5 s at most": round(sum(gap <= 0.5 for gap in gaps) / len(gaps), 2),
        **{ours: sum(row.get(name, 0) for row in rows) for ours, name in names.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=48)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(given.episodes, given.workers, Path(folder, "run")))


if __name__ == "__main__":
    main()
