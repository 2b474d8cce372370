"""Whole runs with a teacher behind a real server: its numbers, its failures, a stop and a resume."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import runs
from tests.rollout.teacher_server import model_server
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.xdist_group("outside teachers")  # The tests share one teacher.
SHORT = (
    *("mode=on_policy_pipeline", "trainer.deterministic=true", "data.val_files=[]"),
    *("sft.steps=10", "sft.batch_size=32", "sft.demonstrations=64", "report.enable=true"),
)
IMPATIENT = ("teachers.a.max_retries=0", "teachers.a.retry_wait_s=0.01")
TIMES = (
    "checkpoint/",
    "perf/",
    "timing",
    "fully_async/",
    "rollouter/",
    "sync/",
    "trainer/idle",
    "time/",
    "teacher/",
    "agents/",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a trained model with the tokenizer of the runs."""
    base = tmp_path_factory.mktemp("outside")
    keys = ("sft.steps=40", "rollout.total_rollout_steps=8", "trainer.save_freq=1", *SHORT[:3])
    done = runs.millrace(*runs.small(base / "run", *keys))
    assert done.code == 0, done.err
    assert runs.millrace("export", str(base / "run"), str(base / "teacher")).code == 0
    return base / "teacher"


def served(url: str) -> tuple[str, ...]:
    return f"teachers.a.base_url={url}", "teachers.a.model=served"


def trained(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    done = runs.millrace(*runs.small(folder, *SHORT, *overrides))
    assert done.code == 0, done.err
    return runs.rows(folder)


def alike(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Assert that two runs trained the same, whatever time they took."""
    for one, other in zip(rows, others, strict=True):
        names = {name for name in {*one, *other} if not name.startswith(TIMES)}
        assert "distillation/a/kl" in names and "actor/grad_norm" in names
        numbers = {k: v for k, v in one.items() if k in names and isinstance(v, int | float)}
        assert numbers == pytest.approx({k: other.get(k) for k in numbers}, abs=1e-4)
        assert names == {k for k in other if k in names}


def test_a_teacher_behind_an_endpoint_gives_the_numbers_of_one_in_the_trainer(
    tmp_path: Path, folder: Path
) -> None:
    inside = trained(tmp_path / "in", f"teachers.a.path={folder}")
    with model_server(folder) as server:
        outside = trained(tmp_path / "out", *served(server.url))
        assert server.requests == 2 + 64 * 4
        tokens = sum(map(len, server.asked[2:]))
    alike(inside, outside)
    assert sum(row["teacher/a/tokens"] for row in outside) == tokens
    assert all(row["teacher/a/seconds"] > 0 == row["teacher/a/retries"] for row in outside)
    assert not any(name.startswith("teacher/") for row in inside for name in row)
    (trace,) = (tmp_path / "out" / "trace").glob("*.json")
    assert '"log_probs' in trace.read_text()


@pytest.mark.slow
def test_a_teacher_in_processes_of_its_own_gives_the_same_numbers(
    tmp_path: Path, folder: Path
) -> None:
    keys = (f"teachers.a.path={folder}", "rollout.temperature=0.7", "rollout.n=2")
    own = ("teachers.a.place=own", "teachers.a.device=cpu", "teachers.a.batch_size=3")
    outside = trained(tmp_path / "out", *keys, *own)
    alike(trained(tmp_path / "in", *keys), outside)
    assert sum(row["teacher/a/requests"] for row in outside) == 64 * 2


def test_a_teacher_that_dies_waits_drops_or_ends_the_run(tmp_path: Path, folder: Path) -> None:
    with model_server(folder) as server:
        own = (*served(server.url), *IMPATIENT)
        whole = trained(tmp_path / "whole", *own)
        server.requests, server.refused = 0, range(70, 90)
        waited = trained(tmp_path / "wait", *own)
        alike(whole, waited)
        assert sum(row.get("teacher/a/failures/unreachable", 0) for row in waited) == 20
        found = runs.audit(tmp_path / "wait")
        assert (found["trained"], found["dropped"]) == (64, {})

        server.requests, server.refused = 0, range(70, 78)
        trained(tmp_path / "drop", *own, "teachers.a.on_failure=drop")
        found = runs.audit(tmp_path / "drop")
        assert found["trained"] == 64 and 1 <= found["dropped"]["teacher_a"] <= 8
        assert found["dropped"].keys() == {"teacher_a"}

        server.requests, server.refused = 0, range(70, 1 << 30)
        said = runs.small(tmp_path / "dead", *SHORT, *own, "teachers.a.on_failure=drop")
        done = runs.millrace(*said)
        assert done.code == 1 and "samples had no log-probs of a teacher, more than" in done.err

        server.requests = 0
        dead = runs.small(tmp_path / "dead2", *SHORT, *own, "teachers.a.wait_deadline_s=1")
        done = runs.millrace(*dead)
        assert done.code == 1
        said_ = f"the teacher a at {server.url} gave no log-probs of prompt"
        assert said_ in done.err and "Fix: start its server, or correct" in done.err


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_stopped_run_resumes_with_another_address_of_its_teacher(
    tmp_path: Path, folder: Path, number: signal.Signals
) -> None:
    long = ("rollout.total_rollout_steps=96", "trainer.save_freq=2", "trainer.resume=auto")
    with model_server(folder) as server:
        whole = trained(tmp_path / "whole", *long, *served(server.url))
        server.requests, server.wait_s = 0, 0.02
        output = tmp_path / "output"
        said = runs.small(tmp_path / "run", *SHORT, *long, *served(server.url))
        process = runs.start_command(*said, output=output)
        until(lambda: server.requests > 150, process, output)
        under = psutil.Process(process.pid).children(recursive=True)
        for one in under if number is signal.SIGKILL else ():
            one.kill()
        process.send_signal(number)
        code = 143 if number is signal.SIGTERM else -number
        assert process.wait(HANG_S) == code, output.read_text()
        before = server.requests
    with model_server(folder) as server:
        rows = trained(tmp_path / "run", *long, *served(server.url))
        assert before + server.requests < 2 * (2 + 96 * 4)
    alike(whole, rows)
    found = runs.audit(tmp_path / "run")
    assert (found["trained"], found["lost"], found["trained_twice"]) == (96, 0, 0)


def test_a_teacher_that_cannot_teach_is_refused_before_a_model_loads(
    tmp_path: Path, folder: Path
) -> None:
    with model_server(folder) as server:
        keys = (*served(server.url), "teachers.a.model=other")
        done = runs.millrace(*runs.small(tmp_path / "run", *SHORT, *keys))
    assert done.code == 2 and "teachers.a.model = 'other'" in done.err
    assert "Fix: teachers.a.model=served" in done.err and not (tmp_path / "run").exists()
