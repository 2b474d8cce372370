"""Tests of staged saves: a checkpoint has the exact bits of the state when `save` was called.

Training may continue while the checkpoint is written. A failed write raises an error.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from millrace.config import Config, OptimConfig
from millrace.errors import CheckpointError
from millrace.ports import TrainBatch
from millrace.train import state_writer
from millrace.train.fsdp import engine as fsdp_train
from millrace.train.fsdp.engine import FsdpTrainEngine
from millrace.train.state_writer import StateWriter, on_host
from tests.decode.helpers import folder as model_folder
from tests.train.forks import GROUP, start_ranks
from tests.train.samples import random_samples
from tests.waiting import HANG_S, until

WITH_ALL_MODELS = {"actor": {"use_kl_loss": True}, "algorithm": {"adv_estimator": "gae"}}
CASES: dict[str, dict[str, Any]] = {
    "a policy": {},
    "with a critic and a reference": WITH_ALL_MODELS,
    "sharded over one rank": {"model": {"dtype": "bfloat16"}},
    "adapters and their reference": {"model": {"lora_rank": 2}, "actor": {"use_kl_loss": True}},
}


class Gate:
    """A gate that blocks the real `save_checkpoint` until it opens.

    It records the names of the writing threads.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.writers: set[str] = set()
        real = state_writer.save_checkpoint

        def held(*args: Any, **kwargs: Any) -> Any:
            self.writers.add(threading.current_thread().name)
            assert self.open.wait(HANG_S)
            return real(*args, **kwargs)

        patch.setattr(state_writer, "save_checkpoint", held)


def engine_of(overrides: dict[str, Any], rank: int = 0, world_size: int = 1) -> FsdpTrainEngine:
    torch.set_num_threads(1)
    lengths = {"max_prompt_length": 8, "max_response_length": 25}
    config = Config(trainer={"device": "cpu"}, rollout=lengths, **overrides)
    engine = fsdp_train.build(config, str(model_folder()), rank=rank, world_size=world_size)
    engine.restart(OptimConfig(lr=1e-2), 10)
    return engine


def batch(seed: int) -> TrainBatch:
    return TrainBatch(random_samples(seed, [4, 2, 3]), 0)


