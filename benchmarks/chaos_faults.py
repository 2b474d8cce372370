"""The faults: how each one is made, how it proves that it fired, and what must follow.

The letters and numbers of the rows are those of docs/failures.md.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from chaos_run import POLL_S, Failed, Run, alive

HEAL_S = 120.0
RANK_LOST = r"trainer.*(lost|died|killed|silent|still)"


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


def one(run: Run, role: str, dice: random.Random) -> tuple[str, int]:
    """Return the name and the process of any worker of a role."""
    if not (found := run.pids(role)):
        raise Failed(f"no worker of {role} is known")
    return dice.choice([*found.items()])


def replica_kill(run: Run, t: Trial, dice: random.Random) -> None:
    name, pid = one(run, "rollout", dice)
    since, during = len(run.lines), run.busy()
    t.fired(signalled(pid, signal.SIGKILL), during)
    t.seen(run.line(f"replica {name} was lost", since, 20))
    t.healed(run.line(f"replica {name} serves again", since, HEAL_S))


def replica_stop(run: Run, t: Trial, dice: random.Random) -> None:
    """The process stands still, and goes on after it was replaced, if it still lives."""
    name, pid = one(run, "rollout", dice)
    since, during = len(run.lines), run.busy()
    t.fired(signalled(pid, signal.SIGSTOP), during)
    t.seen(run.line(f"replica {name} was lost", since, 20))
    t.healed(run.line(f"replica {name} serves again", since, HEAL_S))
    if alive(pid):
        os.kill(pid, signal.SIGCONT)
        raise Failed(f"the stopped worker {pid} was replaced, but lives")


def replica_kill_in_sync(run: Run, t: Trial, dice: random.Random) -> None:
    """Stop a replica, so that the sync waits for it. Kill it while the sync waits."""
    name, pid = one(run, "rollout", dice)
    since = len(run.lines)
    signalled(pid, signal.SIGSTOP)
    end = time.monotonic() + 2.5
    during = run.busy()
    while not any(w in during for w in ("receiver", "sender")) and time.monotonic() < end:
        time.sleep(POLL_S)
        during = run.busy()
    t.fired(signalled(pid, signal.SIGKILL), during)
    t.seen(run.line(f"replica {name} was lost", since, 20))
    t.healed(run.line(f"replica {name} serves again", since, HEAL_S))


def replicas_kill_all(run: Run, t: Trial, dice: random.Random) -> None:
    since, each = len(run.lines), run.pids("rollout")
    during = run.busy()
    t.fired(", ".join(signalled(pid, signal.SIGKILL) for pid in each.values()), during)
    t.seen(max(run.line(f"replica {name} was lost", since, 20) for name in each))
    t.healed(max(run.line(f"replica {name} serves again", since, HEAL_S) for name in each))
    run.moves(1, HEAL_S)


def replica_crash_loop(run: Run, t: Trial, dice: random.Random) -> None:
    """Kill a replica, and every worker that replaces it, until it is given up."""
    name = dice.choice([*run.pids("rollout")])
    since, killed = len(run.lines), 0
    end = time.monotonic() + 180
    while run._found(f"replica {name} .*it is given up", since) is None:
        for pid in run.pids(name).values():
            os.kill(pid, signal.SIGKILL)
            killed += 1
            if killed == 1:
                t.fired(f"every worker of {name} is killed at its start")
        if time.monotonic() > end or not run.alive:
            raise Failed(f"{name} is not given up after {killed} kills: {run.tail()}")
        time.sleep(POLL_S)
    t.proof += f", {killed} times"
    t.seen(run.line(f"replica {name} was lost", since, 5))
    t.healed(run.moves(2, HEAL_S))


def trainer_kill(run: Run, t: Trial, dice: random.Random) -> None:
    _rank(run, t, dice, signal.SIGKILL)


def trainer_stop(run: Run, t: Trial, dice: random.Random) -> None:
    _rank(run, t, dice, signal.SIGSTOP)


def _rank(run: Run, t: Trial, dice: random.Random, how: signal.Signals) -> None:
    """Kill or stop a trainer rank at any moment."""
    _, pid = one(run, "trainer", dice)
    since, during = len(run.lines), run.busy()
    t.fired(signalled(pid, how), during)
    t.seen(run.line(RANK_LOST, since, 30))
    t.healed(run.moves(1, 2 * HEAL_S))


def trainer_kill_in_save(run: Run, t: Trial, dice: random.Random) -> None:
    """Kill a trainer rank while a checkpoint is written."""
    folder = run.folder / "checkpoints"
    _, pid = one(run, "trainer", dice)

    def writing() -> str | None:
        return next((p.name for p in folder.glob(".*") if p.is_dir()), None)

    run.until(lambda: writing() is None, "a quiet disk", 30)
    run.until(lambda: writing() is not None, "a checkpoint", 60)
    since, name = len(run.lines), writing()
    t.fired(f"{signalled(pid, signal.SIGKILL)}, while {name} was there", run.busy())
    t.seen(run.line(RANK_LOST, since, 30))
    t.healed(run.moves(1, 2 * HEAL_S))


def driver_kill(run: Run, t: Trial, dice: random.Random) -> None:
    assert run.driver is not None
    during = run.busy()
    t.fired(signalled(run.driver.pid, signal.SIGKILL), during)
    t.proof += f"; its workers ended after {run.orphans(10):.1f} s"
    _again(run, t)


def power_cut(run: Run, t: Trial, dice: random.Random) -> None:
    _cut(run, t)
    _again(run, t)


def _cut(run: Run, t: Trial) -> None:
    tree, during = run.tree(), run.busy()
    for process in tree:
        process.kill()
    _, left = psutil.wait_procs(tree, timeout=10)
    t.fired(f"SIGKILL to {len(tree)}: {len(tree) - len(left)} gone", during)


def _again(run: Run, t: Trial) -> None:
    begin = len(run.lines)
    t.seen(time.monotonic())
    before = run.versions()
    run.start()
    t.healed(run.until(lambda: run.versions() > before, "a version after the resume", 2 * HEAL_S))
    refused = [text for _, text in run.lines[begin:] if "error" in text.lower()]
    if refused:
        raise Failed(f"the resume says: {refused[0]}")


def stop(how: signal.Signals) -> Act:
    def act(run: Run, t: Trial, dice: random.Random) -> None:
        during = run.busy()
        t.fired(f"{how.name} to the driver", during)
        code, seconds = run.stop(how, 25)
        t.proof += f": exit code {code} after {seconds:.1f} s"
        run.orphans(10)
        _again(run, t)

    return act


def reward(order: str) -> Act:
    """Let one call of the reward function obey an order."""

    def act(run: Run, t: Trial, dice: random.Random) -> None:
        before = len([*run.orders.glob("obeyed-*")])
        new = run.orders / "new"
        new.write_text(order)
        new.rename(run.orders / "reward")
        obeyed = run.until(
            lambda: len([*run.orders.glob("obeyed-*")]) > before, "an obeyed order", 30
        )
        t.fired(f"a call obeyed {order!r}")
        t.at = obeyed
        t.healed(run.moves(3, HEAL_S))

    return act


def tools(order: str) -> Act:
    """Let the tool server fail for some requests."""

    def act(run: Run, t: Trial, dice: random.Random) -> None:
        server, before = run.tools, run.tools.obeyed
        server.order, server.left = order, 8
        at = run.until(lambda: server.obeyed > before, "a request that fails", 60)
        t.fired(f"the tool server: {order}")
        t.at = at
        t.healed(run.moves(3, HEAL_S))
        t.proof += f", {server.obeyed - before} requests"

    return act


def corrupt(how: str) -> Act:
    """Cut the power, damage the newest checkpoint, and resume."""

    def act(run: Run, t: Trial, dice: random.Random) -> None:
        run.until(
            lambda: len([*(run.folder / "checkpoints").glob("version-*")]) > 1, "two cuts", 60
        )
        _cut(run, t)
        folder = run.newest()
        path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        t.proof += f"; {how} {path.relative_to(folder.parent)}"
        data = bytearray(path.read_bytes())
        if how == "remove":
            path.unlink()
        else:
            middle = len(data) // 2
            if how == "flip":
                data[middle] ^= 1
            damaged = {"truncate": data[:middle], "zero": bytearray(len(data)), "flip": data}[how]
            path.write_bytes(damaged)
        begin = len(run.lines)
        _again(run, t)
        if run._found(folder.name, begin) is None:
            raise Failed(f"nothing was said of {folder.name}")

    return act


def disk_full(run: Run, t: Trial, dice: random.Random) -> None:
    """Fill the run's own small disk for some seconds."""
    since, ballast = len(run.lines), run.folder.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                t.fired(f"{error.strerror} after {file.tell() >> 20} MiB of ballast", run.busy())
    try:
        t.seen(run.line("alarm: the disk refuses", since, 60))
        time.sleep(3)
    finally:
        ballast.unlink()
    t.healed(run.line("alarm over: the disk takes", since, 60))
    run.moves(1, HEAL_S)


