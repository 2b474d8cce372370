"""Write a mix of short reasoning-gym problems as files.

The files are for machines that have neither reasoning-gym nor a network.

    python benchmarks/reasoning_mix.py [--folder build/reasoning] [--rows 8000] [--held-out 96]
        [--seed 0]

`train.jsonl` and `val.jsonl` have the columns prompt, answer and data_source, and no scorer.
millrace compares answers exactly, which is correct because each problem of these tasks has one
answer in one form. No problem is in both files, or twice in one. The same arguments write the same
bytes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from command import ROOT

TASKS: dict[str, dict[str, Any]] = {
    # Each task has prompts of at most 120 characters, thousands of different problems, and one
    # answer in one form. A model that has read a few hundred thousand problems can learn the
    # answers.
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
    "letter_counting": {
        "min_words": 3,
        "max_words": 5,
    },  # with one or two words, four answers in five are 1
    "simple_equations": {
        "min_terms": 2,
        "max_terms": 2,
        "min_value": 1,
        "max_value": 9,
        "operators_weights": [0.5, 0.5, 0.0],
    },
    "number_filtering": {
        "min_numbers": 2,
        "max_numbers": 3,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 99,
    },
}
LONGEST = 120
"""Largest number of characters of a prompt.

Longer prompts are left out. So are prompts that are not ASCII: a tokenizer may not know such rare
letters.
"""


def problems(name: str, seed: int, count: int) -> Iterator[dict[str, str]]:
    """Yield `count` different problems of a task, or all that eight times as many draws give."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(name, size=8 * count, seed=seed, **TASKS[name])
    seen: set[str] = set()
    for entry in drawn:
        prompt, answer = entry["question"], str(entry["answer"])
        if prompt not in seen and len(prompt) <= LONGEST and prompt.isascii():
            seen.add(prompt)
            yield {"prompt": prompt, "answer": answer, "data_source": name}
            if len(seen) == count:
                return


def mix(rows: int, held_out: int, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return (train, val), shuffled.

    Each task has up to `rows` problems in train and exactly `held_out` in val.
    """
    train: list[dict[str, str]] = []
    val: list[dict[str, str]] = []
    for place, name in enumerate(TASKS):
        # reasoning-gym draws row i from seed + i, so the seeds must be far apart.
        drawn = list(problems(name, (seed * len(TASKS) + place) * 10_000_000, rows + held_out))
        if len(drawn) <= held_out:
            raise SystemExit(
                f"{name} has {len(drawn)} different problems, and --held-out is {held_out}. "
                "Fix: a smaller --held-out"
            )
        Random(f"{name}|{seed}").shuffle(drawn)
        val += drawn[:held_out]
        train += drawn[held_out:]
    for split in (train, val):
        Random(seed).shuffle(split)
    return train, val


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "reasoning")
    parser.add_argument(
        "--rows", type=int, default=8000, help="most training problems of each task"
    )
    parser.add_argument("--held-out", type=int, default=96, help="held-out problems of each task")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(
        ("train", "val"), mix(options.rows, options.held_out, options.seed), strict=True
    ):
        path = options.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        prompt, answer = (max(len(row[column]) for row in rows) for column in ("prompt", "answer"))
        print(
            f"{path}: {path.stat().st_size / 1e6:.1f} MB, {len(rows)} rows, {prompt} + {answer} characters at most"
        )
        print("   ", dict(Counter(row["data_source"] for row in rows)))


if __name__ == "__main__":
    main()
