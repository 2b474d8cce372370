"""Workers as Ray actors in placement groups. Only ray*.py import Ray.

Frames travel through two actor methods, `push` and a long poll `pull`. A step's hundreds of
requests therefore cost a few Ray calls. The placement groups of ray_places.py reserve the GPUs, and
actors request none: with fractions, Ray could place two ranks on one GPU. The driver gives each
actor its GPUs of the bundle.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from millrace.config import Sides
from millrace.errors import INSTALL, DeadlineError, MissingDependency, WorkerError, bad_value
from millrace.process.rpc import Limit, Peer
from millrace.process.trees import kill_process
from millrace.runtime.address import check_reachable
from millrace.runtime.placement import threads
from millrace.waits.answer import ProcessStatus

try:
    import ray
except ImportError as error:
    raise MissingDependency(f"trainer.runtime=ray needs Ray. Fix: {INSTALL['ray']}.") from error

from millrace.runtime.ray_host import BEAT, WHY, RayHost
from millrace.runtime.ray_places import START_DEADLINE_S, Places, Seat, alive
from millrace.runtime.ray_token import NO_TOKEN, forget_token, fresh_token

T = TypeVar("T")

GOODBYE_S = 5.0
_ENGINE_S = 30.0
"""Time limit for an engine to close: vLLM ends its processes within 17 s, or kills them."""
_ANSWER_S = 2.0
_LOOK_S = 2.0
"""Seconds between two looks at the node of a worker that starts."""


@dataclass(slots=True, eq=False)
class _Worker:
    """An actor of one worker, and its process on the node of its place."""

    peer: Peer
    role: str
    actor: Any
    seat: Seat
    process: tuple[int, float] | None = None  # its id and the time of its start


def started(start: Callable[[], T], within_s: float) -> T:
    """Start a node of Ray. Ray itself gives up after 30 s, which a busy machine may need."""
    end = time.monotonic() + within_s
    while True:
        try:
            return start()
        except Exception as error:  # Ray raises this class itself, so its text must tell
            if "timed out during startup" not in str(error) or time.monotonic() > end:
                raise


def _join(options: dict[str, Any], token: contextlib.AbstractContextManager[None]) -> None:
    """Call ray.init with SIGTERM and SIGHUP blocked. The processes that Ray starts inherit that.

    Ray itself blocks SIGINT. These signals reach every process of a run, and the driver alone acts
    on them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        with token:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            started(lambda: ray.init(**options), START_DEADLINE_S)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _restore_sigterm() -> None:
    """Install the driver's own handler again. ray.init replaces it by one that aborts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


async def _answered(call: Any) -> Any:
    return await call


def _answer(call: Any, name: str, node: str) -> ProcessStatus:
    try:
        answer: ProcessStatus = ray.get(call, timeout=_ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        return ProcessStatus(name, 0, node, silent=True)
    except ray.exceptions.RayError as error:
        return ProcessStatus(
            name, 0, node, silent=True, dead=f"worker {name} on {node} is dead: {error}"
        )
    return answer


class RayRuntime:
    """Start actors in their places, and end all of them."""

    def __init__(self, sides: Sides, places: Places, *, owns_cluster: bool) -> None:
        self._sides, self._places = sides, places
        self._owns_cluster = owns_cluster
        self._workers: list[_Worker] = []
        self._started = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @classmethod
    async def open(
        cls, sides: Sides, log_dir: Path, note: Callable[[str], None] = lambda text: None
    ) -> RayRuntime:
        """Join the cluster at trainer.ray_address, or start one on this machine. Reserve devices.

        A cluster that starts here has a token of its own. `note` hears of one that asks for none.
        Raise ConfigError if no cluster answers, if it lacks the devices, or if a node does not see
        the run's folder.
        """
        address = sides.trainer.ray_address
        owns_cluster = not address and not ray.is_initialized()
        options: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "ignore_reinit_error": True,
        }
        if owns_cluster:  # without "local", Ray would join the cluster of RAY_ADDRESS
            cores = max(os.cpu_count() or 1, sides.trainer.ranks + sides.rollout.devices)
            options |= {
                "address": "local",
                "num_cpus": cores,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            }
        elif address:
            options |= {"address": address}
        try:
            await check_reachable(
                os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
            )
        except OSError as error:  # a timeout and an unknown host are OSErrors too
            rule = f"no cluster answers: {str(error) or type(error).__name__}"
            raise bad_value(
                "trainer.ray_address",
                address,
                rule,
                "the HOST:PORT that `ray start --head` printed",
            ) from error
        try:
            token = fresh_token() if owns_cluster else contextlib.nullcontext()
            await asyncio.to_thread(_join, options, token)
            _restore_sigterm()
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            fix = (
                "`ray start --head`. If the cluster has a token, set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN for this command too"
            )
            rule = f"millrace cannot join a cluster: {str(error).rstrip('.')}"
            raise bad_value("trainer.ray_address", address, rule, fix) from error
        places = Places(sides, log_dir.resolve(), note)
        runtime = cls(sides, places, owns_cluster=owns_cluster)
        try:
            await places.reserve()
            if not places.all_ask_for_a_token:
                note(NO_TOKEN)
        except BaseException:
            await runtime.close()
            raise
        return runtime

    async def start(self, name: str, role: str, index: int) -> Peer:
        """Start a worker. If its node dies meanwhile, start it elsewhere."""
        while True:
            seat = await self._places.seat(role, index)
            peer = await self._start(name, role, seat)
            if peer is not None:
                return peer

    async def _start(self, name: str, role: str, seat: Seat) -> Peer | None:
        """Start a worker in a place. Return None if the node of the place dies meanwhile."""
        address, gpus = seat.bundle.share.address, seat.gpus
        share = seat.count * (0.5 if self._sides.colocated else 1.0)
        workers = threads(self._sides.trainer, seat.bundle.share.cores, seat.bundle.devices)
        variables = {
            "OMP_NUM_THREADS": str(workers),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }
        groups = {"concurrency_groups": {BEAT: 1, WHY: 1}}
        remote: Any = ray.remote(**cast("Any", groups))(RayHost)
        actor = remote.options(
            name=f"millrace-{os.getpid()}-{name}-{next(self._started)}",
            scheduling_strategy=seat.bundle.strategy,
            runtime_env={"env_vars": variables},
            max_concurrency=1000,
            num_cpus=0 if gpus else share,
        ).remote(name, role, self._owns_cluster or self._places.loopback, gpus)
        numbers = itertools.count()
        peer = Peer(
            name,
            lambda frame: self._push(peer, actor, next(numbers), frame),
            deadline_s=self._sides.trainer.wait_deadline_s,
        )
        worker = _Worker(peer, role, actor, seat)
        self._workers.append(worker)
        self._watch(self._serve(peer, actor, address))
        try:
            worker.process = await self._up(worker, address)
            if worker.process is None:
                await self.end(peer)
                return None
            self._watch(self._pull(peer, actor, address))
            self._watch(self._beat(peer, actor, address))
            await peer.call("ping", deadline_s=START_DEADLINE_S)
        except BaseException:  # also a cancellation: nobody else knows of this actor
            await self.end(peer)
            raise
        return peer

    async def _up(self, worker: _Worker, address: str) -> tuple[int, float] | None:
        """Return the process of an actor once it runs, or None if its node dies before."""
        name, node = worker.peer.name, worker.seat.bundle.share.node
        clock, call = asyncio.get_running_loop().time, worker.actor.up.remote()
        up, end = asyncio.ensure_future(_answered(call)), clock() + START_DEADLINE_S
        try:
            while not (await asyncio.wait([up], timeout=_LOOK_S))[0]:
                if node not in await alive():
                    return None
                if clock() > end:
                    raise DeadlineError(
                        f"worker {name} on {address} did not start within {START_DEADLINE_S:g} s"
                    )
            process: tuple[int, float] = up.result()
            return process
        except ray.exceptions.RayError as error:
            if node not in await alive():
                return None
            raise WorkerError(f"worker {name} on {address} is dead: {error}") from error
        finally:
            up.cancel()

    def release(self, replica: int) -> None:
        self._places.release(replica)

    async def limit(self) -> Limit:
        found = await self._places.limit()
        return found._replace(more="") if self._owns_cluster else found  # No node can join.

    async def end(self, peer: Peer) -> None:
        """Kill the process of a worker and those that it started, and then its actor."""
        worker = next((w for w in self._workers if w.peer is peer), None)
        if worker is None:
            return
        self._workers.remove(worker)
        try:
            with contextlib.suppress(WorkerError):  # the cluster does not answer
                if worker.process is not None and worker.seat.bundle.share.node in await alive():
                    await self._kill(worker.process, worker.seat)
        finally:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(worker.actor)

    async def _kill(self, process: tuple[int, float], seat: Seat) -> None:
        options: Any = {"num_cpus": 0, "max_retries": 0}
        kill: Any = ray.remote(**options, scheduling_strategy=seat.bundle.strategy)(kill_process)
        call = kill.remote(*process)
        try:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # its node may be gone
                await asyncio.wait_for(_answered(call), GOODBYE_S)
        finally:
            ray.cancel(call)  # It would wait for another node.

    def _watch(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the task ends with its actor, and `close` awaits it
        task.add_done_callback(self._tasks.discard)

    def _push(self, peer: Peer, actor: Any, number: int, frame: bytes) -> None:
        if peer.death is None:
            actor.push.remote(number, frame)

    async def _serve(self, peer: Peer, actor: Any, address: str) -> None:
        try:
            await actor.serve.remote()
        except ray.exceptions.RayError as error:
            self._mark_dead(peer, address, error)

    async def _beat(self, peer: Peer, actor: Any, address: str) -> None:
        try:
            while peer.death is None:
                await actor.beat.remote()
                peer.beat()
                await asyncio.sleep(self._sides.rollout.heartbeat_s)
        except ray.exceptions.RayError as error:
            self._mark_dead(peer, address, error)

    async def _pull(self, peer: Peer, actor: Any, address: str) -> None:
        try:
            while True:
                for frame in await actor.pull.remote():
                    peer.receive(frame)
        except ray.exceptions.RayError as error:
            self._mark_dead(peer, address, error)

    def _mark_dead(self, peer: Peer, address: str, error: Exception) -> None:
        peer.mark_dead(
            "the run is over"
            if self._closing
            else f"worker {peer.name} on {address} is dead: {error}"
        )

    def answers(self) -> list[ProcessStatus]:
        calls = [
            (w.actor.why.remote(), w.peer.name, w.seat.bundle.share.address) for w in self._workers
        ]
        return [_answer(*call) for call in calls]

    async def close(self) -> None:
        """Kill the actors and free the devices. Stop the cluster if this run started it."""
        self._closing = True
        # When Ray kills an actor, it also kills Python's tracker of vLLM's shared memory. Each
        # replica would then leave 0.4 GB in /dev/shm. So the engines close first.
        closing = [
            asyncio.ensure_future(worker.peer.call("engine.close", deadline_s=_ENGINE_S))
            for worker in self._workers
            if worker.role == "rollout"
        ]
        await asyncio.gather(*closing, return_exceptions=True)  # a replica may have no engine yet
        for worker in self._workers:
            ray.kill(worker.actor)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        self._places.close()
        if self._owns_cluster:
            await asyncio.to_thread(ray.shutdown)
            forget_token()
