"""Each tracker by its own library, in its local mode, and the thread that writes to it."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.errors import MissingDependency
from millrace.observe import trackers
from millrace.observe.trackers import About, Background, text_of
from tests.listening import listeners, outside
from tests.waiting import HANG_S, until

ROWS = [
    (1, {"actor/grad_norm": math.nan, "reward/mean": 0.25}),
    (2, {"actor/grad_norm": math.inf, "reward/mean": 0.5}),
    (1, {"val/d/mean@1": 0.125}),  # A validation may end after the next row.
    (2, {"val/d/mean@1": 0.375}),
]
AGAIN = [(2, {"reward/mean": 0.75}), (3, {"reward/mean": 1.25})]
"""The rows of a resume from version 1."""
CONFIG = {"name": "quick", "trainer": {"seed": 3, "logger": ["wandb"]}, "actor": {"kl": None}}


def opened(before: list[Any]) -> list[Any]:
    """Return the sockets that this process and its children opened since `before`."""
    me = psutil.Process()
    return [s for s in listeners([me, *me.children(recursive=True)]) if s not in before]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def nothing_leaves_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_SERVICE", "WANDB_ERROR_REPORTING", "WANDB_SILENT"):
        monkeypatch.setenv(name, "")  # the library sets it, and the test's end restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))


def track(
    name: str, folder: Path, said: list[str], rows: list[Any], *, resumed: bool = False
) -> None:
    """Write rows as one attempt of a run does."""
    config = CONFIG | {"trainer": {"seed": 4 if resumed else 3}}
    about, before = About(folder, "some project", "quick", config, resumed=resumed), opened([])
    (tracker,) = trackers.start([name, "tensorboard", "console"], about, said.append)
    for version, row in rows:
        tracker.write(version, row)
    until(tracker.idle)  # a new database of MLflow takes seconds
    assert not opened(before)
    tracker.close(complete=resumed)
    assert not tracker.dropped and not [s for s in said if "warning" in s], said


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records of the .wandb files: a LevelDB log of wandb's own messages."""
    from wandb.proto import wandb_internal_pb2

    record_of: Any = vars(wandb_internal_pb2)["Record"].FromString

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        data, at, whole = path.read_bytes(), 7, b""
        assert data[:4] == b":W&B"
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:  # no header fits at the end of a block
                at += left
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                yield record_of(whole)
                whole = b""


