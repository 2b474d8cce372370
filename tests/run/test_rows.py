"""A resume knows rows by their content: a moved file goes on, and a changed one is refused by row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from millrace.config import DataConfig
from millrace.data.chat import Chat
from millrace.data.prompts import PromptStream
from millrace.data.sources import Rows, load_sources
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import ConfigError
from millrace.pipeline.checkpoint import Manifest
from millrace.run import rows as of_run
from millrace.run.rows import identity_of

CHAT = Chat(make_tokenizer("chars", ["0123456789 +?"], 0))
opened = partial(PromptStream.open, chat=CHAT, seed=3, shuffle=True, max_prompt_length=16)


def lines(*numbers: int, **changes: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} + 1?", "answer": str(n + 1)} | changes for n in numbers]


BEFORE = lines(*range(8))


class Folder:
    """A folder with data, and a checkpoint that knows its rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str, rows: Sequence[dict[str, Any]]) -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def save(
        self, stream: PromptStream, admitted: int, val: Rows | None = None, continued: int = 0
    ) -> None:
        manifest = Manifest(1, 1, 1, admitted, admitted, {}, continued=continued)
        (self.folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        of_run.write(self.folder, identity_of(stream, val))

    def check(
        self, sources: Sequence[str], use: str = "refuse", val: Rows | None = None, most: int = 0
    ) -> tuple[of_run.Growth, list[str]]:
        data = DataConfig(train_files=tuple(sources), appended_rows=use)  # type: ignore[arg-type]
        return of_run.check(data, self.folder, load(*sources, most=most), val)


def load(*sources: str, most: int = 0) -> Rows:
    return load_sources(sources, seed=0, max_rows=most)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.save(opened(load(made.file("train.jsonl", BEFORE))), admitted=5)
    return made


def test_windows_that_continue_responses_take_no_prompt_of_an_epoch(folder: Folder) -> None:
    """Of 20 samples, 15 continue a response. So the run is in its first epoch of 8 rows."""
    stream = opened(load(folder.file("train.jsonl", BEFORE)))
    folder.save(stream, admitted=20, continued=15)
    growth, notes = folder.check([folder.file("more.jsonl", [*BEFORE, *lines(9)])], "use")
    assert growth == [(0, 8), (8, 0)] and "Prompts from 8 on" in notes[-1]


def test_the_same_rows_resume_whatever_their_file_is(folder: Folder) -> None:
    for name in ("moved/train.jsonl", "train.parquet", "train.json"):
        rows = [folder.file(name, BEFORE)]
        if name.endswith(".json"):
            Path(rows[0]).write_text(json.dumps(BEFORE))
        assert folder.check(rows) == ([(0, 8)], [])
    growth, notes = folder.check([folder.file("renamed.jsonl", BEFORE)])
    assert growth == [(0, 8)] and "data_source" in notes[0] and "renamed" in notes[0]
    halves = [folder.file("a.jsonl", BEFORE[:3]), folder.file("b.jsonl", BEFORE[3:])]
    assert folder.check(halves)[0] == [(0, 8)]
    more = folder.file("more.jsonl", [*BEFORE, *lines(9)])
    assert folder.check([more], most=8)[0] == [(0, 8)]


@pytest.mark.parametrize(
    ("rows", "row", "why"),
    [
        (BEFORE[::-1], 1, "another order"),
        ([*BEFORE[:2], *lines(3, 2), *BEFORE[4:]], 3, "another order"),
        ([*BEFORE[:5], *lines(5, answer="7"), *BEFORE[6:]], 6, "1 of 8 rows differ"),
        ([*BEFORE[:5], *lines(5, answer=6), *BEFORE[6:]], 6, "1 of 8 rows differ"),
        ([*BEFORE[:5], *lines(5, level=2), *BEFORE[6:]], 6, "1 of 8 rows differ"),
        ([*BEFORE[:3], *BEFORE[4:]], 4, "there are 7 rows, and the checkpoint has 8"),
        ([*BEFORE[:3], *lines(9), *BEFORE[3:]], 4, "there are 9 rows"),
        (BEFORE[:6], 7, "there are 6 rows"),
        ([*BEFORE[:3], BEFORE[2], *BEFORE[4:]], 4, "1 of 8 rows differ"),
    ],
)
def test_changed_rows_are_refused_by_the_first_of_them(
    folder: Folder, rows: list[dict[str, Any]], row: int, why: str
) -> None:
    for use in ("refuse", "use"):
        with pytest.raises(ConfigError, match=rf"^data\.train_files = \[.*row {row}\b") as caught:
            folder.check([folder.file("train.jsonl", rows)], use)
        assert why in str(caught.value) and "Fix: " in str(caught.value)


def test_files_in_another_order_are_refused(folder: Folder) -> None:
    names = [folder.file("a.jsonl", BEFORE[:4]), folder.file("b.jsonl", BEFORE[4:])]
    assert folder.check(names)[0] == [(0, 8)]
    with pytest.raises(ConfigError, match=r"b\.jsonl row 1 is not the row .*another order"):
        folder.check(names[::-1])


GENERATED = "task:sort_digits?size=40"


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (GENERATED, "task:sort_digits?size=40&seed=0", True),
        (GENERATED, "task:sort_digits?size=40&seed=1", False),
        (GENERATED, "task:sort_digits?size=41", False),
        (GENERATED, "task:sort_digits?size=40&max_digits=7", False),
        (GENERATED, "task:copy?size=40", False),
        ("reasoning_gym:leg_counting?size=9", "reasoning_gym:leg_counting?size=9&seed=4", False),
        ("reasoning_gym:leg_counting?size=9", "reasoning_gym:leg_counting?size=9&max_animals=3", False),
        ("reasoning_gym:leg_counting?size=9", "reasoning_gym:leg_counting?size=9", True),
    ],
)  # fmt: skip
def test_a_generated_source_is_known_by_its_parameters(
    tmp_path: Path, before: str, now: str, same: bool
) -> None:
    folder = Folder(tmp_path)
    chat = Chat(make_tokenizer("bpe", ["a"], 400))
    stream = PromptStream.open(load(before), chat, seed=3, shuffle=True, max_prompt_length=4000)
    folder.save(stream, 5)
    if same:
        assert folder.check([now])[0] == [(0, len(stream))]
        return
    with pytest.raises(ConfigError, match=r"^data\.train_files = .* row 1 is not .*and now it is"):
        folder.check([now])


