"""A curriculum: rows that a user's function picks, by the index and the outcomes before it."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.data.chat import Chat
from millrace.data.curriculum import FILE, Curriculum, Outcomes
from millrace.data.prompts import PromptStream
from millrace.data.sources import load_source
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import CheckpointError, ConfigError
from millrace.types import Prompt, Sample, Score, Trajectory, tokens_of

SIZE = 7


class Rows:
    """A stream of seven rows, and two more from prompt 20 on."""

    def rows_at(self, index: int) -> int:
        return SIZE + 2 * (index >= 20)

    def problem_of(self, row: int) -> Any:
        return f"problem {row}"

    def prompt_of(self, index: int, row: int) -> Prompt:
        return Prompt(index, tokens_of([row]), f"problem {row}", "test")

    def where_of(self, row: int) -> str:
        return f"row {row + 1}"


def by_the_past(i: int, rows: Any, outcomes: Outcomes) -> int:
    return hash((i, outcomes.rows.tobytes(), outcomes.scores.tobytes())) % len(rows)


def good(i: int, rows: Any, outcomes: Outcomes) -> Any:
    return numpy.int64(i % len(rows))


def past_the_end(i: int, rows: Any, outcomes: Outcomes) -> int:
    return i * 3 + 2


def below(i: int, rows: Any, outcomes: Outcomes) -> int:
    return -1


def fraction(i: int, rows: Any, outcomes: Outcomes) -> float:
    return i / 1


def truth(i: int, rows: Any, outcomes: Outcomes) -> bool:
    return i > 3


def fails(i: int, rows: Any, outcomes: Outcomes) -> int:
    return int(outcomes.scores[-1])


def fails_on_nan(i: int, rows: Any, outcomes: Outcomes) -> int:
    return int(outcomes.scores.mean()) if len(outcomes) else 0


def impure(i: int, rows: Any, outcomes: Outcomes) -> int:
    return random.randrange(len(rows)) if len(rows) > 1 else 0


def changes_the_past(i: int, rows: Any, outcomes: Outcomes) -> int:
    outcomes.scores[:] = 0
    return 0


def made(name: str, lag: int = 4) -> Curriculum:
    return Curriculum(Rows(), f"{__name__}:{name}", lag)


def sample(curriculum: Curriculum, i: int) -> Sample | None:
    """Return the sample of a prompt, whose scores depend on its row alone. Some have none."""
    row = curriculum[i].tokens[0]
    if row == 3:
        return None
    scores = (Score(row / 10, raw=row / 3), Score(1.0))
    return Sample(curriculum[i], tuple(Trajectory(score=score) for score in scores))


def admit(curriculum: Curriculum, dice: random.Random, begin: int, end: int) -> list[int]:
    """Admit prompts and end them in a random order. Return those that have not ended."""
    running, i = [*range(begin, begin)], begin
    while i < end:
        if curriculum.ready(i) and dice.random() < 0.7:
            assert curriculum[i].index == i
            running.append(i)
            i += 1
        elif running:
            one = running.pop(dice.randrange(len(running)))
            curriculum.ended(one, sample(curriculum, one))
    return running


@given(st.integers(0, 2**32), st.integers(0, 9))
def test_rows_depend_on_no_speed_and_survive_a_kill(
    tmp_path_factory: Any, seed: int, lag: int
) -> None:
    dice, plain, killed = random.Random(seed), made("by_the_past", lag), made("by_the_past", lag)
    for i in range(40):  # one after the other
        plain[i]
        plain.ended(i, sample(plain, i))
    at = dice.randrange(1, 40)
    running = admit(killed, dice, 0, at)
    folder = tmp_path_factory.mktemp("checkpoint")
    finished = {i: sample(killed, i) for i in running if dice.random() < 0.5}
    (folder / FILE).write_bytes(killed.dump(at))
    for i in running:  # after the snapshot: a resume does not know it
        killed.ended(i, None)
    resumed = made("by_the_past", lag)
    resumed.restore(folder, at, ((i, finished.get(i)) for i in running))
    assert not resumed.ready(min([i for i in running if not finished.get(i)], default=99) + lag + 1)
    for i in running:
        if not finished.get(i):
            resumed.ended(i, sample(resumed, i))
    for one in admit(resumed, dice, at, 40):
        resumed.ended(one, sample(resumed, one))
    assert resumed.dump(40) == plain.dump(40)
    assert [resumed[i].tokens[0] for i in range(40)] == [plain[i].tokens[0] for i in range(40)]


def test_outcomes_are_mean_scores_before_any_shaping_and_never_change() -> None:
    seen: list[Outcomes] = []
    curriculum = made("good", lag=1)
    curriculum._choose = lambda i, rows, outcomes: seen.append(outcomes) or 2 * i % len(rows)  # type: ignore[func-returns-value,method-assign,assignment]
    for i in range(3000):
        curriculum[i]
        curriculum.ended(i, sample(curriculum, i) if i != 1 else None)
    assert [len(outcomes) for outcomes in seen[:4]] == [0, 0, 1, 2]
    assert seen[3].scores[0] == 0.5 and numpy.isnan(seen[3].scores[1])
    assert seen[3].rows.tolist() == [0, 2] and seen[-1].rows[:4].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("past_the_end", ["for prompt 2 it returned row 8, and there are 7 rows", "0 to 6"]),
        ("below", ["for prompt 0 it returned row -1"]),
        ("fraction", ["for prompt 0 it returned 0.0, which is no whole number"]),
        ("truth", ["for prompt 0 it returned False, which is no whole number"]),
        ("fails", ["for prompt 0 it raised IndexError", "test_curriculum.py:"]),
        ("fails_on_nan", ["it raised ValueError", "NaN"]),
        ("impure", ["two calls for prompt", "random.Random(i)"]),
        ("changes_the_past", ["it raised ValueError", "read-only"]),
        ("absent", ["has no 'absent'"]),
    ],
)
def test_a_wrong_sampler_is_refused_by_name_before_a_run(name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        made(name).try_out()
    assert all(word in str(refused.value) for word in ["data.sampler", f":{name}", *words])


def test_a_good_one_passes_and_sees_rows_that_a_resume_adds() -> None:
    curriculum = made("good")
    curriculum.try_out()
    for i in range(30):
        assert curriculum[i].tokens[0] == i % (7 if i < 20 else 9)
        curriculum.ended(i, None)
    assert curriculum.where(29) == "row 3"
    with pytest.raises(IndexError):
        curriculum[31]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    for data in (None, b"junk", made("good").dump(0)):
        if data is not None:
            (tmp_path / FILE).write_bytes(data)
        with pytest.raises(CheckpointError, match=FILE):
            made("good").restore(tmp_path, 3, ())


@lru_cache
def chat() -> Chat:
    return Chat(make_tokenizer("chars", ["0123456789>"], 0))


def test_rows_are_those_of_the_files_that_fit(tmp_path: Path) -> None:
    texts = ["1", "2" * 17, "3", "4"]
    lines = "\n".join(json.dumps({"prompt": text, "answer": "1"}) for text in texts)
    (tmp_path / "t.jsonl").write_text(lines)
    rows = load_source(str(tmp_path / "t.jsonl"), seed=0)
    limits: dict[str, Any] = {"seed": 0, "shuffle": True, "max_prompt_length": 16}
    stream = PromptStream.open(rows, chat(), **limits, filter_overlong=True)
    curriculum = Curriculum(stream, f"{__name__}:good", 9)
    assert [curriculum[i].text for i in range(4)] == ["1", "3", "4", "1"]
    assert [curriculum.where(i).rpartition(" ")[2] for i in range(3)] == ["1", "3", "4"]
    seen = curriculum._view
    assert len(seen) == 3 and seen[1].text == "3" and [p.text for p in seen[1:]] == ["3", "4"]