def test_wandb_has_every_row_and_the_version_as_its_axis(tmp_path: Path, said: list[str]) -> None:
    track("wandb", tmp_path, said, ROWS)
    time.sleep(1)  # wandb names the file of an attempt by its second
    track("wandb", tmp_path, said, AGAIN, resumed=True)
    until(lambda: sum(r.HasField("exit") for r in wandb_records(tmp_path)) == 2)  # it writes late
    records = [*wandb_records(tmp_path)]
    history = [
        {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    rows = [
        (int(r["version"]), {k: r[k] for k in sorted(r) if k[0] != "_" and k != "version"})
        for r in history
    ]
    assert repr(rows) == repr([*ROWS, *AGAIN])  # NaN is not equal to itself
    runs = [r.run for r in records if r.HasField("run") and r.run.project]
    ids = json.loads((tmp_path / "trackers.json").read_text())
    assert {(r.run_id, r.project, r.display_name) for r in runs} == {
        (ids["wandb"], "some project", "quick")
    }
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [1, 0]
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "version"


def test_mlflow_continues_its_run(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    track("mlflow", tmp_path, said, ROWS)
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("some project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("quick", "KILLED")
    assert run.data.params == {"name": "quick", "trainer.seed": "3", "actor.kl": "None"}
    track("mlflow", tmp_path, said, AGAIN, resumed=True)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["trainer.seed"] == "4"

    def points(name: str) -> list[tuple[int, float]]:
        return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))

    assert points("reward/mean") == [(1, 0.25), (2, 0.5), (2, 0.75), (3, 1.25)]
    assert run.data.metrics["reward/mean"] == 1.25
    assert points("val/d/mean_at_1") == [(1, 0.125), (2, 0.375)]
    assert repr(points("actor/grad_norm")) == f"[(1, nan), (2, {sys.float_info.max})]"


def test_trackio_continues_its_run_and_prints_nothing(
    tmp_path: Path,
    said: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    project = f"project-{os.getpid()}"  # the library reads TRACKIO_DIR once
    monkeypatch.setattr(sys.modules["trackio.sqlite_storage"], "TRACKIO_DIR", tmp_path / "t")
    for resumed, rows in ((False, ROWS), (True, AGAIN)):
        about, before = About(tmp_path, project, "quick", CONFIG, resumed=resumed), opened([])
        (tracker,) = trackers.start(["trackio"], about, said.append)
        for version, row in rows:
            tracker.write(version, row)
        until(tracker.idle)
        assert not opened(before)
        tracker.close()
    name = json.loads((tmp_path / "trackers.json").read_text())["trackio"]
    assert SQLiteStorage.get_runs(project) == [name] and name.startswith("quick-")
    logs = [
        (log.pop("step"), {k: v for k, v in log.items() if k != "timestamp"})
        for log in SQLiteStorage.get_logs(project, name)
    ]
    assert repr(logs) == repr([*ROWS, *AGAIN])
    config = SQLiteStorage.get_run_config(project, name)
    assert config is not None and config["trainer"] == CONFIG["trainer"]
    assert capfd.readouterr().out == ""


def scrape(said: list[str]) -> dict[tuple[str, str], float]:
    """Return the values of a scrape by Prometheus' own parser, by name and exact name."""
    from prometheus_client.parser import text_string_to_metric_families

    url = said[0].partition(": ")[2]
    with urllib.request.urlopen(url, timeout=HANG_S) as page:
        families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"quick"}
    return {(sample.name, sample.labels["metric"]): sample.value for sample in samples}


def test_prometheus_scrapes_the_newest_row_and_the_newest_validation(
    tmp_path: Path, said: list[str]
) -> None:
    before = opened([])
    (tracker,) = trackers.start(["prometheus"], About(tmp_path, "p", "quick"), said.append)
    rows = [(1, {"reward/mean": 0.25, "gone": 1.0}), ROWS[2], (2, {"reward/mean": math.nan})]
    for version, row in rows:
        tracker.write(version, row)
    until(tracker.idle)
    found = scrape(said)
    assert math.isnan(found.pop(("millrace_reward_mean", "reward/mean")))
    assert found == {
        ("millrace_version", "version"): 2,
        ("millrace_val_version", "val/version"): 1,
        ("millrace_val_d_mean_1", "val/d/mean@1"): 0.125,
    }
    mine = opened(before)
    assert str(mine[0][1]) in said[0] and not outside(mine)
    tracker.close()
    assert not opened(before)


HANGS = """
import sys, time
from pathlib import Path
import psutil
from millrace.observe import trackers
about = trackers.About(Path(sys.argv[1]), "p", "quick")
(tracker,) = trackers.start(["wandb"], about, print)
tracker._close_s = 0.2
tracker.write(1, {"a": 1.0})
while not (found := [p.pid for p in psutil.Process().children() if p.name() == "wandb-core"]):
    time.sleep(0.01)
print(found[0], flush=True)
time.sleep(0.3)
tracker.close()
"""


def test_a_process_ends_although_wandbs_server_hangs(tmp_path: Path) -> None:
    """Nothing is left of it. wandb's own exit waits for its process without a limit."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        env = os.environ | {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
        done = subprocess.run(
            [sys.executable, "-c", HANGS, str(tmp_path)],
            env=env | {"WANDB_MODE": "online"},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
    assert done.returncode == 0, done.stderr
    child, said = done.stdout.splitlines()
    assert said.startswith("wandb: It did not end within 0.2 s. It lacks 1 rows")
    until(lambda: not psutil.pid_exists(int(child)))


KEYS = """
import os, wandb
from millrace.observe import trackers
for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "0" * 40), ("A", "")):
    os.environ[name] = value
    print(name)
    trackers.check(["wandb"])
    del os.environ[name]
    wandb.teardown()
