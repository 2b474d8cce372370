"""Kills a rank of the trainer in a real run, and measures the recovery.

    python benchmarks/bench_recovery.py OUT --at engine.step:5:0:0.02 -- RECIPE key=value ...

`--at METHOD:CALL:RANK:DELAY[:SIGNAL]` sends a signal, SIGKILL by default, DELAY seconds after that
call of a rank, or before it if DELAY is negative. Each run is repeated without the fault. With
trainer.deterministic the weights must be equal. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from safetensors.torch import load_file

from millrace.config import recipe
from millrace.observe.progress import Lines, Progress
from millrace.persist.history import audit
from millrace.process.rpc import Peer
from millrace.run.session import Session, open_session
from millrace.run.signals import StopRequest
from millrace.run.start import start_state
from millrace.run.train import run_training


def pid_of(s: Session, name: str) -> int:
    """Return the process of a worker of this run."""
    runtime: Any = s.engines.train.starter._runtime  # type: ignore[attr-defined]
    if s.config.trainer.runtime == "ray":
        found = next(w for w in runtime._workers if w.peer.name == name)
        return int(found.process[0])
    return next(p.pid for p in psutil.Process().children(recursive=True) if p.name() == name)


class Fault:
    """One signal to one rank."""

    def __init__(self, text: str) -> None:
        self.method, call, rank, delay, *number = text.split(":")
        self.call, self.name, self.delay = int(call), f"trainer-{rank}", float(delay)
        self.number = getattr(signal, number[0]) if number else signal.SIGKILL
        self.calls = 0
        self.fired = 0

    def plant(self, s: Session) -> Any:
        """Replace Peer.call, and return the function before."""
        call, fault = Peer.call, self

        def fire() -> None:
            fault.fired += 1
            os.kill(pid_of(s, fault.name), fault.number)

        async def planted(self: Peer, method: str, *args: Any, **options: Any) -> Any:
            if (self.name, method) == (fault.name, fault.method):
                fault.calls += 1
                if fault.calls == fault.call and fault.delay < 0:
                    fire()
                elif fault.calls == fault.call:
                    asyncio.get_running_loop().call_later(fault.delay, fire)
            return await call(self, method, *args, **options)

        Peer.call = planted  # type: ignore[method-assign]
        return call


async def run(out: Path, name: str, keys: list[str], fault: Fault | None) -> dict[str, Any]:
    """Run once, with or without the fault."""
    config = recipe.load(name, [*keys, f"trainer.run_dir={out}/run"])
    progress = Progress(Lines(Console(stderr=True)), "recovery", "recovery")
    before = Peer.call
    async with open_session(config, progress) as s:
        try:
            if fault is not None:
                fault.plant(s)
            outcome = await run_training(s, await start_state(s), StopRequest())
        finally:
            Peer.call = before  # type: ignore[method-assign]
        async with s.engines.turns.trainer_turn(keep_weights=True):
            await s.engines.train.export(str(out / "weights"))
        ranks = s.engines.train
        found = audit(out / "run")
        rows = (json.loads(line) for line in (out / "run" / "metrics.jsonl").open())
        return {
            "complete": outcome.complete,
            "losses": ranks.losses,
            "replayed": ranks.replayed,
            "recovery_s": [r["trainer/recovery_s"] for r in rows if "trainer/recovery_s" in r],
            "late_s": ranks.seconds,
            "lost": found.lost,
            "trained_twice": found.trained_twice,
            "weights": digest(out / "weights"),
        }


def digest(folder: Path) -> str:
    """Return a digest of the exported weights."""
    known = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            known.update(name.encode())
            known.update(tensor.float().contiguous().numpy().tobytes())
    return known.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at", required=True)
    parser.add_argument("--alone", action="store_true", help="without the undisturbed run")
    options, rest = parser.parse_known_args()
    name, *keys = [word for word in rest if word != "--"]
    options.out.mkdir(parents=True)
    fault = Fault(options.at)
    hurt = asyncio.run(run(options.out / "hurt", name, keys, fault))
    told = {"at": options.at, "keys": [name, *keys], "fired": fault.fired, **hurt}
    if not options.alone:
        calm = asyncio.run(run(options.out / "calm", name, keys, None))
        told["same_weights"] = calm["weights"] == hurt["weights"]
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
