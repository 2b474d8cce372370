"""Reward models: scores equal those of the plain Hugging Face model, whatever the batches are."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from millrace.config import RewardConfig, RewardModelConfig
from millrace.errors import ConfigError, RewardError
from millrace.rewards.model import RewardModel
from millrace.rewards.pool import RewardPool
from millrace.rewards.wire import Call
from millrace.types import Prompt, tokens_of
from tests.rewards.classifiers import last_character, random_classifier, roberta
from tests.rewards.completions import completed
from tests.waiting import HANG_S

MESSAGES = [{"role": "user", "content": "count to ten"}]
PROMPT = Prompt(0, tokens_of([1]), "count to ten", "d", columns={"prompt": MESSAGES})
RESPONSES = ["one two " * (i * 7 % 11) + str(i) for i in range(60)]


def load(folder: Path, **keys: Any) -> RewardModel:
    config = RewardModelConfig(path=str(folder), device="cpu", **keys)
    return RewardModel.load("reward.model", config.model_dump(mode="json"))


def call(*completions: str, messages: Any = MESSAGES) -> Call:
    columns = {} if messages is None else {"prompt": messages}
    return Call(1, "count to ten", "d", None, {}, columns, list(completions))


def direct(folder: Path, response: str) -> torch.Tensor:
    """Return the logits [labels] of one text alone, by transformers itself."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [*MESSAGES, {"role": "assistant", "content": response}], tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits[0]
    return logits


def test_a_batch_of_different_lengths_scores_as_each_text_alone(tmp_path: Path) -> None:
    model = load(random_classifier(tmp_path))
    batch = [model.encode(call(text), text) for text in RESPONSES[:8]]
    assert len({len(tokens) for tokens in batch}) > 3
    alone = [float(direct(tmp_path, text)[0]) for text in RESPONSES[:8]]
    assert model.score(batch) == pytest.approx(alone, abs=1e-5)
    assert max(alone) - min(alone) > 1e-2  # the scores differ


@pytest.mark.parametrize("applied", ["none", "sigmoid", "softmax"])
def test_a_named_label_is_the_score(tmp_path: Path, applied: Any) -> None:
    model = load(random_classifier(tmp_path, labels=3), label="l2", function_to_apply=applied)
    logits = direct(tmp_path, "7")
    expected = {
        "none": logits,
        "sigmoid": 1 / (1 + (-logits).exp()),
        "softmax": logits.exp() / logits.exp().sum(),
    }
    assert model.score([model.encode(call("7"), "7")]) == pytest.approx(
        [float(expected[applied][2])], abs=1e-5
    )


def test_a_model_without_a_template_reads_prompt_and_response_joined(tmp_path: Path) -> None:
    model = load(last_character(tmp_path, "9"))
    for messages in (None, MESSAGES):
        tokens = model.encode(call(" to 9", messages=messages), " to 9")
        assert model.chat.decode(tokens_of(tokens)) == "count to ten to 9"
    assert model.score([model.encode(call(t), t) for t in ("89", "98")]) == pytest.approx(
        [1.0, 0.0], abs=1e-4
    )


def test_the_text_of_a_special_token_stays_text(tmp_path: Path) -> None:
    """Otherwise a policy could end its response, and write the reward model's next message."""
    model = load(random_classifier(tmp_path))
    eos = model.chat.tokenizer.eos_token_id
    plain, hostile = (model.encode(call(text), text) for text in ("yes", "yes<eos>"))
    assert hostile.count(eos) == plain.count(eos)
    assert len(hostile) == len(plain) + len("<eos>")


def test_a_text_over_the_limit_is_an_error_or_is_cut_on_the_chosen_side(tmp_path: Path) -> None:
    last_character(tmp_path, "9")
    text = "a" * 300 + "9"
    with pytest.raises(RewardError, match=r"too_long: .*313 tokens.*reward\.model\.max_length"):
        load(tmp_path).encode(call(text), text)
    left, right = (load(tmp_path, max_length=20, truncation=side) for side in ("left", "right"))
    assert left.score([left.encode(call(text), text)]) == pytest.approx([1.0], abs=1e-4)
    assert right.chat.decode(tokens_of(right.encode(call(text), text))) == "count to ten" + "a" * 8


def test_unused_positions_of_roberta_are_no_room(tmp_path: Path) -> None:
    scorer = load(roberta(tmp_path, 34), truncation="left")
    assert scorer.limit == 33
    text = "a" * 50
    assert len(scorer.score([scorer.encode(call(text), text)])) == 1


def no_head(folder: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(random_classifier(folder))
    model.model.save_pretrained(folder)  # the body alone


def no_padding(folder: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(random_classifier(folder))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.pad_token = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "head": (no_head, {}, r"model\.path = .*no weights for score\.weight.*random"),
    "folder": (lambda f: None, {}, r"model\.path = .*no sequence classifier can be loaded"),
    "padding": (no_padding, {}, r"model\.batch_size = 16: .*no padding token"),
    "label": (random_classifier, {"label": "l1"}, r"model\.label = 'l1': the model has the labels l0"),
    "labels": (lambda f: random_classifier(f, 2), {}, r"model\.label = '': the model has 2 labels"),
    "softmax": (random_classifier, {"function_to_apply": "softmax"}, r"one label the result is"),
    "length": (random_classifier, {"max_length": 257}, r"max_length = 257: .*at most 256 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_score_is_refused(tmp_path: Path, what: str) -> None:
    write, keys, match = REFUSED[what]
    write(tmp_path)
    with pytest.raises(ConfigError, match=match):
        load(tmp_path, **keys)


def test_two_workers_score_every_response_once_though_one_is_killed_or_hangs(
    tmp_path: Path,
) -> None:
    folder = random_classifier(tmp_path)
    here = load(folder)
    expected = [here.score([here.encode(call(text), text)])[0] for text in RESPONSES]

    async def run() -> None:
        keys: dict[str, Any] = {"path": str(folder), "num_workers": 2, "batch_size": 4}
        pool = RewardPool(RewardConfig(model=RewardModelConfig(device="cpu", **keys)))
        try:
            await pool.start()
            calls = [
                asyncio.ensure_future(pool.score(PROMPT, completed([text]))) for text in RESPONSES
            ]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            victim = next(iter(pool.workers))
            os.kill(victim.pid, signal.SIGKILL)
            scores = [score.value for (score,) in await asyncio.gather(*calls)]
            assert scores == pytest.approx(expected, abs=1e-5)
            async with asyncio.timeout(HANG_S):  # until another worker has its place
                while victim in pool.workers or not all(w.hello for w in pool.workers):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            with pytest.raises(RewardError, match="too_long"):
                await pool.score(PROMPT, completed(["1", "a" * 300]))
            for worker in pool.workers:
                os.kill(worker.pid, signal.SIGSTOP)
                worker.job = msgspec.structs.replace(worker.job, timeout_s=0.3)
            with pytest.raises(RewardError, match=r"timeout: .*reward\.model\.timeout_s"):
                await pool.score(PROMPT, completed(["1"]))
        finally:
            await pool.close()

    asyncio.run(run())
