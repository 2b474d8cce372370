"""The start of a run with many rows: generated JSONL or parquet, all distinct or with repeats.

python benchmarks/bench_rows.py --model MODEL --folder FOLDER

FOLDER has the files and the cache. A start ends with the first weight sync. Each line is one start:
the seconds of its parts, the wall time of the command with two steps, and the most memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TEXT = "Solve the problem step by step and end with Answer: and the number. " * 4


def write(path: Path, rows: int, distinct: int) -> None:
    def made(i: int) -> dict[str, Any]:
        k = i % distinct
        prompt = [{"role": "user", "content": f"{TEXT}What is {k} + {rows}?"}]
        return {"prompt": prompt, "answer": str(k + rows)}

    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        size = min(rows, 100_000)
        schema = pyarrow.Table.from_pylist([made(0)]).schema
        with parquet.ParquetWriter(path, schema) as writer:
            for begin in range(0, rows, size):
                table = [made(i) for i in range(begin, min(begin + size, rows))]
                writer.write_table(pyarrow.Table.from_pylist(table, schema))
        return
    with path.open("w") as file:
        file.writelines(json.dumps(made(i)) + "\n" for i in range(rows))


def start(file: Path, model: str, *more: str) -> dict[str, Any]:
    """Run one command, and return its figures."""
    run = file.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    overrides = [f"data.train_files={file}", "data.val_files=[]", f"model.path={model}"]
    overrides += ["sft.steps=0", "rollout.n=4", "rollout.max_prompt_length=900"]
    overrides += [
        "rollout.total_rollout_steps=8",
        "actor.ppo_mini_batch_size=4",
        "trainer.device=cpu",
    ]
    overrides += ["reward.function=exact", f"trainer.run_dir={run}"]
    command = [sys.executable, "-m", "millrace", "train", "quickstart", *overrides, *more]
    environment = os.environ | {"MILLRACE_CACHE": str(file.parent / "cache")}
    begun = time.perf_counter()
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    found: dict[str, Any] = {
        "wall_s": round(time.perf_counter() - begun, 1),
        "code": os.waitstatus_to_exitcode(status),
        "driver_mib": usage.ru_maxrss // 1024,
        "driver_cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
    }
    if (run / "start.jsonl").is_file():
        line = json.loads((run / "start.jsonl").read_text().splitlines()[-1])
        found["start_s"] = line["seconds"]
        for part in line["parts"]["driver"]:
            what, begin, end = part if isinstance(part, list) else part.values()
            if what in ("imports", "data", "prompts"):
                found[f"{what}_s"] = round(end - begin, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_800_000)
    parser.add_argument("--distinct", type=int, nargs="+", default=[8, 17_000, 1_800_000])
    parser.add_argument("--suffix", choices=["jsonl", "parquet"], default="jsonl")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for distinct in given.distinct:
        file = given.folder / f"rows-{distinct}.{given.suffix}"
        write(file, given.rows if distinct > 8 else 8, distinct)  # 8: a start without data
        shutil.rmtree(given.folder / "cache", ignore_errors=True)
        for what, more in (
            ("first start", ()),
            ("second start", ()),
            ("dry run, checks all", ("--dry-run",)),
            ("start after the check", ()),
        ):
            figures = {"distinct": distinct, "what": what} | start(file, given.model, *more)
            print(json.dumps(figures), flush=True)
        file.unlink()


if __name__ == "__main__":
    main()