def disk(order: str, seconds: float) -> Act:
    """Let every write in the run's folder fail, or take long."""

    def act(run: Run, t: Trial, dice: random.Random) -> None:
        obeyed, since = run.orders / "disk-obeyed", len(run.lines)
        obeyed.unlink(missing_ok=True)
        (run.orders / "new").write_text(order)
        (run.orders / "new").rename(run.orders / "disk")
        try:
            run.until(obeyed.is_file, "a write that fails", 60)
            t.fired(f"writes: {order}")
            if order[:1].isalpha():
                t.seen(run.line("alarm: the disk refuses", since, 60))
            time.sleep(seconds)
        finally:
            (run.orders / "disk").unlink()
        t.proof += f", {len(obeyed.read_text().splitlines())} of them"
        t.healed(run.moves(2, HEAL_S))

    return act


def partition(seconds: float) -> Act:
    """Cut every TCP connection of the run, for some seconds."""

    def act(run: Run, t: Trial, dice: random.Random) -> None:
        during = run.busy()
        _loopback("down")
        t.fired(f"the loopback of the run is down for {seconds:g} s", during)
        try:
            if reachable():
                raise Failed("the loopback still takes connections")
            time.sleep(seconds)
        finally:
            _loopback("up")
        t.healed(run.moves(2, 2 * HEAL_S))

    return act


