"""The proof of engines on healthy starts and on planted faults: one table.

    python benchmarks/bench_proof.py [--model FOLDER] [--starts 20] [--budget 20] [--seconds 340]
        [--out benchmarks/results/proof] [key=value ...]

It builds both engines of the configuration in this process: for `rollout.engine=vllm`, on one GPU.
Each healthy start has other prompts and seeds. Then each fault is planted in turn. No fault begins
after `--seconds`. Without `--model`, the model is small and random, and its context matters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

from millrace.config import Config, recipe
from millrace.config.packaged import packaged
from millrace.errors import MillraceError
from millrace.observe.gap import Verdict

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests import proving
from tests.proving import ChatPrompts, small_model


def shown(name: str, verdict: Verdict, seconds: float) -> dict[str, Any]:
    worst = max((f.value / f.limit for f in verdict.findings), default=0.0)
    row = {
        "arm": name,
        "gap": verdict.gap.mean,
        "k3": verdict.gap.k3,
        "worst": verdict.gap.worst,
        "tokens": verdict.gap.tokens,
        "floor": verdict.floor,
        "floor_k3": verdict.floor_k3,
        "limit": verdict.limit,
        "missing": verdict.missing,
        "times_floor": verdict.gap.mean / verdict.floor if verdict.floor else 0.0,
        "times_limit": worst,
        "findings": [asdict(f) for f in verdict.findings],
        "causes": list(verdict.causes),
        "rounds": {name: asdict(g) for name, g in verdict.rounds.items()},
        "seconds": seconds,
    }
    print(
        f"{name:<42} gap {verdict.gap.mean:.3g} = {row['times_floor']:.2f} floors, worst finding "
        f"{worst:.1f} limits, k3 {verdict.gap.k3 / (verdict.floor_k3 or 1):.2f} floors, "
        f"missing {verdict.missing:.4f}, {verdict.gap.tokens} tokens, {seconds:.1f} s",
        flush=True,
    )
    return row


def configuration(folder: str, overrides: list[str]) -> Config:
    own = [
        *("sft.steps=0", f"model.path={folder}", "rollout.max_prompt_length=128"),
        *("rollout.max_response_length=128", "rollout.max_num_seqs=32"),
        *("rollout.session_kv_slots=32", "async_training.on_sync=interrupt"),
    ]
    if any(o.startswith("rollout.engine=vllm") for o in overrides):
        own.remove("rollout.session_kv_slots=32")
    return recipe.load(packaged()["quickstart"], [*own, *overrides])


async def main(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()

    def left() -> bool:
        return time.perf_counter() - begin < options.seconds

    async with AsyncExitStack() as stack:
        folder = options.model or stack.enter_context(tempfile.TemporaryDirectory())
        if not options.model:
            small_model(folder)
        config = configuration(folder, options.overrides)
        prompts = ChatPrompts(folder, 128)

        async def arm(
            name: str, one: proving.Engines, seed: int, plant: proving.Plant | None = None
        ) -> None:
            since = time.perf_counter()
            if plant is None:
                verdict = await one.prove(seed, options.budget)
            else:
                with plant(one):  # a run proves its engines after its first sync
                    await one.sync.transfer(0)
                    await one.sync.activate(0)
                    verdict = await one.prove(seed, options.budget)
            rows.append(shown(name, verdict, time.perf_counter() - since))

        async with proving.engines(config, folder, prompts) as one:
            print(f"engines up after {time.perf_counter() - begin:.0f} s", flush=True)
            for seed in range(options.starts):
                await arm(f"healthy, seed {seed}", one, seed)
            faults = dict(proving.ANY)
            if config.rollout.engine == "torch":
                faults |= proving.TORCH
            for name, plant in faults.items():
                if not left():
                    print(f"left out: {name}")
                    continue
                await arm(name, one, options.starts, plant)
                # A sync of the true weights ends the fault in the engine.
                await one.sync.transfer(0)
                await one.sync.activate(0)
            await arm("healthy, after the faults", one, options.starts + 1)
        changes = dict(proving.CONFIG)
        if config.rollout.engine == "vllm":
            changes |= proving.VLLM
        for name, change in changes.items():
            if not left():
                print(f"left out: {name}")
                continue
            try:
                with proving.changed(folder, change) as wrong:
                    async with proving.engines(
                        config, folder, prompts, rollout_folder=wrong
                    ) as one:
                        await arm(name, one, options.starts)
            except MillraceError as error:  # found before the first token
                print(f"{name}: refused: {error}", flush=True)
    write(options, config, rows)


def write(options: argparse.Namespace, config: Config, rows: list[dict[str, Any]]) -> None:
    healthy = [row for row in rows if row["arm"].startswith("healthy")]
    faults = [row for row in rows if row not in healthy]
    if healthy:
        most = max(row["times_floor"] for row in healthy)
        alarms = sum(bool(row["findings"]) for row in healthy)
        print(f"healthy: {len(healthy)}, alarms {alarms}, largest gap {most:.2f} floors")
    if faults:
        least = min(faults, key=lambda row: row["times_limit"])
        print(
            f"faults: {len(faults)}, least found: {least['arm']}, {least['times_limit']:.1f} limits"
        )
    if not options.out:
        return
    facts = {
        "command": " ".join(sys.argv),
        "engine": config.rollout.engine,
        "dtype": config.model.dtype,
        "rows": rows,
    }
    Path(f"{options.out}.json").write_text(json.dumps(facts, indent=1) + "\n")
    lines = [
        "| arm | gap, nats | gap / floor | worst finding / limit | its kind | part of a change that lacks |",
        "|---|--:|--:|--:|---|--:|",
    ]
    for row in rows:
        worst = max(row["findings"], key=lambda f: f["value"] / f["limit"], default=None)
        kind = f"{worst['kind']}, {worst['where']}" if worst else ""
        lines.append(
            f"| {row['arm']} | {row['gap']:.2g} | {row['times_floor']:.2f} | {row['times_limit']:.1f} | {kind} "
            f"| {row['missing']:.4f} |"
        )
    Path(f"{options.out}.table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--budget", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=340.0)
    parser.add_argument("--out", default="")
    parser.add_argument("overrides", nargs="*")
    asyncio.run(main(parser.parse_args()))
