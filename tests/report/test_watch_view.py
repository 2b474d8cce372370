"""`millrace watch`: what a folder shows, whatever state it is in."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from millrace.cli.watch import verdict_on
from millrace.observe.guard import CAUSES
from millrace.observe.panel import ago, panel, plain, sentence
from millrace.persist.run_reader import RunReader
from millrace.report.live.look import RunSnapshot, look_at
from millrace.run.folder import release
from tests.report.folders import Run, account, devices, row

FILES = ("metrics.jsonl", "history.jsonl", "accounts.jsonl", "config.yaml", ".lock")


def drawn(look: RunSnapshot, width: int = 100, advice: tuple[str, ...] = ()) -> str:
    """Return what a terminal shows of a look."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(panel(look, advice, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return str(text)


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def seen(run: Run, *also: dict[str, Any]) -> str:
    """Return the words that a terminal shows of a run, after `also` are its accounts."""
    if also:
        account(run.path, *also)
    return words(drawn(look_at(RunReader(run.path))))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = Run(tmp_path / "run")
    yield made
    made.close()


def test_a_running_run_shows_its_progress_and_its_pace(run: Run) -> None:
    for version in range(1, 13):
        run.version(version)
    look = look_at(RunReader(run.path))
    assert (look.state, look.name, look.mode) == ("running", "quickstart", "async_partial")
    assert (look.version, look.versions, look.samples, look.total) == (12, 80, 768, 5120)
    assert look.eta_s == pytest.approx((80 - 12) * 2.0)
    assert look.process == f"process {os.getpid()} of this machine is running"
    shown = words(drawn(look))
    assert "version 12 of 80 samples 768 of 5,120 ETA 2:16" in shown
    assert "0.010 to 0.120" in shown and "1,234 drawn" in shown and "trainer 25%" in shown
    assert "running version 12 of 80" in sentence(look).replace("  ", " ")


def test_a_run_that_has_written_nothing_is_starting(run: Run) -> None:
    (run.path / "history.jsonl").unlink()
    look = look_at(RunReader(run.path))
    assert look.state == "starting" and not look.ended
    assert "starting" in drawn(look)


def test_a_folder_with_nothing_in_it_is_no_error(tmp_path: Path) -> None:
    look = look_at(RunReader(tmp_path / "not made yet"))
    assert (look.state, look.age_s) == ("empty", None)
    assert "no sign of life yet" in drawn(look)


def test_an_evaluation_has_ended(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"version": 0, "val/products/mean@1": 0.5}\n')
    look = look_at(RunReader(tmp_path))
    assert look.state == "complete" and look.ended and look.total is None
    assert "products/mean@1 0.5" in drawn(look)
    verdict = verdict_on(tmp_path)
    assert verdict.state == "over" and "evaluation" in verdict.sentence


@pytest.mark.parametrize(("complete", "state"), [(True, "complete"), (False, "stopped")])
def test_the_end_is_shown(run: Run, complete: bool, state: str) -> None:
    run.version(1)
    run.end(1, complete)
    look = look_at(RunReader(run.path))
    assert look.state == state and look.ended and look.eta_s is None
    assert state in drawn(look)


