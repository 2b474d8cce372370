"""The faults: how each one is made, how it proves that it fired, and what must follow.

The letters and numbers of the rows are those of benchmarks/results/chaos.md.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time

from chaos_run import POLL_S, ROOT, Failed, Run, alive
from chaos_trial import HEAL_S, Act, Fault, Trial, again, cut, signalled
from chaos_world import corrupt, disk, disk_full, partition, reward, tools

RANK_LOST = r"trainer.*(lost|died|killed|silent|still)"


def one(run: Run, role: str, dice: random.Random) -> tuple[str, int]:
    """Return the name and the process of any worker of a role."""
    if not (found := run.pids(role)):
        raise Failed(f"no worker of {role} is known")
    return dice.choice([*found.items()])


def told(name: str) -> str:
    """Return the name of a replica in the output. A core of vLLM is a part of its replica."""
    return f"replica {name.partition('-core')[0]}"


def replica_kill(run: Run, t: Trial, dice: random.Random) -> None:
    name, pid = one(run, "rollout", dice)
    since, during = len(run.lines), run.busy()
    t.fired(f"{name}: {signalled(pid, signal.SIGKILL)}", during)
    t.seen(run.line(f"{told(name)} was lost", since, 20))
    t.healed(run.line(f"{told(name)} serves again", since, HEAL_S))


def replica_stop(run: Run, t: Trial, dice: random.Random) -> None:
    """The process stands still, and goes on after it was replaced, if it still lives."""
    name, pid = one(run, "rollout", dice)
    since, during = len(run.lines), run.busy()
    t.fired(f"{name}: {signalled(pid, signal.SIGSTOP)}", during)
    t.seen(run.line(f"{told(name)} was lost", since, 20))
    t.healed(run.line(f"{told(name)} serves again", since, HEAL_S))
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
    t.fired(f"{name}: {signalled(pid, signal.SIGKILL)}", during)
    t.seen(run.line(f"{told(name)} was lost", since, 20))
    t.healed(run.line(f"{told(name)} serves again", since, HEAL_S))


def replicas_kill_all(run: Run, t: Trial, dice: random.Random) -> None:
    since, each = len(run.lines), run.pids("rollout")
    each = {name: pid for name, pid in each.items() if "core" not in name}
    during = run.busy()
    t.fired(", ".join(signalled(pid, signal.SIGKILL) for pid in each.values()), during)
    t.seen(max(run.line(f"{told(name)} was lost", since, 20) for name in each))
    t.healed(max(run.line(f"{told(name)} serves again", since, HEAL_S) for name in each))
    run.moves(1, HEAL_S)


def replica_crash_loop(run: Run, t: Trial, dice: random.Random) -> None:
    """Kill a replica, and every worker that replaces it, until it is given up."""
    name, _ = one(run, "rollout-1", dice)
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
    t.seen(run.line(f"{told(name)} was lost", since, 5))
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
    again(run, t)


def power_cut(run: Run, t: Trial, dice: random.Random) -> None:
    cut(run, t)
    again(run, t)


def stop(how: signal.Signals) -> Act:
    def act(run: Run, t: Trial, dice: random.Random) -> None:
        during = run.busy()
        t.fired(f"{how.name} to the driver", during)
        code, seconds = run.stop(how, 25)
        t.proof += f": exit code {code} after {seconds:.1f} s"
        run.orphans(10)
        again(run, t)

    return act


def scale(run: Run, t: Trial, dice: random.Random) -> None:
    """Let a replica leave, and another one join, with `millrace scale`."""
    before = sum("core" not in name for name in run.pids("rollout"))
    t.fired(_scaled(run, before - 1))
    t.proof += f", {_scaled(run, before)}"
    t.healed(time.monotonic())
    run.moves(1, HEAL_S)


def _scaled(run: Run, count: int) -> str:
    """Ask for another number of replicas, and wait until they serve. Return the answer."""
    command = [sys.executable, "-m", "millrace", "scale", str(run.folder), f"rollout={count}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * HEAL_S)
    answer = done.stdout.strip()
    if done.returncode or not re.fullmatch(
        rf"scaled from \d to {count} replicas? [^.]*[.]\d s", answer
    ):
        raise Failed(f"{command[3:]}: {answer} {done.stderr}")
    return answer


FAULTS: dict[str, Fault] = {
    "replica killed": Fault("R1, R2", replica_kill),
    "replica stopped": Fault("R12", replica_stop),
    "replica killed in a sync": Fault("R3", replica_kill_in_sync),
    "all replicas killed": Fault("R4", replicas_kill_all),
    "replica in a crash loop": Fault("R5", replica_crash_loop),
    "scaled down and up": Fault("", scale),
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
