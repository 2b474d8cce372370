"""vLLM's linear layers in 8 bits on the CPU: the same sync, the same proof, torch's own kernels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.config import Config
from millrace.errors import SyncError
from millrace.observe.gap import Verdict
from millrace.serving.vllm import arguments
from millrace.sync.eight_bit import quantise
from millrace.train import reference
from millrace.train.rows import rows_of_samples
from millrace.types import Prompt, Sample, SamplingParams, Score, Segment, Trajectory, tokens_of
from tests.proving import ChatPrompts, engines, small_model
from tests.serving.replica import PROMPT, Replica
from tests.serving.test_adapters import Adapted
from tests.sync.fleet import regroup
from tests.vllm.processes import WORKER_IN_CORE

pytestmark = pytest.mark.xdist_group("engines")
PARAMS = SamplingParams(max_tokens=200, ignore_eos=True, seed=5)
LAYER = "model.layers.0.mlp.down_proj.weight"
FUSED = "model.layers.0.mlp.gate_up_proj.weight"


@contextmanager
def replica_in_eight_bits(
    runner: asyncio.Runner, folder: Path, **rollout: Any
) -> Iterator[Replica]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        rollout["quantization"] = "fp8"
        made = Replica(folder, rollout=rollout, dtype="bfloat16")
        runner.run(made.start(patch))
        runner.run(made.publish(0, 1))
        yield made
        runner.run(made.engine.close())


@pytest.fixture(scope="module")
def eight(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica_in_eight_bits(runner, tmp_path_factory.mktemp("eight")) as made:
        yield made


def expected(replica: Replica, seed: int, segments: tuple[Segment, ...], *, eight_bit: bool) -> Any:
    """Return the log-probs of an independent model in float32, after PROMPT."""
    prompt = Prompt(0, tokens_of(PROMPT), "", "test")
    sample = Sample(prompt, (Trajectory.of(segments, Score(0.0)),))
    found = reference.log_probs_and_ranks(
        str(replica.folder), replica.models[seed].named_parameters(), rows_of_samples((sample,)),
        1.0, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False,
        computes=True, seconds=60, eight_bit=eight_bit,
    )  # fmt: skip
    return found[0, :-1].numpy()


def check_served(replica: Replica, runner: asyncio.Runner, version: int, seed: int) -> None:
    """Publish a version. Log-probs are those of its model in 8 bits, and not of that in 16."""
    runner.run(replica.publish(version, seed))
    segments = runner.run(replica.engine.generate(tokens_of(PROMPT), PARAMS, "s"))
    assert [s.version for s in segments] == [version]
    drawn = np.array([x for s in segments for x in s.log_probs])
    exact = expected(replica, seed, segments, eight_bit=False)
    change = expected(replica, seed, segments, eight_bit=True) - exact
    part = ((drawn - exact) @ change) / (change @ change)
    # Of the change that 8 bits make. Activations in bfloat16 round in part to other numbers.
    assert 0.3 < part < 1.3, part


def test_every_sync_changes_what_is_served(eight: Replica, runner: asyncio.Runner) -> None:
    for version, seed in ((1, 1), (2, 2), (3, 1), (4, 3)):
        check_served(eight, runner, version, seed)


def test_live_weights_are_the_bits_of_the_rule(eight: Replica, runner: asyncio.Runner) -> None:
    """The reference is NumPy and torch's cast of a number. Norms and embeddings keep 16 bits."""
    runner.run(eight.publish(10, 2))
    (live,) = runner.run(eight.engine.call_workers("live_weights"))
    kinds = {name: dtype for name, (dtype, _) in live.items() if "attn.attn" not in name}
    assert {n for n, d in kinds.items() if d == "torch.float8_e4m3fn"} == {
        n for n in kinds if n.endswith("proj.weight")
    }
    assert {d for n, d in kinds.items() if "norm" in n or "embed" in n} == {"torch.bfloat16"}
    exact = eight.models[2].get_parameter(LAYER).detach().float().numpy()
    scales = (np.abs(exact).max(1, keepdims=True) / np.float32(448)).astype(np.float32)
    numbers = torch.from_numpy(exact / scales).to(torch.float8_e4m3fn).float()
    assert live[LAYER][1] == numbers.flatten()[:8].tolist()
    assert live[f"{LAYER}_scale"][1] == scales[:8, 0].tolist()


def test_a_repeated_load_is_copies_alone(eight: Replica, runner: asyncio.Runner) -> None:
    weights = [n for n, _ in eight.models[1].named_parameters()]
    scales = sum(name.endswith("proj.weight") for name in weights)
    for version in (20, 21):
        runner.run(eight.publish(version, 1))
    copies = runner.run(eight.engine.call_workers("copies_of_a_load"))
    assert copies == [len(weights) + scales]


def test_a_load_that_changes_nothing_is_not_served(eight: Replica, runner: asyncio.Runner) -> None:
    runner.run(eight.publish(40, 1))
    runner.run(eight.engine.call_workers("load_nothing"))
    with pytest.raises(SyncError, match="are not the trainer's"):
        runner.run(eight.publish(41, 3))
    runner.run(eight.publish(42, 3))


