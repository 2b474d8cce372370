"""Rows are checked in blocks, each distinct one once, before a run or ahead of their use."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.data import prompts, row_store
from millrace.data.chat import Chat, Reading
from millrace.data.prompts import Ahead, PromptStream
from millrace.data.row_store import RowCache
from millrace.data.rows import Problem, RowCheck
from millrace.data.sources import Rows, load_sources
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import DataError
from tests.waiting import HANG_S

CHARS = Chat(make_tokenizer("chars", ["0123456789 +?"], 0))


def byte_level() -> Chat:
    """Return a tokenizer in which each token stands for a byte, with a template of chats."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: n for n, c in enumerate([*alphabet, "<e>", "<s>"])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<e>", "<s>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>", bos_token="<s>")  # type: ignore[no-untyped-call]
    made.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] | trim }}<e>{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    return Chat(made, strings="auto")


CHATS = {"chars": CHARS, "bpe": Chat(make_tokenizer("bpe", ["a b"], 300)), "bytes": byte_level()}
TEXTS = st.text("0 1a<es>ü\n", max_size=12)
PROMPTS = TEXTS.filter(str.strip) | st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", CHATS)
@given(st.lists(PROMPTS, max_size=4), st.integers(1, 30))
def test_lengths_are_those_of_rendered_prompts_or_bounds_below_the_limit(
    name: str, given_: list[Any], limit: int
) -> None:
    chat, problems = CHATS[name], [Problem(prompt, "d") for prompt in given_]
    lengths = chat.lengths([(p, "row") for p in problems], limit)
    for problem, length in zip(problems, lengths, strict=True):
        tokens = chat.render(problem)[1]
        if length:
            assert chat.unk_id not in tokens
            assert length == len(tokens) or len(tokens) <= length <= limit


def rows_of(folder: Path, *given: str, cache: RowCache | None = None) -> Rows:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in given))
    return load_sources([str(path)], seed=0, cache=cache or RowCache())


def opened(rows: Rows, check: RowCheck, use_from: int | None = None, **more: Any) -> PromptStream:
    fixed: dict[str, Any] = {"seed": 1, "shuffle": True, "max_prompt_length": 16}
    return PromptStream.open(rows, CHARS, check=check, use_from=use_from, **fixed, **more)


class Counted:
    """Counts the checks of each prompt, and refuses "66"."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, row: Problem, where: str) -> None:
        self.seen.append(row.text)
        if row.text == "66":
            raise DataError(f"{where}: refused")


def test_rows_that_repeat_are_checked_once(tmp_path: Path) -> None:
    inspect = Counted()
    opened(rows_of(tmp_path, *["1", "2", "1"] * 20), RowCheck(inspect=inspect))
    assert inspect.seen == ["1", "2"]


@pytest.mark.parametrize("bad", ["x", "2" * 17, "66", ""])
def test_the_first_bad_row_is_the_one_that_is_named(tmp_path: Path, bad: str) -> None:
    good = [str(i) for i in range(300) if i != 66]
    rows = rows_of(tmp_path, *good[:270], bad, "3" * 18, *good[270:], "y", "66")
    with pytest.raises(DataError, match=r"t\.jsonl row 271\b"):
        opened(rows, RowCheck(inspect=Counted()))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check ten rows before a run."""
    monkeypatch.setattr(prompts, "_FIRST", 10)
    monkeypatch.setattr(prompts, "_BLOCK", 4)
    monkeypatch.setattr(row_store, "_ON_DISK", 0)


NUMBERS = [str(i) for i in range(60)]


@pytest.mark.usefixtures("few")
def test_rows_are_checked_in_the_order_of_their_use_and_the_rest_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ahead, "start", lambda self: None)
    inspect, notes = Counted(), list[str]()
    stream = opened(rows_of(tmp_path, *NUMBERS), RowCheck(inspect=inspect), 25, note=notes.append)
    first = inspect.seen.copy()
    assert "50 of 60 distinct rows are not checked yet" in notes[0]
    assert [stream[i].text for i in range(25, 35)] == first and inspect.seen == first
    late = stream[40].text  # before the thread had it
    assert inspect.seen == [*first, late]
    assert stream[40].text == late and inspect.seen == [*first, late]


@pytest.mark.usefixtures("few")
def test_the_rows_that_are_checked_first_say_how_prompts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ahead, "start", lambda self: None)
    assert opened(rows_of(tmp_path, *NUMBERS), RowCheck(), 0).readings == {Reading.PLAIN: 10}


@pytest.mark.usefixtures("few")
def test_the_thread_checks_all_and_the_next_start_checks_none(tmp_path: Path) -> None:
    inspect, done, notes = Counted(), threading.Event(), list[str]()
    check = RowCheck(inspect=inspect, key="k")

    def note(text: str) -> None:
        notes.append(text)
        if "are checked" in text:
            done.set()

    cache = RowCache(tmp_path / "cache")
    opened(rows_of(tmp_path, *NUMBERS, *NUMBERS, cache=cache), check, 0, note=note)
    assert done.wait(HANG_S) and sorted(inspect.seen) == sorted(NUMBERS)
    again = opened(rows_of(tmp_path, *NUMBERS, *NUMBERS, cache=cache), check, 0, note=note)
    assert again.ahead is None and len(inspect.seen) == 60 and len(notes) == 2
    assert sum(again.readings.values()) == 60
    other = RowCheck(inspect=inspect, key="another key")
    opened(rows_of(tmp_path, *NUMBERS, *NUMBERS, cache=cache), other)
    assert len(inspect.seen) == 120


@pytest.mark.usefixtures("few")
def test_a_bad_row_that_the_thread_finds_ends_the_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    run = Ahead._run

    def watched(self: Ahead, meter: Any) -> None:
        run(self, meter)
        ended.set()

    monkeypatch.setattr(Ahead, "_run", watched)
    rows = rows_of(tmp_path, *NUMBERS, "66")
    used = PromptStream.open(rows, CHARS, seed=1, shuffle=True, max_prompt_length=16)
    last = max(range(61), key=lambda i: used[i].text == "66")
    stream = opened(rows, RowCheck(inspect=Counted()), (last + 1) % 61)  # it is used last
    assert ended.wait(HANG_S)
    with pytest.raises(DataError, match=r"t\.jsonl row 61: refused"):
        stream[last + 1]


@pytest.mark.usefixtures("few")
def test_long_prompts_that_are_left_out_are_all_known_before_a_run(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, *NUMBERS, "2" * 17, *NUMBERS)
    cache = RowCache(tmp_path / "cache")
    for _ in range(2):
        rows = rows_of(tmp_path, *NUMBERS, "2" * 17, *NUMBERS, cache=cache)
        stream = opened(rows, RowCheck(key="k"), 0, filter_overlong=True)
        assert (len(stream), stream.filtered, stream.ahead) == (120, 1, None)
        assert sorted(stream[i].text for i in range(120)) == sorted(NUMBERS * 2)
