"""Inside vLLM's worker processes: weights staged by millrace's own transport, made live through vLLM's weight-transfer API.

vLLM imports this module in every worker before it loads the model (`worker_extension_cls`). Staging goes on in a thread while
the worker decodes; only `update_weights`, a copy on the device, needs the engine held still.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.overrides import TorchFunctionMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as vllm_layers
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from millrace.config import Config
from millrace.config.vllm_checks import HOST_PID
from millrace.errors import SyncError
from millrace.sync import ipc
from millrace.sync.adapters import AdaptedInbox, join_inbox
from millrace.sync.agreement import Agreement
from millrace.sync.inbox import Inbox, read_specs
from millrace.sync.proof import bit_sums
from millrace.sync.store import bound_store

BACKEND = "millrace"
_SWITCH_S = 0.0005
_WATCH_S = 1.0
_NCCL = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
"""Settings of whoever started the run: both ends of a transfer have them. This module is imported before vLLM adds its own."""


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Where the trainer's ranks wait for this replica."""

    host: str
    port: int
    replica: int
    config: dict[str, Any]


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """Which staged version is made live."""

    version: int


class StagedWeights(WeightTransferEngine[StagedInit, StagedUpdate]):
    """vLLM's weight-transfer engine over an Inbox."""

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate
    inbox: Inbox | AdaptedInbox | ipc.IpcInbox
    live_sums: dict[str, int]
    _copies: list[tuple[Tensor, Tensor]] | None = None
    """Target and source of every copy of a load; None before the first, empty where they do not tell all."""

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        """Join the trainer's ranks and the other replicas. Blocks until all are there."""
        forget_nccl_settings()
        agreed = Agreement.of(Config.model_validate(init_info.config))
        limit = timedelta(seconds=agreed.timeout_s)
        self._store = TCPStore(init_info.host, init_info.port, None, False, timeout=limit)
        shard = get_tensor_model_parallel_rank()
        self._key = f"millrace/sync/staged/{init_info.replica}/{shard}"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        where = (read_specs(self._store), self._store, self.device, init_info.replica, agreed)
        self.inbox = (
            ipc.IpcInbox.join(*where, self.model.load_weights)
            if ipc.fits(agreed, self.device)
            else join_inbox(*where, shard)
        )

    def stage(self, version: int, turn: int) -> None:
        """Receive `version` in a thread; its report goes to the store as this turn's."""
        self._in_thread(lambda: self.inbox.receive(version), turn)

    def link(self, turn: int) -> None:
        """The other end of `Sender.link`, in a thread."""
        self._in_thread(self.inbox.link, turn)

    def _in_thread(self, work: Callable[[], int], turn: int) -> None:
        threading.Thread(
            target=self._report, args=(work, f"{self._key}/{turn}"), name="staging", daemon=True
        ).start()

    def _report(self, work: Callable[[], int], key: str) -> None:
        start, interval = time.perf_counter(), sys.getswitchinterval()
        # Every kernel that is launched here waits for the thread that decodes to let go of the interpreter.
        sys.setswitchinterval(_SWITCH_S)
        try:
            if self._stream is not None:
                torch.cuda.set_device(self.device)
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                received = work()
            report: dict[str, Any] = {"bytes": received, "seconds": time.perf_counter() - start}
        except Exception as error:  # noqa: BLE001 - a thread's end: the failure travels to whoever waits for the report
            report = {"error": str(error) if isinstance(error, SyncError) else repr(error)}
        finally:
            sys.setswitchinterval(interval)
        self._store.set(key, json.dumps(report))

    def start_weight_update(self) -> None:
        """Nothing to prepare: unquantised weights are copied over the live ones."""

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Copy the staged version over the live weights, if it is not there already."""
        if self.inbox.version != update_info.version:
            raise SyncError(
                f"version {update_info.version} is to be made live, but {self.inbox.version} is staged"
            )
        with torch.inference_mode():
            if not isinstance(self.inbox, ipc.IpcInbox):
                self.load(self.inbox)
            self.live_sums = bit_sums(dict(self.model.named_parameters()))

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def load(self, inbox: Inbox | AdaptedInbox) -> None:
        """Staged weights over the live ones: by the model's own loader the first time, then by the copies that it made. Both sides'
        memory stays where it is, so they are the same each time, and a few kernels do what costs vLLM some hundred Python calls.
        """
        if self._copies is None:
            with CopiesWatched() as watched:
                self.model.load_weights(inbox.staged.items())
            self._copies = watched.repeatable(inbox.staged.values())
        elif self._copies:
            targets, sources = (list(side) for side in zip(*self._copies, strict=True))
            torch._foreach_copy_(targets, sources)
        else:
            self.model.load_weights(inbox.staged.items())

    def shutdown(self) -> None:
        """Process groups end with the process."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """The trainer's side is `millrace.sync.collective.Sender`."""
        raise SyncError("weights are sent by millrace.sync.collective.Sender")


