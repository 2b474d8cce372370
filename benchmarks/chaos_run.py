"""One run under faults: its processes, its output with times, its versions, its audit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
from chaos_tools import Tools

from millrace.persist.history import Audit, Line, audit
from millrace.waits.answer import ProcessStatus
from millrace.waits.ask import ask_one, processes
from millrace.waits.graph import DRIVER

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
POLL_S = 0.02


line_of = msgspec.json.Decoder(Line).decode


class Failed(Exception):
    """A promise is broken: the run ended, hung, or did not say what it must say."""


class Run:
    """A run of `millrace train` in one folder, over all of its attempts."""

    patience = 1.0
    """Times every limit of a wait."""

    def __init__(self, folder: Path, recipe: str, keys: Sequence[str], tools: Tools) -> None:
        self.folder, self.orders = folder / "run", folder / "orders"
        self.orders.mkdir(parents=True)
        self.recipe, self.keys, self.tools = recipe, list(keys), tools
        self.lines: list[tuple[float, str]] = []
        """Every line of output, with the time of its arrival."""
        self.driver: psutil.Popen | None = None
        self.attempts = 0
        self._read_bytes = self._versions = self._trained = 0

    def start(self) -> None:
        """Start the command. A run that is there resumes."""
        env = os.environ | {
            "CHAOS_RUN": str(self.folder),
            "CHAOS_ORDERS": str(self.orders),
            "CHAOS_TOOLS": self.tools.url,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), str(HERE / "chaos_shim"), os.environ.get("PYTHONPATH", "")]
            ),
        }
        command = [sys.executable, "-m", "millrace", "train", self.recipe, *self.keys]
        command += [f"trainer.run_dir={self.folder}", "trainer.resume=auto"]
        self.driver = psutil.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.attempts += 1
        threading.Thread(target=self._read, args=(self.driver.stdout,), daemon=True).start()

    def _read(self, output: Sequence[bytes]) -> None:
        for line in output:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    @property
    def alive(self) -> bool:
        return self.driver is not None and self.driver.poll() is None

    def tail(self, count: int = 6) -> str:
        return " | ".join(text for _, text in self.lines[-count:])

    def until(self, ready: Callable[[], bool], what: str, limit_s: float) -> float:
        """Wait for something. Return the time. Raises Failed if the run ends or time is up."""
        limit_s *= self.patience
        end = time.monotonic() + limit_s
        while not ready():
            if not self.alive:
                assert self.driver is not None
                raise Failed(
                    f"the run ended ({self.driver.returncode}) before {what}: {self.tail()}"
                )
            if time.monotonic() > end:
                raise Failed(f"{what} did not come in {limit_s:g} s: {self.tail()}")
            time.sleep(POLL_S)
        return time.monotonic()

    def line(self, pattern: str, since: int, limit_s: float) -> float:
        """Wait for a line of output after the first `since`. Return the time of its arrival."""
        self.until(
            lambda: self._found(pattern, since) is not None, f"the line {pattern!r}", limit_s
        )
        found = self._found(pattern, since)
        assert found is not None
        return found

    def _found(self, pattern: str, since: int) -> float | None:
        lines = self.lines[since:]
        return next((at for at, text in lines if re.search(pattern, text)), None)

    def versions(self) -> int:
        """Return how many versions all attempts made live."""
        path = self.folder / "history.jsonl"
        if path.is_file():
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            made = [m for line in whole.splitlines() if (m := line_of(line)).event == "version"]
            self._versions += len(made)
            self._trained += sum(len(m.trained) for m in made)
        return self._versions

    def trained(self) -> int:
        """Return how many samples all attempts trained for versions that are live."""
        self.versions()
        return self._trained

    def moves(self, more: int, limit_s: float) -> float:
        """Wait until `more` versions are live."""
        goal = self.versions() + more
        return self.until(lambda: self.versions() >= goal, f"{more} versions", limit_s)

    def pids(self, role: str) -> dict[str, int]:
        """Return the workers whose names begin with `role`."""
        told = {p["name"]: p["pid"] for p in processes(self.folder)}
        told |= {answer.name: answer.pid for answer in self._driver()}  # which speaks for Ray's
        return {k: v for k, v in sorted(told.items()) if k.startswith(role) and alive(v)}

    def busy(self) -> str:
        """Return what the trainer and the version on its way wait for now."""
        waits = [w for a in self._driver() if a.name == DRIVER for w in a.waits]
        told = {f"{w.whom}/{w.what}" for w in waits if w.who in ("trainer", "sync")}
        return ", ".join(sorted(told))

    def _driver(self) -> list[ProcessStatus]:
        driver = next((p for p in processes(self.folder) if p["name"] == DRIVER), None)
        return ask_one(self.folder, driver) if driver is not None else []

    def explain(self) -> None:
        """Print what everybody waits for."""
        if self.alive:
            command = [sys.executable, "-m", "millrace", "why", str(self.folder), "--full"]
            subprocess.run(command, cwd=ROOT, timeout=60, stdin=subprocess.DEVNULL)

    def tree(self) -> list[psutil.Process]:
        """Return the driver and all processes that it started."""
        assert self.driver is not None
        mine = str(self.folder)
        family = {self.driver.pid: psutil.Process(self.driver.pid)} if self.alive else {}
        for p in [*family.values()]:
            family |= {c.pid: c for c in p.children(recursive=True)}
        for told in processes(self.folder):
            if alive(told["pid"]):
                family[told["pid"]] = psutil.Process(told["pid"])
        for p in psutil.process_iter(["environ"]):
            if (p.info["environ"] or {}).get("CHAOS_RUN") == mine:
                family[p.pid] = p
        family.pop(os.getpid(), None)
        return [*family.values()]

    def stop(self, how: signal.Signals, limit_s: float) -> tuple[int, float]:
        """Stop the run with a signal. Return its exit code and seconds."""
        assert self.driver is not None
        begin = time.monotonic()
        self.driver.send_signal(how)
        try:
            code = int(self.driver.wait(limit_s))
        except psutil.TimeoutExpired:
            raise Failed(f"no end {limit_s:g} s after {how.name}: {self.tail()}") from None
        return code, time.monotonic() - begin

    def orphans(self, limit_s: float) -> float:
        """Wait until no process of a dead driver is left. Return the seconds."""
        begin = time.monotonic()
        while left := self.tree():
            if time.monotonic() - begin > limit_s:
                raise Failed(f"{limit_s:g} s after the driver, these are left: {left}")
            time.sleep(0.1)
        return time.monotonic() - begin

    def account(self) -> Audit:
        return audit(self.folder)

    def newest(self) -> Path:
        latest = self.folder / "checkpoints" / "LATEST"
        return latest.parent / latest.read_text().strip()

    def remove(self) -> None:
        for process in self.tree():
            process.kill()
        shutil.rmtree(self.folder.parent, ignore_errors=True)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
