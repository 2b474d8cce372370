"""The torch rollout engine on real weights: greedy texts and log-probs are those of transformers.

They stay so with any number of slots, through interruptions, swaps and kept prefixes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from millrace.config import Config
from millrace.decode.engine import TorchRolloutEngine, build
from millrace.models.model import load_model
from millrace.testing import joined
from millrace.types import SamplingParams, Segment, Stop, Tokens, tokens_of
from tests.decode.helpers import turns
from tests.real.model import EXACT, LONGEST, Reference, moved

GREEDY = SamplingParams(LONGEST, temperature=0.0)
END = 2
"""<|im_end|>, the end token of generation_config.json."""


def engine(reference: Reference, **rollout: Any) -> TorchRolloutEngine:
    config = Config(
        trainer={"device": "cpu"},
        rollout={"max_prompt_length": 96, "max_response_length": 96, "max_num_seqs": 4} | rollout,
    )
    return build(config.sides, config.model, str(reference.folder))


def check_greedy(reference: Reference, answers: list[Tokens]) -> None:
    assert [reference.text(a) for a in answers] == [reference.text(a) for a in reference.answers]
    assert [list(a) for a in answers] == [list(a) for a in reference.answers]


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_greedy_texts_and_log_probs_are_those_of_transformers(
    slots: int, reference: Reference
) -> None:
    """Greedy and sampled requests share the slots. Each prompt is drawn twice."""

    async def main() -> Any:
        eng = engine(reference, max_num_seqs=slots)
        calls = [eng.generate(p, GREEDY, f"{i}/0") for i, p in enumerate(reference.prompts)]
        sampled = replace(GREEDY, temperature=0.8, max_tokens=12)
        calls += [
            eng.generate(p, sampled.with_seed(i), f"{i}/1") for i, p in enumerate(reference.prompts)
        ]
        return await asyncio.gather(*calls)

    segments = [segment for (segment,) in asyncio.run(main())]
    greedy, sampled = segments[: len(segments) // 2], segments[len(segments) // 2 :]
    check_greedy(reference, [s.tokens for s in greedy])
    for prompt, segment in zip(reference.prompts, greedy, strict=True):
        assert reference.error(prompt, segment) < EXACT
        ends = segment.tokens[-1] == END
        assert segment.stop is (Stop.EOS if ends else Stop.LENGTH)
    assert {s.stop for s in greedy} == {Stop.EOS, Stop.LENGTH}
    for prompt, segment in zip(reference.prompts, sampled, strict=True):
        assert reference.error(prompt, segment, 0.8) < EXACT


@pytest.mark.parametrize("kept", [0, 8])
def test_interrupted_answers_go_on_to_the_same_texts(kept: int, reference: Reference) -> None:
    """The slots are interrupted again and again, with prefixes kept and with prefixes read again."""

    async def answer(eng: TorchRolloutEngine, i: int) -> list[tuple[Tokens, Segment]]:
        context, found, left = reference.prompts[i], [], LONGEST
        while left:
            params = replace(GREEDY, max_tokens=left, offset=LONGEST - left)
            for segment in await eng.generate(context, params, f"{i}/0"):
                found.append((context, segment))
                context, left = context + segment.tokens, left - len(segment.tokens)
                if segment.stop is Stop.EOS:
                    return found
        return found

    async def main() -> Any:
        eng = engine(reference, max_num_seqs=3, session_kv_slots=kept)
        tasks = [asyncio.create_task(answer(eng, i)) for i in range(len(reference.prompts))]
        while not all(task.done() for task in tasks):
            await turns(7)
            await eng.interrupt()
        return [await task for task in tasks], await eng.stats()

    found, stats = asyncio.run(main())
    check_greedy(reference, [joined([s for _, s in each]) for each in found])
    assert sum(len(each) > 1 for each in found) >= 3, "hardly an answer was interrupted"
    assert (stats.reused_tokens > 0) == (kept > 0)
    for context, segment in (pair for each in found for pair in each):
        assert reference.error(context, segment) < EXACT


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_swap_under_running_answers_draws_on_with_the_new_weights(
    kv: str, reference: Reference
) -> None:
    """The new weights are the old ones, moved: only exact log-probs tell them apart."""
    new = moved(reference)

    async def main() -> Any:
        eng = engine(reference, kv_on_swap=kv)
        params = replace(GREEDY, ignore_eos=True)
        tasks = [
            asyncio.create_task(eng.generate(p, params, f"{i}/0"))
            for i, p in enumerate(reference.prompts[:5])  # one waits for a slot
        ]
        await turns(12)
        await eng.swap(1, dict(new.model.named_parameters()))
        return await asyncio.gather(*tasks)

    found = asyncio.run(main())
    assert [[s.version for s in each] for each in found] == [[0, 1]] * 4 + [[1]]
    for prompt, segments in zip(reference.prompts, found, strict=False):
        *before, after = segments
        for segment in before:
            assert reference.error(prompt, segment) < EXACT < new.error(prompt, segment) / 30
        context = prompt + joined(before)
        if kv == "recompute" or not before:
            assert new.error(context, after) < EXACT < reference.error(context, after) / 30
        else:
            assert over_old_kv(reference, new, context, after) < EXACT < new.error(context, after)


@torch.inference_mode()
def over_old_kv(old: Reference, new: Reference, context: Tokens, segment: Segment) -> float:
    """Return the largest distance from the new weights over the K and V of the old ones."""
    cache = old.model(torch.tensor([list(context[:-1])]), use_cache=True).past_key_values
    ids = torch.tensor([[context[-1], *segment.tokens]])
    logits = new.model(ids, past_key_values=cache, use_cache=True).logits[0, :-1]
    exact = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return float((exact - torch.tensor(segment.log_probs)).abs().max())


def test_a_second_turn_reuses_the_prefix_and_answers_like_transformers(
    reference: Reference,
) -> None:
    user = tokens_of(reference.tokenizer.encode(
        "\n<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n"
    ))  # fmt: skip
    prompt, answer = reference.prompts[1], reference.answers[1]
    context = prompt + answer + user

    async def main() -> Any:
        eng = engine(reference, session_kv_slots=4)
        # Another session with the same first turn, and one that has nothing kept.
        await asyncio.gather(*(eng.generate(prompt, GREEDY, f"{i}/0") for i in range(2)))
        before = await eng.stats()
        second = await asyncio.gather(*(eng.generate(context, GREEDY, f"{i}/0") for i in (0, 1, 7)))
        return second, before, await eng.stats()

    second, before, after = asyncio.run(main())
    want = reference.greedy(context)
    assert want[-1] == END
    for (segment,) in second:
        assert list(segment.tokens) == list(want), reference.text(segment.tokens)
        assert reference.error(context, segment) < EXACT
    # The last drawn token has no K and V yet.
    kept = len(prompt) + len(answer) - 1
    assert after.reused_tokens - before.reused_tokens == 2 * kept


def test_weights_of_version_0_are_those_of_the_folder(reference: Reference) -> None:
    loaded: Any = load_model(reference.folder, seed=0, dtype="float32")
    live: Callable[[], Any] = engine(reference).weights
    exact = dict(reference.model.named_parameters())
    assert live().keys() == dict(loaded.named_parameters()).keys() == exact.keys()
    for name, tensor in live().items():
        assert torch.equal(tensor, exact[name])
