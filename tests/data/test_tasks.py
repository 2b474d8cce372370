"""Tasks and demonstrations.

They are pure functions of the seed and the row. The splits are disjoint, and wrong answers are
wrong.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.data.demonstrations import Demonstrations
from millrace.data.rows import problem
from millrace.data.sources import load_source
from millrace.data.tasks import TASKS, SortDigits, corrupt_answer


def test_a_row_depends_on_nothing_but_seed_parameters_and_place() -> None:
    forward, backward = (
        load_source("task:sort_digits", seed=3),
        load_source("task:sort_digits", seed=3),
    )
    there = [forward[i] for i in range(50)]
    assert there == [backward[i] for i in reversed(range(50))][::-1]
    assert there != [load_source("task:sort_digits", seed=4)[i] for i in range(50)]
    assert there != [load_source("task:sort_digits?seed=9", seed=3)[i] for i in range(50)]
    assert there[7]["prompt"] == load_source("task:sort_digits?seed=3", seed=0)[7]["prompt"]


def test_no_training_problem_is_a_validation_problem() -> None:
    train = {
        row["prompt"] for row in load_source("task:sort_digits?size=4000&max_digits=4", seed=0)
    }
    for seed in (0, 1):
        held_out = {
            row["prompt"]
            for row in load_source("task:sort_digits?size=300&max_digits=4", seed=seed, split="val")
        }
        assert not train & held_out


def test_products_and_sums_share_no_problem_also_with_swapped_numbers() -> None:
    for name, sign in (("products", "*"), ("sums", "+")):
        splits: dict[str, list[tuple[int, ...]]] = {}
        for split in ("train", "val"):
            rows = load_source(f"task:{name}?smaller=12&larger=30&size=128", seed=3, split=split)
            splits[split] = []
            for entry in (problem(rows, i) for i in range(len(rows))):
                words = entry.text.removeprefix("What is ").removesuffix("?").split(f" {sign} ")
                a, b = map(int, words)
                assert int(entry.ground_truth) == (a * b if name == "products" else a + b)
                assert min(a, b) <= 12 and max(a, b) <= 30
                assert max(a, b) != int(entry.ground_truth)  # an echo must not be right
                splits[split].append((min(a, b), max(a, b)))
            asked = {entry.text for entry in (problem(rows, i) for i in range(len(rows)))}
            assert any(int(t.split()[2]) > int(t.split()[4][:-1]) for t in asked)
        assert len(set(splits["val"])) == len(set(splits["train"])) == 128
        other = load_source(f"task:{name}?smaller=12&larger=30&size=128", seed=4, split="val")
        held_out = {
            tuple(sorted(map(int, re.findall(r"\d+", problem(other, i).text)))) for i in range(128)
        }
        assert not set(splits["train"]) & (set(splits["val"]) | held_out)


def test_a_task_with_few_problems_asks_all_of_them_before_one_comes_again() -> None:
    rows = load_source("task:products?smaller=2&larger=20&size=60", seed=0)
    pairs = [tuple(sorted(map(int, re.findall(r"\d+", problem(rows, i).text)))) for i in range(60)]
    count = len(set(pairs))
    assert 1 < count < 40 and len(set(pairs[:count])) == count
    assert pairs[count : 2 * count] == pairs[:count]
    alone = load_source("task:products?smaller=2&larger=2&size=2", seed=0, split="val")
    assert problem(alone, 0).text == problem(alone, 1).text == "What is 2 * 2?"


def test_sort_digits_is_what_it_says() -> None:
    for row in load_source("task:sort_digits?size=300", seed=0):
        digits = row["prompt"].removesuffix(">")
        assert 4 <= len(digits) <= 6
        assert row["answer"] == "".join(sorted(digits))


def test_the_tail_is_long_and_clipped() -> None:
    lengths = [
        len(r["prompt"]) - 1
        for r in load_source("task:sort_digits?size=2000&tail=0.2&tail_digits=40", seed=0)
    ]
    assert max(lengths) == 40
    assert 0.12 < sum(n > 6 for n in lengths) / 2000 < 0.22
    assert min(lengths) == 4


def test_every_task_stays_in_its_alphabet() -> None:
    for name in TASKS:
        rows = load_source(f"task:{name}?size=100", seed=0)
        allowed = set(rows.parts[0].task.alphabet())
        for i in range(len(rows)):
            entry = problem(rows, i)
            assert set(entry.text + entry.answer) <= allowed | {"\n"}


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_a_corrupted_answer_is_wrong(seed: int, digits: Any) -> None:
    rng, task = Random(seed), SortDigits(min_digits=digits, max_digits=digits)
    row = task.row(rng)
    assert task.corrupt(rng, row["prompt"], row["answer"]) != row["answer"]


@given(st.integers(0, 10**6), st.text(max_size=20), st.text(max_size=20))
@settings(deadline=None)
def test_any_answer_can_be_corrupted(seed: int, answer: Any, other: Any) -> None:
    assert corrupt_answer(Random(seed), answer, other) != answer


def test_messiness_is_the_share_of_wrong_demonstrations() -> None:
    for spec in ("task:sort_digits", "reasoning_gym:chain_sum?size=40"):
        shown = Demonstrations(load_source(spec, seed=0), seed=0, messiness=0.6)
        drawn = [shown[i] for i in range(400)]
        assert 0.5 < sum(d.messy for d in drawn) / 400 < 0.7
        assert all(d.messy == (d.answer != d.problem.ground_truth) for d in drawn)
        assert drawn[7] == shown[7]
    clean = Demonstrations(load_source("task:sort_digits", seed=0), seed=0, messiness=0.0)
    assert not any(clean[i].messy for i in range(100))


def test_a_wrong_answer_from_another_row_is_one_of_the_same_data_source(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{name} {i}", "answer": f"{name}{i % 7}", "data_source": name}
        for name in "abc"
        for i in range(40)
    ]
    path = tmp_path / "mix.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = Demonstrations(load_source(str(path), seed=0), seed=0, messiness=1.0)
    drawn = [shown[i] for i in range(240)]
    borrowed = [d for d in drawn if d.answer[0] in "abc"]  # the others have two characters swapped
    assert len(borrowed) > 60
    assert all(
        d.answer[0] == d.problem.data_source and d.answer != d.problem.answer for d in borrowed
    )


def test_chase_is_what_it_says_and_its_splits_share_no_problem() -> None:
    splits = {}
    for split in ("train", "val"):
        rows = load_source(f"task:chase?size=400&split={split}", seed=0)
        entries = [problem(rows, i) for i in range(len(rows))]
        for entry in entries:
            hops, at, table = int(entry.text[1]), entry.text[3], entry.extra_info["table"]
            *calls, last = entry.answer.split("\n")
            for call in calls:
                assert call == f"?{at}."
                at = table[int(at)]
            assert last == f"={at}" and entry.ground_truth == at and len(calls) == hops
        assert {e.text[1] for e in entries} == set("1234")
        splits[split] = {(e.text, e.extra_info["table"]) for e in entries}
    assert not splits["train"] & splits["val"]


def test_most_wrong_demonstrations_of_chase_stop_one_step_short() -> None:
    rows = load_source("task:chase", seed=0)
    made = [Demonstrations(rows, 0, 0.8)[i] for i in range(2000)]
    messy = [d for d in made if d.messy]
    assert 0.76 < len(messy) / len(made) < 0.84
    short = 0
    for d in messy:
        right, wrong = d.problem.answer.split("\n"), d.turns
        assert wrong != tuple(right) and wrong[-1][0] == "=" and len(wrong[-1]) == 2
        short += wrong == (*right[:-2], f"={right[-2][1]}")
    assert 0.6 < short / len(messy) < 0.85
