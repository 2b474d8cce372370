"""The default runtime: each worker is a process on this machine, reached over a socket pair.

A worker dies with its driver: by a parent-death signal on Linux, by end of file elsewhere. Its
output goes to a log file. If the worker dies by itself, the error shows the log's last lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from millrace.config import Sides
from millrace.config.serving_checks import SCRATCH
from millrace.errors import bad_value
from millrace.process.channel import payloads_of, write_frame
from millrace.process.rpc import Limit, Peer
from millrace.process.scratch import ScratchFolder
from millrace.process.spawn import spawn
from millrace.process.trees import children_of, group_of, kill_all, lives, wait_until
from millrace.runtime.address import listening_at
from millrace.runtime.fork_server import Fork, ForkedProcess, ForkServer
from millrace.runtime.placement import threads
from millrace.waits.answer import ProcessStatus
from millrace.waits.wait_server import FOLDER, NAME, VARIABLE

START_DEADLINE_S = 180.0
GOODBYE_S = 5.0
"""Seconds in which a worker ends by itself."""
KILLED_S = 30.0
"""Seconds in which a killed process ends, also on a busy machine. A failed GPU may keep it."""
_POLL_S = 0.01
_LONGEST_TMPDIR = 48
"""Characters of a TMPDIR that leave enough of a path to the sockets of engines."""


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    The function does not load CUDA.
    """
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in names.split(",") if name.strip() not in ("", "-1")]
    return [str(i) for i, _ in enumerate(sorted(Path("/dev").glob("nvidia[0-9]*")))]


def check_devices(
    sides: Sides, gpus: Sequence[str], *, rollout: bool = True, nccl: bool = True
) -> None:
    """Raise ConfigError if this machine has too few GPUs. The message shows the arithmetic.

    Without `rollout`, only the training side needs devices. CUDA_VISIBLE_DEVICES may name a GPU
    twice. Two ranks of the trainer cannot share it, nor can two ends of `nccl`.
    """
    if sides.nodes_needed > 1 and gpus:
        rule = f"the run needs {sides.nodes_needed} nodes, and the local runtime has one"
        raise bad_value(
            "trainer.nnodes", sides.trainer.nnodes, rule, "trainer.runtime=ray, or fewer devices"
        )
    both = [sides.trainer.ranks, sides.rollout.devices if rollout else 0]
    needed = max(both) if sides.colocated else sum(both)
    if gpus and needed > len(gpus):
        rule = (
            f"trainer {both[0]} and rollout {both[1]} devices need {needed} GPUs, "
            f"and this machine has {len(gpus)}"
        )
        fix = "mode=colocate_sync (both sides share GPUs), fewer devices, or trainer.device=cpu"
        raise bad_value("trainer.n_gpus_per_node", sides.trainer.n_gpus_per_node, rule, fix)
    used = gpus[: needed if nccl else both[0]]
    if len(set(used)) < len(used):
        raise bad_value(
            "CUDA_VISIBLE_DEVICES",
            ",".join(gpus),
            "two workers would use one GPU, and NCCL refuses that",
            "sync.backend=gloo, if a rank of the trainer and replicas share it; or other GPUs",
        )


_Process = subprocess.Popen[bytes] | ForkedProcess


@dataclass(slots=True, eq=False)
class _Worker:
    peer: Peer
    process: _Process
    writer: asyncio.StreamWriter
    beats: int
    """The file descriptor from which its heartbeats are read."""
    group: list[psutil.Process] | None = None
    """The processes that it left behind, once it has ended."""

    async def wait_for_end(self) -> None:
        """Wait for the end of the process, at most GOODBYE_S seconds.

        The processes of its group are found before the system may give its number to another one.
        """
        if self.group is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self.process.pid)
                await wait_until(lambda: not lives(process), GOODBYE_S)
            self.group = group_of(self.process.pid)
            await wait_until(lambda: _over([self.process]), GOODBYE_S)  # its other threads end too


