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
    from millrace.engines.torch_rollout import TorchRolloutEngine
    from millrace.engines.vllm_rollout import VllmRolloutEngine
    from millrace.ports import TrainRank
    from millrace.sync.collective import Receiver, Sender, Silent
    from millrace.sync.ipc import IpcSender
    from millrace.sync.vllm_receiver import VllmReceiver

_CONNECT_S = 60.0


class Worker:
    """What both roles share: a meeting point for process groups."""

    def __init__(self) -> None:
        self._store: Any = None

    async def ping(self) -> None:
        """Answers once the process is up."""
        return

    async def listen(self) -> tuple[str, int]:
        """Open a store for process groups to meet at; returns its host and port. The port is bound before it is told."""
        from torch.distributed import TCPStore

        host = os.environ.get("MILLRACE_HOST") or _own_address()
        self._store = TCPStore(host, 0, None, True, wait_for_workers=False)
        return host, self._store.port

    def _meet(self, address: tuple[str, int], config: Config) -> Any:
        """The store that trainer rank 0 listens at. What waits in it, waits for a rank that loads a model, perhaps from the hub."""
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore(
                address[0], address[1], None, False, timeout=timedelta(seconds=_CONNECT_S)
            )
        self._store.set_timeout(timedelta(seconds=config.trainer.wait_deadline_s))
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
        from millrace.engines.device import join_group, prepare
        from millrace.engines.factory import train_engine

        resolved = Config.model_validate(config)
        world_size = resolved.trainer_ranks
        prepare(resolved)
        if world_size > 1:
            join_group(self._meet(address, resolved), rank, world_size, resolved)
        self.config = resolved
        self.engine = train_engine(resolved, model_folder, rank=rank, world_size=world_size)
        return resolved.model_dump(mode="json")

    async def connect(self, config: dict[str, Any], rank: int, address: tuple[str, int]) -> None:
        """Join the weight sync's process group, together with every replica."""
        from millrace.sync import ipc
        from millrace.sync.collective import join_sender

        resolved = Config.model_validate(config)
        where = (self.engine, self._meet(address, resolved), rank, resolved)
        by_ipc = ipc.fits(resolved, self.engine.device)
        self.sender = await (ipc.IpcSender.join(*where) if by_ipc else join_sender(*where))

    async def matmul_rate(self) -> float:
        """Multiplications and additions a second of this rank's device, in the dtype that it trains in."""
        from millrace.engines.device import matmul_rate

        return matmul_rate(self.config)

    async def peak_memory(self) -> int:
        """Most bytes that this rank's tensors took on its GPU so far; of the whole process, on a CPU."""
        from millrace.engines.device import peak_memory

        return peak_memory(self.config)


class RolloutWorker(Worker):
    """One replica of a rollout engine, and its end of the weight sync."""

    engine: TorchRolloutEngine | VllmRolloutEngine
    receiver: Receiver | VllmReceiver

    async def build(self, config: dict[str, Any], model_folder: str) -> dict[str, Any]:
        """Build this replica. Returns the configuration that it was built with."""
        resolved = Config.model_validate(config)
        if resolved.rollout.engine == "vllm":
            _vllm_environment(model_folder)
            from millrace.engines import vllm_rollout

            self.engine = vllm_rollout.build(resolved, model_folder)
        else:
            from millrace.engines import torch_rollout
            from millrace.engines.device import prepare

            prepare(resolved)
            self.engine = torch_rollout.build(resolved, model_folder)
        return resolved.model_dump(mode="json")

    async def connect(self, config: dict[str, Any], replica: int, address: tuple[str, int]) -> None:
        """Join the weight sync's process group, together with every trainer rank that sends."""
        resolved = Config.model_validate(config)
        if resolved.rollout.engine == "vllm":
            from millrace.sync.vllm_receiver import VllmReceiver

            engine: Any = self.engine
            store = self._meet(address, resolved)
            self.receiver = await VllmReceiver.join(
                engine, store, address, replica, config, resolved
            )
        else:
            from millrace.sync.collective import Receiver

            holder: Any = self.engine
            store = self._meet(address, resolved)
            self.receiver = await Receiver.join(holder, store, replica, resolved)


def _vllm_environment(model_folder: str) -> None:
    """What vLLM reads from the environment, before it is imported. A user's own settings stay."""
    defaults = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
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


def _own_address() -> str:
    """This node's address as its peers see it: the source address of a packet that leaves it (none is sent)."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def make_worker(role: str) -> Worker:
    """The empty worker of a role."""
    return {"trainer": TrainWorker, "rollout": RolloutWorker}[role]()
