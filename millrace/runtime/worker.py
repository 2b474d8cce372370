"""What lives in a worker: the composition root on the far side of a runtime.

A worker is started empty, so that the driver has its name and its log before anything can go wrong; then it is set up by
calls. Engines are imported here, by name and late.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from millrace.config import Config

if TYPE_CHECKING:
    from millrace.decode.engine import TorchRolloutEngine
    from millrace.ports import TrainRank
    from millrace.sync.collective import Receiver, Sender, Silent
    from millrace.sync.ipc import IpcSender
    from millrace.vllm.engine import VllmRolloutEngine
    from millrace.vllm.receiver import VllmReceiver

_CONNECT_S = 60.0


class Worker:
    """What both roles share: a meeting point for process groups."""

    def __init__(self) -> None:
        self._store: Any = None

    async def ping(self) -> None:
        """Answers once the process is up."""
        return

    async def listen(self) -> tuple[str, int]:
        """Open a store for process groups to meet at. Return its host and port.

        The store listens at that host alone. Its port is bound before anyone learns of it.
        """
        from millrace.sync.store import bound_store

        host = os.environ.get("MILLRACE_HOST", "127.0.0.1")
        self._store = bound_store(host, wait_for_workers=False)
        return host, self._store.port

    def _meet(self, address: tuple[str, int], deadline_s: float) -> Any:
        """The store that trainer rank 0 listens at. What waits in it, waits for a rank that loads a model, perhaps from the hub."""
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore(
                address[0], address[1], None, False, timeout=timedelta(seconds=_CONNECT_S)
            )
        self._store.set_timeout(timedelta(seconds=deadline_s))
        return self._store


class TrainWorker(Worker):
    """One rank of a train engine, and its end of the weight sync."""

    config: Config
    engine: TrainRank
    sender: Sender | Silent | IpcSender

    async def build(
        self, config: dict[str, Any], model_folder: str, rank: int, address: tuple[str, int]
    ) -> dict[str, Any]:
        """Join the train engine's process group and build this rank. Returns its configuration."""
        from millrace.models.device import join_group, prepare
        from millrace.train.factory import train_engine

        resolved = Config.model_validate(config)
        world_size = resolved.trainer_ranks
        prepare(resolved.trainer)
        if world_size > 1:
            store = self._meet(address, resolved.trainer.wait_deadline_s)
            join_group(store, rank, world_size, resolved.trainer)
        self.config = resolved
        self.engine = train_engine(resolved, model_folder, rank=rank, world_size=world_size)
        return resolved.model_dump(mode="json")

    async def connect(self, config: dict[str, Any], rank: int, address: tuple[str, int]) -> None:
        """Join the weight sync's process group, together with every replica."""
        from millrace.sync import ipc
        from millrace.sync.agreement import Agreement
        from millrace.sync.collective import join_sender

        resolved = Config.model_validate(config)
        store, agreed = (
            self._meet(address, resolved.trainer.wait_deadline_s),
            Agreement.of(resolved),
        )
        where = (self.engine, store, rank, agreed)
        by_ipc = ipc.fits(agreed, self.engine.device)
        self.sender = await (ipc.IpcSender.join(*where) if by_ipc else join_sender(*where))

    async def matmul_rate(self) -> float:
        """Multiplications and additions a second of this rank's device, in the dtype that it trains in."""
        from millrace.models.device import matmul_rate

        return matmul_rate(self.config.trainer, self.config.model.dtype)

    async def peak_memory(self) -> int:
        """Most bytes that this rank's tensors took on its GPU so far; of the whole process, on a CPU."""
        from millrace.models.device import peak_memory

        return peak_memory(self.config.trainer)


class RolloutWorker(Worker):
    """One replica of a rollout engine, and its end of the weight sync."""

    engine: TorchRolloutEngine | VllmRolloutEngine
    receiver: Receiver | VllmReceiver

    async def build(self, config: dict[str, Any], model_folder: str) -> dict[str, Any]:
        """Build this replica. Returns the configuration that it was built with."""
        resolved = Config.model_validate(config)
        if resolved.rollout.engine == "vllm":
            _vllm_environment(model_folder)
            from millrace.vllm import engine as vllm_rollout

            self.engine = vllm_rollout.build(resolved.sides, resolved.model, model_folder)
        else:
            from millrace.decode import engine as torch_rollout
            from millrace.models.device import prepare

            prepare(resolved.trainer)
            self.engine = torch_rollout.build(resolved.sides, resolved.model, model_folder)
        return resolved.model_dump(mode="json")

    async def connect(self, config: dict[str, Any], replica: int, address: tuple[str, int]) -> None:
        """Join the weight sync's process group, together with every trainer rank that sends."""
        from millrace.sync.agreement import Agreement

        resolved = Config.model_validate(config)
        store, agreed = (
            self._meet(address, resolved.trainer.wait_deadline_s),
            Agreement.of(resolved),
        )
        engine: Any = self.engine
        if resolved.rollout.engine == "vllm":
            from millrace.vllm.receiver import VllmReceiver

            where = (address, replica, config)
            self.receiver = await VllmReceiver.join(engine, store, *where, agreed)
        else:
            from millrace.sync.collective import Receiver

            self.receiver = await Receiver.join(engine, store, replica, agreed)


def _vllm_environment(model_folder: str) -> None:
    """What vLLM reads from the environment, before it is imported. A user's own settings stay."""
    defaults = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # a replica's processes share a node, and meet there
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; on CPUs alone
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer is on these cores too
    }
    if os.path.isdir(model_folder):
        defaults["HF_HUB_OFFLINE"] = (
            "1"  # vLLM asks the hub about local folders, for minutes where there is no network
        )
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def make_worker(role: str) -> Worker:
    """The empty worker of a role."""
    return {"trainer": TrainWorker, "rollout": RolloutWorker}[role]()
