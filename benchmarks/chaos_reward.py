"""The exact-match reward, which misbehaves once for each order that it finds.

An order is a file ORDER in the folder $CHAOS_ORDERS. Its text names what to do. The call that
renames it obeys it, so each order is obeyed once. The renamed file proves that it was.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

ORDER = "reward"
_HELD: list[bytearray] = []


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> Any:
    score = float(solution_str.strip() == str(ground_truth).strip())
    folder = os.environ["CHAOS_ORDERS"]
    if not os.path.exists(f"{folder}/{ORDER}"):
        return score
    try:
        os.rename(f"{folder}/{ORDER}", taken := f"{folder}/obeyed-{time.time_ns()}")
    except FileNotFoundError:
        return score
    return obey(Path(taken).read_text(), score)


def obey(order: str, score: float) -> Any:
    """Do what an order says. Return a score, or what the order puts in its place."""
    if order == "sleep":
        time.sleep(1e9)
    if order == "loop":
        while True:
            pass
    if order == "long C call":
        return float(sum(range(10**12)) > 0)
    if order == "raise":
        raise RuntimeError("the grader is broken")
    if order == "exit":
        os._exit(3)
    if order == "leak":
        while True:
            _HELD.append(bytearray(2**26))
    if order == "children":
        for _ in range(8):
            if not os.fork():
                time.sleep(1e9)
        return score
    if order == "print":
        for _ in range(2**10):
            sys.stdout.write("x" * 2**20)
        return score
    wrong = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "right",
             "list": [1.0, 2.0], "huge": 1e308}  # fmt: skip
    return wrong[order]
