"""The root object in a worker process: it builds engines and connects the weight sync.

A worker starts empty, so the driver has its name and its log before anything can fail. Calls then
set it up. Engines are imported inside functions, at first use.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from millrace.config import Config, ModelConfig, Sides, TrainerConfig, plugins
from millrace.config.serving_checks import SCRATCH
from millrace.runtime.caches import keep_compiled_code
from millrace.sync.options import SyncOptions
from millrace.waits.kernel import cpu_s
from millrace.waits.registry import PROCESS, Start, measuring, starting, take_starts, waiting

if TYPE_CHECKING:
    from millrace.decode.engine import TorchRolloutEngine
    from millrace.ports import TrainRank
    from millrace.serving.engine import ServingEngine
    from millrace.serving.receiver import EngineReceiver
    from millrace.sync.collective import NullSender, Receiver, Sender
    from millrace.sync.ipc import IpcSender

_CONNECT_S = 60.0


@contextmanager
def _importing() -> Iterator[None]:
    """Collect no garbage. Otherwise, an import of torch and transformers takes a sixth longer."""
    gc.disable()
    try:
        with starting("imports"), _moving():
            yield
    finally:
        gc.enable()


class Worker:
    """The part that both roles share: a store where process groups meet."""

    def __init__(self, alone: bool = False) -> None:
        """`alone` says whether the process runs nothing but this worker."""
        self._store: Any = None
        self._alone = alone

    async def ping(self) -> None:
        """Answer once the process runs."""
        return

    async def load(self, engine: str, model_folder: str) -> None:
        """Import an engine. Workers do this while the driver reads the data."""

    async def starts(self) -> dict[str, list[Start]]:
        """Return the parts of the start of each process of this worker."""
        return {PROCESS.name: take_starts()}

    async def listen(self) -> tuple[str, int]:
        """Open a store where process groups meet. Return its host and port.

        The store listens at that host alone. Its port is bound before this returns.
        """
        with _importing():
            from millrace.sync.store import bound_store

        host = os.environ.get("MILLRACE_HOST", "127.0.0.1")
        self._store = bound_store(host, wait_for_workers=False)
        return host, self._store.port

    def _leave_to_exit(self) -> None:
        """Let garbage collections ignore all objects of now, which live until the process ends.

        Libraries and a model are hundreds of thousands of objects. A full collection looks at each
        of them, for 0.1 s or more, between two tokens.
        """
        if self._alone:
            gc.collect()
            gc.freeze()

    def _meet(self, address: tuple[str, int], deadline_s: float) -> Any:
        """Return the store of trainer rank 0.

        Its deadline is long: a rank may first download and load a model.
        """
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore(
                address[0], address[1], None, False, timeout=timedelta(seconds=_CONNECT_S)
            )
        self._store.set_timeout(timedelta(seconds=deadline_s))
        return self._store


class TrainWorker(Worker):
    """One rank of a train engine, and its end of the weight sync."""

    trainer: TrainerConfig
    dtype: str
    engine: TrainRank
    sender: Sender | NullSender | IpcSender

    async def load(self, engine: str, model_folder: str) -> None:
        keep_compiled_code()
        with _importing():
            import millrace.models.device
            import millrace.sync.store  # noqa: F401

            plugins.load("trainer.engine", engine, "train_engines")

    async def build(
        self, config: dict[str, Any], model_folder: str, rank: int, address: tuple[str, int]
    ) -> dict[str, Any]:
        """Join the train engine's process group and build this rank. Return its configuration."""
        resolved = Config.model_validate(config)
        trainer = resolved.trainer
        await self.load(trainer.engine, model_folder)
        from millrace.models.device import join_group, prepare

        self.trainer, self.dtype = trainer, resolved.model.dtype
        prepare(trainer)
        if trainer.ranks > 1:
            with waiting("trainer-*", "all ranks to join", "the start of the trainer"):
                store = self._meet(address, trainer.wait_deadline_s)
                join_group(store, rank, trainer.ranks, trainer)
        with starting("model"), _moving():
            build = plugins.load("trainer.engine", trainer.engine, "train_engines")
            self.engine = build(resolved, model_folder, rank=rank, world_size=trainer.ranks)
            self._leave_to_exit()
        return resolved.model_dump(mode="json")

    async def connect(self, agreed: SyncOptions, rank: int, address: tuple[str, int]) -> None:
        """Build this rank's end of the weight sync. Its `regroup` joins the replicas."""
        from millrace.sync import ipc
        from millrace.sync.collective import join_sender

        where = (self.engine, self._meet(address, agreed.wait_deadline_s), rank, agreed)
        by_ipc = ipc.fits(agreed, self.engine.device)
        self.sender = await (ipc.IpcSender.join(*where) if by_ipc else join_sender(*where))

    async def matmul_rate(self) -> float:
        """Return the multiplications and additions per second in the training dtype."""
        from millrace.models.device import matmul_rate

        return matmul_rate(self.trainer, self.dtype)

    async def peak_memory(self) -> int:
        """Return the peak memory of this rank's tensors on its GPU so far, in bytes.

        On a CPU, return the peak of the whole process.
        """
        from millrace.models.device import peak_memory

        return peak_memory(self.trainer)


