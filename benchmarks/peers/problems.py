"""The problems of both tasks, and the scorer of all arms: `compute_score` and `trl_reward`.

    python problems.py sums|eight FOLDER    # writes train.jsonl and val.jsonl in verl's columns

| task | a problem | reward |
|---|---|---|
| sums | a sum or difference of two or three terms | 1 if the last number is right |
| eight | eight sums of 10..49 and 1..9, after two worked examples | the share of right sums |

No held-out problem of `sums` is in its training set. `eight` has 360 possible sums: 64 of them are
held out, and 16 are in the examples, so an echo of the examples earns nothing.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

Sums = list[tuple[int, int]]
Row = dict[str, Any]

KINDS = ((2, 1), (2, 2), (3, 1))
"""Terms, and digits of each."""
EXAMPLES: tuple[Sums, ...] = (
    [(12, 5), (41, 7), (34, 8), (25, 3), (48, 4), (22, 9), (19, 2), (33, 6)],
    [(37, 6), (20, 9), (13, 1), (46, 7), (42, 4), (29, 8), (11, 2), (35, 5)],
)
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
STATED = re.compile(r"(?<!\d)(\d{1,4})[ \t]*\+[ \t]*(\d{1,4})[ \t]*=[ \t]*(-?\d+)(?![\d.,]*\d)")


def last_number(text: str, answer: str) -> float:
    found = NUMBER.findall(text)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(answer))


def eight_sums(text: str, answer: str) -> float:
    """Return the share of sums that `text` states rightly, such as `12 + 7 = 19`.

    Only the first statement of a sum counts, so a list of many results earns nothing.
    """
    first: dict[tuple[int, int], int] = {}
    for a, b, result in STATED.findall(text):
        first.setdefault((int(a), int(b)), int(result))
    asked = json.loads(answer)
    return sum(first.get((a, b)) == a + b for a, b in asked) / len(asked)


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    return (eight_sums if data_source == "eight" else last_number)(solution_str, ground_truth)


def trl_reward(
    completions: list[Any], answer: list[str], data_source: list[str], **_: Any
) -> list[float]:
    texts = [c[-1]["content"] if isinstance(c, list) else c for c in completions]
    return [compute_score(*row) for row in zip(data_source, texts, answer, strict=True)]


def sums(rng: random.Random) -> tuple[list[Row], list[Row]]:
    """Return 4,098 training and 258 held-out problems."""
    train: list[Row] = []
    val: list[Row] = []
    for terms, digits in KINDS:
        held_out: dict[str, Row] = {}
        while len(held_out) < 86:
            held_out |= chain(rng, terms, digits)
        rest: list[Row] = []
        while len(rest) < 1366:
            rest += [row for ask, row in chain(rng, terms, digits).items() if ask not in held_out]
        train += rest
        val += held_out.values()
    return train, val


def chain(rng: random.Random, terms: int, digits: int) -> dict[str, Row]:
    """Return {question: row} of one sum, as chain_sum of reasoning-gym asks it."""
    smallest = 0 if digits == 1 else 10 ** (digits - 1)
    numbers = [rng.randrange(smallest, 10**digits) for _ in range(terms)]
    signs = [rng.choice((1, -1)) for _ in numbers[1:]]
    formula = str(numbers[0])
    for sign, number in zip(signs, numbers[1:], strict=True):
        formula += f" {'+' if sign > 0 else '-'} {number}"
    result = numbers[0] + sum(s * n for s, n in zip(signs, numbers[1:], strict=True))
    ask = f"State the final answer to the following arithmetic problem: {formula} ="
    return {ask: row(f"sum_{terms}x{digits}", str(result), {"role": "user", "content": ask})}


def eight(rng: random.Random) -> tuple[list[Row], list[Row]]:
    """Return 4,096 training and 128 held-out problems. They have no sum in common."""
    shown = {pair for example in EXAMPLES for pair in example}
    pairs = [(a, b) for a in range(10, 50) for b in range(1, 10) if (a, b) not in shown]
    rng.shuffle(pairs)
    chat = [message for example in EXAMPLES for message in (ask(example), answer(example))]
    train, val = (
        [
            row("eight", json.dumps(asked), *chat, ask(asked))
            for asked in (rng.sample(pool, 8) for _ in range(count))
        ]
        for pool, count in ((pairs[64:], 4096), (pairs[:64], 128))
    )
    return train, val


def ask(pairs: Sums) -> dict[str, str]:
    lines = [f"{i}. {a} + {b} =" for i, (a, b) in enumerate(pairs, 1)]
    head = "Write out these eight sums with their results:"
    return {"role": "user", "content": "\n".join([head, *lines])}


def answer(pairs: Sums) -> dict[str, str]:
    lines = [f"{i}. {a} + {b} = {a + b}" for i, (a, b) in enumerate(pairs, 1)]
    return {"role": "assistant", "content": "\n".join(lines)}


def row(data_source: str, ground_truth: str, *messages: dict[str, str]) -> Row:
    truth = {"style": "rule", "ground_truth": ground_truth}
    return {"data_source": data_source, "prompt": list(messages), "reward_model": truth}


def main(task: str, folder: str) -> None:
    rng = random.Random(0)
    for name, rows in zip(("train", "val"), {"sums": sums, "eight": eight}[task](rng), strict=True):
        rng.shuffle(rows)
        lines = [json.dumps(row | {"extra_info": {"index": i}}) for i, row in enumerate(rows)]
        Path(folder, f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
