"""Rows of data.

The columns of verl, TRL and reasoning-gym become one Problem. The error of a bad row names the row.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from millrace.codec import from_json, to_json
from millrace.data.rows import RowCheck, check_rows, plain, problem, texts
from millrace.data.sources import load_source
from millrace.errors import DataError


def rows_of(tmp_path: Path, *rows: Any) -> Any:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return load_source(str(tmp_path / "train.jsonl"), seed=0)


def test_verl_columns(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": ""},
            {"role": "user", "content": "1+1?", "name": None},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 4},
    }
    shown = problem(rows_of(tmp_path, row), 0)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "1+1?"}]
    assert (shown.prompt, shown.data_source, shown.ground_truth, shown.answer) == (
        messages,
        "openai/gsm8k",
        "2",
        "2",
    )
    assert shown.extra_info == {"index": 4}
    assert shown.columns == {"ability": "math", "prompt": messages}


def test_trl_columns(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        {"prompt": "1+1?", "solution": "two", "level": 3},
        {"prompt": "2+2?", "ground_truth": 4},
    )
    first, second = problem(rows, 0), problem(rows, 1)
    assert (first.prompt, first.data_source, first.ground_truth, first.answer) == (
        "1+1?",
        "train",
        "two",
        "two",
    )
    assert first.columns == {"solution": "two", "level": 3}
    assert (second.ground_truth, second.answer) == (4, "4")


def test_reasoning_gym_columns_from_a_file_and_from_the_source(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "2", "metadata": {"source_dataset": "chain_sum"}}
    shown = problem(rows_of(tmp_path, row), 0)
    assert (shown.prompt, shown.ground_truth, shown.extra_info) == (
        "1+1?",
        "2",
        {"metadata": row["metadata"]},
    )
    live = problem(load_source("reasoning_gym:knights_knaves?size=3", seed=0), 1)
    assert live.data_source == live.extra_info["reasoning_gym"] == "knights_knaves"


def test_a_problem_survives_a_checkpoint_as_it_is() -> None:
    for name in ("chain_sum", "knights_knaves", "spell_backward"):
        shown = problem(load_source(f"reasoning_gym:{name}?size=3", seed=0), 1)
        assert from_json(to_json(shown.extra_info), dict) == shown.extra_info
    import numpy

    assert plain({"a": (1, numpy.float32(0.5)), "b": numpy.arange(2)}) == {
        "a": [1, 0.5],
        "b": [0, 1],
    }


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question_text": "a"}, "has no column 'prompt'"),
        ({"prompt": None}, "is null"),
        ({"prompt": "  "}, "is empty"),
        ({"prompt": []}, "has no message"),
        ({"prompt": 3}, "must be a string, or messages"),
        ({"prompt": [{"role": "usr", "content": "a"}]}, "Fix: user"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "must be a string"),
        ({"prompt": [{"role": "user", "content": None}]}, "must be a string"),
        ({"prompt": [{"role": "user", "content": ""}]}, "is empty"),
        ({"prompt": "a\x00b"}, "NUL at character 1"),
        ({"prompt": "a\ud800b"}, "surrogate"),
        ({"prompt": "a", "answer": "\x00"}, "NUL"),
        ({"prompt": "a", "reward_model": "x"}, "must be an object"),
        ({"prompt": "a", "data_source": 3}, "must be a string"),
        ({"prompt": "a"}, "no ground truth"),
        ({"prompt": "a", "answer": " "}, "no ground truth"),
        ({"prompt": "a", "answer": []}, "no ground truth"),
        ({"prompt": "a", "reward_model": {"ground_truth": {"target": ["1"]}}}, "is an object"),
        ({"prompt": [{"from": "human", "value": "a"}]}, "Fix: role and content in place of from"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
            "[1]",
        ),
        ({"prompt": "What is it?\n<image>"}, "stands for image"),
        ({"prompt": "<video>\nWhat is it?"}, "stands for video"),
        ({"prompt": "What is it?", "image_path": "a.png"}, "image_path: 'a.png'"),
        ({"prompt": "What?", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_row_is_named_with_its_file_number_rule_and_fix(
    tmp_path: Path, row: Any, said: Any
) -> None:
    rows = rows_of(tmp_path, {"prompt": "fine", "answer": "1"}, row)
    with pytest.raises(DataError) as caught:
        check_rows(rows, RowCheck(need_ground_truth=True))
    message = str(caught.value)
    assert message.startswith("train.jsonl row 2")
    assert said in message
    assert "Fix: " in message
    message.encode()


def test_texts_cover_the_alphabet_of_tasks_and_all_rows_of_files(tmp_path: Path) -> None:
    assert set("0123456789>") <= set(
        "".join(texts(load_source("task:sort_digits", seed=0), limit=3))
    )
    rows = rows_of(tmp_path, *({"prompt": chr(200 + i), "answer": "x"} for i in range(50)))
    assert {chr(200 + i) for i in range(50)} <= set(texts(rows, limit=3))


def test_a_wrong_prompt_key_names_the_usual_column() -> None:
    rows = load_source("task:copy", seed=0)
    with pytest.raises(DataError, match=r"Fix: data\.prompt_key=prompt, or add"):
        check_rows(rows, RowCheck("answers"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "answer": math.nan},
        {"prompt": "1+1?", "reward_model": {"style": "rule", "ground_truth": math.nan}},
    ],
)
def test_nan_is_no_ground_truth(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = rows_of(tmp_path, row)
    assert problem(rows, 0).ground_truth is None
    with pytest.raises(DataError, match=r"no ground truth.*Fix: add one of these columns"):
        problem(rows, 0, need_ground_truth=True)


def test_nan_is_no_source_and_no_prompt(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, {"prompt": "1+1?", "data_source": math.nan}, {"prompt": math.nan})
    assert problem(rows, 0).data_source == "train"
    with pytest.raises(DataError, match="is null"):
        problem(rows, 1)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is it?", "image": "fig/1.png"},
        {"prompt": "What is it?", "videos": ["a.mp4"]},
        {"prompt": "<image> What is it?", "image_path": "fig/1.png"},
        {"prompt": [{"role": "user", "content": "<audio>?"}], "audio_file": b"abc".hex()},
    ],
)
def test_a_row_with_a_part_that_is_no_text_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"the policy would not see it.*Fix: delete the column"):
        problem(rows_of(tmp_path, row), 0)


def test_a_message_that_only_calls_tools_has_an_empty_text(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    read = problem(rows_of(tmp_path, {"prompt": talk}), 0).prompt
    assert isinstance(read, list) and read[1] == talk[1] | {"content": ""}


def test_a_column_with_a_name_like_a_part_stays(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "prompt": "How wide is it?",
        "image_width": "640",
        "images": [],
        "image": None,
    }
    assert problem(rows_of(tmp_path, row), 0).columns["image_width"] == "640"
    row = {"image_question": "Which attribute has <image> in SVG?", "image_hint": "not src"}
    read = problem(rows_of(tmp_path, row), 0, prompt_key="image_question")
    assert read.prompt == row["image_question"] and read.columns == {"image_hint": "not src"}