def test_a_version_that_arrived_is_staged_once_it_is_quantised(
    eight: Replica, runner: asyncio.Runner
) -> None:
    """A transfer breaks off elsewhere. The replica says that it has the version, and serves it."""

    async def main() -> list[int | None]:
        await eight.publish(50, 1)
        await eight.engine.call_workers("hold_quantising")
        eight.current = eight.models[2]
        receiving = asyncio.ensure_future(eight.receiver.transfer(51))
        await asyncio.to_thread(asyncio.run, eight.sender.transfer(51))
        regrouping = asyncio.ensure_future(regroup([eight.sender], {0: eight.receiver}, 2))
        await asyncio.wait([regrouping], timeout=3)
        if not regrouping.done():
            await eight.engine.call_workers("go_on_quantising")
        staged = await regrouping
        await eight.receiver.activate(51)
        await receiving
        return staged

    assert runner.run(main()) == [51]
    (live,) = runner.run(eight.engine.call_workers("live_weights"))
    numbers, _ = quantise(eight.models[2].get_parameter(LAYER).detach())
    assert live[LAYER][1] == numbers.float().flatten()[:8].tolist()


def test_another_trainer_sends_to_the_same_replica(eight: Replica, runner: asyncio.Runner) -> None:
    runner.run(eight.publish(60, 1))
    runner.run(eight.join())
    for version, seed in ((61, 2), (62, 3)):
        runner.run(eight.publish(version, seed))
    scales = quantise(eight.models[3].get_parameter(LAYER).detach())[1]
    (live,) = runner.run(eight.engine.call_workers("live_weights"))
    assert live[f"{LAYER}_scale"][1] == scales[:8, 0].tolist()


def test_adapters_are_merged_before_weights_become_8_bits(
    eight: Replica, runner: asyncio.Runner, tmp_path: Path
) -> None:
    adapted = Adapted(tmp_path, rollout={"quantization": "fp8"}, dtype="bfloat16")
    adapted.engine = eight.engine
    runner.run(adapted.join())
    for version, seed in ((80, 1), (81, 2), (82, 3)):
        runner.run(adapted.publish(version, seed))
        (live,) = runner.run(adapted.engine.call_workers("live_weights"))
        numbers, scales = quantise(adapted.models[seed].get_parameter(LAYER).detach())
        assert live[f"{LAYER}_scale"][1] == scales[:8, 0].tolist()
        assert live[LAYER][1] == numbers.float().flatten()[:8].tolist()
    runner.run(eight.join())


def test_scales_that_change_places_are_not_served(eight: Replica, runner: asyncio.Runner) -> None:
    """The bit sum of the scales is right. A loader that fuses parts in another order does this."""
    runner.run(eight.join())
    runner.run(eight.engine.call_workers("load_scales_in_another_order", FUSED))
    with pytest.raises(SyncError, match=f"{FUSED}_pairs"):
        runner.run(eight.publish(70, 1))
    runner.run(eight.publish(71, 2))


@pytest.mark.xdist_group("two devices")  # It shares no engine.
def test_two_devices_of_a_replica_have_their_parts(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Rows of a weight, or columns, whose scales are then on both devices."""
    two = {"tensor_model_parallel_size": 2, "n_gpus_per_node": 2}
    with replica_in_eight_bits(runner, tmp_path, **two) as replica:
        for version, seed in ((1, 2), (2, 1)):
            check_served(replica, runner, version, seed)
        runner.run(replica.engine.call_workers("double_scale", LAYER))
        with pytest.raises(SyncError, match=f"{LAYER}_scale changed"):
            runner.run(replica.transfer(3, 2))


def test_a_wrong_scale_is_not_served(eight: Replica, runner: asyncio.Runner) -> None:
    """The next sync sees a scale that changes behind the replica's back. This test comes last."""
    runner.run(eight.publish(30, 1))
    runner.run(eight.engine.call_workers("double_scale", LAYER))
    with pytest.raises(SyncError, match=f"{LAYER}_scale changed"):
        runner.run(eight.transfer(31, 2))


@pytest.mark.slow
def test_the_proof_at_the_start_finds_a_wrong_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums agree on a scale that is wrong in the staged weights. The log-probs do not."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv(*WORKER_IN_CORE)
    monkeypatch.setattr(arguments, "EXTENSION", "tests.vllm.faults.FaultyExtension")
    small_model(str(tmp_path), heads=2)
    config = Config.model_validate(
        {
            "trainer": {"device": "cpu"},
            "model": {"path": str(tmp_path), "dtype": "bfloat16"},
            "rollout": {
                "engine": "vllm",
                "quantization": "fp8",
                "max_prompt_length": 64,
                "max_response_length": 48,
                "max_num_seqs": 12,
            },
            "actor": {"ppo_mini_batch_size": 8},
            "guard": {"max_quantization_gap": 1.0},  # Its logits are sharp: 0.36 nats.
        }
    )

    async def main() -> list[Verdict]:
        async with engines(config, str(tmp_path), ChatPrompts(str(tmp_path), 128)) as one:
            healthy = await one.prove(budget_s=200.0)
            await one.rollout.call_workers("scale_wrongly", LAYER, 2.0)
            await one.sync.transfer(0)
            await one.sync.activate(0)
            return [healthy, await one.prove(1, budget_s=200.0)]

    healthy, wrong = asyncio.run(main())
    assert not healthy.findings and healthy.explained
    assert healthy.gap.mean < 1.5 * healthy.floor
    assert wrong.error() is not None
