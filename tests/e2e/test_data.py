"""A run goes on with the rows that its checkpoint knows: the real command, with real workers."""

from __future__ import annotations

import json
from pathlib import Path

from pyarrow import parquet

from millrace.run.rows import read
from tests.e2e.runs import Done, millrace

TINY = """
name: tiny
mode: colocate_sync
trainer: {logger: [], save_freq: 1, seed: 1, val_before_train: false}
guard: {enable: false}
report: {enable: false}
reward: {function: exact}
rollout: {n: 2, max_prompt_length: 16, max_response_length: 4, max_num_seqs: 8}
actor: {ppo_mini_batch_size: 4}
"""
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(run: Path) -> list[str]:
    """Return the ground truth of each sample that was trained, in the order of admission."""
    found = set[tuple[int, str]]()
    for file in sorted((run / "samples").glob("*.parquet")):
        found |= {(r["sample"], r["ground_truth"]) for r in parquet.read_table(file).to_pylist()}
    return [truth for _, truth in sorted(found)]


def test_a_resume_trains_each_row_once_or_refuses_the_first_row_that_differs(
    tmp_path: Path,
) -> None:
    data, run = tmp_path / "t.jsonl", tmp_path / "run"
    (tmp_path / "tiny.yaml").write_text(TINY)

    def train(samples: int, *more: str) -> Done:
        own = f"data.train_files=['{data}']", f"trainer.run_dir={run}", "trainer.resume=auto"
        steps = f"rollout.total_rollout_steps={samples}"
        return millrace("train", str(tmp_path / "tiny.yaml"), *own, steps, *more)

    write(data, ROWS[:8])
    assert train(4).code == 0
    checkpoint = sorted((run / "checkpoints").glob("version-*"))[-1]
    assert (before := read(checkpoint)) is not None and before.rows == 8

    write(data, ROWS[:8][::-1])
    refused = train(8)
    assert refused.code == 2 and "t.jsonl row 1 " in refused.err and "another order" in refused.err
    write(data, ROWS)
    refused = train(8)
    assert refused.code == 2 and "data.appended_rows=use" in refused.err

    data = tmp_path / "moved" / "t.jsonl"
    write(data, ROWS)
    assert train(18, "data.appended_rows=use").code == 0
    truths = trained(run)
    assert sorted(truths[:8]) == sorted(row["answer"] for row in ROWS[:8])
    assert sorted(truths[8:]) == sorted(row["answer"] for row in ROWS)
    assert "lost 0  trained_twice 0" in millrace("ledger", str(run)).out
