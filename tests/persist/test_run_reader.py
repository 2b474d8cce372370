"""The reader of a run's folder, and that all readers say the same of one folder.

`golden/` is what a real run left: the quickstart with 64 samples of 4 trajectories, killed at
version 4, resumed from version 2, with narrow limits of the guard.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.cli.watch import verdict_on
from millrace.observe.files import Tail
from millrace.persist import history
from millrace.persist.history import audit
from millrace.persist.run_reader import FILES, METRICS, RunReader, load
from millrace.report.advice import advise
from millrace.report.live.look import look_at
from millrace.report.page import compare, head
from millrace.report.page.figures import number
from millrace.report.query import query

GOLDEN = Path(__file__).parent / "golden"
REWARD = 0.15625
ALARMS = {"zero_variance": [(1, 1), (3, 3), (5, 8)], "entropy_collapse": [(1, 8)]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


@dataclass
class Seen:
    """The same facts, as each reader tells them."""

    versions: int
    reward: float
    alarms: set[str]
    complete: bool


def of_reader(folder: Path) -> Seen:
    run = RunReader(folder).read()
    alarms = {alarm.name for alarm in run.alarms() if alarm.active}
    return Seen(
        run.versions, run.rows[run.versions]["reward/mean"], alarms, run.state == "complete"
    )


def of_watch(folder: Path) -> Seen:
    look = look_at(RunReader(folder))
    alarms = {alarm.name for alarm in look.alarms}
    return Seen(look.version, look.rewards[-1], alarms, look.state == "complete")


def of_page(folder: Path) -> Seen:
    run = load(folder)
    titles = [box["title"] for box in head.alarms(run) if box["kind"] == "alarm"]
    table = compare.of_runs([run, run])["sections"][0]["blocks"][0]["rows"]
    facts = {row[0]: row[1] for row in table}
    assert facts["last mean reward"] == number(REWARD)
    return Seen(
        facts["versions"],
        run.rows[facts["versions"]]["reward/mean"],
        {title.partition(":")[0] for title in titles},
        facts["state"].startswith("complete"),
    )


def of_query(folder: Path) -> Seen:
    ((version, *figures),) = query(
        RunReader(folder).read(),
        'select version, "reward/mean", "alarm/zero_variance", "alarm/entropy_collapse" '
        "from metrics order by version desc limit 1",
    ).rows
    names = zip(ALARMS, figures[1:], strict=True)
    ends = query(
        RunReader(folder).read(), "select complete from history where survives and event = 'end'"
    ).rows
    return Seen(version, figures[0], {name for name, on in names if on}, ends == [(True,)])


READERS: dict[str, Callable[[Path], Seen]] = {
    "reader": of_reader,
    "watch": of_watch,
    "page": of_page,
    "query": of_query,
}


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("reader", READERS)
def test_all_readers_say_the_same_of_a_run(folder: Path, reader: str, ended: bool) -> None:
    if not ended:
        killed(folder)
    assert READERS[reader](folder) == Seen(8, REWARD, set(ALARMS), ended)


def test_the_account_of_samples_the_advice_and_the_verdict_agree_too(folder: Path) -> None:
    run = load(folder)
    assert run.audit == audit(folder) and run.audit
    assert (run.audit.trained, run.audit.lost, run.audit.trained_twice) == (64, 0, 0)
    assert (run.audit.attempts, run.audit.versions, run.audit.complete) == (2, 8, True)
    assert query(
        RunReader(folder).read(), "select count(*) from history where not survives"
    ).rows == [(2,)]
    assert query(RunReader(folder).read(), "select count(*) from samples").rows == [(64 * 4,)]
    assert [path.name[:14] for path in run.samples] == [f"version-00000{v}" for v in range(1, 9)]
    assert {alarm.name: alarm.periods for alarm in run.alarms()} == ALARMS
    (advice,) = advise(run)
    assert "whole versions after its first 2, and 10 are the fewest" in advice.text
    assert not run.notes and verdict_on(folder).state == "over"


def killed(folder: Path) -> None:
    """Take the end of the run away, and let its process be one that is dead."""
    process = subprocess.Popen(["true"])
    process.wait()
    (folder / ".lock").write_text(f"process {process.pid} on {socket.gethostname()}\n")
    lines = (folder / "history.jsonl").read_text().splitlines(keepends=True)
    (folder / "history.jsonl").write_text("".join(lines[:-1]))


def test_a_killed_run_is_gone_for_everybody(folder: Path) -> None:
    killed(folder)
    run = load(folder)
    assert (run.state, run.running) == ("gone", False)
    verdict = verdict_on(folder)
    assert verdict.state == "dead" and "trainer.resume=auto" in verdict.next
    assert look_at(run).ended
    assert "killed at version 8" in head.state_of(run)


READING: dict[str, tuple[str, ...]] = {
    "watch": ("--once",),
    "why": (),
    "query": (),
    "query SQL": ("select version from metrics",),
}


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("name", ["metrics.jsonl", "history.jsonl", "config.yaml"])
def test_every_command_on_a_run_names_a_damaged_file(folder: Path, command: str, name: str) -> None:
    lines = (folder / name).read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0], b'{"version": \xff}\n', *lines[1:]])
    later = b"trainer: {key_of_another_version: 1}\n"
    (folder / name).write_bytes(later if name == "config.yaml" else damaged)
    found = CliRunner().invoke(app, [command.split()[0], str(folder), *READING[command]])
    assert not isinstance(found.exception, UnicodeError)
    output = f"{found.output} {found.stderr} {found.exception}"
    assert f"{name}: " in output or f"{name}, line 2" in output


def test_a_folder_that_grows_gives_at_each_moment_what_a_new_reader_finds(tmp_path: Path) -> None:
    contents = {path.name: path.read_bytes() for path in GOLDEN.glob("*.jsonl")}
    shutil.copy(GOLDEN / "config.yaml", tmp_path)
    following = RunReader(tmp_path)
    for part in range(1, 12):
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content[: len(content) * part // 11])
        following.read()
        anew = RunReader(tmp_path).read()
        assert (following.rows, following.validations) == (anew.rows, anew.validations)
        assert (following.history, following.accounts) == (anew.history, anew.accounts)
        assert following.alarms() == anew.alarms() and not following.notes
    assert len(following.rows) == 8 and len(following.validations) == 3


def test_only_new_lines_are_read_and_a_new_file_replaces_them(tmp_path: Path) -> None:
    tail = Tail(tmp_path / METRICS, msgspec.json.Decoder(dict[str, int]))
    assert tail.read() == (False, [])
    with tail.path.open("w") as file:
        for number_ in (1, 2):
            file.write(json.dumps({"a": number_}) + "\n")
            file.flush()
            assert tail.read() == (False, [{"a": number_}])
        file.write('{"a": 3')
    assert tail.read() == (False, [])
    (tmp_path / "new").write_text('{"a": 4}\nno line\n')
    (tmp_path / "new").replace(tail.path)
    assert tail.read() == (True, [{"a": 4}])
    assert tail.bad == 1 and tail.damage.startswith("line 2: not readable")


@pytest.mark.parametrize(
    "line",
    [
        '{"reward/mean": 1}',
        '{"version": -5}',
        '{"version": 1e30, "reward/mean": 1}',
        '{"version": "3", "reward/mean": 1}',
        '{"version": 9, "timing_s/step": -5}',
        '{"version": 8.5, "reward/mean": 1}',
        '{"version": 1000000000000, "reward/mean": 1}',
        '{"version": 9, "reward/mean": "high"}',
        '{"version": 9, "reward/mean": {"a": 1}}',
    ],
)
def test_a_line_that_no_run_writes_is_damage_for_each_reader(folder: Path, line: str) -> None:
    before = load(folder).rows
    with (folder / METRICS).open("a") as file:
        file.write(f"{line}\n")
    run = load(folder)
    assert run.rows == before and run.notes == [f"{METRICS}: 1 lines are not readable"]
    said = CliRunner().invoke(app, ["query", str(folder), "select count(*) from metrics"])
    assert f"{METRICS}: 1 lines" in said.stderr


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_or_empty_is_named_once_the_run_is_over(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    with (folder / history.FILE).open("a") as file:
        last = json.loads((folder / history.FILE).read_text().splitlines()[-1])
        file.write(json.dumps(last | {"event": "end", "complete": True}) + "\n")
    assert not load(folder).notes
    with (folder / name).open("ab") as file:
        file.write(content[:40])
    said = CliRunner().invoke(app, ["ledger", str(folder)])
    assert f"{name}: its last line has no end" in said.stderr and said.exit_code == 0
    if name != "accounts.jsonl":
        (folder / name).write_bytes(b"")
        said = CliRunner().invoke(app, ["ledger", str(folder)])
        assert f"{name}: is missing or empty" in said.stderr
        assert said.exit_code == (name == history.FILE)


@pytest.mark.parametrize("command", ["watch", "why", "report"])
def test_lines_of_another_program_are_no_run(tmp_path: Path, command: str) -> None:
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 0.5}\n')
    found = CliRunner().invoke(app, [command, str(tmp_path)])
    assert found.exception and "is a run's" in str(found.exception)


@pytest.mark.parametrize("seconds", [-1e-6, 0.0])
def test_seconds_of_rounding_are_no_damage(folder: Path, seconds: float) -> None:
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps({"version": 9, "timing_s/step": seconds}) + "\n")
    assert not load(folder).notes


@pytest.mark.parametrize(
    ("name", "key"), [("accounts.jsonl", "seconds"), ("history.jsonl", "version")]
)
def test_accounts_and_history_refuse_negative_seconds_and_versions(
    folder: Path, name: str, key: str
) -> None:
    path = folder / name
    line = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        file.write(json.dumps(line | {key: -2}) + "\n")
    assert any(note.startswith(name) for note in load(folder).notes)
