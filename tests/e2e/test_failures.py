"""Failures during a run, through the command line: signals, kills, broken rewards.

One run ends in every possible way, one after the other, and resumes each time. At its end, every
sample was trained exactly once.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.pipeline import journal_file
from millrace.pipeline.checkpoint import Checkpoints
from tests.e2e import runs
from tests.e2e.accounts import check_accounts
from tests.waiting import HANG_S, until
from tests.workers import workers_of

LONG = [
    "rollout.total_rollout_steps=800",
    "trainer.save_freq=2",
    "trainer.test_freq=5",
    "trainer.max_ckpt_to_keep=2",
    "trainer.threads=1",
    "trainer.resume=auto",
]


def history(folder: Path) -> list[dict[str, object]]:
    """Return the complete lines of the history."""
    path = folder / "history.jsonl"
    return (
        [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []
    )


def attempts(folder: Path) -> int:
    return sum(line["event"] == "start" for line in history(folder))


class Chain:
    """Attempts at one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.output = folder / "output"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *overrides: str, versions: int = 3) -> subprocess.Popen[bytes]:
        """Start the next attempt, and return after `versions` more versions."""
        before = attempts(self.folder)
        self.process = runs.start_command(
            *runs.small(self.folder, *LONG, *overrides), output=self.output
        )

        def trained() -> bool:
            lines = history(self.folder)
            starts = [i for i, line in enumerate(lines) if line["event"] == "start"]
            return len(starts) > before and len(lines) - starts[-1] > versions

        until(trained if versions else lambda: True, self.process, self.output)
        return self.process

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=HANG_S)

    def said(self) -> list[str]:
        return self.output.read_text().strip().splitlines()

    def worker(self, name: str) -> psutil.Process:
        assert self.process is not None
        return workers_of(self.process.pid)[name]

    def signal_all(self, number: signal.Signals) -> list[psutil.Process]:
        """Signal the process group and every process under the driver, as Slurm or a terminal.

        Returns the processes under the driver.
        """
        assert self.process is not None
        under = psutil.Process(self.process.pid).children(recursive=True)
        assert len(under) >= 3, "a rank, a replica and a reward worker"
        for process in under:
            if os.getpgid(process.pid) != self.process.pid:
                process.send_signal(number)
        os.killpg(self.process.pid, number)
        return under

    def saves_after_a_signal_to_all(self) -> None:
        """Send SIGTERM to every process. The run saves, and leaves no process and no sample."""
        under = self.signal_all(signal.SIGTERM)
        assert self.end() == 143, "\n".join(self.said())
        assert not psutil.wait_procs(under, timeout=HANG_S)[1]
        assert Checkpoints(self.folder, keep=2).newest()[0] is not None
        found = runs.audit(self.folder)
        assert (found["lost"], found["trained_twice"], found["dropped"]) == (0, 0, {})

    def kill_tree(self) -> None:
        """Send kill -9 to the driver and its descendants, like a scheduler or the OOM killer."""
        assert self.process is not None
        tree = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        for process in tree:
            process.kill()
        self.process.wait()
        psutil.wait_procs(tree, timeout=HANG_S)


HANGS = """
import time
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    mine, others = Path(__file__).parent / f"hang-{ground_truth}", list(Path(__file__).parent.glob("hang-*"))
    drawn = extra_info["split"] == "train"  # A failed score of a validation drops nothing.
    if drawn and len(others) < 3 and not mine.exists():
        mine.touch()
        time.sleep(10_000)
    return float(solution_str == ground_truth)
"""


def interrupted(chain: Chain) -> None:
    """Ctrl-C, which reaches every process, saves a checkpoint. The exit code tells the cause.

    The driver has died before, and its supervisor has started it anew.
    """
    process = chain.start("--keep-going", "guard.enable=true")
    (driver,) = psutil.Process(process.pid).children()
    workers = driver.children(recursive=True)
    driver.kill()
    done = {"event": "version", "attempt": 2}
    until(lambda: done.items() <= history(chain.folder)[-1].items(), process, chain.output)
    until(lambda: not any(worker.is_running() for worker in workers))
    under = chain.signal_all(signal.SIGINT)
    assert chain.end() == 130
    assert not psutil.wait_procs(under, timeout=HANG_S)[1]
    said = "\n".join(chain.said())
    why = "keep-going: the driver was killed by SIGKILL"
    assert f"{why}; restart 1 of 5 of {chain.folder} in 1 s" in said
    assert any("restarted" in file.read_text() for file in chain.folder.glob("trace/*"))
    assert (
        "SIGINT: saving a checkpoint, then ending" in said
        and "not complete: resume with trainer.resume=auto" in said
    )
    cut = history(chain.folder)[-1]
    assert (
        cut["event"] == "end"
        and (
            chain.folder / "checkpoints" / f"version-{cut['version']:06d}" / "manifest.json"
        ).is_file()
    )


