"""The cost of the journal: the control plane with it and without it, in alternating blocks.

    python benchmarks/bench_journal.py [--samples 4000] [--rounds 7] [--json FILE]

The loops are real and the engines answer at once, as in bench_control.py. A sample has 8
trajectories. Seconds are those of all threads of the process, user and system. The cost at 1,000
samples a second is the journal's seconds for 1,000 samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import bench_control as control

from millrace.pipeline.journal import Journal, NoJournal
from millrace.pipeline.journal_file import FORMAT, Header
from millrace.pipeline.recall import Past
from millrace.schedule.ledger import Ledger
from millrace.types import floats_of, tokens_of

N = 8


def block(samples: int, folder: Path | None) -> tuple[float, float]:
    """Return microseconds of CPU for each sample, and bytes of the journal for each."""
    made: list[Journal] = []

    def journal_of(ledger: Ledger) -> NoJournal:
        if folder is None:
            return NoJournal()
        header = Header(FORMAT, 1, 0, "", "")
        made.append(Journal(folder / "journal", ledger, header, Past(), save_freq=10))
        return made[0]

    begin = time.process_time()
    case = control.case(256, lookahead=True, straggler=False)
    asyncio.run(control.pipeline(case, samples, N, [], journal_of=journal_of))
    spent = time.process_time() - begin
    for file in folder.glob("journal/*") if folder else ():
        file.unlink()
    return spent / samples * 1e6, made[0].written / samples if made else 0.0


def measure(tokens: int, samples: int, rounds: int) -> dict[str, float]:
    """Measure samples whose trajectories have `tokens` tokens each."""
    control.RESPONSE = tokens_of(range(tokens))
    control.LOG_PROBS = floats_of([-1.0] * tokens)
    off, on, size = [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        block(samples // 4, None)
        for _ in range(rounds):
            off.append(block(samples, None)[0])
            spent, size = block(samples, Path(folder))
            on.append(spent)
    extra = statistics.median(b - a for a, b in zip(off, on, strict=True))
    return {
        "tokens": N * tokens,
        "off_us": statistics.median(off),
        "on_us": statistics.median(on),
        "extra_us": extra,
        "cost_at_1000_per_s": extra / 1000,
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(tokens, options.samples, options.rounds) for tokens in (64, 512)]
    print("| tokens of a sample | us/sample off | on | extra | of a core at 1,000/s | bytes |")
    print("|--:|--:|--:|--:|--:|--:|")
    for r in rows:
        print(
            f"| {r['tokens']:,.0f} | {r['off_us']:.1f} | {r['on_us']:.1f} | {r['extra_us']:.1f} "
            f"| {r['cost_at_1000_per_s']:.2%} | {r['bytes']:,.0f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
