"""String prompts of a model with a chat template: data.chat, and what a run says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from millrace.config import Config, recipe
from millrace.data.chat import Chat, Reading
from millrace.data.prompts import PromptStream
from millrace.data.rows import Problem
from millrace.data.sources import load_source
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import ConfigError, DataError
from millrace.models.model import write_shape
from millrace.run.problems import Problems, first_prompts, load, prepare
from tests.data.test_tokenizer import CHATML

ASKED = "What is 1 + 1?"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    made = make_tokenizer("bpe", [f"hello {ASKED} What is the sum of these?"], 300)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def text(prompt: Any) -> Problem:
    return Problem(prompt=prompt, data_source="s")


def rendered() -> str:
    return str(
        tokenizer().apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    )


@pytest.mark.parametrize("strings", ["auto", "always"])
def test_a_string_is_one_message_of_the_user(strings: Any) -> None:
    chat = Chat(tokenizer(), strings=strings)
    assert chat.render(text(ASKED)) == chat.render(text(MESSAGES))
    assert chat.as_chat(text(ASKED)).columns["prompt"] == MESSAGES  # what rewards receive


def test_never_keeps_a_string_as_it_is() -> None:
    chat = Chat(tokenizer(), strings="never")
    assert chat.render(text(ASKED)) == (ASKED, chat.render(text(ASKED))[1])
    assert list(chat.render(text(ASKED))[1]) == chat.encode(ASKED)


@pytest.mark.parametrize("template", [None, make_tokenizer("chars", ["a"], 0).chat_template])
def test_auto_leaves_strings_to_models_without_a_template_of_their_own(template: Any) -> None:
    assert Chat(tokenizer(template), strings="auto").reading(text(ASKED)) is Reading.PLAIN


@pytest.mark.parametrize("strings", ["auto", "always", "never"])
def test_a_string_that_the_template_has_rendered_is_not_wrapped_again(strings: Any) -> None:
    chat = Chat(tokenizer(), strings=strings)
    assert chat.reading(text(rendered())) is Reading.RENDERED
    assert chat.render(text(rendered()))[1] == chat.render(text(MESSAGES))[1]


def test_markup_of_a_template_without_special_tokens_counts_too() -> None:
    chat = Chat(tokenizer("{{ '[INST] ' + messages[0]['content'] + ' [/INST]' }}"), strings="auto")
    assert chat.reading(text("[INST] hello [/INST]")) is Reading.RENDERED
    assert chat.reading(text("hello [INST]")) is Reading.WRAPPED


def test_a_special_token_inside_a_wrapped_string_stays_text() -> None:
    chat = Chat(tokenizer(), strings="auto")
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.render(text(f"What is <|im_end|>{ASKED}"))[1].count(end) == 1


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize(
    "prompt",
    [
        f"See <|im_start|>user\n{ASKED}<|im_end|>",
        f"<|start_header_id|>user<|end_header_id|>\n\n{ASKED}",
        f"<s>[INST] {ASKED} [/INST]",
        f"<start_of_turn>user\n{ASKED}",
        f"<｜User｜>{ASKED}<｜Assistant｜>",
        f'[{{"role": "user", "content": "{ASKED}"}}]',
        f"[{{'content': '{ASKED}', 'role': 'user'}}]",
        f'{{"from": "human", "value": "{ASKED}"}}',
    ],
)
def test_markup_that_would_be_read_as_characters_is_refused(prompt: str, template: Any) -> None:
    with pytest.raises(DataError, match=r"row 3: .*Fix: messages .*data\.chat=never"):
        Chat(tokenizer(template), strings="auto").render(text(prompt), "row 3")
    assert Chat(tokenizer(template), strings="never").render(text(prompt))[0] == prompt
    if template is not None:
        wrapped = Chat(tokenizer(template), strings="always").render(text(prompt))
        assert wrapped[0].endswith("assistant\n") and ASKED in wrapped[0]


@pytest.mark.parametrize(
    "prompt", ["[1, 2] and {role: x}", "if a < b | c > d: [INST", "user stories, briefly"]
)
def test_text_that_is_no_markup_stays(prompt: str) -> None:
    assert Chat(tokenizer(), strings="auto").reading(text(prompt)) is Reading.WRAPPED
    assert prompt in Chat(tokenizer(), strings="auto").render(text(prompt))[0]


@pytest.mark.parametrize("prompt", ["Say [INST] hi", '{"role": "user", "content": "hi"}'])
def test_a_stream_refuses_markup_before_a_run(tmp_path: Path, prompt: str) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": prompt}))
    rows, chat = load_source(str(tmp_path / "t.jsonl"), seed=0), Chat(tokenizer(), strings="auto")
    with pytest.raises(DataError, match=r"t\.jsonl row 1.*markup.*Fix: "):
        PromptStream.open(rows, chat, seed=0, shuffle=False, max_prompt_length=4000)


@pytest.mark.parametrize(
    "prompt",
    [
        '{"value": 3, "unit": "m"}: how many feet is it?',
        '{"role": "detective", "content": "clue"}: who is it?',
        '[{"content": 1}] has how many keys?',
    ],
)
def test_a_problem_that_is_json_is_no_markup(prompt: str) -> None:
    assert prompt in Chat(tokenizer(), strings="auto").render(text(prompt))[0]


def test_tokens_are_shown_on_one_line_with_special_ones_marked() -> None:
    chat = Chat(tokenizer(), strings="auto")
    shown = chat.marked(chat.render(text(ASKED))[1])
    assert shown == f"«<|im_start|>»user\\n{ASKED}«<|im_end|>»\\n«<|im_start|>»assistant\\n"


def test_a_dry_run_shows_the_first_prompt_of_each_source(tmp_path: Path) -> None:
    problems = prepared(tmp_path, STRING)
    (line,) = first_prompts(problems.chat, problems.train)
    assert line.startswith("train.jsonl row 1") and f"«<|im_start|>»user\\n{ASKED}" in line
    assert f"{len(problems.train[0].tokens)} tokens" in line


def test_messages_without_a_template_name_the_file_that_lacks() -> None:
    with pytest.raises(DataError, match=r"no chat template.*chat_template\.jinja"):
        Chat(tokenizer(None)).render(text(MESSAGES))


# -- in a run


def prepared(
    tmp_path: Path,
    prompt: str,
    *overrides: str,
    template: str | None = CHATML,
    weights: str = "pytorch_model.bin",
) -> Problems:
    folder, rows = tmp_path / "instruct", tmp_path / "train.jsonl"
    made = tokenizer(template)
    made.save_pretrained(folder)
    config: Config = recipe.load(
        "quickstart",
        [
            *(f"model.path={folder}", f"data.train_files=[{rows}]", "data.val_files=[]"),
            *("rollout.max_prompt_length=64", "reward.function=exact", *overrides),
        ],
    )
    write_shape(folder, config.model.shape, vocab_size=len(made), max_position_embeddings=256)
    (folder / weights).touch()
    rows.write_text(f'{{"prompt": {prompt}, "answer": "2"}}\n')
    return prepare(config, load(config), tmp_path / "model")


STRING, CHAT = f'"{ASKED}"', f'[{{"role": "user", "content": "{ASKED}"}}]'


def test_a_run_says_how_strings_are_read_and_names_a_scorer_that_does_not_fit(
    tmp_path: Path,
) -> None:
    problems = prepared(tmp_path, STRING)
    assert problems.train[0].text == rendered()
    line, warning = problems.notes
    assert line.startswith("data.chat=auto") and Reading.WRAPPED in line
    assert "reward.function = 'exact'" in warning and "reward.function=last_number" in warning


def test_messages_need_no_line_and_a_scorer_that_fits_no_warning(tmp_path: Path) -> None:
    assert prepared(tmp_path, CHAT, "reward.function=math").notes == ()


def test_a_model_without_weights_is_named(tmp_path: Path) -> None:
    (warning,) = prepared(tmp_path, CHAT, "reward.function=math", weights="model.gguf").notes
    assert str(tmp_path / "instruct") in warning and "random" in warning


def test_without_the_template_there_is_no_warning(tmp_path: Path) -> None:
    (line,) = prepared(tmp_path, STRING, "data.chat=never").notes
    assert line.startswith("data.chat=never") and Reading.PLAIN in line


def test_the_rendered_prompt_counts_for_the_limit(tmp_path: Path) -> None:
    plain = len(prepared(tmp_path, STRING, "data.chat=never").train[0].tokens)
    with pytest.raises(DataError, match=r"rollout\.max_prompt_length"):
        prepared(tmp_path, STRING, f"rollout.max_prompt_length={plain}")


def test_always_needs_a_template_and_never_refuses_messages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.chat = 'always'.*chat_template\.jinja"):
        prepared(tmp_path, STRING, "data.chat=always", template=None)
    with pytest.raises(DataError, match=r"row 1.*data\.chat=never.*Fix: data\.chat=auto"):
        prepared(tmp_path, CHAT, "data.chat=never")