def test_a_killed_run_is_told_from_one_that_ended(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.report.folders import Run;"
        "run = Run(Path(sys.argv[1])); run.version(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "run"])
    assert killed.returncode == -signal.SIGKILL
    look = look_at(RunReader(tmp_path / "run"))
    assert look.state == "gone" and look.ended
    assert "killed, failed, or never trained" in words(drawn(look))


def test_a_process_that_took_the_number_of_a_dead_one_is_not_the_run(run: Run) -> None:
    run.version(1)
    release(run.path)  # this process must not hold the lock that it looks at
    os.utime(run.path / ".lock", (1e9, 1e9))
    assert look_at(RunReader(run.path)).state == "gone"


def test_a_run_on_another_machine_goes_on_as_far_as_this_one_can_tell(run: Run) -> None:
    run.version(1)
    release(run.path)  # this process must not hold the lock that it looks at
    (run.path / ".lock").write_text("process 1 on another-host\n")
    later = (run.path / "metrics.jsonl").stat().st_mtime + 600
    for path in run.path.rglob("*"):
        os.utime(path, (later - 600, later - 600))
    look = look_at(RunReader(run.path, lambda: later))
    assert look.state == "running" and not look.ended
    assert look.process == "process 1 is on another-host, so this machine cannot see it"
    assert look.age_s == pytest.approx(600) and look.quiet
    assert "last sign of life 10 min ago" in words(drawn(look))


def test_a_resume_is_a_new_attempt_without_the_rows_that_it_makes_again(run: Run) -> None:
    for version in (1, 2, 3):
        run.version(version)
    reader = RunReader(run.path)
    assert look_at(reader).version == 3
    run.end(3, complete=False)
    again = Run(run.path, resumed_from=1)
    try:
        assert (look_at(reader).state, look_at(reader).version) == ("running", 1)
        again.version(2, **{"reward/mean": 0.75})
        look = look_at(reader)
        assert look.rewards == [0.01, 0.75] and look.attempt == 2 and look.version == 2
        assert "attempt 2" in drawn(look)
    finally:
        again.close()


def test_an_attempt_that_begins_is_not_the_end_of_the_last_one(run: Run) -> None:
    run.version(1)
    run.end(1, complete=False)
    os.utime(run.path / "history.jsonl", (1e9, 1e9))
    assert look_at(RunReader(run.path)).state == "starting"


def test_half_a_line_is_read_when_it_is_whole(run: Run) -> None:
    run.version(1)
    reader = RunReader(run.path)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"version": 2, "reward/me')
        file.flush()
        assert look_at(reader).rewards == [0.01]
        file.write('an": 0.5}\n')
    assert look_at(reader).rewards == [0.01, 0.5]


def test_lines_that_are_no_figures_are_left_out(run: Run) -> None:
    run.version(1)
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'not JSON\n[1]\n{"version": "x"}\n\xff\n{"version": 3, "reward/mean": "y"}\n')
        file.write(b'{"version": 1e300, "reward/mean": 1}\n{"version": -1, "reward/mean": 1}\n')
        file.write(b'{"version": 4, "reward/mean": 1e300}\n{"reward/mean": 1}\n')
        file.write(b'{"version": 5, "reward/mean": null}\n{"version": 2, "reward/mean": 0.5}\n')
    look = look_at(RunReader(run.path))
    assert look.rewards == [0.01, 0.5]
    assert "not readable: metrics.jsonl" in words(drawn(look))


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_or_a_folder_in_place_of_a_file_does_not_stop_a_look(run: Run, name: str) -> None:
    run.version(1)
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    assert drawn(look_at(RunReader(run.path)))
    (run.path / name).unlink()
    (run.path / name).mkdir()
    assert drawn(look_at(RunReader(run.path)))


@settings(max_examples=50, deadline=None)
@given(contents=st.fixed_dictionaries({name: st.binary(max_size=80) for name in FILES}))
def test_no_content_of_a_folder_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for name, content in contents.items():
        (folder / name).write_bytes(content + b"\n")
    assert drawn(look_at(RunReader(folder)))


def test_an_alarm_has_its_cause_its_fix_and_the_version_at_which_it_began(run: Run) -> None:
    for version in (1, 2, 3, 4):
        on = float(version != 2)
        run.version(version, **{"alarm/equal_rewards": on, "alarm/truncation": 0.0})
    look = look_at(RunReader(run.path))
    assert [(a.name, a.since) for a in look.alarms] == [("equal_rewards", 3)]
    shown = words(drawn(look))
    assert f"alarm equal_rewards since version 3 {CAUSES['equal_rewards']}" in shown
    assert "truncation" not in shown


def test_the_newest_validation_is_shown_with_the_first(run: Run) -> None:
    run.metrics.write(0, {"val/sort/mean@1": 0.25})
    run.version(1)
    assert "before" not in drawn(look_at(RunReader(run.path)))
    run.metrics.write(1, {"val/sort/mean@1": 0.75})
    shown = seen(run)
    assert "held out, version 1 sort/mean@1 0.750 before: sort/mean@1 0.250" in shown


def line(event: str, version: int, attempt: int, wait: float, work: float) -> dict[str, Any]:
    tokens = {"trained": 900 * version, "held": 100 * version}
    about = {"event": event, "attempt": attempt, "version": version, "time": 1e9, "limit": 5120}
    seconds = devices({"trainer": {"update_actor": work, "wait_samples": wait}})
    drawn = {"generated": 1000 * version, "tokens": tokens}
    return {**about, **drawn, "seconds": wait + work, "devices": seconds}


def test_a_device_shows_its_last_versions_and_its_whole_run(run: Run) -> None:
    lines = [line("start", 0, 1, 0, 0)]
    lines += [line("version", v, 1, wait=v, work=0) for v in range(1, 21)]
    lines += [line("version", v, 1, wait=20, work=v - 20) for v in range(21, 31)]
    account(run.path, *lines)
    (device,) = look_at(RunReader(run.path)).devices
    assert device.recent == {"update_actor": 1.0}
    assert device.whole == pytest.approx({"wait_samples": 2 / 3, "update_actor": 1 / 3})
    shown = seen(run)
    assert f"trainer 0% 67% {'█' * 24} update_actor 100%" in shown
    assert "tokens 30,000 generated: trained 90.0%, held 10.0%" in shown


