"""SQL on a run: its tables, its printed forms, and what it must not reach."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import console
from millrace.cli import main as cli
from millrace.cli.query import printable
from millrace.config import Config
from millrace.config.recipe import dump
from millrace.errors import ConfigError, MissingDependency
from millrace.observe.sinks import JsonLines
from millrace.persist.history import History
from millrace.persist.run_reader import RunReader
from millrace.report.query import EXAMPLES, TABLES, query, tables
from millrace.schedule.ledger import Totals
from tests.report.runs import Run

ACCOUNTS = [
    {"event": "version", "attempt": 1, "version": 1, "time": 1.7e9, "seconds": 2.5, "generated": 7,
     "tokens": {"trained": 5, "dropped/equal_outcomes": 2}, "price": 0.0,
     "devices": {"trainer": {"count": 1, "seconds": {"update_actor": 1.5, "other": 1.0}}}},
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two attempts: versions 1 to 3, and 2 to 3 again."""
    attempts = Run(tmp_path)
    for versions in ([1, 2, 3], [2, 3]):
        sink = JsonLines(tmp_path / "metrics.jsonl", versions[0] - 1)
        history = History(tmp_path, Totals(versions[0] - 1, 0, 0, {}, []))
        for v in versions:
            sink.write(v, {"reward/mean": v / 10, "staleness/mean": float("nan")})
            sink.write(v, {"val/sums/mean@1": v / 100})
            history.version(Totals(v, 2 * v, 2 * v, {"timeout": 1}, [7]), [2 * v - 2, 2 * v - 1])
        sink.close()
        attempts.go(versions)
    (tmp_path / "config.yaml").write_text(dump(Config()))
    (tmp_path / "accounts.jsonl").write_text("".join(f"{json.dumps(a)}\n" for a in ACCOUNTS))
    return tmp_path


def rows(run: Path, sql: str) -> list[tuple[Any, ...]]:
    return query(RunReader(run).read(), sql).rows


def test_each_table_has_what_its_file_has(run: Path) -> None:
    assert rows(run, 'select version, "reward/mean", "staleness/mean" from metrics') == [
        (1, 0.1, None),
        (2, 0.2, None),
        (3, 0.3, None),
    ]
    assert rows(run, 'select * from validations where "val/sums/mean@1" > 0.02') == [(3, 0.03)]
    sql = "select version, count(*), sum(reward) from samples group by 1 order by 1"
    assert rows(run, sql) == [(v, 4, 0.0) for v in (1, 2, 3)]
    sql = "select count(*), sum(end_s - start_s) from spans where name = 'transfer'"
    assert rows(run, sql) == [(5, pytest.approx(1.25))]
    sql = "select facts->>'stop' from spans where name = 'request' and key = '0/0'"
    assert rows(run, sql) == [("eos",)]
    sql = "select name, amount from accounts where kind = 'tokens' and version = 1"
    assert rows(run, sql) == [("trained", 5.0), ("dropped/equal_outcomes", 2.0)]
    sql = "select device, name, amount / seconds from accounts where kind = 'device_seconds'"
    assert rows(run, sql) == [("trainer", "update_actor", 0.6), ("trainer", "other", 0.4)]
    sql = "select version, trained, dropped['timeout'] from history where survives and attempt = 2"
    assert rows(run, sql)[1:] == [(2, [2, 3], 1), (3, [4, 5], 1)]
    assert rows(run, "select version from history where not survives") == [(2,), (3,)]


def test_tables_can_be_joined(run: Path) -> None:
    sql = """
        select m.version, m."reward/mean", s.n from metrics m
        join (select version, count(*) as n from samples group by all) s using (version)
        order by m.version"""
    assert rows(run, sql) == [(1, 0.1, 4), (2, 0.2, 4), (3, 0.3, 4)]


