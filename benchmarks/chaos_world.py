"""Faults around the processes: rewards, tool servers, checkpoints, disks, the network."""

from __future__ import annotations

import random
import socket
import subprocess
import time

from chaos_run import Failed, Run
from chaos_trial import HEAL_S, Act, Trial, again, cut


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
        cut(run, t)
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
        again(run, t)
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
    protected(run)


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
        protected(run)

    return act


def protected(run: Run) -> None:
    """Wait for a checkpoint after a fault of the disk. The journal begins again with it.

    A trainer that is lost before ends the run: a resume then trains from the checkpoint before.
    """
    before = run.newest().name
    run.until(lambda: run.newest().name > before, "a checkpoint after the fault", HEAL_S)


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