def interrupted_twice(chain: Chain) -> None:
    """The second Ctrl-C ends the process and its workers. Nothing else would: no wait ends here."""
    cut = history(chain.folder)[-1]["version"]
    process = chain.start()
    first = next(line for line in reversed(history(chain.folder)) if line["event"] == "start")
    assert first["version"] == cut, "nothing is trained again after a signal"
    workers = psutil.Process(process.pid).children(recursive=True)
    chain.worker("trainer-0").send_signal(signal.SIGSTOP)  # the first Ctrl-C cannot complete
    process.send_signal(signal.SIGINT)
    until(lambda: "saving a checkpoint" in chain.output.read_text(), process, chain.output)
    process.send_signal(signal.SIGINT)
    assert chain.end() == 130
    _, left = psutil.wait_procs(workers, timeout=HANG_S)
    assert not left


def killed(chain: Chain) -> None:
    """Kill everything with kill -9 at a random moment of start-up."""
    chain.start(versions=0)
    time.sleep(random.Random().uniform(0.2, 3))
    chain.kill_tree()


def lost_all_workers(chain: Chain) -> set[int]:
    """The fork server dies, and with it the trainer and its only replica. The run goes on.

    Return the versions whose validation was cut short. Each time, the next version is validated.
    """
    process = chain.start()
    server = chain.worker("trainer-0").parent()
    assert server is not None and server.name() == "fork-server"
    before = len(history(chain.folder))
    server.kill()
    until(lambda: len(history(chain.folder)) > before + 2, process, chain.output)
    said = chain.output.read_text()
    assert "trainer-0 ended with its fork server, which was killed by SIGKILL" in said
    assert "serves again" in said and "the trainer is back" in said
    return {int(v) for v in re.findall(r"the validation of version (\d+) was cut short", said)}


def killed_while_writing(chain: Chain) -> int:
    """Kill everything during the write of a checkpoint, while the next version trains.

    The checkpoint before it is whole. Return its version.
    """
    assert chain.process is not None
    writing = chain.folder / "checkpoints"
    until(lambda: any(writing.glob(".writing-*/engine/*")), chain.process, chain.output)
    chain.kill_tree()
    path, passed = Checkpoints(chain.folder, keep=2).newest()
    assert path is not None and not passed
    return int(path.name.removeprefix("version-"))


def lost_last_replica(chain: Chain) -> range:
    """A run without any replica saves what it has, and says why it ends.

    Return its versions. No replica is there to validate the last ones. Errors of other workers,
    whose collectives broke, are not reported.
    """
    chain.start("rollout.max_restarts=0", "guard.enable=true")
    chain.worker("rollout-0").kill()
    assert chain.end() == 1
    said = chain.said()
    assert not any("Traceback" in line for line in said), (
        "an error of millrace's own is one message"
    )
    why = "error: no replica is left: rollout-0 is retired: worker rollout-0 was killed by SIGKILL"
    assert why in said[-1]
    newest = Checkpoints(chain.folder, keep=2).newest()[0]
    assert (
        newest is not None and newest.name == f"version-{history(chain.folder)[-1]['version']:06d}"
    )
    lines = history(chain.folder)
    start: Any = next(line["version"] for line in reversed(lines) if line["event"] == "start")
    end: Any = lines[-1]["version"]
    return range(start + 1, end + 1)


