"""The proof of real engines: healthy ones pass, and each planted fault exceeds its limit twofold.

The model is small and random, with weights so large that a permuted context moves log-probs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from millrace.config import Config
from millrace.observe.gap import DISPLACED, TRUE, Verdict
from tests import proving
from tests.proving import ChatPrompts, small_model
from tests.sweeps import sweep

LIMIT = 5e-5
FAR = 1e4
"""A budget that no machine needs. Otherwise, a slow one compares less."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small_model(str(folder))
    return str(folder)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    yield


def config(model: str, response: int = 48, **keys: Any) -> Config:
    rollout = {
        "max_prompt_length": 64,
        "max_response_length": response,
        "max_num_seqs": 12,
        "session_kv_slots": 12,
    }
    return Config(
        trainer={"device": "cpu"},
        model={"path": model} | keys,
        rollout=rollout,
        actor={"ppo_mini_batch_size": 8},
    )


def prove(c: Config, use: Callable[[proving.Engines], Any], *, of: str | None = None) -> Any:
    async def main() -> Any:
        prompts = ChatPrompts(str(c.model.path), 128)
        async with proving.engines(c, str(c.model.path), prompts, rollout_folder=of) as one:
            return await use(one)

    return asyncio.run(main())


@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16"}, {"lora_rank": 4}])
def test_healthy_engines_pass_and_their_weights_come_back_bit_for_bit(
    model: str, keys: dict[str, Any]
) -> None:
    async def use(one: proving.Engines) -> tuple[Verdict, list[str]]:
        lines: list[str] = []
        before = {name: t.clone() for name, t in one.train.full_weights()}
        verdict = await one.prove(budget_s=FAR, note=lines.append)
        live = one.rollout.weights()
        for name, tensor in one.train.full_weights():
            assert torch.equal(tensor, before[name]), name
            assert torch.equal(live[name], tensor.to(live[name].dtype)), name
        assert one.rollout.version == 0
        return verdict, lines

    if "lora_rank" in keys:
        pytest.importorskip("peft")
    verdict, (line,) = prove(config(model, **keys), use)
    assert verdict.error() is None and verdict.explained
    assert verdict.rounds[TRUE].tokens > 300 and verdict.rounds[DISPLACED].tokens > 300
    assert "engines proven" in line and "1 to 12 requests at once" in line


def test_every_planted_fault_exceeds_its_limit_twofold(model: str) -> None:
    """A sync of the true weights ends each fault, so that the engines are healthy at the end."""

    async def use(one: proving.Engines) -> None:
        for seed, (name, plant) in enumerate({**proving.ANY, **proving.TORCH}.items()):
            with plant(one):
                verdict = await one.prove(seed, FAR)
            over = max((f.value / f.limit for f in verdict.findings), default=0.0)
            assert over > 2 and verdict.causes, (name, over)
            await one.sync.transfer(0)
            await one.sync.activate(0)
        assert (await one.prove(100, FAR)).error() is None

    prove(config(model), use)


@pytest.mark.parametrize("dtype", sweep(["float32", "bfloat16"], "bfloat16".__eq__))
def test_a_fault_of_the_last_positions_of_long_responses_is_found(model: str, dtype: str) -> None:
    """In bfloat16, the mean of all tokens hides it."""

    async def use(one: proving.Engines) -> list[Verdict]:
        verdicts = [await one.prove(0, FAR)]
        for plant in proving.LONG.values():
            with plant(one):
                verdicts.append(await one.prove(1, FAR))
        return verdicts

    healthy, *wrong = prove(config(model, 800, dtype=dtype), use)
    assert healthy.error() is None
    for verdict in wrong:
        assert max((f.value / f.limit for f in verdict.findings), default=0.0) > 2


def test_another_base_of_rope_is_found(model: str) -> None:
    with proving.changed(model, proving.rope) as wrong:
        verdict = prove(config(model), lambda one: one.prove(0, FAR), of=wrong)
    error = verdict.error()
    assert error is not None and "model.path" not in str(error).partition("Likely")[0]
    assert any("rope" in cause for cause in verdict.causes)


def test_a_part_that_no_sync_reaches_is_found_with_displaced_weights_alone(model: str) -> None:
    async def use(one: proving.Engines) -> Verdict:
        with proving.unsynced_layer(one):
            return await one.prove(0, FAR)

    verdict = prove(config(model), use)
    assert {f.where for f in verdict.findings} == {DISPLACED}
    assert verdict.rounds[TRUE].mean < LIMIT < verdict.rounds[DISPLACED].mean
    assert "sync" in verdict.causes[0]


def test_a_deadline_ends_the_draws_and_the_rest_is_compared(model: str) -> None:
    verdict = prove(config(model), lambda one: one.prove(budget_s=1e-9))
    assert verdict.error() is None
