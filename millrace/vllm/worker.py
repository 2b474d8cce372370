"""The weight sync inside vLLM's worker processes.

millrace's own transport stages the weights. vLLM's weight-transfer API makes them live. vLLM
imports this module in every worker before it loads the model (`worker_extension_cls`). A thread
stages weights beside decoding, which pauses only for `update_weights`, a copy on the device.
"""

from __future__ import annotations

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
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from millrace.config.vllm_checks import HOST_PID
from millrace.errors import BrokenTransfer, SyncError
from millrace.process.death import ignore_stop_signals, prctl
from millrace.process.trees import kill_all, lives
from millrace.sync import ipc
from millrace.sync.adapters import LoraStaging, join_inbox
from millrace.sync.options import SyncOptions
from millrace.sync.proof import bit_sums, changed, start_bit_sums
from millrace.sync.staging import StagingBuffer, wire_device
from millrace.sync.store import bound_store
from millrace.sync.table import read_specs
from millrace.vllm.experts import folder_names, live_names, use_plain_experts
from millrace.vllm.requests import warm_up_params
from millrace.vllm.timing import time_starts
from millrace.waits.registry import take_starts

BACKEND = "millrace"
_SWITCH_S = 0.0005
_WATCH_S = 1.0
_NCCL = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
"""The user's NCCL settings, which both ends of a transfer share.

This module is imported before vLLM adds its own settings.
"""


