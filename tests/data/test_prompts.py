"""The prompt stream.

It is a pure function of (seed, i). Each epoch has every row once. Prompts that are too long are
found before the run.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.codec import from_json, to_json
from millrace.data.chat import Chat
from millrace.data.prompts import PromptStream, shuffled
from millrace.data.sources import load_source
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import DataError
from millrace.types import Prompt


@lru_cache
def chat() -> Chat:
    return Chat(make_tokenizer("chars", ["0123456789>"], 0))


def stream(rows: Any, **changes: Any) -> Any:
    return PromptStream.open(
        rows, chat(), **{"seed": 0, "shuffle": True, "max_prompt_length": 16} | changes
    )


def file_rows(tmp_path: Path, *prompts: Any) -> Any:
    (tmp_path / "t.jsonl").write_text(
        "\n".join(json.dumps({"prompt": p, "answer": "1"}) for p in prompts)
    )
    return load_source(str(tmp_path / "t.jsonl"), seed=0)


@given(st.integers(1, 600), st.text(max_size=5))
def test_a_shuffle_is_a_permutation(n: Any, key: Any) -> None:
    assert sorted(shuffled(i, n, key) for i in range(n)) == list(range(n))


def test_shuffles_of_small_sets_reach_every_order_about_equally() -> None:
    seen = [tuple(shuffled(i, 3, f"{e}") for i in range(3)) for e in range(1200)]
    assert len(set(seen)) == 6
    assert all(140 < seen.count(order) < 260 for order in set(seen))


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    rows = file_rows(tmp_path, *(str(i) for i in range(40)))
    shown = stream(rows)
    epochs = [[shown[e * 40 + i].text for i in range(40)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != [stream(rows, seed=1)[i].text for i in range(40)]
    in_order = stream(rows, shuffle=False)
    assert [in_order[i].text for i in range(80)] == [str(i) for i in range(40)] * 2


def test_any_prompt_can_be_had_again_from_its_index_alone() -> None:
    first, again = (stream(load_source("task:sort_digits", seed=5)) for _ in range(2))
    there = [first[i] for i in range(30)]
    assert there == [again[i] for i in reversed(range(30))][::-1]
    assert [p.index for p in there] == list(range(30))
    assert first[3_000_017] == again[3_000_017]
    assert from_json(to_json(there[0]), Prompt) == there[0]


def test_a_long_prompt_of_a_file_is_an_error_at_the_start_or_left_out(tmp_path: Path) -> None:
    rows = file_rows(tmp_path, "1", "2" * 17, "3", "4" * 20)
    with pytest.raises(DataError, match=r"t\.jsonl row 2: .*17 tokens.*rollout\.max_prompt_length"):
        stream(rows)
    shown = stream(rows, filter_overlong=True)
    assert (len(shown), shown.filtered) == (2, 2)
    assert {shown[i].text for i in range(4)} == {"1", "3"}
    with pytest.raises(DataError, match="every row is longer"):
        stream(file_rows(tmp_path, "2" * 17), filter_overlong=True)


def test_a_character_without_a_token_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t\.jsonl row 2: 'x'"):
        stream(file_rows(tmp_path, "1", "x"))


def test_long_prompts_of_endless_tasks_are_replaced_or_refused() -> None:
    rows = load_source("task:sort_digits?tail=0.5&tail_digits=30", seed=0)
    shown = stream(rows, filter_overlong=True)
    assert len(shown) == 1_000_000
    assert all(len(shown[i].tokens) <= 16 for i in range(300))
    with pytest.raises(DataError, match=r"rollout\.max_prompt_length is 16"):
        stream(rows)


def test_a_generated_set_takes_no_memory_for_its_rows() -> None:
    rows = load_source(f"task:sort_digits?size={10**15}", seed=0)
    shown = stream(rows, shuffle=False)
    assert len(shown) == 10**15 and shown[10**14].index == 10**14


def test_small_generated_sets_are_filtered_and_counted() -> None:
    shown = stream(
        load_source("task:sort_digits?size=200&tail=0.5&tail_digits=30", seed=0),
        filter_overlong=True,
    )
    assert shown.filtered > 10
    assert len(shown) + shown.filtered == 200