class RolloutWorker(Worker):
    """One replica of a rollout engine, and its end of the weight sync."""

    engine: TorchRolloutEngine | ServingEngine
    receiver: Receiver | EngineReceiver | None = None

    async def build(self, config: dict[str, Any], model_folder: str) -> dict[str, Any]:
        """Build this replica. Return the configuration that it was built with."""
        resolved = Config.model_validate(config)
        await self.load(resolved.rollout.engine, model_folder)
        with starting("engine"), _moving():
            self.engine = _rollout_engine(resolved.sides, resolved.model, model_folder)
            self._leave_to_exit()
        return resolved.model_dump(mode="json")

    async def load(self, engine: str, model_folder: str) -> None:
        keep_compiled_code()
        if variables := _VARIABLES.get(engine):
            _set_defaults(variables, model_folder)
        if engine == "vllm":
            from millrace.serving.vllm.fork import start_import_process

            start_import_process()
        with _importing():
            plugins.load("rollout.engine", engine, "rollout_engines")

    async def starts(self) -> dict[str, list[Start]]:
        found = await super().starts()
        if call := getattr(self.engine, "call_workers", None):  # a serving engine
            for rank, parts in enumerate(await call("start_times")):
                found[f"{PROCESS.name}-core-{rank}"] = [Start(*part) for part in parts]
        return found

    async def connect(self, agreed: SyncOptions, replica: int, address: tuple[str, int]) -> None:
        """Build this replica's end of the weight sync. Its `regroup` joins the trainer ranks.

        A second call leaves the lost ranks of the trainer, and meets those that have their place.
        """
        self._store = None
        store = self._meet(address, agreed.wait_deadline_s)
        engine: Any = self.engine
        if self.receiver is not None:
            await self.receiver.meet(store, agreed, address)
            return
        if agreed.serving:
            from millrace.serving.receiver import EngineReceiver

            self.receiver = await EngineReceiver.join(engine, store, address, replica, agreed)
        else:
            from millrace.sync.collective import Receiver

            self.receiver = await Receiver.join(engine, store, replica, agreed)


def _rollout_engine(
    sides: Sides, model: ModelConfig, model_folder: str
) -> TorchRolloutEngine | ServingEngine:
    if not sides.rollout.serves:
        from millrace.models.device import prepare

        prepare(sides.trainer)
    build = plugins.load("rollout.engine", sides.rollout.engine, "rollout_engines")
    built: TorchRolloutEngine | ServingEngine = build(sides, model, model_folder)
    return built


def _moving() -> AbstractContextManager[None]:
    """Let CPU time count as progress. A start loads and compiles, and counts nothing else."""
    return measuring("CPU seconds of the start", lambda: round(cpu_s(os.getpid()), 1))


_VARIABLES = {
    "vllm": {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # all processes of a replica are on one node
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_RPC_BASE_PATH": os.environ.get(SCRATCH) or tempfile.gettempdir(),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, used on CPUs alone
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same cores
    },
    "sglang": {
        "SGLANG_SET_CPU_AFFINITY": "0",  # the trainer uses the same cores
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the tokens that SGLang reserves
    },
}
"""The environment variables that an engine reads at import. A user's own settings stay."""


def _set_defaults(variables: Mapping[str, str], model_folder: str) -> None:
    if os.path.isdir(model_folder):
        # Engines ask the hub even about local folders. Without a network that takes minutes.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def make_worker(role: str, alone: bool = False) -> Worker:
    """Return the empty worker of a role."""
    return {"trainer": TrainWorker, "rollout": RolloutWorker}[role](alone)
