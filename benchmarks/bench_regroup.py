"""Measure how a weight sync heals: a receiver is killed in a transfer, and a new one joins.

    python -m benchmarks.bench_regroup gloo --members 8      CPU, gloo
    python -m benchmarks.bench_regroup nccl                  two GPUs: NCCL refuses two ranks on one
    python -m benchmarks.bench_regroup ipc                   one GPU, CUDA IPC

Each end is a process. Member 0 dies by SIGKILL, and by `--stop` it stands still instead. The rest
regroups, gets the same version, and then a restarted member 0 joins and gets it too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from millrace.errors import MillraceError
from millrace.sync import ipc
from millrace.sync.buckets import specs_of
from millrace.sync.collective import Receiver, join_sender
from millrace.sync.options import SyncOptions
from millrace.sync.table import Shards

PARTS = 64


def weights(seed: int, mb: int, device: torch.device) -> dict[str, Tensor]:
    noise = torch.Generator(device).manual_seed(seed)
    count = (mb << 20) // 2 // PARTS
    return {
        f"w.{i}": torch.randn(count, generator=noise, device=device).to(torch.bfloat16)
        for i in range(PARTS)
    }


class Source:
    """A trainer rank with whole tensors. A version is the seed of its weights."""

    def __init__(self, device: torch.device, mb: int) -> None:
        self.device, self.mb = device, mb
        self.tensors = weights(0, mb, device)

    def shards(self) -> Shards:
        return ((n, tuple(t.shape), t.dtype, 0, t) for n, t in self.tensors.items())

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


class Holder:
    def __init__(self, device: torch.device, mb: int) -> None:
        self.live = {n: torch.zeros_like(t) for n, t in weights(0, mb, device).items()}

    def weights(self) -> Mapping[str, Tensor]:
        return self.live

    async def swap(self, version: int, staged: Mapping[str, Tensor]) -> float:
        for name, tensor in self.live.items():
            tensor.copy_(staged[name])
        return 0.0

    def load(self, arrived: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in arrived:
            self.live[name].copy_(tensor)


class InPlace:
    """A receiver over CUDA IPC, which loads each bucket into the live weights."""

    def __init__(self, holder: Holder, inbox: ipc.IpcStaging) -> None:
        self.holder, self.inbox = holder, inbox

    async def regroup(self, generation: int, members: list[int]) -> Any:
        return await asyncio.to_thread(self.inbox.regroup, generation, members)

    async def transfer(self, version: int) -> Any:
        return await asyncio.to_thread(self.inbox.receive, version)

    async def activate(self, version: int) -> None:
        return None


async def end_of(options: Any, name: str, member: int, device: torch.device, store: Any) -> Any:
    agreed = SyncOptions(
        ranks=1,
        devices=1,
        bucket_bytes=options.bucket_mb << 20,
        timeout_s=120,
        wait_deadline_s=120,
        stall_s=60,
        colocated=options.kind == "ipc",
        gloo=False,
        serving=False,
        adapter_scale=None,
    )
    in_place = options.kind == "ipc"
    if member < 0:
        source: Any = Source(device, options.mb)
        join = ipc.IpcSender.join if in_place else join_sender
        return await join(source, store, 0, agreed)
    holder = Holder(device, options.mb)
    if in_place:
        where = (specs_of(holder.live), store, device, member, agreed, holder.load)
        return InPlace(holder, await asyncio.to_thread(ipc.IpcStaging.join, *where))
    receiver = await Receiver.join(holder, store, member, agreed)
    receiver.holder = holder  # type: ignore[attr-defined]
    return receiver


async def serve(options: Any, member: int, port: int, pipe: Any) -> None:
    """Run the commands of the parent, each as a task, and send the outcomes."""
    torch.set_num_threads(1)
    loop, device = asyncio.get_running_loop(), torch.device("cpu")
    if options.kind != "gloo":
        device = torch.device("cuda", 0 if options.kind == "ipc" else int(member >= 0))
        torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, None, False)
    end = await end_of(options, "", member, device, store)
    commands: asyncio.Queue[Any] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(EOFError):
            while True:
                loop.call_soon_threadsafe(commands.put_nowait, pipe.recv())

    threading.Thread(target=read, daemon=True).start()

    async def run(number: int, method: str, args: tuple[Any, ...]) -> None:
        start = time.monotonic()
        try:
            if method == "become":
                end._source.tensors = weights(args[0], options.mb, device)
            elif method == "equals":
                live, want = end.holder.live, weights(args[0], options.mb, device)
                assert all(torch.equal(live[n], want[n]) for n in want), "other weights"
            else:
                await getattr(end, method)(*args)
            text = ""
        except (MillraceError, AssertionError, RuntimeError) as error:
            text = f"{type(error).__name__}: {error}"[:160]
        pipe.send((number, text, time.monotonic() - start))

    pipe.send((-1, "", 0.0))
    tasks = set()
    while True:
        tasks.add(asyncio.ensure_future(run(*await commands.get())))


def child(options: Any, member: int, port: int, pipe: Any) -> None:
    asyncio.run(serve(options, member, port, pipe))


class End:
    """The parent's side of an end."""

    def __init__(self, options: Any, member: int, port: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=child, args=(options, member, port, other), daemon=True)
        self.process.start()
        self.calls = 0

    def call(self, method: str, *args: Any) -> None:
        self.calls += 1
        self.pipe.send((self.calls, method, args))

    def answer(self, number: int | None = None) -> tuple[str, float]:
        """Return what went wrong in a call, and its seconds. Raises EOFError of a dead process."""
        while True:
            if not self.pipe.poll(150):
                return "no answer in 150 s", 150.0
            got, text, seconds = self.pipe.recv()
            if got == (self.calls if number is None else number):
                return text, seconds


