"""The real model's chat: its prompts are those of transformers' chat pipeline, and answers end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from millrace.config import Config
from millrace.data.chat import Chat
from millrace.data.rows import Problem
from millrace.decode.engine import build
from millrace.models.model import folder_eos_ids
from millrace.models.tokenizer import load_tokenizer
from millrace.types import SamplingParams, Stop
from tests.real.model import LONGEST, Reference

TALKS: dict[str, list[dict[str, str]]] = {
    "a user": [{"role": "user", "content": "What is 7 times 8?"}],
    "a system and a user": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  Hé, 漢字?\n\n"},
    ],
    "three turns": [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2+2?"},
    ],
}


@pytest.mark.parametrize("talk", TALKS)
def test_prompts_are_those_of_transformers_chat_pipeline(talk: str, reference: Reference) -> None:
    chat = Chat(load_tokenizer(reference.folder))
    _, tokens = chat.render(Problem(TALKS[talk], "x"))
    want = reference.tokenizer.apply_chat_template(
        TALKS[talk], add_generation_prompt=True, tokenize=True
    )["input_ids"]
    assert list(tokens) == want
    start = reference.tokenizer.bos_token_id  # it is <|im_start|>, which begins every message
    messages = len(TALKS[talk]) + (TALKS[talk][0]["role"] != "system") + 1
    assert list(tokens).count(start) == messages and tokens[1] != start


@pytest.mark.parametrize("ends", [2, [2], [2, 11499], [11499, 28]])
def test_answers_end_at_any_end_token_of_generation_config(
    ends: Any, reference: Reference, tmp_path: Path
) -> None:
    """The end token is the last of the response. The tokenizer's own always ends it."""
    for file in reference.folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    generation = json.loads((reference.folder / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(
        json.dumps(generation | {"eos_token_id": ends})
    )
    prompts = [reference.prompts[i] for i in (1, 4)]
    config = Config(
        trainer={"device": "cpu"},
        rollout={"max_prompt_length": 64, "max_response_length": 32, "max_num_seqs": 2},
    )

    async def main() -> Any:
        eng = build(config.sides, config.model, str(tmp_path))
        params = SamplingParams(LONGEST, temperature=0.0)
        return await asyncio.gather(*(eng.generate(p, params, "s") for p in prompts))

    known = folder_eos_ids(tmp_path)
    listed = ends if isinstance(ends, list) else [ends]
    assert set(known) == {*listed, reference.tokenizer.eos_token_id}
    for prompt, (segment,) in zip(prompts, asyncio.run(main()), strict=True):
        want = reference.greedy(prompt, eos_token_id=list(known))
        assert list(segment.tokens) == list(want), reference.text(segment.tokens)
        last = segment.tokens[-1] in known
        assert segment.stop is (Stop.EOS if last else Stop.LENGTH)
