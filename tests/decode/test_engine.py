"""Tests of the torch rollout engine: drawn tokens, their log-probs, and ends of responses."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from millrace.config import Config, ModelConfig, RolloutConfig, TrainerConfig
from millrace.decode.engine import build
from millrace.decode.kv_cache import NAME
from millrace.errors import DataError, MillraceError
from millrace.testing import check_replica
from millrace.types import SamplingParams, Stop, tokens_of
from tests.decode.helpers import (
    EOS,
    VOCABULARY,
    WIDE,
    engine,
    error,
    folder,
    full_log_probs,
    llama,
    long,
    prompt,
    qwen,
    turns,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deterministic": True},
        {"slots": 1},
        {"kv_on_swap": "recompute", "slots": 3},
        {"kept_slots": 16},
        {"kept_slots": 2, "slots": 3},
    ],
)
def test_the_engine_conforms_to_its_port(changes: dict[str, Any]) -> None:
    async def make() -> Any:
        return engine(**changes)

    asyncio.run(check_replica(make))


@pytest.mark.parametrize("make_model", [qwen, llama])
@pytest.mark.parametrize("deterministic", [False, True])
async def test_log_probs_are_those_of_a_full_forward_pass_whatever_the_batch(
    make_model: Any, deterministic: bool
) -> None:
    """Forty requests of many lengths share eight slots, at temperatures 1, 0.7 and 0 (greedy)."""
    model, reference = make_model(), make_model()

    async def one(eng: Any, i: Any) -> Any:
        temperature = (1.0, 0.7, 0.0)[i % 3]
        params = SamplingParams(max_tokens=1 + (7 * i) % 40, seed=i, temperature=temperature)
        await turns(i % 5)
        (segment,) = await eng.generate(prompt(i), params, "s")
        if temperature == 0:
            with torch.inference_mode():
                logits = reference(torch.tensor([[*prompt(i), *segment.tokens]])).logits[0]
            assert logits[len(prompt(i)) - 1 : -1].argmax(-1).tolist() == segment.tokens.tolist()
        return error(reference, prompt(i), segment, temperature or 1.0)

    eng = engine(model, deterministic=deterministic)
    assert max(await asyncio.gather(*(one(eng, i) for i in range(40)))) < 1e-5


async def test_bfloat16_weights_draw_with_log_probs_near_those_of_a_full_forward_pass() -> None:
    eng = engine(qwen(dtype="bfloat16"))
    got = await asyncio.gather(*(eng.generate(prompt(i), long(20, seed=i), "s") for i in range(12)))
    assert max(error(qwen(dtype="bfloat16"), prompt(i), s) for i, (s,) in enumerate(got)) < 0.05


def test_registering_the_attention_function_leaves_ordinary_forward_passes_alone() -> None:
    model, ids = qwen(), torch.tensor([[*prompt(1, 12)], [*prompt(2, 12)]])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.inference_mode():
        before = model(ids, attention_mask=mask).logits
        asyncio.run(engine(model).generate(prompt(0), long(3), "s"))
        assert model.config._attn_implementation == NAME
        assert torch.equal(before, model(ids, attention_mask=mask).logits)


async def test_samples_follow_the_models_distribution() -> None:
    model = qwen()
    with torch.inference_mode():
        expected = torch.softmax(model(torch.tensor([[*prompt(3, 6)]])).logits[0, -1] / 0.8, -1)

    eng = engine(model, slots=64)
    calls = (
        eng.generate(prompt(3, 6), SamplingParams(1, temperature=0.8, seed=s), "s")
        for s in range(4000)
    )
    drawn = torch.tensor([s.tokens[0] for (s,) in await asyncio.gather(*calls)])
    found = torch.bincount(drawn, minlength=VOCABULARY) / 4000
    assert (found - expected).abs().max() < 0.025  # three standard deviations at p = 0.5


async def test_top_k_and_top_p_cut_the_draw_but_not_the_log_probs() -> None:
    eng = engine()
    cuts = [{"top_k": 1}, {"top_k": 2}, {"top_p": 1e-6}, {"top_p": 0.5}, {}]
    drawn = await asyncio.gather(
        *(eng.generate(prompt(i), long(30, seed=i, **cuts[i % 5]), "s") for i in range(20))  # type: ignore[arg-type]
    )
    for i, (segment,) in enumerate(drawn):
        assert error(qwen(), prompt(i), segment) < 1e-5
        ids = torch.tensor([[*prompt(i), *segment.tokens]])
        with torch.inference_mode():
            probs = torch.softmax(qwen()(ids).logits[0, len(prompt(i)) - 1 : -1], -1)
        rank = (probs > probs.gather(1, ids[0, len(prompt(i)) :, None])).sum(1)
        above = (probs * (probs > probs.gather(1, ids[0, len(prompt(i)) :, None]))).sum(1)
        assert {
            0: rank.max() < 1,
            1: rank.max() < 2,
            2: rank.max() < 1,
            3: above.max() < 0.5,
            4: True,
        }[i % 5]


async def test_eos_ends_a_response_and_is_kept_unless_it_is_ignored() -> None:
    eng = engine()
    calls = [
        eng.generate(prompt(i), SamplingParams(80, seed=i, ignore_eos=i % 2 == 0), "s")
        for i in range(16)
    ]
    results = await asyncio.gather(*calls)
    for i, (segment,) in enumerate(results):
        if i % 2 == 0:
            assert segment.stop is Stop.LENGTH
        elif segment.stop is Stop.EOS:
            assert segment.tokens[-1] == EOS and EOS not in segment.tokens[:-1]
        else:
            assert EOS not in segment.tokens
    assert any(s.stop is Stop.EOS for (s,) in results)


async def test_a_stop_string_ends_a_response_with_the_tokens_that_complete_it() -> None:
    def decode(tokens: Any) -> Any:
        return "".join(chr(97 + t) for t in tokens)

    eng = engine(decode=decode, max_len=90)
    plain = await asyncio.gather(
        *(eng.generate(prompt(i), long(60, seed=i), "s") for i in range(8))
    )
    texts = [decode(s.tokens) for (s,) in plain]
    stops = [(text[20:23], "never seen") for text in texts]
    params = [long(60, seed=i, stop=stop) for i, stop in enumerate(stops)]
    stopped = await asyncio.gather(*(eng.generate(prompt(i), p, "s") for i, p in enumerate(params)))
    # This prompt ends with the first two characters of the stop string. An earlier call of the
    # same response drew them.
    end = texts[0].index(stops[0][0])
    head = plain[0][0].tokens[: end + 2]
    rest = await eng.generate(
        prompt(0) + head, long(40, seed=0, stop=stops[0], offset=len(head)), "s"
    )
    # With this limit, the string ends with the last token that the response may have.
    (last,) = await eng.generate(prompt(0), long(end + 3, seed=0, stop=stops[0]), "s")
    assert (last.stop, last.tokens) == (Stop.STRING, plain[0][0].tokens[: end + 3])
    assert not eng._table.with_stop
    # This prompt ends with a whole stop string. The response must continue to the next one.
    past = plain[0][0].tokens[: end + 3]
    on = await eng.generate(
        prompt(0) + past, long(20, seed=0, stop=stops[0], offset=len(past)), "s"
    )
    assert len(on[0].tokens) > 1 or decode(past + on[0].tokens).count(stops[0][0]) == 2
    for text, (stop, _), (segment,) in zip(texts, stops, stopped, strict=True):
        assert segment.stop is Stop.STRING
        assert decode(segment.tokens) == text[: text.index(stop) + len(stop)]
    assert rest[0].stop is Stop.STRING and len(rest[0].tokens) == 1


async def test_a_response_ends_where_the_engine_has_no_more_room() -> None:
    eng = engine(max_len=32)
    for n in (1, 20, 31):
        (segment,) = await eng.generate(prompt(0, n), long(1000), "s")
        assert segment.stop is Stop.LENGTH and len(segment.tokens) == 32 - n
        assert error(qwen(), prompt(0, n), segment) < 1e-5


@pytest.mark.parametrize(
    ("tokens", "params", "words"),
    [
        (prompt(0, 32), long(1), "32 tokens"),
        (tokens_of(), long(1), "at least 1"),
        (prompt(0, 4), long(0), "max_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_not_truncated(
    tokens: Any, params: Any, words: Any
) -> None:
    with pytest.raises(MillraceError, match=words) as caught:
        asyncio.run(engine(max_len=32).generate(tokens, params, "s"))
    assert isinstance(caught.value, DataError) or words == "max_tokens"


async def test_queued_requests_are_served_in_order_of_arrival() -> None:
    done = []

    async def one(eng: Any, i: Any) -> None:
        await eng.generate(prompt(i), long(5), "s")
        done.append(i)

    eng = engine(slots=4)
    await asyncio.gather(*(one(eng, i) for i in range(22)))
    stats = await eng.stats()
    assert stats.tokens == 22 * 5 and stats.prefill_tokens == sum(len(prompt(i)) for i in range(22))
    assert done == sorted(done)


def requests_for_bits() -> Any:
    draw = random.Random(3)
    return [
        (
            prompt(i, draw.randrange(1, 40)),
            SamplingParams(draw.randrange(1, 40), seed=i, temperature=draw.choice([1.0, 0.7, 0.0])),
        )
        for i in range(36)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_depend_on_no_other_request(dtype: str) -> None:
    """The same requests give the same bits in every setting.

    They run together, in other orders, staggered in time, alone, and with cancelled co-runners.
    """
    model, requests = qwen(dtype=dtype, shape=WIDE), requests_for_bits()

    async def run(order: Any, delay: Any, companions: Any = 0) -> Any:
        eng = engine(model, deterministic=True, slots=20)
        noise = [
            asyncio.create_task(eng.generate(prompt(99 + i), long(50, top_p=0.9), "s"))
            for i in range(companions)
        ]

        async def one(i: Any) -> Any:
            await turns(delay(i))
            (segment,) = await eng.generate(*requests[i], "s")  # type: ignore[call-arg]
            return i, (segment.tokens.tobytes(), segment.log_probs.tobytes(), segment.stop)

        results = dict(await asyncio.gather(*(one(i) for i in order)))
        for task in noise:
            task.cancel()
        await asyncio.gather(*noise, return_exceptions=True)
        return results

    order = list(range(len(requests)))
    base = asyncio.run(run(order, lambda i: 0))
    assert asyncio.run(run(order[::-1], lambda i: 0)) == base
    assert asyncio.run(run(order, lambda i: (i * 7) % 50)) == base
    assert (
        asyncio.run(run(order[::3] + order[1::3] + order[2::3], lambda i: i % 9, companions=4))
        == base
    )
    for i in order[:8]:
        assert asyncio.run(run([i], lambda i: 0))[i] == base[i]


async def test_slots_move_together_when_few_are_left_and_nothing_changes_for_them() -> None:
    """Forty short requests and two long ones use 42 slots.

    At the end, the long ones fill two rows and their log-probs are still exact.
    """

    eng = engine(slots=42)
    lengths = [60 if i in (17, 41) else 3 + i % 7 for i in range(42)]
    tasks = [
        asyncio.create_task(eng.generate(prompt(i), long(n, seed=i), "s"))
        for i, n in enumerate(lengths)
    ]
    await turns(25)
    assert eng._table.rows == 2
    results = await asyncio.gather(*tasks)
    for i, (segment,) in enumerate(results):
        expected = full_log_probs(qwen(), prompt(i), segment.tokens)
        assert (expected - torch.tensor(segment.log_probs)).abs().max() < 1e-5


def test_build_makes_the_engine_that_the_configuration_describes() -> None:
    config = Config(
        model=ModelConfig(dtype="bfloat16"),
        trainer=TrainerConfig(device="cpu", seed=2),
        rollout=RolloutConfig(max_prompt_length=10, max_response_length=6, max_num_seqs=5),
    )
    eng = build(config.sides, config.model, str(folder()))
    (segment,) = asyncio.run(eng.generate(prompt(0, 10), long(100), "s"))
    assert len(segment.tokens) == 6
    assert asyncio.run(eng.stats()).slots == 5
    assert all(
        torch.equal(a, b)
        for a, b in zip(eng.weights().values(), qwen(2, "bfloat16").parameters(), strict=True)
    )