def test_mixed_sources_are_compared_one_after_the_other(folder: Folder) -> None:
    file = folder.file("train.jsonl", BEFORE)
    folder.save(
        opened(
            load(file, GENERATED),
            max_prompt_length=64,
            chat=Chat(make_tokenizer("bpe", ["a"], 400)),
        ),
        5,
    )
    assert len(folder.check([file, GENERATED])[0]) == 1
    with pytest.raises(ConfigError, match="row 1 is not"):
        folder.check([GENERATED, file])
    with pytest.raises(ConfigError, match="no source follows"):
        folder.check([file])


def test_added_rows_are_a_choice(folder: Folder) -> None:
    more = [folder.file("train.jsonl", [*BEFORE, *lines(10, 11)])]
    with pytest.raises(
        ConfigError, match=r"lacks 2 rows, from train\.jsonl row 9.*Fix: data\.appended_rows=use"
    ):
        folder.check(more)
    growth, notes = folder.check(more, "use")
    assert growth == [(0, 8), (8, 0)] and "Prompts from 8 on" in notes[0]
    old, new = opened(load(*more), growth=((0, 8),)), opened(load(*more), growth=growth)
    assert [new[i].text for i in range(8)] == [old[i].text for i in range(8)]
    assert sorted(new[i].text for i in range(8)) == sorted(row["prompt"] for row in BEFORE)
    assert (
        len({new[i].text for i in range(8, 18)}) == len({new[i].text for i in range(18, 28)}) == 10
    )
    assert [new[i].text for i in range(8, 18)] != [new[i].text for i in range(18, 28)]
    # The next resume goes on in the same order, and a second growth begins after its epoch.
    folder.save(new, admitted=12)
    assert folder.check(more)[0] == [(0, 8), (8, 10)]
    again = [folder.file("train.jsonl", [*BEFORE, *lines(10, 11, 12)])]
    assert folder.check(again, "use")[0] == [(0, 8), (8, 10), (18, 0)]


def test_other_validation_rows_are_a_note(folder: Folder) -> None:
    train = folder.file("train.jsonl", BEFORE)
    folder.save(opened(load(train)), 5, load(folder.file("val.jsonl", BEFORE[:2])))
    assert folder.check([train], val=load(folder.file("val.jsonl", BEFORE[:2])))[1] == []
    notes = folder.check([train], val=load(folder.file("val.jsonl", BEFORE[:3])))[1]
    assert len(notes) == 1 and notes[0].startswith("data.val_files")


def test_a_checkpoint_without_digests_resumes_with_a_note(folder: Folder) -> None:
    (folder.folder / "rows.msgpack").unlink()
    growth, notes = folder.check([folder.file("train.jsonl", BEFORE[::-1])])
    assert growth == () and len(notes) == 1 and "no digests" in notes[0]


def test_other_prompts_that_fit_are_refused(folder: Folder) -> None:
    """As with another tokenizer: the same rows, of which others are left out."""
    rows = load(folder.file("train.jsonl", [*BEFORE, *lines(10_000_000)]))
    fit = partial(opened, rows, filter_overlong=True)
    folder.save(fit(max_prompt_length=10), 5)
    of_run.check_kept(folder.folder, fit(max_prompt_length=10))
    with pytest.raises(ConfigError, match=r"^data\.filter_overlong_prompts = True"):
        of_run.check_kept(folder.folder, fit(max_prompt_length=16))
    assert of_run.training_key(fit(max_prompt_length=10)) != of_run.training_key(fit())


def test_a_resume_knows_the_journal_of_its_run_by_the_rows(folder: Folder) -> None:
    rows = load(train := folder.file("train.jsonl", BEFORE))
    folder.save(first := opened(rows), 5)
    resumed = opened(rows, growth=folder.check([train])[0], use_from=5)
    assert of_run.training_key(resumed) == of_run.training_key(first)
