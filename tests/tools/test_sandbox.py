"""Attacks on the sandbox. Each one fails, and its result says how."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import EpisodeError
from millrace.tools.sandbox import Limits, Result, Sandbox, SandboxRefused
from tests.waiting import HANG_S, until, until_async

MB = 1024 * 1024
ROOT = str(Path(__file__).parent.parent.parent)
SMALL = Limits(wall_s=HANG_S, cpu_s=5, memory=256 * MB, processes=8, disk=4 * MB, output=100_000)


def run(source: Any, limits: Limits = SMALL, stdin: str = "", **options: Any) -> Result:
    async def main() -> Result:
        return await Sandbox(limits=limits, **options).run(source, stdin)

    return asyncio.run(main())


def nobody(source: str) -> str:
    """Return what a user without any privilege prints. Skip the test if none can be made."""
    python = unprivileged_python()
    if os.geteuid() or not os.access("/usr/bin/setpriv", os.X_OK):
        pytest.skip("needs root and setpriv")
    command = ["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    folder = tempfile.mkdtemp()
    try:
        os.chmod(folder, 0o755)
        for room in ("process", "tools"):
            shutil.copytree(f"{ROOT}/millrace/{room}", f"{folder}/millrace/{room}")
        os.mkdir(f"{folder}/millrace/environments")
        waits = ("environments/__init__.py", "environments/deadline.py")
        for name in ("__init__.py", "errors.py", *waits):
            shutil.copy(f"{ROOT}/millrace/{name}", f"{folder}/millrace/{name}")
        start = f"import sys; sys.path.insert(0, {folder!r})\n"
        done = subprocess.run(
            [*command, "--no-new-privs", python, "-c", start + source],
            capture_output=True,
            text=True,
            cwd="/",
        )
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file of the run, which everyone on the machine may read."""
    path = tmp_path / "answers.json"
    path.write_text("the answer is xyzzy")
    path.chmod(0o644)
    for folder in path.parents:
        if folder.name.startswith("pytest"):
            folder.chmod(0o755)
    yield path
    assert path.read_text() == "the answer is xyzzy"


def test_a_program_runs_with_its_input_and_its_files() -> None:
    source = (
        "import sys; print(sys.stdin.read().upper()); print('to err', file=sys.stderr); exit(3)"
    )
    result = run(source, stdin="hello ünïcode")
    assert result.stdout == "HELLO ÜNÏCODE\n" and result.stderr == "to err\n"
    assert (result.status, result.reason) == (3, "exit") and result.seconds > 0
    assert run(["/bin/sh", "-c", "kill -SEGV $$"]).reason == "signal"
    assert run("print(input())", stdin="\ud800").stdout == "?\n"


def test_nothing_of_the_driver_is_visible(secret: Path) -> None:
    source = f"""
import os, socket
print(sorted(os.environ))
print(os.path.exists({str(secret)!r}), os.path.exists({str(Path(__file__))!r}))
print(os.path.exists("/root/.ssh"), os.path.exists("/home"), os.path.exists("/sys"))
print(sorted(os.listdir("/proc/self/fd"))[:3], socket.gethostname(), os.getpid() < 10)
print([n for n in os.listdir("/proc") if n.isdigit()])
"""
    lines = run(source).stdout.splitlines()
    assert "HOME" in lines[0] and "PYTHONPATH" not in lines[0] and "PYTEST" not in lines[0]
    assert lines[1] == "False False" and lines[2] == "False False False"
    assert lines[3].endswith("sandbox True") and lines[4] == "['1', '2']"


