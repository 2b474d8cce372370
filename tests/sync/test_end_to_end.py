"""Weight sync in a real training run without worker processes.

If one tensor of one replica is wrong, the run ends with an error that names both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.config import Config, ModelShape
from millrace.decode import engine as torch_rollout
from millrace.decode.engine import TorchRolloutEngine
from millrace.errors import SyncError
from millrace.models.model import eos_ids, load_model, write_shape
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.ports import TransferReport
from millrace.replicas.pool import RolloutPool
from millrace.rollout.episode import SingleTurn
from millrace.rollout.sample import SampleRoller
from millrace.run.engines import sync_options
from millrace.schedule.ledger import Ledger
from millrace.sync.collective import Receiver, Sender, join_sender
from millrace.train.fsdp import engine as fsdp_train
from millrace.types import Completion, Prompt, SamplingParams, Score, tokens_of
from tests.pipeline.simulated import Record
from tests.sync.fleet import regroup
from tests.waiting import HANG_S

SHAPE = ModelShape(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)
BROKEN = "model.layers.1.mlp.up_proj.weight"


class OldTensor(TorchRolloutEngine):
    """A replica whose swap silently keeps one old tensor, from version `since` on."""

    since = 2

    async def swap(self, version: int, staged: Mapping[str, Tensor]) -> float:
        live = self.weights()
        return await super().swap(
            version, {**staged, BROKEN: live[BROKEN].clone()} if version >= self.since else staged
        )


class Sync:
    """A sender and receivers without workers, with the methods that remote.py calls."""

    def __init__(self, sender: Sender, receivers: Sequence[Receiver]) -> None:
        self.sender = sender
        self.receivers = receivers
        self.sent = -1

    async def keep(self, version: int) -> None:
        await self.sender.keep(version)
        self.sent = version

    async def transfer(self, version: int) -> TransferReport:
        if version == self.sent:
            return (await asyncio.gather(*(r.transfer(version) for r in self.receivers)))[0]
        sending = asyncio.to_thread(asyncio.run, self.sender.transfer(version))  # type: ignore[arg-type]
        reports = await asyncio.gather(sending, *(r.transfer(version) for r in self.receivers))
        return reports[0]  # type: ignore[return-value]

    async def activate(self, version: int) -> float:
        return max(await asyncio.gather(*(r.activate(version) for r in self.receivers)))


class Prompts:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, tokens_of([2 + index % 5, 3]), "", "d")


class Reward:
    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return [Score(float(len(one.text) % 2)) for one in completions]

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def config(**schedule: object) -> Config:
    return Config(
        trainer={"device": "cpu"},
        rollout={
            "n": 2,
            "n_gpus_per_node": 2,
            "max_prompt_length": 8,
            "max_response_length": 8,
            "max_num_seqs": 16,
        },
        actor={"ppo_mini_batch_size": 2, "optim": {"lr": 1e-2}},
        async_training=schedule,
        sync={"timeout_s": HANG_S},
    )


async def train(
    folder: str, c: Config, second: type[TorchRolloutEngine], samples: int = 12
) -> tuple[Record, list[TorchRolloutEngine]]:
    """Run a training with two replicas; the second one has class `second`."""
    engine = fsdp_train.build(c, folder, rank=0, world_size=1)
    engine.restart(c.actor.optim, samples)
    # These weights differ from the trainer's, which arrive with the first sync.
    model = load_model(folder, seed=9, dtype="float32")
    broken = second(model, eos_ids=eos_ids(model), slots=16, max_len=16)
    replicas = [torch_rollout.build(c.sides, c.model, folder), broken]
    store = dist.HashStore()
    joined = await asyncio.gather(
        join_sender(engine, store, 0, sync_options(c)),
        *(Receiver.join(replica, store, i, sync_options(c)) for i, replica in enumerate(replicas)),
    )
    await regroup(joined[:1], dict(enumerate(joined[1:])))
    ledger = Ledger(c.schedule, samples)
    queue = SampleQueue(ledger, deadline_s=HANG_S)
    roller = SampleRoller(
        SingleTurn(), Reward(), lambda tokens: " " * sum(tokens), SamplingParams(8), 2, seed=0
    )
    rollouter, record = Rollouter(queue, Prompts(), RolloutPool(replicas), roller), Record(ledger)
    sync = Sync(joined[0], joined[1:])  # type: ignore[arg-type]
    turns = turns_of(False, rollouter.pool, engine)
    trainer = Trainer(queue, rollouter, engine, turns, sync, record)
    await trainer.begin()
    try:
        assert await run_pipeline(rollouter, trainer)
    finally:
        records.append(record)
    for name, tensor in engine.full_weights():
        assert all(torch.equal(replica.weights()[name], tensor) for replica in replicas), name
    return record, replicas


records: list[Record] = []


@pytest.fixture
def model(tmp_path: Path) -> str:
    records.clear()
    write_shape(tmp_path, SHAPE, vocab_size=24, eos_token_id=1, max_position_embeddings=64)
    return str(tmp_path)


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("on_sync", ["drain", "interrupt", "swap"])
def test_both_replicas_end_with_the_trainers_weights_bit_for_bit(
    model: str, on_sync: str, overlap: bool
) -> None:
    schedule = {"on_sync": on_sync, "staleness_threshold": 1.0, "overlap_sync": overlap}
    record, replicas = asyncio.run(train(model, config(**schedule), TorchRolloutEngine))
    assert all(("timing_s/sync_keep" in row) == overlap for row in record.rows[:-1])
    assert [r.version for r in replicas] == [6, 6] and len(record.rows) == 6


@pytest.mark.parametrize("on_sync", ["drain", "interrupt", "swap"])
def test_a_replica_that_keeps_one_old_tensor_ends_the_run_before_its_version_counts(
    model: str, on_sync: str
) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(train(model, config(on_sync=on_sync, staleness_threshold=0.5), OldTensor))
    cause = leaf(caught.value)
    assert isinstance(cause, SyncError)
    assert (
        f"replica 1: live weights of version 2 are not the trainer's: {BROKEN} differ in checksum"
        in str(cause)
    )
    assert [row["version"] for row in records[0].rows] == [1] and len(records[0].cuts) == 1


def test_a_broken_replica_is_found_by_the_first_sync_too(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OldTensor, "since", 0)
    with pytest.raises(SyncError, match="replica 1: live weights of version 0"):
        asyncio.run(train(model, config(), OldTensor))