@dataclass
class StagedInit(WeightTransferInitInfo):
    """The address at which the trainer's ranks wait for this replica."""

    host: str
    port: int
    replica: int
    agreed: dict[str, Any]
    """The fields of SyncOptions."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """The staged version that becomes live."""

    version: int


class StagedWeights(WeightTransferEngine[StagedInit, StagedUpdate]):
    """vLLM's weight-transfer engine over an Inbox."""

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate
    inbox: StagingBuffer | LoraStaging | ipc.IpcStaging
    live_sums: dict[str, int] | None = None
    """The bit sums of the live parameters by name. None before the first version."""
    _copies: list[tuple[Tensor, Tensor]] | None = None
    """(target, source) of every copy of a load.

    None before the first load. Empty if these copies alone cannot repeat the load.
    """

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        """Prepare to receive from the trainer's ranks. `regroup` joins them."""
        restore_nccl_settings()
        if (inbox := self.__dict__.pop("inbox", None)) is not None:
            inbox.leave()  # the ranks of a lost trainer
            inbox = self._copies = None
        agreed = SyncOptions(**init_info.agreed)
        limit = timedelta(seconds=agreed.timeout_s)
        self._store = TCPStore(init_info.host, init_info.port, None, False, timeout=limit)
        self._replica = init_info.replica
        shard = get_tensor_model_parallel_rank()
        self._key = f"millrace/sync/staged/{init_info.replica}/{shard}"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # NCCL leaves the GPU time to read the live weights. On a CPU, it takes as long beside it.
        nccl = wire_device(agreed, self.device).type == "cuda"
        self._proof_stream = torch.cuda.Stream(self.device) if nccl else None
        where = (read_specs(self._store), self._store, self.device, init_info.replica, agreed)
        self.inbox = (
            ipc.IpcStaging.join(*where, self._load, shard)
            if ipc.fits(agreed, self.device)
            else join_inbox(*where, shard)
        )

    def regroup(self, generation: int, members: list[int], turn: int) -> None:
        """Exchange the groups in a thread, as `stage` works."""

        def work() -> int:
            self.inbox.regroup(generation, members)
            return 0

        self._in_thread(work, turn)

    def stage(self, version: int, turn: int) -> None:
        """Receive `version` in a thread. The thread stores its report under the key of `turn`.

        Over NCCL, the live weights are verified meanwhile. A change in these 50 ms is not seen.
        """

        def work() -> int:
            if self._proof_stream is not None:
                return self._receive_and_prove(version, self._proof_stream)
            # An IpcInbox replaces the live weights while it receives.
            if in_place := isinstance(self.inbox, ipc.IpcStaging):
                self.prove_unchanged()
            received = self.inbox.receive(version)
            if not in_place:
                self.prove_unchanged()
            return received

        self._in_thread(work, turn)

    def _receive_and_prove(self, version: int, stream: torch.cuda.Stream) -> int:
        """Receive `version`. Meanwhile, look at the live weights in `stream`."""
        live, own = dict[str, int](), torch.empty(0)

        def look() -> None:
            nonlocal live, own
            if live := self.live_sums or {}:
                with torch.cuda.stream(stream):
                    own = start_bit_sums(dict(self.model.named_parameters()))

        assert not isinstance(self.inbox, ipc.IpcStaging)  # It has no proof stream.
        received = self.inbox.receive(version, look)
        if live and self.live_sums:
            with torch.cuda.stream(stream):  # Its sums may not be ready.
                self._compare(live, own.tolist())
        return received

    def prove_unchanged(self) -> None:
        """Raise SyncError if a live parameter has changed since its version became live."""
        if live := self.live_sums:
            self._compare(live, [*bit_sums(dict(self.model.named_parameters())).values()])

    def _compare(self, live: dict[str, int], own: list[int]) -> None:
        """Raise SyncError if these bit sums are not those of the live version."""
        known = zip(live.items(), own, strict=True)
        if names := [name for (name, value), now in known if now != value]:
            self.inbox.version = None
            raise changed(self._replica, self._live, names)

    def link(self, turn: int) -> None:
        """Run the receiving end of `Sender.link` in a thread."""
        self._in_thread(self.inbox.link, turn)

    def _in_thread(self, work: Callable[[], int], turn: int) -> None:
        threading.Thread(
            target=self._report, args=(work, f"{self._key}/{turn}"), name="staging", daemon=True
        ).start()

    def _report(self, work: Callable[[], int], key: str) -> None:
        interval = sys.getswitchinterval()
        # Each kernel launch of this thread waits until the decoding thread releases the GIL. A
        # shorter switch interval shortens these waits.
        sys.setswitchinterval(_SWITCH_S)
        try:
            if self._stream is not None:
                torch.cuda.set_device(self.device)
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                received = work()
            report: dict[str, Any] = {"bytes": received, "version": self.inbox.version}
        except Exception as error:  # noqa: BLE001 - the report carries the failure
            report = {"error": str(error) if isinstance(error, SyncError) else repr(error)}
            report["broken"] = isinstance(error, BrokenTransfer)
        finally:
            sys.setswitchinterval(interval)
        self._store.set(key, json.dumps(report))

    def start_weight_update(self) -> None:
        """Do nothing. Unquantised weights are copied over the live ones without preparation."""

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Copy the staged version over the live weights. An IpcInbox has already written them."""
        if self.inbox.version != update_info.version:
            raise SyncError(
                f"version {update_info.version} must become live, "
                f"but version {self.inbox.version} is staged"
            )
        with torch.inference_mode():
            if not isinstance(self.inbox, ipc.IpcStaging):
                self.load(self.inbox)
            self.live_sums = bit_sums(dict(self.model.named_parameters()))
            self._live = update_info.version

    def finish_weight_update(self) -> None:
        """Do nothing. `receive_weights` completes the update."""

    def load(self, inbox: StagingBuffer | LoraStaging) -> None:
        """Copy the staged weights over the live ones.

        The first load uses the model's own loader and records its copies. Later loads repeat these
        copies, because source and target memory never move. A few kernels then replace several
        hundred Python calls in vLLM.
        """
        if self._copies is None:
            with CopyRecorder() as recorder:
                self._load(inbox.staged.items())
            self._copies = recorder.repeatable(inbox.staged.values())
        elif self._copies:
            targets, sources = (list(side) for side in zip(*self._copies, strict=True))
            torch._foreach_copy_(targets, sources)
        else:
            self._load(inbox.staged.items())

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(folder_names(self.model.config.model_type, weights))

    def shutdown(self) -> None:
        """Do nothing. Process groups end with the process."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise SyncError: on the trainer's side, `millrace.sync.collective.Sender` sends."""
        raise SyncError("millrace.sync.collective.Sender sends the weights")


def restore_nccl_settings() -> None:
    """Restore the user's NCCL settings, without those that vLLM made for its own collectives.

    With VLLM_BATCH_INVARIANT, vLLM sets NCCL's protocol and number of threads. The trainer lacks
    these settings, and NCCL aborts a transfer whose ends differ. In a replica with several devices,
    this comes too late: NCCL has already read vLLM's settings.
    """
    for name in [name for name in os.environ if name.startswith("NCCL_") and name not in _NCCL]:
        del os.environ[name]
    os.environ.update(_NCCL)


