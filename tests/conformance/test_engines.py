"""Tests that every implementation of a port conforms to the port.

Implementations: an engine in a worker, a pool, an engine on several ranks, and simulated engines.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from millrace.config import Config, ModelShape
from millrace.ports import Replica
from millrace.process.rpc import Peer
from millrace.replicas.pool import RolloutPool
from millrace.replicas.replica import RemoteRolloutEngine
from millrace.replicas.trainer_group import TrainerGroup
from millrace.runtime.local import LocalRuntime
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimRolloutEngine, SimTrainEngine
from millrace.testing import (
    RolloutCase,
    TrainCase,
    check_replica,
    check_sleeping_train_engine,
    check_train_engine,
)
from tests.random_models import write_random

SHAPE = ModelShape(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)
VOCABULARY = 24
CASE = RolloutCase(length=80)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    write_random(folder, SHAPE, vocab_size=VOCABULARY, eos_token_id=1, max_position_embeddings=256)
    return str(folder)


def config(**trainer: Any) -> Config:
    return Config(
        trainer={"device": "cpu"} | trainer,
        rollout={"max_prompt_length": 96, "max_response_length": 96, "max_num_seqs": 4},
        actor={"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 256, "optim": {"lr": 3e-3}},
    )


def runtime(folder: Path, c: Config) -> LocalRuntime:
    return LocalRuntime(folder, c.sides, gpus=[])


def makers(
    peers: list[Peer], model: str, c: Config
) -> Callable[[int], Awaitable[RemoteRolloutEngine]]:
    """Return a function that builds a fresh engine in worker `i`.

    The check has closed the previous engine, but the worker process is still running.
    """

    async def make(i: int) -> RemoteRolloutEngine:
        await peers[i].call("build", (c.model_dump(mode="json"), model))
        return RemoteRolloutEngine(peers[i])

    return make


def test_a_rollout_engine_in_a_worker_and_a_pool_of_two_conform(tmp_path: Path, model: str) -> None:
    async def main() -> None:
        c = config()
        workers = runtime(tmp_path, c)
        try:
            peers = list(
                await asyncio.gather(
                    *(workers.start(f"rollout-{i}", "rollout", i) for i in range(2))
                )
            )
            make = makers(peers, model, c)

            async def one() -> Replica:
                return await make(0)

            async def pool() -> Replica:
                return RolloutPool(await asyncio.gather(make(0), make(1)))

            await check_replica(one, CASE)
            await check_replica(pool, CASE)
        finally:
            await workers.close()

    asyncio.run(main())


def test_a_train_engine_on_two_ranks_conforms(tmp_path: Path, model: str) -> None:
    """Four workers run two engines at a time, with two ranks each."""

    async def main() -> None:
        c = config(n_gpus_per_node=2)
        workers = runtime(tmp_path, c)
        try:
            peers = await asyncio.gather(
                *(workers.start(f"trainer-{i}", "trainer", i) for i in range(4))
            )
            groups = itertools.cycle([list(peers[:2]), list(peers[2:])])
            joined: dict[str, tuple[str, int]] = {}

            def trainer(ranks: list[Peer]) -> TrainerGroup:
                return TrainerGroup(ranks, cast("Any", None), max_restarts=0)

            async def make() -> TrainerGroup:
                ranks = next(groups)
                name = ranks[0].name
                if name not in joined:
                    joined[name] = await ranks[0].call("listen", (), tuple[str, int])
                    first = [
                        p.call("build", (c.model_dump(mode="json"), model, r, joined[name]))
                        for r, p in enumerate(ranks)
                    ]
                    await asyncio.gather(*first)
                    (tmp_path / name).mkdir()
                    await asyncio.gather(*(p.call("engine.begin", ("rl", 100)) for p in ranks))
                    await trainer(ranks).save(str(tmp_path / name))
                engine = trainer(ranks)
                await engine.begin("rl", 100)
                await engine.load(str(tmp_path / name))
                await engine.begin("rl", 100)
                return engine

            await check_sleeping_train_engine(make, TrainCase(vocab_size=VOCABULARY))
        finally:
            await workers.close()

    asyncio.run(main())


@pytest.mark.parametrize("slots", [1, 3, 64])
@pytest.mark.parametrize("prefill_token_s", [0.0, 0.002])
def test_the_simulated_rollout_engine_conforms_on_the_virtual_clock(
    slots: int, prefill_token_s: float
) -> None:
    async def make() -> Replica:
        return SimRolloutEngine(CostModel(prefill_token_s=prefill_token_s), slots=slots, version=0)

    clock.run(check_replica(make, RolloutCase(timeout_s=1000)))


def test_a_pool_of_simulated_engines_conforms() -> None:
    async def make() -> Replica:
        return RolloutPool([SimRolloutEngine(CostModel(), slots=2, version=0) for _ in range(3)])

    clock.run(check_replica(make, RolloutCase(timeout_s=1000)))


def test_the_simulated_train_engine_learns_nothing_and_so_does_not_conform() -> None:
    """The simulated engine has no weights; it simulates only time.

    The suite must reject it, which shows that the suite can fail.
    """

    async def make() -> SimTrainEngine:
        return SimTrainEngine(CostModel())

    with pytest.raises(AssertionError):
        clock.run(check_train_engine(make))
