"""The default runtime: each worker is a process on this machine, spoken to over a socket pair.

A worker dies with its driver, however that dies (a parent-death signal on Linux, end of file elsewhere). Its output goes to
a log file, whose last lines are part of the error if it dies by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from millrace.config import Sides
from millrace.errors import bad_value
from millrace.runtime.address import listening_at
from millrace.runtime.host import HEADER
from millrace.runtime.placement import threads
from millrace.runtime.rpc import Peer

START_DEADLINE_S = 180.0
GOODBYE_S = 5.0
_LOOK_S = 0.01


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; found without loading CUDA."""
    if (said := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in said.split(",") if name.strip() not in ("", "-1")]
    return [str(i) for i, _ in enumerate(sorted(Path("/dev").glob("nvidia[0-9]*")))]


def check_devices(sides: Sides, gpus: Sequence[str], *, rollout: bool = True) -> None:
    """Refuse what this machine cannot place, with the arithmetic. Without `rollout` the training side is alone."""
    if sides.nodes_needed > 1 and gpus:
        rule = f"{sides.nodes_needed} nodes are needed, and the local runtime is this machine alone"
        raise bad_value(
            "trainer.nnodes", sides.trainer.nnodes, rule, "trainer.runtime=ray, or fewer devices"
        )
    both = [sides.trainer.ranks, sides.rollout.devices if rollout else 0]
    needed = max(both) if sides.colocated else sum(both)
    if gpus and needed > len(gpus):
        rule = f"trainer {both[0]} and rollout {both[1]} devices need {needed} GPUs, and this machine offers {len(gpus)}"
        fix = (
            "mode=colocate_sync, where both sides share GPUs, fewer devices, or trainer.device=cpu"
        )
        raise bad_value("trainer.n_gpus_per_node", sides.trainer.n_gpus_per_node, rule, fix)


class LocalRuntime:
    """Starts worker processes; ends them all."""

    def __init__(self, log_dir: Path, sides: Sides, *, gpus: Sequence[str]) -> None:
        self._log_dir = log_dir
        self._sides = sides
        devices = sides.trainer.ranks + (0 if sides.colocated else sides.rollout.devices)
        self._threads = threads(sides.trainer, os.cpu_count() or 1, devices)
        self._gpus = gpus
        self._workers: list[tuple[Peer, subprocess.Popen[bytes], asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self, name: str, role: str, index: int) -> Peer:
        ours, theirs = socket.socketpair()
        log = self._log_dir / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "millrace.runtime.host",
                    str(theirs.fileno()),
                    role,
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self._environment(role, index),
                start_new_session=True,
            )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=2**26)

        def send(frame: bytes) -> None:
            writer.write(HEADER.pack(len(frame)))
            writer.write(frame)

        peer = Peer(name, send, deadline_s=self._sides.trainer.wait_deadline_s)
        task = asyncio.get_running_loop().create_task(
            self._read(peer, reader, process, log), name=f"read-{name}"
        )
        self._tasks.add(task)  # ends with the process; `close` awaits it
        self._workers.append((peer, process, writer))
        await peer.call("ping", deadline_s=START_DEADLINE_S)
        return peer

    def _environment(self, role: str, index: int) -> dict[str, str]:
        variables = {
            "OMP_NUM_THREADS": str(self._threads),
            "MKL_NUM_THREADS": str(self._threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # a side that waits must not spin on the other side's core
            "TOKENIZERS_PARALLELISM": "false",
        }
        variables |= listening_at("127.0.0.1")
        return variables | (
            {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus_of(role, index))} if self._gpus else {}
        )

    def _gpus_of(self, role: str, index: int) -> Sequence[str]:
        """Trainer ranks first, then replicas; colocated sides share by index."""
        each = self._sides.rollout.tensor_model_parallel_size if role == "rollout" else 1
        separate = role == "rollout" and not self._sides.colocated
        first = index * each + (self._sides.trainer.ranks if separate else 0)
        return self._gpus[first : first + each]

    async def _read(
        self, peer: Peer, reader: asyncio.StreamReader, process: subprocess.Popen[bytes], log: Path
    ) -> None:
        try:
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                peer.receive(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            await _ended([process.poll], GOODBYE_S)
            peer.lose(
                "the run is over" if self._closing else _obituary(peer.name, process.poll(), log)
            )

    async def close(self) -> None:
        """Close every socket: workers exit at end of file, and what they started with them. What does not within GOODBYE_S is killed."""
        self._closing = True
        processes = [process for _, process, _ in self._workers]
        started = [child for process in processes for child in _children(process.pid)]
        for _, _, writer in self._workers:
            writer.close()
        looks = [process.poll for process in processes] + [
            partial(_end_of, child) for child in started
        ]
        await _ended(looks, GOODBYE_S)
        for one in [*processes, *started]:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                one.kill()
        if not await _ended(looks, GOODBYE_S):
            left = [
                one.pid
                for one, look in zip([*processes, *started], looks, strict=True)
                if look() is None
            ]
            warnings.warn(
                f"processes {left} were killed and do not end: what they have of a GPU is lost",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GOODBYE_S)
        self._workers.clear()


def _children(pid: int) -> list[psutil.Process]:
    """What a worker has started: vLLM's processes."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end_of(process: psutil.Process) -> int | None:
    """As Popen.poll, of a process that is no child of this one."""
    try:
        return None if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else 0
    except psutil.NoSuchProcess:
        return 0


async def _ended(looks: Sequence[Callable[[], int | None]], limit_s: float) -> bool:
    """Whether all have ended, within the limit. A process whose GPU is lost may never."""
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    while not (done := all(look() is not None for look in looks)) and clock() < end:  # noqa: ASYNC110 (a process has no event)
        await asyncio.sleep(_LOOK_S)
    return done


def _obituary(name: str, code: int | None, log: Path) -> str:
    if code is None:
        cause = "hung up, and its process does not end"
    else:
        cause = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
    with log.open(errors="replace") as lines:
        tail = "".join(deque(lines, maxlen=5)).strip()
    return f"worker {name} {cause}; its log is {log}" + (f"\n{tail}" if tail else "")
