"""A serving engine on real weights, on a CPU: greedy texts and log-probs are those of transformers.

`make test-real` runs it in the environments of vLLM and SGLang. One engine serves all tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace import testing
from millrace.config import Config
from millrace.testing import RolloutCase, joined
from millrace.types import SamplingParams, Segment, Stop, Tokens, tokens_of
from tests.real.model import EXACT, LONGEST, Reference, moved
from tests.serving.replica import ENGINE, Replica

pytestmark = pytest.mark.xdist_group("engines")
GREEDY = SamplingParams(LONGEST, temperature=0.0)
END, LEMON = 2, 11499
"""The end tokens of the engine's generation_config.json: a list."""


class RealReplica(Replica):
    """An engine on the real weights. Version 1 has them, and version 2 has moved ones."""

    def __init__(self, folder: Path, reference: Reference, other: Reference) -> None:
        for file in reference.folder.iterdir():
            (folder / file.name).symlink_to(file)
        generation = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").unlink()
        ends = json.dumps(generation | {"eos_token_id": [END, LEMON]})
        (folder / "generation_config.json").write_text(ends)
        self.folder = folder
        self.models = {1: reference.model, 2: other.model}
        self.current = self.models[1]
        self.config = Config.model_validate({
            "model": {"path": str(folder)},
            "rollout": {
                "engine": ENGINE,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 512,
                "max_prompt_length": 192,
                "max_response_length": 128,
            },
            "actor": {"ppo_max_token_len_per_gpu": 512},
            "sync": {"timeout_s": 300},
        })  # fmt: skip


@pytest.fixture(scope="module")
def other(reference: Reference) -> Reference:
    return moved(reference)


@pytest.fixture(scope="module")
def served(
    runner: asyncio.Runner,
    reference: Reference,
    other: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealReplica]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        made = RealReplica(tmp_path_factory.mktemp("model"), reference, other)
        runner.run(made.start(patch))
        yield made
        runner.run(made.engine.close())


def until_the_end(answer: Tokens) -> list[int]:
    """Return an answer up to its first end token."""
    tokens = list(answer)
    places = [i for i, token in enumerate(tokens) if token in (END, LEMON)]
    return tokens[: places[0] + 1] if places else tokens


def test_greedy_texts_and_log_probs_are_those_of_transformers(
    served: RealReplica, runner: asyncio.Runner, reference: Reference
) -> None:
    """Twelve requests share four slots. The second time, the prompts are in the prefix cache."""

    async def main() -> Any:
        await served.publish(1, 1)
        calls = []
        for i, prompt in enumerate(reference.prompts):
            sampled = replace(GREEDY, temperature=0.8, max_tokens=12, seed=i)
            calls += [served.engine.generate(prompt, p, f"{i}") for p in (GREEDY, sampled)]
        return await asyncio.gather(*calls)

    for _ in range(2):
        segments = [segment for (segment,) in runner.run(main())]
        greedy, sampled = segments[::2], segments[1::2]
        want = [until_the_end(answer) for answer in reference.answers]
        assert [reference.text(s.tokens) for s in greedy] == [reference.text(a) for a in want]
        assert [list(s.tokens) for s in greedy] == want
        for prompt, segment in zip(reference.prompts, greedy, strict=True):
            assert reference.error(prompt, segment) < EXACT
            ends = segment.tokens[-1] in (END, LEMON)
            assert segment.stop is (Stop.EOS if ends else Stop.LENGTH)
        assert {END, LEMON} < {s.tokens[-1] for s in greedy}
        for prompt, segment in zip(reference.prompts, sampled, strict=True):
            assert reference.error(prompt, segment, 0.8) < EXACT


def test_interrupted_answers_go_on_to_the_same_texts(
    served: RealReplica, runner: asyncio.Runner, reference: Reference
) -> None:
    async def answer(i: int) -> list[tuple[Tokens, Segment]]:
        context, found, left = reference.prompts[i], [], LONGEST
        while left:
            params = replace(GREEDY, max_tokens=left, offset=LONGEST - left)
            for segment in await served.engine.generate(context, params, f"again {i}"):
                found.append((context, segment))
                context, left = context + segment.tokens, left - len(segment.tokens)
                if segment.stop is Stop.EOS:
                    return found
        return found

    async def main() -> Any:
        await served.publish(2, 1)
        tasks = [asyncio.create_task(answer(i)) for i in range(4)]
        for drawn in (8, 24):  # tokens of all answers together, whatever the time they take
            await testing.rollouts._drawing(served.engine, drawn, RolloutCase())
            await served.engine.interrupt()
        return [await task for task in tasks]

    found = runner.run(main())
    want = [until_the_end(answer) for answer in reference.answers[:4]]
    assert [list(joined([s for _, s in each])) for each in found] == want
    assert sum(len(each) > 1 for each in found) >= 2, "hardly an answer was interrupted"
    for context, segment in (pair for each in found for pair in each):
        assert reference.error(context, segment) < EXACT


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_swap_under_running_answers_draws_on_with_the_new_weights(
    kv: str,
    served: RealReplica,
    runner: asyncio.Runner,
    reference: Reference,
    other: Reference,
) -> None:
    async def main() -> Any:
        await served.publish(10, 1)
        await served.transfer(11, 2)
        served.engine._recompute = kv == "recompute"
        params = replace(GREEDY, ignore_eos=True, max_tokens=60)
        tasks = [
            asyncio.create_task(served.engine.generate(p, params, f"{kv} {i}"))
            for i, p in enumerate(reference.prompts[:4])
        ]
        await testing.rollouts._drawing(served.engine, 16, RolloutCase())
        await served.receiver.activate(11)
        served.engine._recompute = False
        found = await asyncio.gather(*tasks)
        # What the old weights read is not served as a prefix of the new ones.
        new = await served.engine.generate(reference.prompts[0], GREEDY, "new")
        return found, new

    found, (new,) = runner.run(main())
    assert other.error(reference.prompts[0], new) < EXACT
    swapped = 0
    for prompt, segments in zip(reference.prompts, found, strict=False):
        context = tokens_of(prompt)
        for segment in segments:
            old_error = reference.error(context, segment)
            new_error = other.error(context, segment)
            if segment.version == 10:
                assert old_error < EXACT < new_error / 30
            elif kv == "recompute" or len(segments) == 1:
                assert new_error < EXACT < old_error / 30
            else:
                assert min(new_error, old_error) > EXACT
            context = context + segment.tokens
        swapped += [s.version for s in segments] == [10, 11]
    assert swapped >= 2, "hardly an answer was under way at the swap"


def test_a_second_turn_finds_its_prefix_and_answers_like_transformers(
    served: RealReplica, runner: asyncio.Runner, reference: Reference
) -> None:
    """The prefix is longer than a block of the KV cache."""
    said = "\n<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n"
    user = tokens_of(reference.tokenizer.encode(said))
    longer = reference.prompts[1]
    for _ in range(5):
        longer = longer + reference.answers[1] + user

    async def main() -> Any:
        await served.publish(20, 1)
        await served.engine.generate(longer, GREEDY, "first")
        before = (await served.engine.stats()).reused_tokens
        (segment,) = await served.engine.generate(longer, GREEDY, "second")
        return segment, (await served.engine.stats()).reused_tokens - before

    segment, reused = runner.run(main())
    assert list(segment.tokens) == until_the_end(reference.greedy(longer))
    assert reference.error(longer, segment) < EXACT
    assert 0 < reused < len(longer)
