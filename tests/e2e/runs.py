"""Small real runs of the quickstart task.

The engines are real, in real processes. They start once and serve many runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from millrace.cli import main as cli
from millrace.config import recipe
from millrace.observe.progress import Lines, Progress
from millrace.pipeline.checkpoint import Checkpoints
from millrace.run.agents import open_agent
from millrace.run.folder import RunDir, open_run_dir
from millrace.run.session import Session, open_session
from millrace.run.signals import StopRequest
from millrace.run.start import start_state, warm_up
from millrace.run.train import Outcome, run_training
from millrace.schedule.ledger import Ledger
from tests.waiting import HANG_S

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "millrace" / "recipes" / "quickstart.yaml"
SMALL = [
    "sft.steps=0",
    "actor.ppo_mini_batch_size=8",
    "rollout.n=4",
    "rollout.total_rollout_steps=64",
    "rollout.max_num_seqs=64",
    "rollout.test_freq=0",
    "guard.enable=false",  # A proof takes longer than most of these runs.
    # A busy machine is slow, and loses no worker.
    f"rollout.heartbeat_s={HANG_S}",
    f"rollout.stall_s={HANG_S}",
    "trainer.save_freq=0",
    "trainer.val_before_train=false",
    "data.val_files=['task:sort_digits?min_digits=4&max_digits=6&split=val&size=16']",
]


def progress() -> Progress:
    return Progress(Lines(Console(stderr=True)), "test", "test")


@asynccontextmanager
async def session(
    folder: Path, *overrides: str, name: Path | str = RECIPE
) -> AsyncIterator[Session]:
    """Start the engines once. `run` below uses them for one run after the other."""
    warm = ["sft.steps=50", "sft.batch_size=64"]  # enough for some rewards to differ
    config = recipe.load(name, [*SMALL, *warm, f"trainer.run_dir={folder / 'session'}", *overrides])
    async with open_session(config, progress()) as s:
        await warm_up(s)
        await s.engines.train.begin("rl", 1)
        (folder / "start").mkdir()
        await s.engines.train.save(str(folder / "start"))
        yield s


async def run(
    s: Session,
    folder: Path,
    *overrides: str,
    resume: bool = False,
    stop: StopRequest | None = None,
    name: Path | str = RECIPE,
) -> Outcome:
    """Run once on the session's engines.

    The run starts from the session's start weights, or from the newest checkpoint of `folder`.
    """
    said = [*SMALL, f"trainer.run_dir={folder}", "trainer.resume=auto", *overrides]
    said += [f"trainer.deterministic={str(s.config.trainer.deterministic).lower()}"]
    config = recipe.load(name, said)
    opened = open_run_dir(config)
    if not (folder / "model").exists():
        (folder / "model").symlink_to(s.run.model.resolve())
    found = Checkpoints(folder, keep=1).newest()[0] if resume else None
    mine = replace(s, config=config, run=RunDir(opened.path, found))
    horizon = config.derived(len(s.problems.train)).lr_horizon
    if found is None:
        await s.engines.train.begin("rl", horizon)
        await s.engines.train.load(str(s.run.path.parent / "start"))
        await s.engines.train.begin("rl", horizon)
        ledger = Ledger(config.schedule, config.derived(len(s.problems.train)).samples)
    else:
        ledger = await start_state(mine)
    tokenizer = s.problems.chat.tokenizer
    async with open_agent(
        config.agents, config.rollout, tokenizer, folder, s.progress.note
    ) as agent:
        outcome = await run_training(replace(mine, agent=agent), ledger, stop or StopRequest())
    await s.engines.turns.enter()
    return outcome


async def weights(s: Session, folder: Path) -> dict[str, Tensor]:
    """Return the current weights of the train engine."""
    await s.engines.train.export(str(folder))
    return load_file(folder / "model.safetensors")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of versions in metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "reward/mean" in row]


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `millrace ...` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "millrace", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        **options,
    )


def start_command(*arguments: str, output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "millrace", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )


def last_json(text: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return parsed


def audit(folder: Path) -> dict[str, Any]:
    return last_json(millrace("ledger", str(folder), "--json").out)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def small(folder: Path, *overrides: str) -> Sequence[str]:
    """Return the arguments of a small run for the command line."""
    return ["train", str(RECIPE), *SMALL, f"trainer.run_dir={folder}", *overrides]


@dataclass
class Done:
    """The end of a command."""

    code: int
    out: str
    err: str

    @property
    def printed(self) -> str:
        return self.out + self.err

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        return last_json(self.out)


def millrace(*arguments: str) -> Done:
    """Run a command through `main`, in this process, with real workers.

    A new process would only import everything once more.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["millrace", *arguments])
        patch.setenv("COLUMNS", "400")
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def mixture_learns(folder: Path, *keys: str) -> None:
    """Train a mixture with the experts that the rollout engine chose, and check that it learns."""
    size = ["rollout.total_rollout_steps=1024", f"trainer.run_dir={folder}"]
    done = millrace("train", "gspo_moe", *size, *keys)
    assert done.code == 0, done.err
    found = rows(folder)
    first, last = found[0]["reward/mean"], found[-1]["reward/mean"]
    assert first < 0.5 and last > 0.6, f"reward went from {first:.2f} to {last:.2f}"
    assert found[0]["actor/log_prob_gap_same_version"] < 1e-4
    # Several optimizer steps for a version: the router would choose other experts in the later ones.
    assert all(0 < row["actor/router_moved"] < 0.5 for row in found)
