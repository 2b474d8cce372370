"""The recipe agents_quickstart for real: an environment, a function, a command and workers.

One session serves all runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from millrace.persist.history import audit
from tests.e2e import runs

NAME = "agents_quickstart"
PROGRAM = "millrace.environments.chase_program"
PLAYERS = {
    "environment": (),
    "program": ("agents.environment=", f"agents.program={PROGRAM}:play"),
    "command": ("agents.environment=", f"agents.command={sys.executable} -m {PROGRAM}"),
}
PLAYERS["workers"] = (*PLAYERS["command"], "agents.workers=1", "agents.max_concurrent=64")
START = (
    "mode=on_policy_pipeline",
    "sft.steps=20",
    "sft.batch_size=32",
    "sft.demonstrations=32",
    "rollout.max_num_seqs=32",
    "trainer.deterministic=true",
    "data.val_files=['task:chase?split=val&size=16']",
)
SIZES = {
    "environment": ("rollout.total_rollout_steps=24",),
    "program": ("rollout.total_rollout_steps=24",),
    "workers": ("rollout.total_rollout_steps=24",),
    "command": ("mode=colocate_sync", "rollout.total_rollout_steps=4", "rollout.n=2",
                "actor.ppo_mini_batch_size=4"),
}  # fmt: skip


async def play(folder: Path) -> None:
    """Run the recipe small, once for each player."""
    async with runs.session(folder, *START, name=NAME) as s:
        unvalidated = replace(s, problems=replace(s.problems, val=()))
        for player, keys in PLAYERS.items():
            session = unvalidated if player == "command" else s
            said = [*START, *SIZES[player], *keys]
            outcome = await runs.run(session, folder / player, *said, name=NAME)
            assert outcome.complete


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
    """Calls, an OpenAI client in process, and one over HTTP in another: no bit differs.

    The command plays every episode in a process of its own.
    """
    asyncio.run(play(tmp_path))
    for player in PLAYERS:
        found = audit(tmp_path / player)
        wanted = 4 if player == "command" else 24
        assert (found.trained, found.lost, found.trained_twice) == (wanted, 0, 0)
    alike = [player for player in PLAYERS if player != "command"]
    environment, *others = (drawn(tmp_path / player) for player in alike)
    assert len(environment) == 24 * 4 and all(environment == other for other in others)
    assert {part["version"] for _, _, parts, _ in environment.values() for part in parts} > {0, 1}
    rows = [runs.rows(tmp_path / player) for player in alike]
    for one, *others in zip(*rows, strict=True):
        names = [name for name in one if name.startswith(ALIKE)]
        assert len(names) > 20
        assert all({n: one[n] for n in names} == {n: other[n] for n in names} for other in others)
        assert one["agents/turns/mean"] > 1 and one["agents/threads/max"] == 1
    (row,) = runs.rows(tmp_path / "command")
    assert row["train/samples"] == 4 and row["agents/turns/mean"] >= 1
    said = [json.loads(m["messages"]) for f in (tmp_path / "command" / "samples").glob("*.parquet")
            for m in pq.read_table(f).to_pylist()]  # fmt: skip
    assert len(said) == 8 and all(m[0]["role"] == "user" for m in said)
