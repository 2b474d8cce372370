"""The seconds of a run's start by part: cold, without compiled code from earlier runs, then warm.

    python benchmarks/bench_start.py RECIPE [KEY=VALUE ...] OUT [--warm 2]

Each start is a whole run of one window, without validation and warm-up. Its times come from its
`start.jsonl`. The cold start has an empty cache folder, and the warm ones use what it left. The
files of Python and the weights may be in the system's page cache for all of them. OUT gets a line
of JSON for each start: the seconds from the command to the first sync, and (part, begin, end) of
each process. The visible GPUs are used: `CUDA_VISIBLE_DEVICES=0` for one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from command import millrace

from millrace.run.starts import lines
from millrace.runtime.caches import VARIABLES
from millrace.waits.registry import Start

SHORT = (
    *("sft.steps=0", "trainer.total_training_steps=1", "trainer.val_before_train=false"),
    *("trainer.save_freq=0", "trainer.save_last=false", "data.val_files=[]", "report.enable=false"),
    *("rollout.test_freq=0", "trainer.logger=[]"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("arguments", nargs="+", metavar="KEY=VALUE ... OUT")
    parser.add_argument("--warm", type=int, default=2, help="warm starts")
    options = parser.parse_args()
    *keys, out = options.arguments
    with tempfile.TemporaryDirectory() as folder, Path(out).open("w") as file:
        for i in range(1 + options.warm):
            name = f"warm {i}" if i else "cold"
            line = start(Path(folder), name, options.recipe, *keys)
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(f"{name}: {line['seconds']:.1f} s", flush=True)
            parts = {who: [Start(*p) for p in each] for who, each in line["parts"].items()}
            print("\n".join(lines(parts)), flush=True)


def start(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Return the line of one start."""
    run = folder / name.replace(" ", "-")
    caches = {variable: str(folder / "cache" / part) for variable, part in VARIABLES.items()}
    millrace("train", *arguments, *SHORT, f"trainer.run_dir={run}", env=caches)
    (line,) = (run / "start.jsonl").read_text().splitlines()
    return {"start": name, **json.loads(line)}


if __name__ == "__main__":
    main()