def test_a_replica_that_left_has_no_idle_share_of_the_last_versions(run: Run) -> None:
    seconds = {"trainer": {"other": 1.0}, "rollout-1": {"tail": 1.0}}
    lines = [line("start", 0, 1, 1, 1) | {"devices": devices(seconds)}]
    for v in range(1, 13):
        seconds["trainer"] = {"other": 1.0 + v}
        lines.append(line("version", v, 1, 1 + v, v) | {"devices": devices(seconds)})
    shown = seen(run, *lines)
    assert "trainer 0% 0%" in shown and "rollout-1 100%" in shown
    assert "rollout-1 0%" not in shown


def test_many_devices_are_in_the_order_of_their_numbers_and_cut_off(run: Run) -> None:
    names = [*(f"rollout-{i}" for i in range(20)), "trainer"]
    seconds = {name: {"generate": 1.0} for name in names}
    account(run.path, line("start", 0, 1, 1, 1) | {"devices": devices(seconds)})
    look = look_at(RunReader(run.path))
    assert [device.name for device in look.devices] == ["trainer", *names[:-1]]
    shown = words(drawn(look))
    assert "rollout-14 " in shown and "rollout-15 " not in shown and "and 5 more" in shown


def test_a_replica_without_work_is_idle_and_a_trainer_that_does_other_things_is_not(
    run: Run,
) -> None:
    seconds = {"trainer": {"other": 1.0}, "rollout-0": {"other": 1.0}, "rollout-1": {"tail": 1.0}}
    shown = seen(run, line("start", 0, 1, 1, 1) | {"devices": devices(seconds)})
    assert "trainer 0% 0%" in shown and "rollout-0 100% 100%" in shown
    assert "rollout-1 100% 100%" in shown


def test_accounts_of_a_superseded_attempt_do_not_count(run: Run) -> None:
    old = [line("version", v, 1, wait=100 * v, work=0) for v in range(1, 9)]
    account(run.path, line("start", 0, 1, 0, 0), *old, line("start", 2, 2, 200, 0))
    look = look_at(RunReader(run.path))
    assert look.generated == 2000 and look.devices[0].whole == {"wait_samples": 1.0}


def test_texts_of_the_folder_do_not_control_the_terminal(run: Run) -> None:
    run.metrics.write(0, {"val/\x1b[2Jtask\r/mean@1": 0.5})
    run.version(1, **{"alarm/\x1b]0;title\x07": 1.0})
    account(run.path, line("start", 0, 1, 1, 1) | {"devices": devices({"\x1b[31m": {"a\nb": 1}})})
    shown = drawn(look_at(RunReader(run.path)), advice=("\x1b[5madvice",))
    assert "\x1b" not in shown and "\r" not in shown and "\x07" not in shown
    assert plain("[bold]x[/bold]\x00") == "[bold]x[/bold]�"


@pytest.mark.parametrize("width", [40, 60, 79])
def test_a_narrow_terminal_shows_whole_names(run: Run, width: int) -> None:
    run.version(1)
    parts = {"rollout-0": {"generate": 0.7, "wait_trainer": 0.3}}
    account(run.path, line("start", 0, 1, 1, 1) | {"devices": devices(parts)})
    shown = drawn(look_at(RunReader(run.path)), width)
    assert "rollout-0" in shown and "…" not in shown.replace("att…", "")
    assert ("wait_trainer" in shown) == (width >= 60)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_any_width_of_a_terminal_will_do(run: Run, width: int) -> None:
    run.metrics.write(0, {"val/sort/mean@1": 0.25})
    for version in range(1, 200):
        run.version(version, **{"alarm/equal_rewards": 1.0})
    account(run.path, line("start", 0, 1, 1, 1))
    assert drawn(look_at(RunReader(run.path)), width, ("Raise the staleness.",))


def test_a_run_that_an_epoch_ends_has_its_total_in_the_accounts(tmp_path: Path) -> None:
    made = Run(tmp_path / "run", "trainer.total_epochs=1")
    made.version(1)
    look = look_at(RunReader(made.path))
    assert (look.total, look.versions, look.eta_s) == (None, None, None)
    assert "version 1 samples 64" in words(drawn(look))
    account(made.path, line("start", 0, 1, 0, 0) | {"limit": 300})
    look = look_at(RunReader(made.path))
    made.close()
    assert (look.total, look.versions, look.eta_s) == (300, 5, pytest.approx(2.0 * 236 / 64))


def test_the_age_has_one_unit() -> None:
    assert [ago(s) for s in (0, 119, 120, 7200, 3 * 86400)] == [
        "0 s ago", "119 s ago", "2 min ago", "2 h ago", "3 days ago"
    ]  # fmt: skip


def test_the_figures_of_the_newest_row_stand_alone_without_accounts(run: Run) -> None:
    run.metrics.write(1, {k: v for k, v in row(1).items() if k.startswith("reward")})
    assert "staleness - mean, - max" in seen(run)
