"""What each of two ranks does with weights, states and a sync, for one shape after the other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from millrace.decode import engine as rollout
from millrace.extras.megatron import engine as megatron
from millrace.models.model import load_model
from millrace.run.engines import sync_options
from millrace.sync.buckets import Spec
from millrace.sync.collective import Receiver, join_sender
from millrace.sync.table import check_cover
from millrace.train.fsdp import engine as fsdp
from tests.train.megatron import shim
from tests.train.megatron.cases import (
    CP,
    EP,
    HORIZON,
    MODELS,
    OPTIM,
    OVERLAP,
    PLAIN,
    PP,
    SP,
    TP,
    Case,
    batches,
    config_of,
)  # fmt: skip

CASES = {
    "TP2": Case("qwen2", TP),
    "TP2, one KV head": Case("one KV head", TP),
    "TP2, q and k norms": Case("qwen3", SP),
    "TP2, llama": Case("llama", TP),
    "PP2, tied": Case("qwen2", PP),
    "PP2, untied": Case("qwen3", PP),
    "DP2": Case("qwen2", PLAIN),
    "DP2, distributed optimizer": Case("qwen3", OVERLAP),
    "CP2": Case("llama", CP),
    "EP2": Case("qwen3_moe", EP),
    "EP2, mixtral": Case("mixtral", EP),
    "PP2, experts": Case("mixtral", PP),
    "TP2, ETP2": Case("qwen3_moe", SP),
    "TP2, EP2": Case("mixtral", SP | EP | {"expert_tensor_parallel_size": 1}),
}


FAST = {"TP2", "TP2, one KV head", "PP2, tied", "DP2, distributed optimizer", "CP2", "TP2, EP2"}
"""The cases that are not slow."""
SYNCS = {"TP2": Case("qwen2", TP), "PP2": Case("qwen3", PP), "EP2": Case("mixtral", EP)}
"""Shapes that send to a rollout engine of torch."""


def run_rank(rank: int, folder: str, names: Sequence[str]) -> None:
    """Run the cases in one of two processes, and write its results. A third is the replica."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank == 2:
        torch.save({name: run_replica(name, folder) for name in SYNCS}, f"{folder}/replica.pt")
        return
    shim.install()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results: dict[str, Any] = {f"{name} sync": run_sender(name, folder, rank) for name in SYNCS}
    results |= {name: run_case(name, folder, rank) for name in CASES if name in names}
    for dtype, chains in (("float32", CHAINS), ("bfloat16", HALF_CHAINS)):
        for model, chain in chains.items():
            if dtype == "float32":
                state = f"{folder}/{model} state of fsdp"
                run_again(folder, model, chain[0], state, f"{state} again", rank)
            if dtype == "float32" or f"{model} {dtype}" in names:
                results[f"{model} {dtype}"] = run_states(folder, model, chain, dtype, rank)
    torch.save(results, f"{folder}/weights-{rank}.pt")
    dist.destroy_process_group()


def run_sender(name: str, folder: str, rank: int) -> list[dict[str, Any]]:
    """Send three versions, the last one from a copy while the engine steps. Return them."""
    case, sent = SYNCS[name], []
    config = config_of("megatron", case.keys, 2)
    engine = megatron.build(config, f"{folder}/{case.model}", rank=rank, world_size=2)
    engine.restart(OPTIM, HORIZON)
    store = dist.FileStore(f"{folder}/sync {name}", 3)

    async def main() -> None:
        sender = await join_sender(engine, store, rank, sync_options(config))
        await sender.regroup(1, [0])
        for version in range(3):
            sent.append({n: t.clone() for n, t in engine.full_weights()})
            await (sender.keep if version == 2 else sender.transfer)(version)
            await engine.step(batches()[version % 2])
        await sender.sent()

    asyncio.run(main())
    asyncio.run(engine.close())
    return sent


def run_replica(name: str, folder: str) -> list[dict[str, Any]]:
    """Receive three versions, prove and serve them. Return the weights that are live then."""
    case, live = SYNCS[name], []
    config = config_of("megatron", case.keys, 2)
    replica = rollout.build(config.sides, config.model, f"{folder}/{case.model}")
    store = dist.FileStore(f"{folder}/sync {name}", 3)

    async def main() -> None:
        receiver = await Receiver.join(replica, store, 0, sync_options(config))
        await receiver.regroup(1, [0])
        for version in range(3):
            await receiver.transfer(version)
            await receiver.activate(version)
            live.append({n: t.clone() for n, t in replica.weights().items()})
        await replica.close()

    asyncio.run(main())
    return live


def run_case(name: str, folder: str, rank: int, device: str = "cpu") -> dict[str, Any]:
    case = CASES[name]
    config = config_of("megatron", case.keys, 2, device=device)
    engine = megatron.build(config, f"{folder}/{case.model}", rank=rank, world_size=2)
    found: dict[str, Any] = {
        "shards": [(n, w, d, first, t.clone()) for n, w, d, first, t in engine.shards()],
        "whole": {n: t.clone() for n, t in engine.full_weights()},
    }
    target = f"{folder}/{name} exported"
    if rank == 0:
        Path(target).mkdir()
    dist.barrier()
    asyncio.run(engine.export(target))
    asyncio.run(engine.close())
    return found


CHAINS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [TP, PP, OVERLAP, CP, TP],
    "mixtral": [EP, SP, PP, SP | EP | {"expert_tensor_parallel_size": 1}, EP],
}
"""Shapes of a model. Each loads the state that the one before it saved. The last is the first."""
HALF_CHAINS: dict[str, list[dict[str, Any]]] = {"qwen2": [OVERLAP, TP | PLAIN, PP, OVERLAP]}
"""The same with weights in bfloat16, of which the optimizer has float32 copies."""