async def save_both_ways(
    engine: FsdpTrainEngine, folder: Path, gate: Gate, *, held: bool = True
) -> None:
    """Save the same state at once and staged, then save a later state.

    If `held`, this rank writes nothing of the staged save before two more steps are done.
    """
    await engine.step(batch(0))
    await engine.save(str(folder / "at once"))
    if held:
        gate.open.clear()
    await engine.save(str(folder / "staged"), True)
    for seed in (1, 2):
        await engine.step(batch(seed))
    assert not (folder / "staged" / ".metadata").exists(), "steps do not wait for it"
    gate.open.set()
    await engine.saved()
    await engine.save(str(folder / "later"))


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, by its path in the state."""
    dcp_to_torch_save(folder, folder.with_suffix(".pt"))

    def walk(value: Any, path: str) -> dict[str, Tensor]:
        if isinstance(value, Tensor):
            return {path: value}
        parts = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list | tuple)
            else ()
        )
        return {name: t for key, part in parts for name, t in walk(part, f"{path}/{key}").items()}

    return walk(torch.load(folder.with_suffix(".pt"), weights_only=False), "")


def check_bits(folder: Path) -> dict[str, Tensor]:
    at_once, staged, later = (tensors(folder / name) for name in ("at once", "staged", "later"))
    assert list(staged) == list(at_once)
    assert [
        name
        for name, t in staged.items()
        if t.dtype != at_once[name].dtype or not torch.equal(t, at_once[name])
    ] == []
    assert any(not torch.equal(t, later[name]) for name, t in staged.items()), (
        "the state has gone on"
    )
    return staged


@pytest.mark.parametrize("case", CASES)
def test_a_staged_save_has_the_bits_of_the_cut_though_the_engine_steps_on(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "adapters" in case:
        pytest.importorskip("peft")
    gate, engine = Gate(monkeypatch), engine_of(CASES[case])
    asyncio.run(save_both_ways(engine, tmp_path, gate))
    asyncio.run(engine.close())
    names = check_bits(tmp_path)
    assert {"/random", "/kl_coef", "/steps"} <= set(names) and any(
        name.endswith("/exp_avg") for name in names
    )
    if CASES[case] == WITH_ALL_MODELS:
        assert {name.split("/")[1] for name in names} >= {
            "model",
            "optimizer",
            "critic",
            "reference",
        }
    assert gate.writers == {threading.current_thread().name, "state-writer_0"}, (
        "what is saved at once needs no thread"
    )


def test_who_gives_up_waiting_does_not_end_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, engine = Gate(monkeypatch), engine_of(next(iter(CASES.values())))

    async def main() -> None:
        gate.open.clear()
        await engine.save(str(tmp_path), True)
        waiting = asyncio.ensure_future(engine.saved())
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
        asyncio.get_running_loop().call_later(0.2, gate.open.set)
        await engine.saved()
        assert (tmp_path / ".metadata").exists(), "it was still being written"

    asyncio.run(main())
    asyncio.run(engine.close())


def two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    with pytest.MonkeyPatch.context() as patch:
        gate, engine = Gate(patch), engine_of(WITH_ALL_MODELS, rank, 2)
        # Rank 1's writer thread waits for rank 0's writer thread in a collective. Meanwhile, both
        # ranks take part in the collectives of two training steps.
        asyncio.run(save_both_ways(engine, Path(folder), gate, held=rank == 0))
        if rank == 1:
            (Path(folder) / "file").write_text("")
        with pytest.raises(
            CheckpointError, match=r"file/engine was not written: rank \d: \w+Error: "
        ):
            asyncio.run(save_into_a_file(engine, Path(folder) / "file" / "engine"))
        asyncio.run(engine.step(batch(5)))
    dist.destroy_process_group()


async def save_into_a_file(engine: FsdpTrainEngine, folder: Path) -> None:
    await engine.step(batch(4))
    await engine.save(str(folder), True)
    await engine.step(batch(5))
    await engine.saved()


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
def test_ranks_agree_on_a_staged_save_while_they_train(tmp_path: Path) -> None:
    """Ranks write a staged save together while they train, and every rank reports a failure."""
    start_ranks(two_ranks, (str(tmp_path),), 2)
    check_bits(tmp_path)


@pytest.mark.parametrize("staged", [True, False])
async def test_what_cannot_be_written_is_an_error_with_its_folder_and_reason_and_the_next_save_is_its_own(
    tmp_path: Path, staged: bool
) -> None:
    (tmp_path / "file").write_text("")
    engine = engine_of({})
    with pytest.raises(
        CheckpointError,
        match=r"file/engine was not written: rank 0: NotADirectoryError: .*file/engine",
    ):
        await engine.save(str(tmp_path / "file" / "engine"), staged)
        await engine.saved()
    await engine.saved()
    await engine.save(str(tmp_path / "good"), staged)
    await engine.saved()
    assert (tmp_path / "good" / ".metadata").is_file()


async def test_at_most_one_save_is_under_way_and_an_engine_is_not_closed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, engine = Gate(monkeypatch), engine_of({})
    gate.open.clear()
    await engine.save(str(tmp_path / "first"), True)
    second = asyncio.ensure_future(engine.save(str(tmp_path / "second"), True))
    await asyncio.sleep(0.05)
    assert not second.done()
    gate.open.set()
    await second
    assert (tmp_path / "first" / ".metadata").is_file()
    await engine.close()
    assert (tmp_path / "second" / ".metadata").is_file()


def test_a_copy_is_whole_of_the_same_layout_and_gone_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    state = {"a": [weight, (1, "x")], "b": torch.tensor(3)}
    copy = on_host(state)
    assert (
        copy["a"][1] == (1, "x")
        and torch.equal(copy["a"][0], weight)
        and copy["a"][0].stride() == weight.stride()
    )
    assert copy["a"][0].data_ptr() != weight.data_ptr() and not copy["a"][0].requires_grad

    copies: list[weakref.ref[Tensor]] = []

    def remember(value: Any) -> Any:
        copies.append(weakref.ref(copied := value["w"].clone()))
        return {"w": copied}

    monkeypatch.setattr(state_writer, "on_host", remember)
    writer = StateWriter(timeout_s=HANG_S)
    writer.start({"w": torch.ones(3)}, str(tmp_path))
    asyncio.run(writer.done())
    # The thread reports the end before it frees the copy, and does not keep it until the next save.
    until(lambda: copies[0]() is None)