def test_the_list_has_every_table_and_its_examples_work(run: Path) -> None:
    found = {t.name: t for t in tables(RunReader(run).read())}
    assert found.keys() == TABLES.keys()
    assert {name: t.rows for name, t in found.items() if name != "spans"} == {
        "metrics": 3,
        "validations": 3,
        "samples": 12,
        "accounts": 17,
        "history": 7,
    }
    assert found["spans"].rows > 100 and found["metrics"].columns["reward/mean"] == "DOUBLE"
    for example in EXAMPLES:
        assert query(RunReader(run).read(), example).rows


def test_an_empty_run_has_every_table(tmp_path: Path) -> None:
    assert {t.name for t in tables(RunReader(tmp_path).read())} == TABLES.keys()
    assert not any(t.rows for t in tables(RunReader(tmp_path).read()))


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/passwd')",
        "select * from '/etc/passwd'",
        "select * from glob('/*')",
        "copy metrics to 'stolen.csv'",
        "attach 'stolen.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "reset enable_external_access",
        "export database 'stolen'",
        "select * from secret",
    ],
)
def test_sql_reaches_neither_files_nor_the_program(
    sql: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    secret = pa.table({"a": [1]})
    monkeypatch.chdir(run)
    before = sorted(run.iterdir())
    with pytest.raises(ConfigError):
        query(RunReader(run).read(), sql)
    assert sorted(run.iterdir()) == before and secret.num_rows == 1


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("selec 1", "syntax error"),
        ("select * from nothing", "nothing does not exist"),
        ("select nothing from metrics", "nothing"),
        ("", "has no statement"),
        ("select 1; selec 2", "syntax error"),
        ("select 1; select 2", "more than one statement"),
        ("select cast('a' as int)", "Could not convert"),
    ],
)
def test_an_error_is_one_line(sql: str, said: str, run: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        query(RunReader(run).read(), sql)
    text = str(raised.value)
    assert said in text and "\n" not in text and "Fix: " in text and raised.value.exit_code == 2


def test_a_name_with_a_slash_needs_quotes(run: Path) -> None:
    with pytest.raises(ConfigError, match='Fix: "reward/mean" in double quotes'):
        query(RunReader(run).read(), "select version, reward/mean from metrics")


def test_damaged_files_are_read_as_far_as_they_are_whole(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('3\n[]\n{"version": "x"}\n{"version": 4, "a": "text", "b": 1' + "0" * 400)
        file.write('}\n{"version": 5, "reward/me')
    with (run / "accounts.jsonl").open("a") as file:
        file.write('{"attempt": 1e999, "version": {}, "devices": {"a": 3}, "tokens": 4}\n[]\n{"a')
    (run / "samples" / "version-000004-attempt-002.parquet").write_text("no parquet")
    assert rows(run, "select count(*) from metrics") == [(3,)]
    assert rows(run, "select count(*) from samples") == [(12,)]
    reader = RunReader(run).read()
    query(reader, "select count(*) from samples")
    notes = " ".join(reader.notes)
    assert "version-000004-attempt-002.parquet is damaged" in notes and "metrics.jsonl: " in notes
    assert rows(run, "select count(*) from accounts") == [(17,)]
    (run / "history.jsonl").write_text("no history\n")
    with pytest.raises(ConfigError, match="line 1: not readable"):
        query(RunReader(run).read(), "select * from history")


def test_without_duckdb_the_error_says_how_to_install_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingDependency, match=r"pip install 'duckdb"):
        query(RunReader(run).read(), "select 1")


# -- the command


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run `millrace query` on the run, in this process. Return exit code, stdout and stderr."""
    monkeypatch.chdir(run)
    monkeypatch.setenv("COLUMNS", "100")

    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["millrace", "query", *arguments])
        monkeypatch.setattr(console, "_printed", False)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return ask


SQL = 'select version, "reward/mean" as reward from metrics'


def test_rows_are_printed_as_a_table(ask: Cli) -> None:
    code, out, err = ask(".", SQL)
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["version", "reward"],
        ["1", "0.1"],
        ["2", "0.2"],
        ["3", "0.3"],
    ]


def test_wide_rows_are_printed_below_one_another(ask: Cli) -> None:
    _, out, _ = ask(".", "select * from samples limit 2")
    lines = [line.split() for line in out.splitlines()]
    assert ["row", "2"] in lines and ["response", "CDEFG"] in lines
    assert all(len(line) <= 100 for line in out.splitlines())


def test_many_rows_are_cut_and_counted(ask: Cli) -> None:
    _, out, _ = ask(".", "select range as i from range(1000)")
    assert len(out.splitlines()) == 202 and out.splitlines()[-1].startswith("800 more rows")


def test_json_has_all_rows(ask: Cli) -> None:
    code, out, _ = ask(".", f"{SQL} union all select 9, 'nan'::double", "--json")
    assert code == 0
    assert json.loads(out) == {
        "columns": ["version", "reward"],
        "rows": [{"version": v, "reward": v / 10} for v in (1, 2, 3)]
        + [{"version": 9, "reward": None}],
    }
    _, out, _ = ask(".", "select segments, components, now() as t from samples", "--json")
    assert json.loads(out)["rows"][0]["segments"][0]["text"] == "AB"


def test_csv_goes_to_a_new_file_or_to_standard_output(ask: Cli, run: Path) -> None:
    assert ask(".", SQL, "--csv", "a.csv") == (0, "", "")
    expected = [["version", "reward"], ["1", "0.1"], ["2", "0.2"], ["3", "0.3"]]
    assert list(csv.reader((run / "a.csv").open())) == expected
    assert list(csv.reader(io.StringIO(ask(".", SQL, "--csv", "-")[1]))) == expected
    code, _, err = ask(".", SQL, "--csv", "a.csv")
    assert code == 2 and "cannot be written: File exists" in err


def test_csv_into_a_pipe_that_closes_is_no_wrong_file(run: Path) -> None:
    command = [sys.executable, "-m", "millrace", "query", str(run)]
    command += ["select range from range(100000)", "--csv", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        assert asked.stdout is not None and asked.stdout.readline() == b"range\r\n"
        asked.stdout.close()
        assert asked.stderr is not None and asked.stderr.read() == b""


def test_without_sql_the_command_lists_tables_and_examples(ask: Cli) -> None:
    code, out, _ = ask(".")
    assert code == 0
    for name in TABLES:
        assert f" {name} " in out
    assert all(f"millrace query . '{example}'" in out for example in EXAMPLES)
    listed = json.loads(ask(".", "--json")[1])
    assert listed["tables"]["samples"]["rows"] == 12 and listed["examples"] == list(EXAMPLES)


def test_csv_without_sql_is_refused(ask: Cli, tmp_path: Path) -> None:
    code, _, error = ask(".", "--csv", str(tmp_path / "new.csv"))
    assert code == 2 and "--csv needs a query" in error and not (tmp_path / "new.csv").exists()


def test_wrong_sql_and_a_wrong_folder_exit_with_2(ask: Cli) -> None:
    for arguments in ((".", "selec"), ("nowhere",), ("trace",), ("nowhere", "select 1")):
        code, out, err = ask(*arguments)
        assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1


def test_control_characters_of_a_model_do_not_reach_the_terminal(ask: Cli) -> None:
    _, out, _ = ask(".", "select chr(27) || '[31m red' || chr(10) || chr(8238) as \"a\u009b\"")
    assert "\x1b" not in out and "\\x1b[31m red\\n\\u202e" in out and "\u009b" not in out
    assert printable("é 漢 [bold]") == "é 漢 [bold]"


def test_ctrl_c_ends_an_endless_query(tmp_path: Path) -> None:
    before, found = signal.getsignal(signal.SIGINT), threading.Timer(1.0, _press_ctrl_c)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            found.start()
            query(
                RunReader(tmp_path).read(),
                "select count(*) from range(100000000000) a, range(1000) b",
            )
    finally:
        found.cancel()
        signal.signal(signal.SIGINT, before)


def _press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_answer_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.report.query.MOST_ROWS", 1000)
    assert len(query(RunReader(tmp_path).read(), "select * from range(1000)").rows) == 1000
    with pytest.raises(ConfigError, match=r"has more than 1,000 rows.*limit"):
        query(RunReader(tmp_path).read(), "select * from range(100000)")