def write_models(folder: str) -> None:
    """Write every model. Also norms and biases differ from their defaults, and -0.0 stays -0.0."""
    for name, hf in MODELS.items():
        hf.save_pretrained(f"{folder}/{name}")
        model = load_model(f"{folder}/{name}", seed=1, dtype="float32")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) / 10).view(-1)[0] = -0.0
        model.save_pretrained(f"{folder}/{name}")
    for name in CHAINS:
        engine = fsdp_engine(folder, name)
        asyncio.run(engine.step(batches()[0]))
        asyncio.run(engine.save(f"{folder}/{name} state of fsdp"))
        asyncio.run(engine.close())


def fsdp_engine(folder: str, name: str, device: str = "cpu") -> Any:
    config = config_of("fsdp", {}, 1, device=device)
    engine = fsdp.build(config, f"{folder}/{name}", rank=0, world_size=1)
    engine.restart(OPTIM, HORIZON)
    return engine


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def check_whole(folder: str, name: str, ranks: Sequence[Any], want: dict[str, Any]) -> None:
    """Check that whole weights and the exported folder are bit for bit those of the folder."""
    for rank in ranks:
        assert list(rank["whole"]) == list(want)
        for key, tensor in rank["whole"].items():
            assert torch.equal(bits(tensor), bits(want[key])), key
    exported = AutoModelForCausalLM.from_pretrained(f"{folder}/{name} exported")
    for key, tensor in exported.named_parameters():
        assert torch.equal(bits(tensor), bits(want[key])), key


def check_rows(name: str, ranks: Sequence[Any], want: dict[str, Any]) -> None:
    """Check that the rows that ranks send cover every tensor once."""
    first_rank = ranks[0]["shards"]
    specs = [Spec(n, shape, "float32") for n, shape, *_ in first_rank]
    assert [(s.name, s.shape) for s in specs] == [(n, tuple(t.shape)) for n, t in want.items()]
    table = {}
    for number, rank in enumerate(ranks):
        assert [s[:3] for s in rank["shards"]] == [s[:3] for s in first_rank]
        table[number] = {n: (a, len(t)) for n, _, _, a, t in rank["shards"] if len(t)}
        for key, _, _, first, rows in rank["shards"]:
            assert torch.equal(bits(rows), bits(want[key][first : first + len(rows)])), key
    check_cover(specs, table)
    if "TP2" in name or "PP2" in name or "EP2" in name:
        sizes = [sum(t.numel() for *_, t in rank["shards"]) for rank in ranks]
        assert max(sizes) < 0.8 * sum(sizes), "both ranks send"


def tensors_of(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a state on disk, by their keys."""
    if isinstance(state, dict):
        parts = [tensors_of(value, f"{name}.{key}") for key, value in state.items()]
        return {key: tensor for part in parts for key, tensor in part.items()}
    return {name: state} if isinstance(state, torch.Tensor) else {}


def read(folder: str, target: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder, target)
    return tensors_of(torch.load(target, weights_only=False))


def check_same_state(first: dict[str, torch.Tensor], last: dict[str, torch.Tensor]) -> None:
    assert first.keys() == last.keys() and len(first) > 40
    assert all(torch.equal(last[key], tensor) for key, tensor in first.items())


def run_again(
    folder: str,
    model: str,
    keys: dict[str, Any],
    saved: str,
    again: str,
    rank: int,
    device: str = "cpu",
) -> None:
    """Load the state `saved` in a shape, and save it as `again`."""
    config = config_of("megatron", keys, 2, device=device)
    engine = megatron.build(config, f"{folder}/{model}", rank=rank, world_size=2)
    engine.restart(OPTIM, HORIZON)
    asyncio.run(engine.load(saved))
    asyncio.run(engine.save(again))
    asyncio.run(engine.close())


def run_states(
    folder: str, model: str, chain: list[dict[str, Any]], dtype: str, rank: int, device: str = "cpu"
) -> dict[str, Any]:
    """Return the weights and metrics of a step before and after a way through all shapes."""

    def built(keys: dict[str, Any]) -> Any:
        config = config_of("megatron", keys, 2, device=device, dtype=dtype)
        engine = megatron.build(config, f"{folder}/{model}", rank=rank, world_size=2)
        engine.restart(OPTIM, HORIZON)
        return engine

    def stepped(engine: Any) -> dict[str, Any]:
        metrics = asyncio.run(engine.step(batches()[1])).metrics
        weights = {n: t.clone() for n, t in engine.full_weights()}
        assert all(p.main_grad.dtype is torch.float32 for p in engine.policy.parameters())
        asyncio.run(engine.close())
        return {"metrics": metrics, "weights": weights}

    def path(number: int) -> str:
        return f"{folder}/{model} {dtype} state {number}"

    first, *others, last = chain
    engine = built(first)
    asyncio.run(engine.step(batches()[0]))
    asyncio.run(engine.save(path(0), staged=True))
    want = stepped(engine)  # while the state is written
    for number, keys in enumerate(others):
        engine = built(keys)
        asyncio.run(engine.load(path(number)))
        asyncio.run(engine.save(path(number + 1)))
        asyncio.run(engine.close())
    engine = built(last)
    asyncio.run(engine.load(path(len(others))))
    return {"want": want, "got": stepped(engine), "last": path(len(others))}