ATTACKS = {
    "reads /etc/shadow": ("open('/etc/shadow').read()", "FileNotFoundError"),
    "reads the run": ("open({secret!r}).read()", "FileNotFoundError"),
    "reads it by a link": (
        "import os; os.symlink({secret!r}, 'l'); open('l').read()",
        "FileNotFoundError",
    ),
    "reads it by /proc": ("open('/proc/1/root' + {secret!r}).read()", "Error"),
    "lists the old root": ("import os; print(os.listdir('/old'))", "FileNotFoundError"),
    "writes to /usr": ("open('/usr/x', 'w')", "Error"),
    "writes to the root": ("open('/x', 'w')", "Error"),
    "writes to /proc": ("open('/proc/sys/kernel/core_pattern', 'w').write('x')", "Error"),
    "remounts": (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); "
        "assert c.mount(None, b'/', None, 0x1020, None) == 0, os.strerror(ctypes.get_errno())",
        "Operation not permitted",
    ),
    "unshares": (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); "
        "assert c.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())",
        "Operation not permitted",
    ),
    "traces process 1": (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); "
        "assert c.ptrace(16, 1, 0, 0) == 0, os.strerror(ctypes.get_errno())",
        "Operation not permitted",
    ),
    "becomes root": ("import os; os.setuid(0)", "PermissionError"),
    "makes a device": ("import os; os.mknod('d', 0o60666, os.makedev(254, 0))", "PermissionError"),
    "connects to loopback": (
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "OSError",
    ),
    "connects outside": (
        "import socket; socket.create_connection(('169.254.169.254', 80), 1)",
        "Network is unreachable",
    ),
    "asks the kernel of the host": (
        "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
        "OSError",
    ),
    "fills the memory": ("x = bytearray(10**10)", "MemoryError"),
    "fills the disk": ("open('big', 'wb').write(b'x' * 10**8)", "OSError"),
    "signals the driver": ("import os; os.kill({driver}, 9)", "ProcessLookupError"),
    "hides memory in a file": ("import os; os.memfd_create('x')", "PermissionError"),
    "uses shared memory": (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); "
        "assert c.shmget(0, 4096, 0o1600) >= 0, os.strerror(ctypes.get_errno())",
        "Operation not permitted",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails_and_names_its_error(attack: str, secret: Path) -> None:
    import socket

    source, error = ATTACKS[attack]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(source.format(secret=str(secret), port=port, driver=os.getpid()))
    assert (result.status, result.reason) == (1, "exit"), result
    assert error in result.stderr and "xyzzy" not in result.stdout + result.stderr