def completed_with_hanging_rewards(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    function = f"reward.function={tmp_path}/hangs.py:score"
    chain.start(function, "reward.trial=false", "reward.timeout_s=8", "--json", versions=0)
    assert chain.end() == 0, "\n".join(chain.said())
    result = json.loads(chain.said()[-1])
    assert result["complete"] and result["samples_trained"] == 800


@pytest.mark.slow
def test_a_run_that_is_ended_in_every_way_trains_each_sample_exactly_once(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    try:
        interrupted(chain)
        interrupted_twice(chain)
        killed(chain)
        cut = lost_all_workers(chain)
        kept = killed_while_writing(chain)
        cut = {version for version in cut if version < kept}  # The others are validated anew.
        alone = lost_last_replica(chain)
        completed_with_hanging_rewards(chain, tmp_path)
    finally:
        if chain.process is not None and chain.process.poll() is None:
            chain.kill_tree()
    found = runs.audit(chain.folder)
    assert found["complete"] and found["trained"] == 800 and found["attempts"] >= 5
    assert (found["lost"], found["trained_twice"], found["in_flight"]) == (0, 0, 0)
    assert found["dropped"] == {"timeout": 3}, "no signal costs a sample"
    assert [row["version"] for row in runs.rows(chain.folder)] == list(
        range(1, found["versions"] + 1)
    ), "one row for each version"
    # The bucket "lost" may be empty: the journal may have all that the killed attempts had drawn.
    assert check_accounts(chain.folder)[-1].tokens["dropped/timeout"] > 0
    written = [
        json.loads(line) for line in (chain.folder / "metrics.jsonl").read_text().splitlines()
    ]
    validated = [row["version"] for row in written if "val/sort_digits/greedy" in row]
    last = found["versions"]  # The loss of all replicas may have cut a window in two.
    due = {*range(5, last + 1, 5), last, *(version + 1 for version in cut)} - cut
    assert validated == sorted({*validated}) and {*validated} <= due
    assert due - {*validated} <= {*alone}, (
        "each due validation once, also one that a stop cut short"
    )
    done = runs.millrace(*runs.small(chain.folder, *LONG, "rollout.total_rollout_steps=400"))
    assert (
        done.code == 2
        and "rollout.total_rollout_steps = 400: the run would end after 400 samples" in done.err
    )
    assert "has trained 800. Fix: a larger value" in " ".join(done.err.split())


def test_a_run_trains_to_its_end_on_a_full_disk_and_then_names_the_folder_and_the_reason(
    tmp_path: Path,
) -> None:
    """A limit on the size of files simulates a full disk.

    The write of the engine's state exceeds the limit while the next version trains. A save waits for
    the one before, so the last row knows of the first refusals, however fast a version is.
    """
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2**19, 2**19))
    done = runs.command(
        *runs.small(tmp_path / "run", "trainer.save_freq=1", "trainer.threads=1"),
        preexec_fn=limit,
        timeout=HANG_S,
    )
    assert done.returncode == 1, done.stderr
    folder = tmp_path / "run" / "checkpoints"
    said = " ".join((done.stdout + done.stderr).split())
    assert said.count("alarm: the disk refuses a checkpoint.") == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: trainer-0: {folder}/.writing-"), done.stderr
    assert "OSError: [Errno 27] File too large. Fix: a disk with free space" in last
    assert "Traceback" not in done.stderr
    assert Checkpoints(tmp_path / "run", keep=2).all() == []
    rows = runs.rows(tmp_path / "run")
    assert rows[-1]["checkpoint/refused"] > 0
    assert runs.audit(tmp_path / "run")["trained"] == rows[-1]["version"] * 16


@pytest.mark.slow
def test_a_signal_to_every_process_of_a_cluster_that_the_run_started_saves_too(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray")
    chain = Chain(tmp_path)
    try:
        chain.start("trainer.runtime=ray")
        chain.saves_after_a_signal_to_all()
    finally:
        if chain.process is not None and chain.process.poll() is None:
            chain.kill_tree()


@pytest.mark.slow
def test_each_resume_of_a_killed_run_uses_the_samples_of_its_journal(tmp_path: Path) -> None:
    """The first kill comes after a checkpoint, and the second one after a resume."""
    chain, keys = Chain(tmp_path), ["trainer.save_freq=50", "rollout.total_rollout_steps=100000"]
    process = chain.start(*keys)
    folder = chain.folder / "journal"
    saved = chain.folder / "checkpoints" / "version-000050" / "manifest.json"

    def durable() -> bool:
        """Whether the journal has a sample that finished after the checkpoint."""
        newest = journal_file.files(folder)[-1]
        return saved.is_file() and any(b.finished for b in journal_file.read(newest).batches)

    for _ in range(2):
        until(durable, process, chain.output)
        chain.kill_tree()
        process = chain.start(*keys)
        said = chain.output.read_text()
        assert re.search(r"resumed at version \d+ \+ journal: [1-9]\d* finished samples used", said)
        assert "Settings changed" not in said
    chain.kill_tree()
    found = runs.audit(chain.folder)
    assert found["lost"] == found["trained_twice"] == 0


def test_after_all_of_this_no_process_is_left() -> None:
    assert not workers_of()