def _loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def reachable() -> bool:
    """Return whether a TCP connection over the loopback can be made."""
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.settimeout(0.2)
            client.connect(server.getsockname())
        except OSError:
            return False
        return True


FAULTS: dict[str, Fault] = {
    "replica killed": Fault("R1, R2", replica_kill),
    "replica stopped": Fault("R12", replica_stop),
    "replica killed in a sync": Fault("R3", replica_kill_in_sync),
    "all replicas killed": Fault("R4", replicas_kill_all),
    "replica in a crash loop": Fault("R5", replica_crash_loop),
    "trainer killed": Fault("R6", trainer_kill),
    "trainer stopped": Fault("R12", trainer_stop),
    "trainer killed in a save": Fault("R7", trainer_kill_in_save),
    "driver killed": Fault("R9", driver_kill, ends=True),
    "power cut": Fault("R10", power_cut, ends=True),
    **{f"{s.name}": Fault("R11", stop(s), ends=True) for s in (signal.SIGTERM, signal.SIGINT)},
    **{f"reward: {o}": Fault("R13", reward(o)) for o in ("sleep", "loop", "long C call")},
    **{
        f"reward: {o}": Fault("R14", reward(o))
        for o in ("raise", "exit", "nan", "inf", "none", "text", "list", "huge")
    },
    **{f"reward: {o}": Fault("R15", reward(o)) for o in ("children", "print", "leak")},
    **{
        f"tools: {o}": Fault("R16", tools(o), recipe="agents_quickstart")
        for o in ("500", "slow", "hangs", "drops", "10 MB", "garbage")
    },
    **{
        f"checkpoint: {h}": Fault("R20", corrupt(h), ends=True)
        for h in ("truncate", "zero", "flip", "remove")
    },
    "disk full": Fault("R21", disk_full),
    "disk: EIO": Fault("R22", disk("EIO", 3)),
    "disk: ESTALE": Fault("R22", disk("ESTALE", 3)),
    "disk: read-only": Fault("R22", disk("EROFS", 3)),
    "disk: slow": Fault("R22", disk("0.5", 5)),
    "partition of 1 s": Fault("R26", partition(1)),
    "partition of 10 s": Fault("R26", partition(10)),
}
