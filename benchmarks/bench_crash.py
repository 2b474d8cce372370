"""Kill a whole training run at random moments, and account for every sample.

    python benchmarks/bench_crash.py [--kills 10] [--seed 0] [--json]

It runs `millrace train quickstart trainer.save_freq=5 trainer.resume=auto`. At a random moment of
start-up, warm-up or training, kill -9 ends the driver and all its workers. Then it starts the run
again in the same folder, until the run is complete.

    python benchmarks/bench_crash.py --bits --kills 20

With --bits the run is deterministic, and all kills come in training. At the end an uninterrupted
run follows, and the final weights must be the same, bit for bit. What each resume took from the
journal is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
PHASES = ("start-up", "warm-up", "training")
POLL_S = 0.02


@dataclass
class Kill:
    """One attempt and its end."""

    attempt: int
    phase: str
    """The phase in which the kill came."""
    seconds: float
    """Seconds since the start of the attempt."""
    from_version: int
    """The version that the attempt resumed from."""
    to_version: int
    """The last version in the history at the kill."""
    checkpoint: str
    """The newest checkpoint at the kill."""


BITS = ["trainer.deterministic=true", "mode=one_step_off", "sft.steps=50", "rollout.total_rollout_steps=5120", "trainer.save_freq=10",
        "trainer.val_before_train=false", "data.val_files=['task:sort_digits?split=val&size=16']"]  # fmt: skip
extra: list[str] = []
"""Further arguments of every run."""


def arguments(run_dir: Path) -> list[str]:
    return [*_arguments(run_dir), *extra]


def weights(run_dir: Path) -> bytes:
    """Return the final weights of a run."""
    folder, saved = (
        run_dir.parent / f"{run_dir.name}-model",
        run_dir / "checkpoints" / newest(run_dir),
    )
    subprocess.run(
        [sys.executable, "-m", "millrace", "export", str(saved), str(folder)], cwd=ROOT, check=True
    )
    return (folder / "model.safetensors").read_bytes()


def same_bits(run_dir: Path, log: Path) -> bool:
    """Whether an uninterrupted run ends with the same weights."""
    whole = run_dir.with_name("whole")
    if start(whole, log).wait():
        sys.exit(log.read_text(errors="replace"))
    return weights(run_dir) == weights(whole)


def _arguments(run_dir: Path) -> list[str]:
    return [sys.executable, "-m", "millrace", "train", "quickstart", "trainer.save_freq=5", "trainer.resume=auto",
            "trainer.val_before_train=false", "rollout.test_freq=0", f"trainer.run_dir={run_dir}", "--json"]  # fmt: skip


def start(run_dir: Path, log: Path) -> psutil.Popen:
    with log.open("wb") as output:
        return psutil.Popen(arguments(run_dir), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def kill_tree(driver: psutil.Popen) -> None:
    tree = [driver, *driver.children(recursive=True)]
    for process in tree:
        process.kill()
    _, left = psutil.wait_procs(tree, timeout=10)
    assert not left, f"processes are left: {left}"


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "history.jsonl"
    return (
        [json.loads(text) for text in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []
    )


def newest(run_dir: Path) -> str:
    path = run_dir / "checkpoints" / "LATEST"
    return path.read_text() if path.is_file() else "none"


def phase_of(log: Path) -> str:
    """Return the phase that the run reported last."""
    text = log.read_text(errors="replace")
    return (
        "training"
        if "first weight sync" in text
        else "warm-up"
        if "supervised warm-up" in text
        else "start-up"
    )


def tell(log: Path) -> None:
    """Print what a resume took from the journal."""
    for line in log.read_text(errors="replace").splitlines():
        if "journal" in line:
            print(line, file=sys.stderr)


def attempt(number: int, wanted: str, dice: random.Random, run_dir: Path, log: Path) -> Kill | None:
    """Run one attempt and kill it in phase `wanted` or later.

    Returns None if the attempt completes before that.
    """
    begin, saved = time.monotonic(), newest(run_dir)
    attempts = len([line for line in lines(run_dir) if line["event"] == "start"])
    driver = start(run_dir, log)
    reach = PHASES.index(wanted)
    most = 2.0 if extra else {"start-up": 4.0, "warm-up": 8.0, "training": 6.0}[wanted]
    delay = dice.uniform(0.0, most)
    reached: float | None = None
    while driver.poll() is None:
        now = time.monotonic()
        if reached is None and PHASES.index(phase_of(log)) >= reach:
            reached = now
        if reached is not None and now - reached >= delay:
            phase = phase_of(log)
            kill_tree(driver)
            tell(log)
            events = lines(run_dir)
            version = 0 if saved == "none" else int(saved.rpartition("-")[2])
            started = len([line for line in events if line["event"] == "start"]) > attempts
            return Kill(
                number,
                phase,
                round(now - begin, 2),
                version,
                events[-1]["version"] if started else version,
                newest(run_dir),
            )
        time.sleep(POLL_S)
    if driver.returncode:
        sys.exit(
            f"attempt {number} ended by itself with {driver.returncode}:\n{log.read_text(errors='replace')}"
        )
    return None


def audit(run_dir: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "millrace", "ledger", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    account: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return account


def show(kills: list[Kill], result: dict[str, object], account: dict[str, object]) -> None:
    print(
        "| kill | phase | seconds after start | resumed from version | reached version | newest checkpoint |"
    )
    print("|--:|---|--:|--:|--:|---|")
    for k in kills:
        print(
            f"| {k.attempt} | {k.phase} | {k.seconds:.2f} | {k.from_version} | {k.to_version} | {k.checkpoint} |"
        )
    print(f"\nfinal run: {result}\naudit: {account}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bits", action="store_true")
    options = parser.parse_args()
    extra.extend(BITS if options.bits else [])
    dice = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    run_dir, log = folder / "run", folder / "output"
    # A run warms up once, so kills in warm-up come before kills in training. Kills in start-up may
    # come at any time.
    early, late = ["start-up", "warm-up", "warm-up"], ["start-up", "training", "training"]
    plan = [early[i % 3] if i < options.kills * 0.3 else late[i % 3] for i in range(options.kills)]
    plan = ["training"] * options.kills if options.bits else plan
    kills: list[Kill] = []
    for number, wanted in enumerate(plan, start=1):
        kill = attempt(number, wanted, dice, run_dir, log)
        if kill is None:
            break
        kills.append(kill)
        print(f"kill {number}: {kill}", file=sys.stderr)
    begin = time.monotonic()
    driver = start(run_dir, log)
    code = driver.wait()
    output = log.read_text(errors="replace").strip().splitlines()
    result = json.loads(output[-1]) if code == 0 else {"exit code": code, "said": output[-1:]}
    result = {k: result.get(k) for k in ("complete", "versions", "samples_trained", "val")} | {
        "seconds": round(time.monotonic() - begin, 1)
    }
    tell(log)
    account = audit(run_dir)
    equal = not options.bits or same_bits(run_dir, log)
    if options.bits:
        print(f"final weights equal an uninterrupted run's bit for bit: {equal}")
    if options.json:
        print(
            json.dumps(
                {
                    "kills": [asdict(k) for k in kills],
                    "final": result,
                    "audit": account,
                    "complete": bool(account["complete"]),
                }
            )
        )
    else:
        show(kills, result, account)
    sys.exit(
        0
        if equal and account["complete"] and not account["lost"] and not account["trained_twice"]
        else 1
    )


if __name__ == "__main__":
    main()
