"""Mixtures of experts on a serving engine: syncs of weights, and the experts that it returns."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig

from millrace import testing
from millrace.testing import RolloutCase, joined
from millrace.types import SamplingParams, Segment, Stop, Tokens, joined_experts, tokens_of
from tests.serving.replica import ENGINE, EOS, PROMPT, TENSOR, VOCABULARY, Replica, gap

pytestmark = pytest.mark.xdist_group("engines")

LAYERS, EXPERTS, K = 2, 8, 2
REQUESTS = 48
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": TENSOR,
    "head_dim": 32,
    "num_experts_per_tok": K,
    "initializer_range": 0.1,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
QWEN = Qwen3MoeConfig(
    **WIDTHS,
    num_experts=EXPERTS,
    moe_intermediate_size=32 * TENSOR,
    norm_topk_prob=True,
    tie_word_embeddings=True,
    architectures=["Qwen3MoeForCausalLM"],
)
FULL = {"engine_kwargs": {"max_total_tokens": 1200} if ENGINE == "sglang" else {}}
"""Little room for K and V: SGLang retracts some of many requests, and reads them again."""
MIXTRAL = MixtralConfig(
    **WIDTHS, num_local_experts=EXPERTS, sliding_window=None, architectures=["MixtralForCausalLM"]
)


@pytest.fixture(scope="module")
def mixture(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        made = Replica(tmp_path_factory.mktemp("mixture"), QWEN, FULL, router_replay="R3")
        cores = importlib.import_module(f"tests.{ENGINE}.faults").cores
        before = cores()
        runner.run(made.start(patch))
        own = [core for core in cores() if core not in before]
        runner.run(made.publish(0, 1))
        yield made
        runner.run(made.engine.close())
        assert len(own) in (1, TENSOR) and not psutil.wait_procs(own, timeout=30)[1]


def chosen(replica: Replica, seed: int, tokens: Any) -> list[set[int]]:
    """Return the experts that transformers' model routes each token to, layer after layer."""
    with torch.inference_mode():
        found = replica.models[seed](torch.tensor([[*tokens]]), output_router_logits=True)
    layers = [logits.topk(K).indices for logits in found.router_logits]
    return [set(layer[at].tolist()) for at in range(len(tokens)) for layer in layers]


def said(segments: tuple[Segment, ...]) -> list[set[int]]:
    experts = joined_experts(s.experts for s in segments)
    assert experts is not None and experts.typecode == "B"
    return [set(experts[i : i + K]) for i in range(0, len(experts), K)]


def draw(replica: Replica, tokens: Tokens, number: int, first: int | None) -> Any:
    params = SamplingParams(number, ignore_eos=True, seed=5, experts_from=first)
    return replica.engine.generate(tokens, params, "s")


def test_every_sync_changes_the_experts_that_are_served(
    mixture: Replica, runner: asyncio.Runner
) -> None:
    """The weights go from A to B and back. The engine proves each sync by the sums of its bits."""
    for version, seed in ((10, 1), (11, 2), (12, 1)):
        runner.run(mixture.publish(version, seed))
        for _ in range(2):  # the second request finds the prefix of the first
            segments = runner.run(draw(mixture, tokens_of(PROMPT), 24, 0))
            assert gap(mixture, seed, PROMPT, segments)[0] < 1e-4
            tokens = [*PROMPT, *joined(segments)]
            assert said(segments) == chosen(mixture, seed, tokens[:-1])
    copies = 2 * EXPERTS * LAYERS + EXPERTS * LAYERS
    rest = [n for n, _ in mixture.models[1].named_parameters() if ".experts." not in n]
    found = runner.run(mixture.engine.call_workers("copies_of_a_load"))
    assert found == ([copies + len(rest)] if TENSOR == 1 else [0] * TENSOR)