def forget_nccl_settings() -> None:
    """Undo what vLLM set for its own collectives (with VLLM_BATCH_INVARIANT a protocol and a number of threads): the trainer has
    other settings, and NCCL breaks off a transfer whose ends differ. Where a replica has several devices NCCL has read them before.
    """
    for name in [name for name in os.environ if name.startswith("NCCL_") and name not in _NCCL]:
        del os.environ[name]
    os.environ.update(_NCCL)


class CopiesWatched(TorchFunctionMode):
    """Which tensor was copied to which, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.seen.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def repeatable(self, staged: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The copies, if they alone brought all of `staged` to where it belongs, straight from there; else none of them."""
        sources = {t.untyped_storage().data_ptr() for t in staged}
        total = sum(t.numel() for t in staged)
        straight = all(source.untyped_storage().data_ptr() in sources for _, source in self.seen)
        return (
            self.seen
            if straight and sum(source.numel() for _, source in self.seen) == total
            else []
        )


class WorkerExtension:
    """Calls that millrace adds to vLLM's workers."""

    weight_transfer_engine: StagedWeights
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def stage_weights(self, version: int, turn: int) -> None:
        """Start receiving `version` beside the live weights."""
        self.weight_transfer_engine.stage(version, turn)

    def measure_link(self, turn: int) -> None:
        """Start receiving as many bytes as a transfer has."""
        self.weight_transfer_engine.link(turn)

    def activate_weights(
        self, version: int
    ) -> tuple[dict[str, int], dict[str, int], dict[str, list[str]]]:
        """Make the staged `version` live, through vLLM's own calls and in one call of the driver's: each costs milliseconds of a pause.

        Returns bit sums of the staged and of the live weights, and which live modules are made of several.
        """
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()
        engine = self.weight_transfer_engine
        return (
            engine.inbox.bit_sums,
            engine.live_sums,
            dict(getattr(engine.model, "packed_modules_mapping", {})),
        )


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


def _die_with_host() -> None:
    """An engine whose host is gone would hold its GPU's memory for ever. The host may be gone already, so that no signal comes. With
    several workers vLLM's core is between the two, and knows nothing of this module: a worker ends it.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        host, parent = psutil.Process(int(os.environ[HOST_PID])), psutil.Process(os.getppid())
        core = parent if parent.ppid() == host.pid else None
    except psutil.NoSuchProcess:
        os._exit(1)
    threading.Thread(target=_outlive_no_host, args=(host, core), name="orphan", daemon=True).start()


def _ignore_stop_signals() -> None:
    """Leave SIGTERM and SIGINT to the driver, in a worker of several: vLLM ends it by its pipe.

    vLLM's core has handlers of its own after this, which `vllm_scheduler` puts aside.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _outlive_no_host(host: psutil.Process, core: psutil.Process | None) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        while host.is_running() and host.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_WATCH_S)
    if core is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            core.kill()
    os._exit(1)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, StagedWeights)
    _die_with_host()
    _ignore_stop_signals()
    # Where vLLM's workers meet: torch would listen on every interface.
    setattr(importlib.import_module("torch.distributed.rendezvous"), "TCPStore", bound_store)  # noqa: B010
    if current_platform.is_cpu():
        # vLLM packs linear weights for the CPU when it has loaded them, and serves the packed ones: an update of the weights
        # would change nothing, silently.
        vllm_layers.dispatch_cpu_unquantized_gemm = _plain_linear
        # Its sampler for CPUs forgets every seed as soon as one request of a batch is greedy, and compiles for half a minute.
        TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native
