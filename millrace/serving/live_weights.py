"""The weights of a serving engine, in the process of its model: staged, proven and made live.

A thread stages weights beside decoding, which pauses only for a copy on the device.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.overrides import TorchFunctionMode

from millrace.errors import BrokenTransfer, SyncError
from millrace.sync import ipc
from millrace.sync.adapters import LoraStaging, join_inbox
from millrace.sync.eight_bit import PAIRS, in_eight_bits, pair_sums, quantised_names, sums_of
from millrace.sync.options import SyncOptions
from millrace.sync.proof import bit_sums, changed, start_bit_sums
from millrace.sync.staging import StagingBuffer, wire_device
from millrace.sync.table import read_specs

_SWITCH_S = 0.0005
_NCCL = "MILLRACE_NCCL"
"""Environment variable: the user's NCCL settings, which both ends of a transfer share."""
_FUSED = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""The modules in each fused module of a model that does not name them."""


class LiveWeights:
    """The staged and the live weights of one process of a model."""

    model: Any
    """The engine's model. Its `load_weights` takes the names of a model folder."""
    device: torch.device
    shard: int
    """The rank of this process among those of the replica."""
    inbox: StagingBuffer | LoraStaging | ipc.IpcStaging
    live_sums: dict[str, int] | None = None
    """The bit sums of the live parameters by name. None before the first version."""
    _staging: threading.Lock
    """Held by the thread that stages a version."""
    _paired: bool
    """Whether sums have proven that each row has its scale. Each load puts it in the same place."""
    _staged: dict[str, Tensor] | None = None
    """The staged tensors as they are loaded. None before the first version."""
    _copies: list[tuple[list[Tensor], list[Tensor]]] | None = None
    """(targets, sources) of the copies of a load, by dtype.

    None before the first load. Empty if these copies alone cannot repeat the load.
    """

    def join(self, host: str, port: int, replica: int, agreed: dict[str, Any]) -> None:
        """Prepare to receive from the trainer's ranks at an address. `regroup` joins them.

        `agreed` has the fields of SyncOptions.
        """
        restore_nccl_settings()
        if (inbox := self.__dict__.pop("inbox", None)) is not None:
            inbox.leave()  # the ranks of a lost trainer
            with self._staging:
                inbox = self._staged = self._copies = None
        self._staging, self._paired = threading.Lock(), False
        options = SyncOptions(**agreed)
        limit = timedelta(seconds=options.timeout_s)
        self._store = TCPStore(host, port, None, False, timeout=limit)
        self._replica = replica
        self._key = f"millrace/sync/staged/{replica}/{self.shard}"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # NCCL leaves the GPU time to read the live weights. On a CPU, it takes as long beside it.
        nccl = wire_device(options, self.device).type == "cuda"
        self._proof_stream = torch.cuda.Stream(self.device) if nccl else None
        where = (read_specs(self._store), self._store, self.device, replica, options)
        self.inbox = (
            ipc.IpcStaging.join(*where, self._load, self.shard, self._in_eight_bits)
            if ipc.fits(options, self.device)
            else join_inbox(*where, self.shard)
        )

    def regroup_weights(self, generation: int, members: list[int], turn: int) -> None:
        """Exchange the groups in a thread, as `stage_weights` works."""

        def work() -> int:
            self.inbox.regroup(generation, members)
            with self._staging:  # A version that has arrived may not be quantised yet.
                return 0

        self._in_thread(work, turn)

    def stage_weights(self, version: int, turn: int) -> None:
        """Receive `version` in a thread. The thread stores its report under the key of `turn`.

        Over NCCL, the live weights are verified meanwhile. A change in these 50 ms is not seen.
        """

        def work() -> int:
            with self._staging:
                if self._proof_stream is not None:
                    return self._receive_and_prove(version, self._proof_stream)
                # An IpcStaging replaces the live weights while it receives. If it breaks off, they
                # are of two versions, and the next transfer replaces them all.
                if in_place := isinstance(self.inbox, ipc.IpcStaging):
                    self.prove_unchanged()
                    self.live_sums = None
                received = self.inbox.receive(version)
                if not in_place:
                    self._quantise()
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
                    own = start_bit_sums(self._parameters())

        assert not isinstance(self.inbox, ipc.IpcStaging)  # It has no proof stream.
        received = self.inbox.receive(version, look)
        self._quantise()
        if live and self.live_sums:
            with torch.cuda.stream(stream):  # Its sums may not be ready.
                self._compare(live, own.tolist())
        return received

    def prove_unchanged(self) -> None:
        """Raise SyncError if a live parameter has changed since its version became live."""
        if live := self.live_sums:
            self._compare(live, [*bit_sums(self._parameters()).values()])

    def _parameters(self) -> dict[str, Tensor]:
        """Return the live weights. An engine's constants, which no sync sends, begin with `_`."""
        named = self.model.named_parameters()
        return {n: p for n, p in named if not n.rpartition(".")[2].startswith("_")}

    def _in_eight_bits(
        self, weights: dict[str, Tensor], into: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return received weights as the model keeps them."""
        names = quantised_names(self._parameters(), self._fused)
        return in_eight_bits(weights, names, self.device, into) if names else weights

    def _quantise(self) -> None:
        """Bring the staged weights into the form in which the model keeps them, and add their sums.

        Decoding goes on meanwhile. The pause then has copies alone.
        """
        assert not isinstance(self.inbox, ipc.IpcStaging)  # It loads each bucket as it arrives.
        received = self.inbox.staged
        self._staged = self._in_eight_bits(received, self._staged)
        self.inbox.bit_sums |= sums_of(ipc.replaced(self._staged, received))

    @property
    def _fused(self) -> dict[str, list[str]]:
        """Return the names of the modules in each fused module."""
        return dict(getattr(self.model, "packed_modules_mapping", None) or _PARTS)

    def _compare(self, live: dict[str, int], own: list[int]) -> None:
        """Raise SyncError if these bit sums are not those of the live version."""
        known = zip(live.items(), own, strict=True)
        if names := [name for (name, value), now in known if now != value]:
            self.inbox.version = None
            raise changed(self._replica, self._live, names)

    def measure_link(self, turn: int) -> None:
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

    def activate_weights(
        self, version: int
    ) -> tuple[dict[str, int], dict[str, int], dict[str, list[str]]]:
        """Copy the staged version over the live weights. An IpcStaging has already written them.

        Return the bit sums of the staged weights, the bit sums of the live weights, and the names
        of the modules in each fused module. The driver makes one call for all of this, because
        each call adds milliseconds to the pause.
        """
        if self.inbox.version != version:
            raise SyncError(
                f"version {version} must become live, but version {self.inbox.version} is staged"
            )
        with torch.inference_mode():
            if not isinstance(self.inbox, ipc.IpcStaging):
                self.load()
            self.live_sums = bit_sums(self._parameters())
            pairs = {} if self._paired else pair_sums(self._parameters())
        sent, self._live = self.inbox.bit_sums, version
        if self._paired:
            sent = {name: value for name, value in sent.items() if not name.endswith(PAIRS)}
        self._paired = True
        return live_names(sent, self.live_sums), self.live_sums | pairs, self._fused

    def changed_weights(self) -> str:
        """Return what is wrong with the live weights, or nothing. The engine will discard them."""
        try:
            self.prove_unchanged()
        except SyncError as error:
            return str(error)
        finally:
            self.live_sums = None
        return ""

    def load(self) -> None:
        """Copy the staged weights over the live ones.

        The first load uses the model's own loader and records its copies. Later loads repeat these
        copies, because source and target memory never move. A few kernels then replace several
        hundred Python calls in the engine.
        """
        assert self._staged is not None
        if self._copies is None:
            with CopyRecorder() as recorder:
                self._load(self._staged.items())
            self._copies = recorder.repeatable(self._staged.values())
        elif self._copies:
            for targets, sources in self._copies:
                torch._foreach_copy_(targets, sources)
        else:
            self._load(self._staged.items())

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(folder_names(self.model.config.model_type, weights))


def keep_nccl_settings() -> None:
    """Note the user's NCCL settings, before an engine adds its own."""
    own = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    os.environ[_NCCL] = json.dumps(own)


def restore_nccl_settings() -> None:
    """Restore the user's NCCL settings, without those that the engine made for its collectives.

    With VLLM_BATCH_INVARIANT, vLLM sets NCCL's protocol and number of threads. The trainer lacks
    these settings, and NCCL aborts a transfer whose ends differ. In a replica with several devices,
    this comes too late: NCCL has already read the engine's settings.
    """
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        del os.environ[name]
    os.environ.update(json.loads(os.environ[_NCCL]))


class CopyRecorder(TorchFunctionMode):
    """A context that records the target and the source of each tensor copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def repeatable(self, staged: Iterable[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return (targets, sources) by dtype if copies alone make up the load of `staged`, else [].

        Every source must be staged memory, and the copies must cover all of it.
        """
        sources = {t.untyped_storage().data_ptr() for t in staged}
        total = sum(t.numel() for t in staged)
        direct = all(source.untyped_storage().data_ptr() in sources for _, source in self.copies)
        if not direct or sum(source.numel() for _, source in self.copies) != total:
            return []
        found: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for pair in self.copies:
            for side, tensor in zip(
                found.setdefault(pair[1].dtype, ([], [])), map(_as_bytes, pair), strict=True
            ):
                side.append(tensor)
        return [*found.values()]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view without numbers of 8 bits, which copies of many tensors may not support."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def folder_names(kind: str, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names of a model folder, expert by expert, without copies.

    `kind` is the model_type of config.json.
    """
    mixtral = kind == "mixtral"
    room = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in weights:
        fused = _FUSED.fullmatch(name)
        if fused is None:
            yield name.replace(".mlp.gate.", f".{room}.gate."), tensor
            continue
        parts = [(down, tensor)]
        if fused[2] == "gate_up_proj":
            parts = list(zip((gate, up), tensor.chunk(2, dim=1), strict=True))
        for part, experts in parts:
            for number, expert in enumerate(experts):
                yield f"{fused[1]}.{room}.experts.{number}.{part}.weight", expert


def live_names(sent: Mapping[str, int], live: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of sent tensors. Those of experts get the name of the engine's live tensor.

    Several devices can then be verified: each has a part of the live tensor.
    """
    blocks = {
        key: name
        for name in live
        if (key := _block(name)) is not None  # its layer, and which of the two tensors it is
    }
    named = {}
    for name, value in sent.items():
        fused = _FUSED.fullmatch(name)
        key = fused and (f"{fused[1]}.", fused[2] == "gate_up_proj")
        named[blocks.get(key, name) if key else name] = value
    return {_gate(name, live): value for name, value in named.items()}


def _block(name: str) -> tuple[str, bool] | None:
    found = re.fullmatch(
        r"(.+\.)(?:mlp|block_sparse_moe)\.experts\.(?:\w+\.)?(w13|w2)_weight", name
    )
    return None if found is None else (found[1], found[2] == "w13")


def _gate(name: str, live: Mapping[str, int]) -> str:
    other = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    return other if other in live and name not in live else name
