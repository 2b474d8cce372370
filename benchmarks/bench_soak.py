"""A run for hours, in pieces: does it keep its memory, open files, disk and gap?

    python benchmarks/bench_soak.py RUN RECIPE [KEY=VALUE ...] [--hours 2] [--piece-s 1200]
    python benchmarks/bench_soak.py RUN --plot docs/soak.svg

A piece is `millrace train` with `trainer.resume=auto`. SIGINT ends it, and the next one resumes.
Every 15 s, `RUN.soak.jsonl` gets a line: the attempt, the seconds that pieces have run so far, for
each process its memory (PSS, MiB), its open files and threads, and the MiB of the run's folder by
part. A later call goes on where the last one ended. `--plot` draws these and the gap of the run's
`metrics.jsonl`, and prints a line for each curve: mean of the second and of the last tenth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

EVERY_S = 15
END_S = 600
"""Seconds that a stop may take, with its checkpoint."""
MIB = 2**20
GAP, LIMIT = "actor/log_prob_gap_same_version", "actor/log_prob_gap_limit"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("recipe", nargs="*", metavar="RECIPE KEY=VALUE")
    parser.add_argument("--hours", type=float, default=2.0, help="of all pieces so far together")
    parser.add_argument("--piece-s", type=float, default=1200)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    out = options.run.with_name(f"{options.run.name}.soak.jsonl")
    lines = read(out)
    if options.plot:
        plot(lines, read(options.run / "metrics.jsonl"), options.plot)
        return 0
    while (ran := lines[-1]["seconds"] if lines else 0.0) < options.hours * 3600:
        attempt = lines[-1]["attempt"] + 1 if lines else 1
        length = min(options.piece_s, options.hours * 3600 - ran)
        code = piece(options.run, options.recipe, out, attempt, ran, length)
        lines = read(out)
        print(f"piece {attempt}: exit code {code}, {lines[-1]['seconds']:.0f} s in all", flush=True)
        if code != 130:  # the run is complete, or it failed
            return code
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def piece(run: Path, keys: list[str], out: Path, attempt: int, ran: float, length: float) -> int:
    """Run one piece and return its exit code."""
    command = [sys.executable, "-m", "millrace", "train", *keys, f"trainer.run_dir={run}"]
    begin = time.monotonic()
    with Path(f"{out}.log").open("a") as log, out.open("a") as file:
        process = subprocess.Popen([*command, "trainer.resume=auto"], stdout=log, stderr=log)
        try:
            while process.poll() is None and time.monotonic() - begin < length:
                time.sleep(EVERY_S)
                seconds = ran + time.monotonic() - begin
                line = {"attempt": attempt, "seconds": round(seconds, 1), **look(process.pid, run)}
                file.write(json.dumps(line) + "\n")
                file.flush()
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(END_S)
    return code


def look(pid: int, run: Path) -> dict[str, Any]:
    """The processes of a run and the parts of its folder."""
    found: dict[str, Any] = {}
    try:
        driver = psutil.Process(pid)
        family = [driver, *driver.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            log = Path(f"/proc/{process.pid}/fd/1").readlink()
            worker = log.stem if log.parent.name == "logs" else "others"
            name = "driver" if process.pid == pid else worker
            with process.oneshot():
                one = [process.memory_full_info().pss / MIB, process.num_fds()]
                one.append(process.num_threads())
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # it ended in between
        found[name] = [
            round(a + b, 1) for a, b in zip(found.get(name, (0, 0, 0)), one, strict=True)
        ]
    parts: dict[str, float] = {}
    for path in run.rglob("*"):
        try:
            size = path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a checkpoint that was deleted in between
            continue
        part = path.relative_to(run).parts[0]
        parts[part] = parts.get(part, 0.0) + size / MIB
    return {"processes": found, "folder": {n: round(s, 3) for n, s in sorted(parts.items())}}


def plot(lines: list[dict[str, Any]], metrics: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    hours = [line["seconds"] / 3600 for line in lines]
    roles = sorted({name for line in lines for name in line["processes"]})
    panels: list[tuple[str, dict[str, tuple[list[float], list[Any]]]]] = []
    for i, title in enumerate(("memory (PSS), MiB", "open files", "threads")):
        curves = {
            role: (hours, [line["processes"].get(role, (None,) * 3)[i] for line in lines])
            for role in roles
        }
        panels.append((title, curves))
    parts = sorted({name for line in lines for name in line["folder"]})
    folder = {part: (hours, [line["folder"].get(part, 0.0) for line in lines]) for part in parts}
    panels.append(("folder of the run, MiB", {n: c for n, c in folder.items() if max(c[1]) > 1}))
    rows = [row for row in metrics if row.get(GAP) is not None]
    versions = [float(row["version"]) for row in rows]
    gaps = {name: (versions, [row.get(name) for row in rows]) for name in (GAP, LIMIT)}
    panels.append(("log-prob gap, nats, by version", gaps))
    rewards = [row for row in metrics if "reward/mean" in row]
    reward = ([float(row["version"]) for row in rewards], [row["reward/mean"] for row in rewards])
    panels.append(("training reward, by version", {"reward/mean": reward}))
    figure, axes = pyplot.subplots(3, 2, figsize=(11, 10), layout="constrained")
    borders = [
        b["seconds"] / 3600 for a, b in itertools.pairwise(lines) if a["attempt"] != b["attempt"]
    ]
    for axis, (title, curves) in zip(axes.flat, panels, strict=True):
        for name, (x, y) in curves.items():
            axis.plot(x, y, label=name, linewidth=1)
            known = [value for value in y if value is not None]
            tenth = max(1, len(known) // 10)
            early, late = known[tenth : 2 * tenth] or known, known[-tenth:]
            print(f"{title} | {name} | {sum(early) / len(early):.4g} | {sum(late) / len(late):.4g}")
        if "version" not in title:
            axis.set_xlabel("hours; a line is a resume")
            for border in borders:
                axis.axvline(border, color="0.85", linewidth=0.6, zorder=0)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the piece is saved, and a later call goes on
        sys.exit(130)
