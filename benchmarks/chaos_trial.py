"""One fault of one run: what is noted, and the steps that many faults share."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from chaos_run import Failed, Run, alive

HEAL_S = 120.0


@dataclass
class Trial:
    """One fault of one run."""

    number: int
    name: str
    row: str
    proof: str = ""
    """How it is known that the fault fired."""
    during: str = ""
    """What the trainer waited for when it fired."""
    at: float = 0.0
    seen_s: float | None = None
    healed_s: float | None = None
    error: str = ""

    def fired(self, proof: str, during: str = "") -> None:
        self.at, self.proof, self.during = time.monotonic(), proof, during

    def seen(self, at: float) -> None:
        self.seen_s = round(max(0.0, at - self.at), 2)

    def healed(self, at: float) -> None:
        self.healed_s = round(max(0.0, at - self.at), 2)


Act = Callable[[Run, Trial, random.Random], None]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `ends` means that the command ends by it and is started again."""

    row: str
    act: Act
    ends: bool = False
    recipe: str = "quickstart"


def signalled(pid: int, how: signal.Signals) -> str:
    """Send a signal. Return the proof that it worked."""
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        raise Failed(f"process {pid} has ended before {how.name}") from None
    end = time.monotonic() + 5
    want = how is signal.SIGSTOP
    while time.monotonic() < end:
        if want and psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return f"{how.name} to {pid}: stopped"
        if not want and not alive(pid):
            return f"{how.name} to {pid}: gone"
        time.sleep(0.002)
    raise Failed(f"{how.name} to {pid} had no effect")


def cut(run: Run, t: Trial) -> None:
    tree, during = run.tree(), run.busy()
    for process in tree:
        process.kill()
    _, left = psutil.wait_procs(tree, timeout=10)
    t.fired(f"SIGKILL to {len(tree)}: {len(tree) - len(left)} gone", during)


def again(run: Run, t: Trial) -> None:
    begin = len(run.lines)
    t.seen(time.monotonic())
    before = run.versions()
    run.start()
    t.healed(run.until(lambda: run.versions() > before, "a version after the resume", 2 * HEAL_S))
    refused = [text for _, text in run.lines[begin:] if "error" in text.lower()]
    if refused:
        raise Failed(f"the resume says: {refused[0]}")
