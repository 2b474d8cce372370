"""Seconds and bytes of the report of a large run, in a folder with synthetic contents.

    python benchmarks/bench_report.py --samples 100000 [--agents]

With --agents, each trajectory has three turns, two calls of a tool and its messages.
The files have the formats of real runs. The trace and the accounts come from their real writers.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millrace.config import recipe
from millrace.config.packaged import find
from millrace.persist.accounts import Device
from millrace.persist.accounts import Line as Account
from millrace.persist.history import Line
from millrace.report.accounts import DeviceAccount, FlowAccount
from millrace.report.page.figures import number
from millrace.report.page.write import write_report
from millrace.report.samples.store import SCHEMA
from millrace.report.trace.writer import TraceWriter
from millrace.schedule.schedule import Schedule
from millrace.waits.registry import Registry

WINDOW, N, REPLICAS = 64, 8, 8
VERSION_S = 20.0
WORDS = [f"word{i}" for i in range(3000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=None, help="keep the run's folder here")
    parser.add_argument("--agents", action="store_true", help="the trajectories are episodes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "run"
        versions = -(-options.samples // WINDOW)
        if not (folder / "metrics.jsonl").exists():
            began = time.perf_counter()
            make(folder, versions, options.agents)
            print(f"made {folder} in {time.perf_counter() - began:.0f} s")
        sizes = {
            name: sum(p.stat().st_size for p in (folder / name).iterdir()) for name in ("trace", "samples")
        }  # fmt: skip
        began, used = time.perf_counter(), time.process_time()
        path = write_report([folder])
        seconds, used = time.perf_counter() - began, time.process_time() - used
        result = {
            "samples": versions * WINDOW,
            "trajectories": versions * WINDOW * N,
            "versions": versions,
            "seconds": round(seconds, 2),
            "cpu_seconds": round(used, 2),
            "bytes": path.stat().st_size,
            "trace_bytes": sizes["trace"],
            "samples_bytes": sizes["samples"],
        }
        print(" ".join(f"{name} {number(value)}" for name, value in result.items()))
        print(json.dumps(result))


def make(folder: Path, versions: int, agents: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    keys = [f"rollout.n={N}", "actor.ppo_mini_batch_size=32", f"rollout.n_gpus_per_node={REPLICAS}"]
    config = recipe.load(find(Path("quickstart"), Path(), "NAME"), keys)
    (folder / "config.yaml").write_text(recipe.dump(config))
    (folder / ".millrace-run").write_text("a benchmark made this folder\n")
    _metrics(folder, versions, agents)
    _history_and_accounts(folder, versions)
    _samples(folder, versions, agents)
    _trace(folder, versions, 3 if agents else 1)


def _metrics(folder: Path, versions: int, agents: bool) -> None:
    chance = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for version in range(1, versions + 1):
            row = {f"figure/{i}": chance.random() for i in range(90)}
            row |= {
                "reward/mean": version / versions,
                "reward/std": 0.3,
                "timing_s/step": VERSION_S,
            }
            row |= {f"staleness/token_hist/{age}": 1e5 / (age + 1) for age in range(4)}
            row |= {"sync/transfer_s": 0.5, "sync/pause_s": 0.1, "sync/bytes": 3e9}
            if agents:
                row |= {"agents/turns/mean": 3.0, "agents/turns/max": 3.0, "agents/ended/done": 1.0}
                row |= {"agents/drawing": 200.0, "agents/waiting": 300.0, "agents/dead_turns": 0.0}
            row |= {f"response_length/p{p}": 3.0 * p for p in (50, 90, 99)}
            file.write(json.dumps({"version": version, **row}) + "\n")
            if version % 20 == 0:
                file.write(json.dumps({"version": version, "val/task/mean@1": 0.5}) + "\n")


def _history_and_accounts(folder: Path, versions: int) -> None:
    history, accounts = [], []
    for version in range(versions + 1):
        event = "version" if version else "start"
        ids = list(range((version - 1) * WINDOW, version * WINDOW)) if version else []
        history.append(
            Line(event, 1, version, version * WINDOW, trained=ids, retired=version * WINDOW)
        )
        spent = version * VERSION_S
        devices = {"trainer": Device(1, {"update_actor": 0.7 * spent, "wait_samples": 0.3 * spent})}
        rollouts = Device(1, {"generate": 0.8 * spent, "wait_trainer": 0.2 * spent})
        devices |= {f"rollout-{i}": rollouts for i in range(REPLICAS)}
        tokens = version * WINDOW * N * 200
        accounts.append(Account(event, 1, version, 1.7e9 + spent, spent, tokens, {"trained": tokens}, devices=devices))  # fmt: skip
    for name, lines in (("history.jsonl", history), ("accounts.jsonl", accounts)):
        (folder / name).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _samples(folder: Path, versions: int, agents: bool) -> None:
    (folder / "samples").mkdir()
    chance = np.random.default_rng(0)
    picks = chance.integers(0, len(WORDS), (4096, 120))
    texts = [" ".join(WORDS[i] for i in pick) for pick in picks]
    count = WINDOW * N
    for version in range(1, versions + 1):
        lengths = np.minimum(1024, chance.lognormal(5.5, 0.8, count)).astype(int)
        drawn = [texts[i] for i in chance.integers(0, len(texts), count)]
        columns = {
            "version": [version] * count,
            "sample": np.repeat(np.arange((version - 1) * WINDOW, version * WINDOW), N),
            "trajectory": np.tile(np.arange(N), WINDOW),
            "outcome": ["trained"] * count,
            "data_source": ["task"] * count,
            "prompt": np.repeat(drawn[:WINDOW], N),
            "response": drawn,
            "ground_truth": ["42"] * count,
            "reward": chance.integers(0, 2, count).astype(float),
            "raw": [None] * count,
            "components": [[("format", 1.0)]] * count,
            "answer": ["42"] * count,
            "prompt_tokens": [100] * count,
            "tokens": lengths,
            "stop": ["eos"] * count,
            "ended": ["done"] * count,
            "threads": [1] * count,
            "messages": [_messages(text) if agents else None for text in drawn],
            "admitted_version": [version - 1] * count,
            "segments": [
                _segments(version - 1, int(n), text, agents)
                for n, text in zip(lengths, drawn, strict=True)
            ],
        }
        arrays = [pa.array(columns[field.name], field.type) for field in SCHEMA]
        name = f"version-{version:06d}-attempt-001.parquet"
        pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), folder / "samples" / name, compression="zstd")  # fmt: skip


def _parts(text: str) -> list[tuple[str, str]]:
    """Return the turns of an episode: the policy asks a tool twice, and answers."""
    third = len(text) // 3
    said = text[:third], text[third : 2 * third], text[2 * third :]
    tool = [("tool", "42")]
    return [("assistant", said[0]), *tool, ("assistant", said[1]), *tool, ("assistant", said[2])]


def _messages(text: str) -> str:
    return json.dumps([{"role": role, "content": words} for role, words in _parts(text)])


def _segments(version: int, tokens: int, text: str, agents: bool) -> list[dict[str, Any]]:
    if not agents:
        return [{"version": version, "author": "policy", "tokens": tokens, "text": text}]
    return [
        {"version": version, "author": "policy", "tokens": tokens // 3, "text": words}
        if role == "assistant"
        else {"version": -1, "author": "environment", "tokens": 2, "text": words}
        for role, words in _parts(text)
    ]


def _trace(folder: Path, versions: int, turns: int) -> None:
    """Write the spans of every turn, reward, sync and step."""
    now = [0.0]
    writer = TraceWriter(folder, 1, lambda: now[0], print, limit_mb=4096, most_events=10**9, close_s=3600)  # fmt: skip
    flow, replicas = FlowAccount(0.0), {f"rollout-{i}": 1 for i in range(REPLICAS)}
    account = DeviceAccount(0.0, Schedule(ppo_mini_batch_size=WINDOW), flow, trainers=1, replicas=replicas)  # fmt: skip
    account.tell(0.0, writer.put)
    watch = Registry("run", lambda: now[0], flow, account, writer)
    chance = random.Random(0)
    for version in range(1, versions + 1):
        begin = (version - 1) * VERSION_S
        ids = range((version - 1) * WINDOW, version * WINDOW)
        moments: list[tuple[float, str, str, str, str]] = []
        for i in ids:
            admitted = begin + chance.random()
            for state, at in (("waiting", 0.0), ("running", 0.1), ("ready", 11.0), ("taken", 12.0), ("trained", 17.0), ("sealed", 18.5), ("retired", 18.9)):  # fmt: skip
                moments.append((admitted + at, "at", "samples", state, str(i)))
            for k in range(N):
                track, key = f"rollout-{(i + k) % REPLICAS}", f"{i}/{k}"
                start, length = admitted + 0.2, min(10.0, chance.lognormvariate(1.0, 0.8))
                for turn in range(turns):
                    at = start + turn * length / turns
                    moments.append((at, "begin", track, "request", key))
                    moments.append((at + 0.8 * length / turns, "end", track, "request", key))
            moments.append((admitted + 10.5, "begin", "rewards", "score", str(i)))
            moments.append((admitted + 10.9, "end", "rewards", "score", str(i)))
        for at, state in ((0.0, "wait_samples"), (12.0, "train"), (18.5, "sync_transfer"), (18.8, "sync_activate"), (18.9, "other")):  # fmt: skip
            moments.append((begin + at, "state", "trainer", state, ""))
        for name, a, b in (("transfer", 18.5, 18.8), ("activate", 18.8, 18.9)):
            moments.append((begin + a, "begin", "sync", name, str(version)))
            moments.append((begin + b, "end", "sync", name, str(version)))
        for moment in sorted(moments):
            at, phase, track, name, key = moment
            now[0] = at
            watch.emit(track, name, phase, key, {"tokens": 200} if phase == "end" else {})  # type: ignore[arg-type]
    writer.close()


if __name__ == "__main__":
    main()