def all_call(ends: list[End], method: str, *args: Any) -> float:
    start = time.monotonic()
    for end in ends:
        end.call(method, *args)
    for end in ends:
        text, _ = end.answer()
        if text:
            raise SystemExit(f"{method}{args}: {text}")
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["gloo", "nccl", "ipc"])
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--after-s", type=float, default=0.02, help="when it dies")
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    options = parser.parse_args()
    if options.kind == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    members = list(range(options.members))
    ends = [End(options, k, store.port) for k in (-1, *members)]
    for end in ends:
        end.answer(-1)
    sender, receivers = ends[0], ends[1:]
    figures: dict[str, Any] = {"kind": options.kind, "members": options.members, "mb": options.mb}
    figures["join_s"] = all_call(ends, "regroup", 1, members)
    for version in (1, 2):
        all_call([sender], "become", version)
        figures["transfer_s"] = all_call(ends, "transfer", version)
        all_call(receivers, "activate", version)
    all_call([sender], "become", 3)
    for end in ends:
        end.call("transfer", 3)
    started = {id(end): end.calls for end in ends}
    time.sleep(options.after_s)
    victim, rest = receivers[0], [sender, *receivers[1:]]
    os.kill(victim.process.pid or 0, signal.SIGSTOP if options.stop else signal.SIGKILL)
    died = time.monotonic()
    for end in rest:
        end.call("regroup", 2, members[1:])
    figures["broke"] = sorted({end.answer(started[id(end)])[0] for end in rest})
    figures["broke_s"] = time.monotonic() - died
    for end in rest:
        text, _ = end.answer()
        if text:
            raise SystemExit(f"regroup: {text}")
    figures["regroup_s"] = time.monotonic() - died
    if rest[1:]:
        all_call(rest, "transfer", 3)
        all_call(rest[1:], "activate", 3)
        all_call(rest[1:], "equals", 3)
    victim.process.kill()
    new = End(options, 0, store.port)
    new.answer(-1)
    ends = [sender, new, *rest[1:]]
    figures["rejoin_s"] = all_call(ends, "regroup", 3, members)
    all_call(ends, "transfer", 3)
    all_call(ends[1:], "activate", 3)
    all_call(ends[1:], "equals", 3)
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
    for end in ends:
        end.process.kill()


if __name__ == "__main__":
    main()
