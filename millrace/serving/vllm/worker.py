"""The weight sync inside vLLM's worker processes.

millrace's own transport stages the weights. vLLM's weight-transfer API makes them live. vLLM
imports this module in every worker before it loads the model (`worker_extension_cls`). A thread
stages weights beside decoding, which pauses only for `update_weights`, a copy on the device.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
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

from millrace.config.serving_checks import HOST_PID
from millrace.errors import SyncError
from millrace.process.death import ignore_stop_signals, prctl
from millrace.process.trees import kill_all, lives
from millrace.serving.live_weights import LiveWeights
from millrace.serving.vllm.eight_bit import as_in_a_checkpoint, reset_cache_scales
from millrace.serving.vllm.experts import use_plain_experts
from millrace.serving.vllm.requests import warm_up_params
from millrace.serving.vllm.timing import time_starts
from millrace.sync.store import bound_store
from millrace.waits.registry import take_starts

BACKEND = "millrace"
_WATCH_S = 1.0


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


class StagedWeights(LiveWeights, WeightTransferEngine[StagedInit, StagedUpdate]):
    """vLLM's weight-transfer engine over LiveWeights."""

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        self.shard = get_tensor_model_parallel_rank()
        self.join(init_info.host, init_info.port, init_info.replica, init_info.agreed)

    def start_weight_update(self) -> None:
        """Do nothing. Staged weights have the form of the live ones, over which they are copied."""

    def receive_weights(self, update_info: StagedUpdate) -> None:
        self.report = self.activate_weights(update_info.version)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with as_in_a_checkpoint(self.model):
            super()._load(weights)
        reset_cache_scales(self.model)

    def finish_weight_update(self) -> None:
        """Do nothing. `receive_weights` completes the update."""

    def shutdown(self) -> None:
        """Do nothing. Process groups end with the process."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise SyncError: on the trainer's side, `millrace.sync.collective.Sender` sends."""
        raise SyncError("millrace.sync.collective.Sender sends the weights")


class WorkerExtension:
    """Methods that millrace adds to vLLM's workers."""

    start_times = staticmethod(take_starts)
    weight_transfer_engine: StagedWeights
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def regroup_weights(self, generation: int, members: list[int], turn: int) -> None:
        """Start to join the groups of a new generation."""
        self.weight_transfer_engine.regroup_weights(generation, members, turn)

    def stage_weights(self, version: int, turn: int) -> None:
        """Start to receive `version` into staging memory."""
        self.weight_transfer_engine.stage_weights(version, turn)

    def changed_weights(self) -> str:
        """Return what is wrong with the live weights, or nothing. vLLM will now discard them."""
        return self.weight_transfer_engine.changed_weights()

    def measure_link(self, turn: int) -> None:
        """Start to receive as many bytes as a transfer has."""
        self.weight_transfer_engine.measure_link(turn)

    def activate_weights(
        self, version: int
    ) -> tuple[dict[str, int], dict[str, int], dict[str, list[str]]]:
        """Make the staged `version` live through vLLM's own calls: LiveWeights.activate_weights."""
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()
        return self.weight_transfer_engine.report


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
    # core, which installs its own handlers later. `millrace.serving.vllm.scheduler` replaces those.
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