class LocalRuntime:
    """Start worker processes, and end all of them."""

    def __init__(self, log_dir: Path, sides: Sides, *, gpus: Sequence[str]) -> None:
        self._log_dir = log_dir
        self._sides = sides
        devices = sides.trainer.ranks + (0 if sides.colocated else sides.rollout.devices)
        self._threads = threads(sides.trainer, os.cpu_count() or 1, devices)
        self._gpus = gpus
        self._forks = sys.platform == "linux" and not gpus and sides.rollout.engine == "torch"
        """Whether workers are forked. CUDA and vLLM are set up by variables before their import."""
        self._servers: list[ForkServer] = []
        """The last one forks new workers. An earlier one has ended, or no longer answers."""
        self._scratch: ScratchFolder | None = None
        """The files of serving engines, which do not remove them if they are killed."""
        self._workers: list[_Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self, name: str, role: str, index: int) -> Peer:
        driver_end, worker_end = socket.socketpair()
        beats, beats_in = os.pipe()
        log = self._log_dir / f"{name}.log"
        variables = self._environment(name, role, index)
        try:
            with worker_end, log.open("ab") as output:
                ends = (worker_end.fileno(), beats_in, output.fileno())
                process: _Process = (
                    await self._fork(role, name, variables, ends)
                    if self._forks
                    else self._spawn(role, variables, ends)
                )
            reader, writer = await asyncio.open_connection(sock=driver_end, limit=2**26)
        except BaseException:
            driver_end.close()
            os.close(beats)
            raise
        finally:
            os.close(beats_in)

        send = partial(write_frame, writer)
        peer = Peer(name, send, deadline_s=self._sides.trainer.wait_deadline_s)
        loop = asyncio.get_running_loop()
        worker = _Worker(peer, process, writer, beats)
        loop.add_reader(beats, _watch_heartbeat, worker)
        task = loop.create_task(self._read(worker, reader, log), name=f"read-{name}")
        self._tasks.add(task)  # the task ends with the process, and `close` awaits it
        task.add_done_callback(self._tasks.discard)
        self._workers.append(worker)
        try:
            await peer.call("ping", deadline_s=START_DEADLINE_S)
        except BaseException:  # also a cancellation: nobody else knows of this process
            await self.end(peer)
            raise
        return peer

    async def _fork(
        self, role: str, name: str, variables: dict[str, str], ends: Sequence[int]
    ) -> ForkedProcess:
        """Fork a process from one that has imported torch and transformers."""
        if not self._servers or not self._servers[-1].answers:
            log = self._log_dir / "fork-server.log"
            engine = self._sides.trainer.engine
            self._servers.append(ForkServer(log, engine, self._threads_of_libraries))
        request = Fork(role, name, self._sides.rollout.heartbeat_s, variables)
        return await self._servers[-1].fork(request, ends, START_DEADLINE_S)

    def _spawn(
        self, role: str, variables: dict[str, str], ends: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        calls, beats, output = ends
        beat = {"MILLRACE_BEAT": f"{beats} {self._sides.rollout.heartbeat_s}"}
        command = ["-m", "millrace.runtime.host", str(calls), role, str(os.getpid())]
        variables = os.environ | variables | beat
        rollout = self._sides.rollout
        if role == "rollout" and rollout.serves:
            self._scratch = self._scratch or _folder_of_sockets()
            variables[SCRATCH] = self._scratch.name
        python = rollout.python if role == "rollout" and rollout.engine != "torch" else ""
        return spawn([python or sys.executable, *command], variables, output, fds=[calls, beats])

    @property
    def _threads_of_libraries(self) -> dict[str, str]:
        """Return the variables that libraries read when they are imported."""
        return {
            "OMP_NUM_THREADS": str(self._threads),
            "MKL_NUM_THREADS": str(self._threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # a waiting side must not spin on the other side's core
        }

    def _environment(self, name: str, role: str, index: int) -> dict[str, str]:
        variables = {
            VARIABLE: str(self._log_dir.resolve().parent / FOLDER),
            NAME: name,
            "TOKENIZERS_PARALLELISM": "false",
        }
        variables |= self._threads_of_libraries | listening_at("127.0.0.1")
        return variables | (
            {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus_of(role, index))} if self._gpus else {}
        )

    def _gpus_of(self, role: str, index: int) -> Sequence[str]:
        """Return a worker's GPUs: trainer ranks come first, then replicas.

        Colocated sides share GPUs by index.
        """
        each = self._sides.rollout.tensor_model_parallel_size if role == "rollout" else 1
        separate = role == "rollout" and not self._sides.colocated
        first = index * each + (self._sides.trainer.ranks if separate else 0)
        return self._gpus[first : first + each]

    async def _read(self, worker: _Worker, reader: asyncio.StreamReader, log: Path) -> None:
        peer, process = worker.peer, worker.process
        async for frame in payloads_of(reader):
            peer.receive(frame)
        if peer.death is None and not self._closing:
            await worker.wait_for_end()
        peer.mark_dead(
            "the run is over" if self._closing else _cause_of_death(peer.name, process, log)
        )

    async def end(self, peer: Peer) -> None:
        """Kill a worker and the processes that it started, and wait for their end."""
        worker = next((w for w in self._workers if w.peer is peer), None)
        if worker is None:
            return
        self._workers.remove(worker)
        processes = worker.group or group_of(worker.process.pid)
        kill_all(processes)
        worker.writer.close()
        if not await wait_until(lambda: _over([worker.process], processes), KILLED_S):
            _warn_of(processes)
        _unwatch_heartbeat(worker)

    def release(self, replica: int) -> None:
        """Do nothing: the devices of a process end with it."""

    async def limit(self) -> Limit:
        if not self._gpus:
            return Limit(None)
        ranks, each = self._sides.trainer.ranks, self._sides.rollout.tensor_model_parallel_size
        uses = f"the trainer uses {ranks}, and a replica {each}"
        why = f"this machine has {len(self._gpus)} GPUs, {uses}"
        return Limit((len(self._gpus) - ranks) // each, why)

    def answers(self) -> list[ProcessStatus]:
        """Return nothing: each worker has a socket of its own."""
        return []

    async def close(self) -> None:
        """Close every socket. Workers and their children exit at end of file.

        A process that still runs after GOODBYE_S is killed.
        """
        self._closing = True
        workers: list[_Process] = [worker.process for worker in self._workers]
        children = [child for process in workers for child in children_of(process.pid)]
        for worker in self._workers:
            worker.writer.close()
        await wait_until(lambda: _over(workers, children), GOODBYE_S)
        for process in workers:
            process.kill()
        kill_all(children)
        if not await wait_until(lambda: _over(workers, children), KILLED_S):
            _warn_of([*(p for p in workers if p.poll() is None), *children])
        servers = [server.close() for server in self._servers]
        if not await wait_until(lambda: _over(servers), GOODBYE_S):
            for server in servers:
                server.kill()
            await wait_until(lambda: _over(servers), KILLED_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GOODBYE_S)
        if self._scratch:
            self._scratch.cleanup()
        for worker in self._workers:
            _unwatch_heartbeat(worker)
        self._workers.clear()


def _watch_heartbeat(worker: _Worker) -> None:
    """Read the heartbeats that have arrived."""
    if os.read(worker.beats, 4096):
        worker.peer.beat()
    else:
        asyncio.get_running_loop().remove_reader(worker.beats)  # the worker has ended


def _unwatch_heartbeat(worker: _Worker) -> None:
    """Stop reading heartbeats."""
    asyncio.get_running_loop().remove_reader(worker.beats)
    os.close(worker.beats)


def _folder_of_sockets() -> ScratchFolder:
    """Make a folder for the sockets of serving engines. Linux allows 107 characters for a path."""
    parent = tempfile.gettempdir()
    return ScratchFolder(parent if len(parent) <= _LONGEST_TMPDIR else "/tmp")


def _over(started: Sequence[_Process], others: Sequence[psutil.Process] = ()) -> bool:
    """Return whether processes have ended: some that this runtime started, and others."""
    return all(p.poll() is not None for p in started) and not any(map(lives, others))


def _warn_of(processes: Sequence[_Process | psutil.Process]) -> None:
    alive = [p.pid for p in processes if not isinstance(p, psutil.Process) or lives(p)]
    warnings.warn(
        f"processes {alive} were killed and do not end: their GPU memory stays in use",
        RuntimeWarning,
        stacklevel=3,
    )


def _end_of(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _cause_of_death(name: str, process: _Process, log: Path) -> str:
    code = process.poll()
    server = process.server_code if isinstance(process, ForkedProcess) else None
    if code is None:
        cause = "closed its socket, and its process does not end"
    elif server is not None:
        cause = f"ended with its fork server, which {_end_of(server)}"
    else:
        cause = _end_of(code)
    with log.open(errors="replace") as lines:
        tail = "".join(deque(lines, maxlen=5)).strip()
    return f"worker {name} {cause}; its log is {log}" + (f"\n{tail}" if tail else "")
