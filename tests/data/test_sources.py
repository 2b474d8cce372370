"""Sources: every kind loads, and every fault is reported before a model loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from millrace.data.rows import problem
from millrace.data.sources import load_source, load_sources
from millrace.errors import ConfigError, DataError


def write(path: Path, rows: list) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(5)]


def test_all_file_formats_hold_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "c.json").write_text(json.dumps({"data": ROWS}))
    write(tmp_path / "d.jsonl", ROWS)
    write(tmp_path / "e.json", ROWS)
    for name in ("a.parquet", "b.json", "c.json", "d.jsonl", "e.json"):
        rows = load_source(str(tmp_path / name), seed=0)
        assert list(rows) == ROWS
        assert rows.describe(2) == f"{name} row 3"
        assert rows.locate(0)[0].name == name[0]


def test_sources_follow_one_another_and_max_rows_cuts_the_whole(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.jsonl", ROWS), write(tmp_path / "two.jsonl", ROWS)
    rows = load_sources((one, two, "task:copy?size=4"), seed=0)
    assert len(rows) == 14
    assert rows.describe(5) == "two.jsonl row 1"
    assert rows[13]["data_source"] == "copy"
    assert len(load_sources((one, two), seed=0, max_rows=7)) == 7
    with pytest.raises(IndexError):
        rows[14]


def test_row_numbers_count_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert load_source(str(tmp_path / "t.jsonl"), seed=0).describe(1) == "t.jsonl row 3"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("task:sort_digts", "Fix: task:sort_digits"),
        ("task:sort_digits?min_digit=3", "unknown parameter 'min_digit'"),
        ("task:sort_digits?min_digits=x", "not a value of type int"),
        ("task:sort_digits?tail=nan", "not a value of type float"),
        ("task:sort_digits?min_digits=9", "min_digits=9 <= max_digits=6"),
        ("task:sort_digits?split=test", "train or val"),
        ("task:sort_digits?size", "param=value"),
        ("task:sort_digits?size=1&size=2", "twice"),
        ("task:sort_digits?size=-1", "size=-1"),
        ("reasoning_gym:chainsum", "Fix: reasoning_gym:chain_sum"),
        ("reasoning_gym:chain_sum?terms=2", "unknown parameter 'terms'"),
        ("reasoning_gym:chain_sum?min_terms=9&max_terms=2", "max_terms must be"),
        ("train.csv", ".csv is none"),
        ("tsk:copy", "Fix: task:copy"),
        ("hello", "a source is"),
        ("./owner/name", "a source is"),
        ("/no/such/folder/a.jsonl", "does not exist"),
        ("a.jsonl,b/c.jsonl", "=[a.jsonl,b/c.jsonl]', in brackets"),
    ],
)
def test_a_bad_spec_names_key_value_rule_and_fix(spec: Any, said: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_source(spec, seed=0, key="data.val_files")
    message = str(caught.value)
    assert message.startswith(f"data.val_files = {spec!r}: ")
    assert said in message
    assert ". Fix: " in message


def test_a_missing_file_names_the_files_that_are_there(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"has train\.jsonl\. Fix: .*train\.jsonl"):
        load_source(str(tmp_path / "trian.jsonl"), seed=0)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_an_empty_file_is_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"t.{suffix}").write_text("\n")
    with pytest.raises(ConfigError, match="has no rows"):
        load_source(str(tmp_path / f"t.{suffix}"), seed=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "t.jsonl row 2"),
        (b'{"prompt": "a"}\n[1]\n', "t.jsonl row 2: [1]: must be an object"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "t.jsonl row 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: Any, said: Any) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_source(str(tmp_path / "t.jsonl"), seed=0)
    assert said in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"t\.parquet.*not readable as parquet"):
        load_source(str(tmp_path / "t.parquet"), seed=0)


def test_reasoning_gym_rows_depend_on_seed_and_split() -> None:
    def first(**kwargs: Any) -> Any:
        return load_source("reasoning_gym:chain_sum?size=20", **kwargs)[3]["prompt"]

    assert first(seed=1) == first(seed=1)
    assert len({first(seed=1), first(seed=2), first(seed=1, split="val")}) == 3
    fixed = load_source("reasoning_gym:chain_sum?size=20&seed=7", seed=1)
    assert fixed[3] == load_source("reasoning_gym:chain_sum?size=20&seed=7", seed=2)[3]


def test_importing_data_and_rewards_is_light() -> None:
    heavy = "torch transformers datasets pyarrow reasoning_gym math_verify tokenizers"
    code = f"""
import sys, pkgutil, importlib, millrace.data, millrace.rewards
for package in (millrace.data, millrace.rewards):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        own = {{"millrace.rewards.model", "millrace.rewards.teacher_model"}}
        if module.name not in own:  # only their workers import them
            importlib.import_module(module.name)
sys.exit(",".join(m for m in "{heavy}".split() if m in sys.modules) or None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr


def test_bytes_in_parquet_are_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [b"1 + 1?"], "answer": ["2"]}), tmp_path / "t.parquet")
    rows = load_source(str(tmp_path / "t.parquet"), seed=0)
    with pytest.raises(DataError, match=r"t\.parquet row 1, prompt: .*must be a string"):
        problem(rows, 0)


def test_a_field_whose_name_has_binary_is_no_bytes(tmp_path: Path) -> None:
    extra = {"is_binary": True, "n": 3}
    table = pa.Table.from_pylist([{"prompt": "1 + 1?", "answer": "2", "extra_info": extra}])
    pq.write_table(table, tmp_path / "t.parquet")
    assert problem(load_source(str(tmp_path / "t.parquet"), seed=0), 0).extra_info == extra


@pytest.mark.parametrize("value", [[b"x"], {"a": b"x"}])
def test_bytes_inside_of_other_values_are_found(tmp_path: Path, value: Any) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "1?", "x": value}]), tmp_path / "t.parquet")
    (row,) = load_source(str(tmp_path / "t.parquet"), seed=0)
    assert "bytes" in row["x"]
