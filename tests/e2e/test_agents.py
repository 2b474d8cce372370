"""The recipe agents_quickstart for real: as an environment, as a function, a command and workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace.pipeline.history import audit
from tests.e2e import runs

PROGRAM = "millrace.environments.chase_program"
PLAYERS = {
    "environment": (),
    "program": ("agents.environment=", f"agents.program={PROGRAM}:play"),
    "command": ("agents.environment=", f"agents.command={sys.executable} -m {PROGRAM}"),
}
PLAYERS["workers"] = (*PLAYERS["command"], "agents.workers=1", "agents.max_concurrent=64")
SMALL = (
    "sft.steps=20",
    "sft.batch_size=32",
    "sft.demonstrations=32",
    "actor.ppo_mini_batch_size=8",
    "rollout.n=4",
    "rollout.max_num_seqs=32",
    "rollout.test_freq=0",
    "trainer.save_freq=0",
    "trainer.val_before_train=false",
    "data.val_files=['task:chase?split=val&size=16']",
)
pytestmark = pytest.mark.timeout(240)


def train(folder: Path, player: str, *overrides: str) -> list[dict[str, Any]]:
    """Run the recipe small, and return the rows of its versions."""
    said = [*SMALL, *PLAYERS[player], f"trainer.run_dir={folder}", *overrides]
    done = runs.command("train", "agents_quickstart", *said)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs.rows(folder)


def drawn(folder: Path) -> dict[tuple[int, int], list[Any]]:
    """Return what each trajectory read and drew, part by part, and its reward."""
    found: dict[tuple[int, int], list[Any]] = {}
    for file in sorted((folder / "samples").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            at = row["sample"], row["trajectory"]
            found[at] = [row["version"], row["prompt"], row["segments"], row["reward"]]
    return found


ALIKE = ("actor/", "reward/", "response_length/m", "response_length/p", "agents/turns",
         "agents/threads", "agents/context_tokens", "agents/tool_calls", "train/tokens")  # fmt: skip


def test_an_environment_a_program_and_workers_draw_and_train_the_same_tokens(
    tmp_path: Path,
) -> None:
    """Calls, an OpenAI client in process, and one over HTTP in another: no bit differs."""
    exact = ("mode=on_policy_pipeline", "trainer.deterministic=true")
    rows = {}
    for player in ("environment", "program", "workers"):
        folder = tmp_path / player
        rows[player] = train(folder, player, "rollout.total_rollout_steps=24", *exact)
        found = audit(folder)
        assert (found.trained, found.lost, found.trained_twice) == (24, 0, 0)
    environment = drawn(tmp_path / "environment")
    assert len(environment) == 24 * 4
    assert environment == drawn(tmp_path / "program") == drawn(tmp_path / "workers")
    assert {part["version"] for _, _, parts, _ in environment.values() for part in parts} > {0, 1}
    alike = zip(*(rows[player] for player in rows), strict=True)
    for one, *others in alike:
        names = [name for name in one if name.startswith(ALIKE)]
        assert len(names) > 20
        assert all({n: one[n] for n in names} == {n: other[n] for n in names} for other in others)
        assert one["agents/turns/mean"] > 1 and one["agents/threads/max"] == 1


def test_a_command_plays_every_episode_in_a_process_of_its_own(tmp_path: Path) -> None:
    few = ("sft.batch_size=4", "sft.demonstrations=4", "rollout.total_rollout_steps=4",
           "actor.ppo_mini_batch_size=4", "rollout.n=2", "data.val_files=[]")  # fmt: skip
    (row,) = train(tmp_path / "run", "command", "mode=colocate_sync", *few)
    assert row["train/samples"] == 4 and row["agents/turns/mean"] >= 1
    assert audit(tmp_path / "run").trained == 4
    said = [json.loads(m["messages"]) for f in (tmp_path / "run" / "samples").glob("*.parquet")
            for m in pq.read_table(f).to_pylist()]  # fmt: skip
    assert len(said) == 8 and all(m[0]["role"] == "user" for m in said)
