"""Canaries: no byte that a run writes has the value of a secret of the user."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest

from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("secrets")  # The tests share one run.
NAMES = (
    *("WANDB_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"),
    "MY_JUDGE_KEY",
)
CANARIES = {name: f"canary/{name.lower()}+{n}e8f3a7c1b2d" for n, name in enumerate(NAMES)}
MARK = "the-reward-has-failed"
"""A text beside each canary. Where it is found, a secret would be found too."""

REWARD = f"""
import os
import time

NAMES = {NAMES!r}
scored = 0


def score(data_source, solution_str, ground_truth, extra_info):
    global scored
    scored += 1
    open(__file__ + ".scoring", "a").close()
    while not os.path.exists(__file__ + ".asked"):
        time.sleep(0.1)
    told = " ".join(os.environ[name] for name in NAMES)
    if scored > 200 or scored % 16 == 0:
        print("printed", {MARK!r}, told, flush=True)
        raise RuntimeError(f"{MARK}: 401 for https://host/v1?keys={{told}}")
    return float(solution_str == ground_truth)
"""
TINY = """
name: canary
inherits: quickstart
trainer: {save_freq: 1, val_before_train: false, logger: [tensorboard, wandb]}
sft: {steps: 5, batch_size: 16}
actor: {ppo_mini_batch_size: 8}
rollout: {n: 4, total_rollout_steps: 96, test_freq: 0, stall_s: 10000}
reward: {max_error_share: 0.9, timeout_s: 10000}
data: {val_files: ['task:sort_digits?min_digits=4&max_digits=6&split=val&size=8']}
"""


@dataclass
class Ended:
    folder: Path
    code: int
    output: bytes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "canary.yaml").write_text(TINY)
    return folder


def start(home: Path, *overrides: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "millrace", "train", str(home / "canary.yaml"), *overrides]
    variables = os.environ | CANARIES | {"WANDB_MODE": "offline", "HOME": str(home)}
    return subprocess.Popen(
        command,
        cwd=home,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        umask=0o077,
    )


def millrace(home: Path, *arguments: str) -> bytes:
    return subprocess.run(
        [sys.executable, "-m", "millrace", *arguments],
        cwd=home,
        env=os.environ | CANARIES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        umask=0o077,
    ).stdout


@pytest.fixture(scope="module")
def run(home: Path) -> Ended:
    """A run whose reward function tells the keys, and all that millrace says of it.

    In the middle of the run, the function begins to fail each time. That ends the run.
    """
    folder = home / "run"
    process = start(home, f"reward.function={home}/rewards.py:score", f"trainer.run_dir={folder}")
    asked = b""
    while process.poll() is None and not (home / "rewards.py.scoring").exists():
        time.sleep(0.1)
    while process.poll() is None and b"stack of rollout-0" not in asked:
        asked = millrace(home, "why", str(folder), "--full")
    (home / "rewards.py.asked").touch()
    output, _ = process.communicate(timeout=HANG_S)
    shown = [millrace(home, "report", str(folder)), millrace(home, "why", str(folder), "--full")]
    assert b"stack of rollout-0" in asked, asked.decode()
    return Ended(folder, process.returncode, b"".join([output, asked, *shown]))


def texts(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file of a folder, also what is compressed in it."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield str(path), path.read_bytes()
            if path.suffix == ".parquet":
                yield f"{path} (rows)", repr(pq.read_table(path).to_pylist()).encode()


def leaks(where: str, data: bytes) -> list[str]:
    """Return which secrets are in `data`, as they are, quoted for a URL, or in base64."""
    return [
        f"{where}: {name}"
        for name, value in CANARIES.items()
        if any(
            form.encode() in data
            for form in (value, quote(value, safe=""), base64.b64encode(value.encode()).decode())
        )
    ]


def test_no_file_of_a_run_and_no_line_that_it_prints_has_a_secret(run: Ended) -> None:
    assert run.code == 1 and b"reward.max_error_share" in run.output, run.output.decode()
    found = dict(texts(run.folder))
    assert any("report" in where for where in found) and any("wandb" in where for where in found)
    assert any("metrics.jsonl" in where for where in found), "some versions were trained"
    assert MARK.encode() in run.output, "the errors of the reward are told"
    assert [
        *leaks("output", run.output),
        *(leak for w, d in found.items() for leak in leaks(w, d)),
    ] == []


def test_a_run_makes_no_file_that_the_users_umask_forbids(run: Ended) -> None:
    open_to_others = [
        str(path)
        for path in run.folder.rglob("*")
        if not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert open_to_others == []