"""


def test_wandb_needs_a_key_or_its_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    done = subprocess.run([sys.executable, "-c", KEYS], capture_output=True, text=True)
    assert done.stdout.split() == ["WANDB_MODE", "WANDB_API_KEY", "A"]
    *_, last = done.stderr.splitlines()
    assert last == (
        "millrace.errors.ConfigError: trainer.logger = ['wandb']: wandb has no API key. Fix: "
        "WANDB_API_KEY=KEY in the environment, `wandb login`, or WANDB_MODE=offline."
    )


@pytest.mark.parametrize("name", trackers.NEEDS)
def test_a_missing_library_is_an_error_with_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(MissingDependency, match=rf"trainer.logger={name} .*Fix: pip install '"):
        trackers.check(["tensorboard", name])
    trackers.check(["console", "tensorboard"])


def test_mlflow_keeps_unicode_and_never_two_names_as_one() -> None:
    assert trackers._mlflow_name("val/数学/mean@1") == "val/数学/mean_at_1"
    names = ["a%b", "a&b", "a_b", "a@b", "a\tb", "数%", "数&"]
    assert len({trackers._mlflow_name(name) for name in names}) == len(names)


def test_a_password_is_never_cut_open() -> None:
    long = "x" * 180 + " http://user:pass@word@host/path is out of reach"
    assert "pass" not in text_of(OSError(long)) and "***@host" in text_of(OSError(long[90:]))


class Fake:
    """A tracker that fails, hangs or works, as a test says."""

    where = "here"

    def __init__(self, act: Callable[[int], None] = lambda version: None) -> None:
        self.act, self.complete = act, False
        self.rows: list[int] = []

    def write(self, version: int, row: dict[str, float]) -> None:
        self.act(version)
        self.rows.append(version)

    def close(self, complete: bool) -> None:
        self.complete = complete


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1)])
def test_a_row_that_fails_is_dropped_and_counted_with_one_warning(
    error: BaseException, said: list[str]
) -> None:
    fake = Fake(lambda version: fail(error) if version in (2, 3) else None)
    sink = Background("fake", lambda: fake, said.append, close_s=HANG_S)
    for version in range(1, 5):
        sink.write(version, {})
    sink.close()
    assert fake.rows == [1, 4] and fake.complete is True
    assert trackers.dropped([sink]) == {"trackers/fake/dropped": 2.0}
    warning = f"warning: fake does not work: {type(error).__name__}: {error}. "
    assert said == [
        "fake: here",
        warning + "The run does not wait for it.",
        "fake: It lacks 2 rows of this run. metrics.jsonl has them.",
    ]


def test_a_tracker_that_starts_late_gets_every_row(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [Fake()]
    errors: Iterator[Exception] = iter([ConnectionError("//me:secret@host\nrefused")])
    sink = Background(
        "fake", lambda: fakes[0] if (e := next(errors, None)) is None else fail(e), said.append
    )
    for version in (1, 2):
        sink.write(version, {})
    until(lambda: fakes[0].rows == [1, 2])
    sink.close()
    assert not sink.dropped
    assert said[0].startswith("warning: fake does not work: ConnectionError: //***@host. ")
    assert said[1:] == ["fake: here"]


def test_a_tracker_that_never_starts_costs_its_rows_alone(said: list[str]) -> None:
    sink = Background("fake", lambda: fail(ConnectionError("refused")), said.append)
    sink.write(1, {})
    sink.close()
    assert len(said) == 2 and "It lacks 1 rows" in said[1]


def burn(version: int) -> None:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass


def test_a_tracker_rests_between_rows_and_the_close_writes_the_rest(said: list[str]) -> None:
    """Each row takes 50 ms of a processor, so the next one waits for over an hour."""
    fake = Fake(burn)
    sink = Background("fake", lambda: fake, said.append, share=1e-5, close_s=HANG_S)
    for version in (1, 2, 3):
        sink.write(version, {})
    until(lambda: fake.rows == [1])
    time.sleep(0.2)
    assert fake.rows == [1]
    sink.close()
    assert fake.rows == [1, 2, 3] and not sink.dropped


def test_rows_that_wait_are_written_together(said: list[str]) -> None:
    fake = Fake()
    sink = Background("fake", lambda: fake, said.append, share=0.01, pause_s=600, close_s=HANG_S)
    sink.write(1, {})
    until(lambda: fake.rows == [1])
    for version in (2, 3, 4):
        sink.write(version, {})
    time.sleep(0.1)
    assert fake.rows == [1]
    sink.close()
    assert fake.rows == [1, 2, 3, 4] and not sink.dropped


def test_a_tracker_does_not_rest_while_many_rows_wait(said: list[str]) -> None:
    go = threading.Event()
    fake = Fake(lambda version: burn(version) if go.wait() else None)
    sink = Background("fake", lambda: fake, said.append, share=1e-6, most_rows=20, close_s=HANG_S)
    for version in range(10):
        sink.write(version, {})
    go.set()
    until(lambda: len(fake.rows) == 8)
    sink.close()
    assert fake.rows == list(range(10)) and not sink.dropped


def test_a_tracker_that_hangs_takes_no_time_and_the_close_names_it(said: list[str]) -> None:
    """A row or a close that waited for it would wait for ever."""

    def hang(version: int) -> None:
        threading.Event().wait()

    fake = Fake(hang)
    sink = Background("fake", lambda: fake, said.append, most_rows=100, close_s=0.3)
    for version in range(1000):
        sink.write(version, {})
    assert sink.dropped == 900
    sink.close()
    assert "100 rows wait for it" in said[1]
    assert said[2].startswith("fake: It did not end within 0.3 s. It lacks 1000 rows of this run.")
    assert sink._thread.daemon
