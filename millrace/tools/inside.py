"""The sandbox's own processes: they build the walls, start the program, watch it and end it.

    starter      enters the namespaces, and waits
    watcher      process 1 inside: builds the root, watches limits. Its end kills everything inside
    program      what the model wrote

The driver starts `python -c "... main(3, 4)"` with two pipes. LIFE carries one line of JSON, and its
end of file means that the driver is gone. STATUS carries one line of JSON back. The code uses the
standard library alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import time
from typing import Any

from millrace.process.death import kill, prctl
from millrace.tools import kernel

LIFE, STATUS = 3, 4
WORK = "/sandbox"
_NOBODY = 65534
_TICK_S = 0.1
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")


def main(life: str, status: str) -> None:
    """Run the program that the first line of LIFE describes. Both pipes have any numbers yet."""
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (int(life), int(status))]
    for fd, number in zip(ends, (LIFE, STATUS), strict=True):
        os.dup2(fd, number, inheritable=False)
    os.closerange(STATUS + 1, 4096)
    with os.fdopen(os.dup(LIFE), "rb") as told:
        line = told.readline()
    if not line:  # the driver is gone
        os._exit(1)
    try:
        spec = json.loads(line)
        uid = _enter(spec)
        watcher = os.fork()
        if watcher == 0:
            _watch(spec, uid)
        os.close(STATUS)
        os.waitpid(watcher, 0)
    except BaseException as error:  # noqa: BLE001 - nothing may escape into the driver's copy
        _report(failed=str(error) if isinstance(error, OSError) else repr(error))
        os._exit(1)
    os._exit(0)


def _report(**values: Any) -> None:
    os.write(STATUS, json.dumps(values).encode() + b"\n")


def _enter(spec: dict[str, Any]) -> int | None:
    """Enter the namespaces, if the level has some. Return the user to become, None for no change.

    Root becomes a user that owns nothing. Any other user stays itself, and sees none of its files.
    """
    extents = [tuple(map(int, line.split())) for line in _read("/proc/self/uid_map").splitlines()]
    top = extents[-1][0] + extents[-1][2]
    can_drop = os.geteuid() == 0 and top > _NOBODY
    uid = min(top - 2, 2_000_000_000) - os.getpid() % 4096 if can_drop else None
    if spec["level"] == "process":
        return uid
    same = "\n".join(f"{first} {first} {count}" for first, _, count in extents)
    here = os.getpid()
    ready, go = os.pipe()
    helper = os.fork() if can_drop else 0
    if can_drop and helper == 0:  # it stays outside, and may write the map of users
        os.read(ready, 1)
        for name in ("uid_map", "gid_map"):
            _write(f"/proc/{here}/{name}", same)
        os._exit(0)
    user, group = os.geteuid(), os.getegid()
    kernel.unshare()
    if can_drop:
        os.write(go, b"x")
        if os.waitpid(helper, 0)[1] != 0:
            raise OSError("the map of users cannot be written")
    else:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_NOBODY} {user} 1")
        _write("/proc/self/gid_map", f"{_NOBODY} {group} 1")
    os.close(ready)
    os.close(go)
    return uid


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _watch(spec: dict[str, Any], uid: int | None) -> None:
    """Build the root, start the program, and report how it ended."""
    own = spec["level"] == "namespaces"
    if own:
        _build_root(spec)
    else:
        prctl("PR_SET_CHILD_SUBREAPER", 1)
    _write_files(spec, uid)
    program = kernel.filter_program(network=own)
    kernel.drop_privileges(uid)
    failed, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _become(spec, program)
        except BaseException as error:  # noqa: BLE001 - the watcher reports it
            os.write(tell, f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    os.close(tell)
    os.closerange(0, 3)
    if problem := os.read(failed, 4096):
        _report(failed=f"the program cannot start: {problem.decode()}")
        os._exit(1)
    status, reason, peak = _wait(spec, child, own)
    _report(status=status, reason=reason, peak=peak)
    if not own:
        _end_descendants()
    os._exit(0)


def _build_root(spec: dict[str, Any]) -> None:
    """Make a root that has the system's programs, read-only, and an empty working folder."""
    readable = [os.path.realpath(path) for path in spec["readable"]]
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    kernel.pivot("/tmp", "/tmp/old")
    os.chdir("/")
    os.umask(0o022)
    for path in _SYSTEM:
        if os.path.islink(f"/old{path}"):
            os.symlink(os.readlink(f"/old{path}"), path)
        elif os.path.isdir(f"/old{path}"):
            _show(path)
    for path in (*_ETC, *readable):
        if os.path.exists(f"/old{path}") and not os.path.exists(path):
            _show(path)
    os.mkdir("/dev")
    for name in _DEVICES:
        _show(f"/dev/{name}", device=True)
    os.mkdir("/proc")
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
    kernel.mount("proc", "/proc", "proc", flags, "subset=pid")
    os.mkdir(WORK)
    options = f"size={spec['disk']},nr_inodes={spec['files']},mode=777"
    kernel.mount("tmpfs", WORK, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    if not os.path.exists("/tmp"):  # something readable may be below it
        os.symlink(WORK, "/tmp")
    _write("/etc/passwd", f"sandbox:x:{_NOBODY}:{_NOBODY}::{WORK}:/bin/sh\n")
    kernel.detach("/old")
    os.rmdir("/old")
    kernel.set_flags("/", kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEV)
    kernel.set_hostname("sandbox")


def _show(path: str, *, device: bool = False) -> None:
    """Show a file or folder of the old root at the same place."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(f"/old{path}"):
        os.mkdir(path)
    else:
        _write(path, "")
    kernel.bind(f"/old{path}", path, device=device)


def _write_files(spec: dict[str, Any], uid: int | None) -> None:
    folder = spec["folder"]
    os.chdir(folder)
    if uid is not None:
        os.chown(folder, uid, uid)
    for name, text in spec["inputs"].items():
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)


def _become(spec: dict[str, Any], program: bytes) -> None:
    """Set the limits and become the program."""
    os.setsid()
    prctl("PR_SET_PDEATHSIG", signal.SIGKILL)  # a change of the user would undo it
    limits = {
        resource.RLIMIT_AS: spec["address"],
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_FSIZE: spec["disk"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if spec["level"] == "namespaces" or os.geteuid() > _NOBODY:
        limits[resource.RLIMIT_NPROC] = spec["processes"] + 3  # starter, watcher, and one too many
    for kind, limit in limits.items():
        hard = limit + 1 if kind == resource.RLIMIT_CPU else limit
        resource.setrlimit(kind, (limit, hard))
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_DFL)
    os.closerange(LIFE, LIFE + 2)
    kernel.install_filter(program)
    os.execve(spec["argv"][0], spec["argv"], spec["env"])


def _wait(spec: dict[str, Any], child: int, own: bool) -> tuple[int, str, int]:
    """Return the program's status, the limit that ended it or "", and the peak of its memory."""
    ended, waits = os.pidfd_open(child), select.poll()
    waits.register(ended, select.POLLIN)
    waits.register(LIFE, select.POLLIN)
    deadline, peak, reason, tick = time.monotonic() + spec["wall_s"], 0, "", 0.002
    pids: list[int] = []
    while not reason:
        events = dict(waits.poll(1000 * tick))
        if ended in events:
            return _status(child), "", peak
        if LIFE in events:
            reason = "gone"
            break
        tick = min(2 * tick, _TICK_S)
        everybody = (int(name) for name in os.listdir("/proc") if name.isdigit())
        pids = [pid for pid in everybody if pid > 1] if own else _descendants(os.getpid())
        used = sum(map(_memory, pids))
        peak = max(peak, used)
        if time.monotonic() >= deadline:
            reason = "wall"
        elif used > spec["memory"]:
            reason = "memory"
        elif len(pids) > spec["processes"]:
            reason = "processes"
        _reap(child)
    for pid in {child, *pids}:
        kill(pid)
    return _status(child), reason, peak


def _status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _reap(child: int) -> None:
    """Take the status of orphans that ended. The program's own status stays."""
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == child:
            return
        os.waitpid(found.si_pid, 0)


def _descendants(root: int) -> list[int]:
    found, left = [], [root]
    while left:
        pid = left.pop()
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
            texts = [_read(f"/proc/{pid}/task/{task}/children") for task in tasks]
        except OSError:  # it ended meanwhile
            continue
        children = [int(word) for text in texts for word in text.split()]
        found += children
        left += children
    return found


def _memory(pid: int) -> int:
    """Return the bytes that a process holds for itself or shares without a file."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line.split() for line in file if line.startswith(("RssAnon", "RssShmem"))]
    except OSError:  # it ended meanwhile
        return 0
    return sum(1024 * int(words[1]) for words in lines)


def _end_descendants() -> None:
    """Kill everything that the program left behind. They are all children of this process now."""
    for _ in range(100):
        left = _descendants(os.getpid())
        if not left:
            return
        for pid in left:
            kill(pid)
        _reap(0)
        time.sleep(0.01)