class CopyRecorder(TorchFunctionMode):
    """A context that records the target and the source of each tensor copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def repeatable(self, staged: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the copies if they alone make up the load of `staged`, else an empty list.

        Every source must be staged memory, and the copies must cover all of it.
        """
        sources = {t.untyped_storage().data_ptr() for t in staged}
        total = sum(t.numel() for t in staged)
        direct = all(source.untyped_storage().data_ptr() in sources for _, source in self.copies)
        return (
            self.copies
            if direct and sum(source.numel() for _, source in self.copies) == total
            else []
        )


class WorkerExtension:
    """Methods that millrace adds to vLLM's workers."""

    start_times = staticmethod(take_starts)
    weight_transfer_engine: StagedWeights
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def regroup_weights(self, generation: int, members: list[int], turn: int) -> None:
        """Start to join the groups of a new generation."""
        self.weight_transfer_engine.regroup(generation, members, turn)

    def stage_weights(self, version: int, turn: int) -> None:
        """Start to receive `version` into staging memory."""
        self.weight_transfer_engine.stage(version, turn)

    def changed_weights(self) -> str:
        """Return what is wrong with the live weights, or nothing. vLLM will now discard them."""
        engine = self.weight_transfer_engine
        try:
            engine.prove_unchanged()
        except SyncError as error:
            return str(error)
        finally:
            engine.live_sums = None
        return ""

    def measure_link(self, turn: int) -> None:
        """Start to receive as many bytes as a transfer has."""
        self.weight_transfer_engine.link(turn)

    def activate_weights(
        self, version: int
    ) -> tuple[dict[str, int], dict[str, int], dict[str, list[str]]]:
        """Make the staged `version` live through vLLM's own calls.

        Return the bit sums of the staged weights, the bit sums of the live weights, and the names
        of the modules in each fused module. The driver makes one call for all of this, because
        each call adds milliseconds to the pause.
        """
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()
        engine = self.weight_transfer_engine
        assert engine.live_sums is not None
        return (
            live_names(engine.inbox.bit_sums, engine.live_sums),
            engine.live_sums,
            dict(getattr(engine.model, "packed_modules_mapping", {})),
        )


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


def _die_with_host() -> None:
    """Arrange that this process ends when its host dies. Otherwise it would keep its GPU memory.

    The kernel's signal at the parent's death is not enough. The host may be dead already. With
    several workers, their parent is vLLM's core, which does not import this module. A thread
    therefore watches the host, and also kills that core.
    """
    if sys.platform != "linux":
        return
    prctl("PR_SET_PDEATHSIG", signal.SIGKILL)
    try:
        host, parent = psutil.Process(int(os.environ[HOST_PID])), psutil.Process(os.getppid())
        core = parent if host in parent.parents() and parent != host else None
    except psutil.NoSuchProcess:
        os._exit(1)
    threading.Thread(target=_end_after_host, args=(host, core), name="orphan", daemon=True).start()


def _end_after_host(host: psutil.Process, core: psutil.Process | None) -> None:
    while lives(host):
        time.sleep(_WATCH_S)
    kill_all([core] if core is not None else [])
    os._exit(1)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, StagedWeights)
    _die_with_host()
    # With several workers, vLLM ends a worker through its pipe. A single worker runs in vLLM's
    # core, which installs its own handlers later. `millrace.vllm.scheduler` replaces those.
    ignore_stop_signals()
    time_starts()
    # vLLM would compile kernels for penalties, biases and bad words, which millrace never uses.
    SamplingParams.for_sampler_warmup = staticmethod(warm_up_params)
    # vLLM's workers find each other through this store. torch's own store would listen on every
    # interface.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    setattr(rendezvous, "TCPStore", bound_store)  # noqa: B010
    if current_platform.is_cpu():
        # On a CPU, vLLM packs linear weights after the load and computes with the packed copies.
        # A weight update would then have no effect, and no error.
        vllm_layers.dispatch_cpu_unquantized_gemm = _plain_linear
        use_plain_experts()
        # vLLM's CPU sampler ignores all seeds of a batch with a greedy request. It also takes half
        # a minute to compile.
        TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native