BOMBS = {
    "an endless loop": ("while True: pass", "wall"),
    "an endless sleep": ("import time; time.sleep(10**4)", "wall"),
    "a loop that burns time": ("while True: pass", "cpu"),
    "a fork bomb": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", "processes"),
    "a flood": ("import os\nwhile True: os.write(1, b'x' * 65536)", "output"),
    "a flood of errors": ("import os\nwhile True: os.write(2, b'x' * 65536)", "output"),
    "memory of many": (
        "import os, time\nfor _ in range(6):\n"
        " if not os.fork():\n  x = bytearray(b'x') * (60 * 2**20); time.sleep(10**4)\ntime.sleep(10**4)",
        "memory",
    ),
    "deaf to signals": (
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(10**4)",
        "wall",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_ends_at_the_limit_that_is_named(bomb: str) -> None:
    source, reason = BOMBS[bomb]
    wall, cpu = (1.0, 60) if reason == "wall" else (HANG_S, 1)
    result = run(source, Limits(wall, cpu, 256 * MB, processes=8, output=100_000))
    assert result.reason == reason, result
    assert len(result.stdout) + len(result.stderr) <= 100_000
    assert result.status in (-signal.SIGKILL, -signal.SIGXCPU)


def processes() -> set[str]:
    """Return the command lines of every process of this machine."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(path.read_text())
        except OSError:
            continue
    return found


def test_no_process_is_left_behind() -> None:
    mark = "left-by-the-sandbox-31415"
    source = f"""
import os, subprocess, sys
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9000) # {mark}"],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print("started")
"""
    result = run(source)
    assert result.stdout == "started\n" and result.reason == "exit"
    assert not any(mark in line for line in processes())


def test_a_dead_driver_leaves_no_process() -> None:
    mark = "left-by-the-driver-27182"
    driver = f"""
import asyncio
from millrace.tools.sandbox import Limits, Sandbox
source = "import time; time.sleep(9000) # {mark}"
asyncio.run(Sandbox(limits=Limits(wall_s=9000)).run(["/bin/sleep", "9000.{mark[-5:]}"]))
"""
    child = subprocess.Popen([sys.executable, "-c", driver])
    try:
        until(lambda: any(f"9000.{mark[-5:]}" in line for line in processes()), child)
    finally:
        child.kill()
        child.wait()
    until(lambda: not any(f"9000.{mark[-5:]}" in line for line in processes()))


def test_a_cancelled_run_leaves_no_process() -> None:
    mark = "9000.16180"

    async def main() -> None:
        sandbox = Sandbox(limits=Limits(wall_s=9000))
        task = asyncio.ensure_future(sandbox.run(["/bin/sleep", mark]))
        await until_async(lambda: any(mark in line for line in processes()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(mark in line for line in processes())

    asyncio.run(main())


def test_many_run_at_once_and_each_has_its_own_folder() -> None:
    async def main() -> None:
        sandbox = Sandbox(limits=SMALL)
        source = "import os; print(os.listdir('.')); open('mine', 'w').write('x')"
        results = await asyncio.gather(*(sandbox.run(source) for _ in range(12)))
        assert {r.stdout for r in results} == {"['main.py']\n"}

    asyncio.run(main())


def test_a_program_that_cannot_start_is_no_result_of_the_program() -> None:
    with pytest.raises(EpisodeError, match=r"cannot start.*no-such-program"):
        run(["/no-such-program"])


def test_isolation_that_is_missing_is_refused_with_the_reason_and_the_fix() -> None:
    """Inside of a sandbox, no other one can be made."""
    inside = f"""
import sys; sys.path.insert(0, {ROOT!r})
import asyncio
from millrace.tools.sandbox import Sandbox
asyncio.run(Sandbox().run("print(1)"))
"""
    result = run(inside, readable=[ROOT])
    assert "level namespaces: a trial run failed" in result.stderr
    assert "Operation not permitted" in result.stderr and "Fix: allow" in result.stderr
    with pytest.raises(SandboxRefused, match=r"level namespaces: a trial run failed.*Fix: allow"):
        run("print(1)", python="/no/such/python")


def test_a_user_without_privileges_is_isolated_as_well() -> None:
    bomb = BOMBS["a fork bomb"][0]
    printed = nobody(f"""
import asyncio, os
from millrace.tools.sandbox import Limits, Sandbox
sandbox = Sandbox(limits=Limits(wall_s={HANG_S}, processes=8))
for source in ("import os; print(os.listdir('/home'))", "print(open('/etc/hostname').read())",
               "import socket; socket.create_connection(('127.0.0.1', 1))",
               "open('/usr/x', 'w')", {bomb!r},
               "print([l for l in open('/proc/self/status') if 'CapBnd' in l])"):
    r = asyncio.run(sandbox.run(source))
    print(r.reason, r.stderr.strip().rpartition(chr(10))[2] or r.stdout)
""").splitlines()
    assert "FileNotFoundError" in printed[0] and "FileNotFoundError" in printed[1]
    assert "unreachable" in printed[2] and "Read-only" in printed[3]
    assert printed[4].startswith("processes") and "0000000000000000" in printed[5]


def unprivileged_python() -> str:
    """Return an interpreter that every user may read, or skip the test."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        real = os.path.realpath(path)
        if os.path.exists(real) and not real.startswith("/root/"):
            return real
    pytest.skip("every Python of this machine belongs to root")


def test_the_level_process_limits_and_cleans_up_but_hides_nothing() -> None:
    python = unprivileged_python()
    level: dict[str, Any] = {"level": "process", "python": python}
    assert run("print(6 * 7)", **level).stdout == "42\n"
    assert run("while True: pass", Limits(wall_s=1), **level).reason == "wall"
    assert run(BOMBS["a fork bomb"][0], SMALL, **level).reason == "processes"
    assert run("print('x' * 10**6)", SMALL, **level).reason == "output"
    refused = run("import socket; socket.socket()", **level)
    assert "Address family not supported" in refused.stderr
    mark = "9000.14142"
    source = (
        f"import subprocess; subprocess.Popen(['/bin/sleep', '{mark}'], start_new_session=True)"
    )
    assert run(source, **level).reason == "exit"
    assert not any(mark in line for line in processes())
