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
import os
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import bench_control as control

from millrace import codec
from millrace.pipeline.journal import RECORD, Journal
from millrace.pipeline.journal_file import FORMAT, Batch, Finished, Header, framed
from millrace.pipeline.replay import JournalState
from millrace.schedule.ledger import Ledger
from millrace.types import (
    Author,
    Score,
    Segment,
    Stop,
    Thread,
    Trajectory,
    floats_of,
    tokens_of,
)

N = 8


def block(samples: int, folder: Path | None) -> tuple[float, float]:
    """Return microseconds of CPU for each sample, and bytes of the journal for each."""
    made: list[Journal] = []

    def journal_of(ledger: Ledger) -> Journal | None:
        if folder is None:
            return None
        header = Header(FORMAT, 1, 0, "", "")
        made.append(Journal(folder / "journal", ledger, header, JournalState(), save_freq=10))
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


def samples_of(tokens: int, count: int) -> list[Finished]:
    """Return finished samples that share no array."""

    def one() -> Trajectory:
        drawn = floats_of([-1.0] * tokens)
        part = Segment(tokens_of(range(tokens)), Author.POLICY, 3, drawn, Stop.EOS)
        return Trajectory((Thread((part,)),), Score(1.0), "done")

    return [Finished(i, 1, tuple(one() for _ in range(N)), None) for i in range(count)]


def columns(many: list[Finished]) -> list[bytes]:
    """Pack the plain parts of plain samples by column. A real form would need more columns."""
    whole = [t for one in many for t in one.trajectories]
    parts = [s for t in whole for thread in t.threads for s in thread.segments]
    scores = [t.score.value if t.score else 0.0 for t in whole]
    shape = ([one.sample_id for one in many], scores, [(s.version, s.stop) for s in parts])
    tokens, log_probs = [s.tokens for s in parts], [s.log_probs for s in parts]
    return [codec.pack(shape), b"".join(tokens), b"".join(log_probs)]


def ways(tokens: int) -> dict[str, float]:
    """Return microseconds of CPU of this process for each sample, of the parts of three ways."""
    many, found = samples_of(tokens, 256), dict[str, float]()
    groups = [many[i : i + RECORD] for i in range(0, len(many), RECORD)]
    packed = [framed(Batch(finished=group)) for group in groups]
    reader, writer = os.pipe()
    sink = subprocess.Popen(["cat"], stdin=reader, stdout=subprocess.DEVNULL)

    def pipe() -> None:
        for head, payload in packed:
            with memoryview(payload) as left:
                os.write(writer, head)
                done = 0
                while done < len(left):
                    done += os.write(writer, left[done:])

    def disk(path: Path) -> None:
        with path.open("ab") as file:
            for head, payload in packed:
                file.write(head)
                file.write(payload)
            file.flush()
            os.fsync(file.fileno())

    with tempfile.NamedTemporaryFile() as file:
        steps: dict[str, Callable[[], object]] = {
            "pack": lambda: [codec.pack(Batch(finished=group)) for group in groups],
            "pack by columns": lambda: [columns(group) for group in groups],
            "checksum": lambda: [zlib.crc32(payload) for _, payload in packed],
            "write and sync": lambda: disk(Path(file.name)),
            "pipe to a process": pipe,
        }
        for name, step in steps.items():
            step()
            took = []
            for _ in range(9):
                begin = time.process_time()
                step()
                took.append(time.process_time() - begin)
            found[name] = statistics.median(took) / len(many) * 1e6
    os.close(writer)
    os.close(reader)
    sink.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = (
        []
        if options.rounds < 1
        else [measure(tokens, options.samples, options.rounds) for tokens in (64, 512)]
    )
    print("| tokens of a sample | us/sample off | on | extra | of a core at 1,000/s | bytes |")
    print("|--:|--:|--:|--:|--:|--:|")
    for r in rows:
        print(
            f"| {r['tokens']:,.0f} | {r['off_us']:.1f} | {r['on_us']:.1f} | {r['extra_us']:.1f} "
            f"| {r['cost_at_1000_per_s']:.2%} | {r['bytes']:,.0f} |"
        )
    for tokens in (64, 512):
        parts = ", ".join(f"{name} {us:.1f}" for name, us in ways(tokens).items())
        print(f"us/sample of {N * tokens:,} tokens: {parts}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