def test_the_experts_of_a_thread_follow_its_turns_and_interruptions(
    mixture: Replica, runner: asyncio.Runner
) -> None:
    """A response is interrupted and continued. A turn follows it. Nothing is returned twice."""

    async def interrupted() -> tuple[Segment, ...]:
        await mixture.publish(20, 1)
        call = asyncio.create_task(draw(mixture, tokens_of(PROMPT), 100, 0))
        await testing.rollouts._drawing(mixture.engine, 20, RolloutCase())
        await mixture.engine.interrupt()
        return await call

    first = runner.run(interrupted())
    assert first[-1].stop is Stop.INTERRUPTED
    whole = tokens_of(PROMPT) + joined(first)
    second = runner.run(draw(mixture, whole, 8, len(whole) - 1))
    known, whole = len(whole) + 7, whole + joined(second) + tokens_of([7, 9, 11])
    third = runner.run(draw(mixture, whole, 5, known))
    tokens = whole + joined(third)
    assert said((*first, *second, *third)) == chosen(mixture, 1, tokens[:-1])
    assert all(s.experts is None for s in runner.run(draw(mixture, whole, 5, None)))


def test_a_swap_divides_the_experts_by_version(mixture: Replica, runner: asyncio.Runner) -> None:
    async def main() -> tuple[Segment, ...]:
        await mixture.publish(30, 1)
        call = asyncio.create_task(draw(mixture, tokens_of(PROMPT[:20]), 100, 0))
        await testing.rollouts._drawing(mixture.engine, 20, RolloutCase())
        await mixture.publish(31, 2)
        return await call

    segments = runner.run(main())
    assert [s.version for s in segments] == [30, 31]
    rows = [len(s.experts or ()) // (LAYERS * K) for s in segments]
    assert rows == [19 + len(segments[0].tokens), len(segments[1].tokens)]
    tokens = [*PROMPT[:20], *joined(segments)]
    assert said(segments[:1]) == chosen(mixture, 1, tokens[: rows[0]])


def test_a_swap_that_reads_again_keeps_the_experts_that_drew(
    mixture: Replica, runner: asyncio.Runner
) -> None:
    """The old tokens get K and V of the new weights. Their experts are still those of the old."""

    async def main() -> tuple[Segment, ...]:
        await mixture.publish(40, 1)
        call = asyncio.create_task(draw(mixture, tokens_of(PROMPT[:20]), 100, 3))
        await testing.rollouts._drawing(mixture.engine, 20, RolloutCase())
        await mixture.transfer(41, 2)
        mixture.engine._recompute = True
        await mixture.receiver.activate(41)
        mixture.engine._recompute = False
        return await call

    segments = runner.run(main())
    assert [s.version for s in segments] == [40, 41]
    tokens, rows = [*PROMPT[:20], *joined(segments)][:-1], 19 + len(segments[0].tokens)
    first, second = (chosen(mixture, seed, tokens) for seed in (1, 2))
    assert said(segments) == first[3 * LAYERS : rows * LAYERS] + second[rows * LAYERS :]


def test_the_experts_of_many_requests_are_those_of_their_tokens(
    mixture: Replica, runner: asyncio.Runner
) -> None:
    """Prompts share prefixes. Requests are interrupted, continued, cancelled and retracted."""
    rng = random.Random(1)
    known: dict[int, tuple[Tokens, list[Segment]]] = {}

    async def respond(number: int) -> None:
        prompt = tokens_of([*PROMPT[: 20 + number % 7 * 10], number % 40])
        drawn: list[Segment] = []
        while (left := 120 - sum(len(s.tokens) for s in drawn)) > 0:
            context = prompt + joined(drawn)
            params = SamplingParams(
                left, ignore_eos=True, seed=number, experts_from=len(context) - 1 if drawn else 0
            )
            drawn += await mixture.engine.generate(context, params, str(number))
        known[number] = prompt, drawn

    async def main() -> None:
        await mixture.publish(50, 1)
        tasks = [asyncio.create_task(respond(number)) for number in range(REQUESTS)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(rng.random() * 0.1)
            match rng.randrange(4):
                case 0:
                    await mixture.engine.interrupt()
                case 1:
                    rng.choice(tasks[: REQUESTS // 8]).cancel()
                case 2:
                    await mixture.retract()
        await asyncio.wait(tasks)

    runner.run(main())
    assert len(known) >= REQUESTS * 7 // 8
    assert sum(len(drawn) > 1 for _, drawn in known.values()) > REQUESTS // 4
    for prompt, drawn in known.values():
        tokens = [*prompt, *joined(drawn)]
        assert said(tuple(drawn)) == chosen(mixture, 1, tokens[:-1])


@pytest.mark.skipif(ENGINE != "sglang", reason="vLLM reads no prompt in parts on a CPU")
def test_a_retracted_request_is_interrupted_while_it_is_read_in_parts(
    mixture: Replica, runner: asyncio.Runner
) -> None:
    engine, count = mixture.engine, 4

    async def main() -> list[tuple[Segment, ...]]:
        await mixture.publish(60, 1)
        prompts = [tokens_of([number, *PROMPT]) for number in range(count)]
        tasks = [asyncio.create_task(draw(mixture, prompt, 100, 0)) for prompt in prompts]
        await testing.rollouts._drawing(engine, 40 * count, RolloutCase())
        await engine.call_workers("pause", "another name in the prefix cache", 0)
        await engine.call_workers("pause_at_a_part")
        async with asyncio.timeout(60):
            while not all(await engine.call_workers("is_at_a_part")):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        interrupting = asyncio.create_task(engine.interrupt())
        await asyncio.sleep(0)
        await engine.call_workers("resume")
        await interrupting
        return await asyncio.gather(*tasks)

    for number, segments in enumerate(runner.run(main())):
        assert segments[-1].stop is Stop.INTERRUPTED
        tokens = [number, *PROMPT, *joined(segments)]
        assert said(segments) == chosen(mixture, 1, tokens[:-1])


@pytest.mark.skipif(ENGINE != "sglang", reason="vLLM has no checker of weights")
@pytest.mark.skipif(TENSOR > 1, reason="the checker compares whole weights, and a rank has parts")
async def test_sglangs_checker_finds_the_experts_of_the_trainer(
    mixture: Replica, runner: asyncio.Runner
) -> None:
    wrong = importlib.import_module("tests.sglang.checker").wrong
    for version, seed in ((70, 1), (71, 2)):
        await mixture.publish(version, seed)
        assert not await wrong(mixture, seed)
    name = "model.layers.1.mlp.experts.w13_weight"
    await mixture.engine.call_workers("exchange_rows", name)
    assert await wrong(mixture, 2) == {name}
    await mixture.publish(72, 1)
    assert not await wrong(mixture, 1)


@pytest.mark.parametrize("shape", [QWEN, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_the_names_are_those_of_a_saved_model(shape: Any, tmp_path: Any) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from millrace.serving.live_weights import folder_names

    model: Any = AutoModelForCausalLM.from_config(shape)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    own = dict(folder_names(shape.model_type, [(n, p.data) for n, p in model.named_parameters()]))
    assert own.keys() == saved.keys() and all(torch.equal(own[n], saved[n]) for n in saved)


def test_the_sums_of_experts_have_the_names_of_live_tensors() -> None:
    from millrace.serving.live_weights import live_names

    layer = "model.layers.3."
    sent = {
        f"{layer}mlp.experts.gate_up_proj": 1,
        f"{layer}mlp.experts.down_proj": 2,
        f"{layer}mlp.gate.weight": 3,
    }
    blocks = ("w13_weight", "w2_weight")
    for room, inner in (("mlp", "experts.routed_experts."), ("block_sparse_moe", "experts.")):
        live = [f"{layer}{room}.{inner}{name}" for name in blocks]
        live.append(f"{layer}{room}.gate.weight")
        assert live_names(sent, dict.fromkeys(live, 0)) == dict(zip(live, (1, 2, 3), strict=True))
