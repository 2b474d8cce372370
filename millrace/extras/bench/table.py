"""The table of `bench modes`, its warnings and its advice."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

MOST_STOCK = 0.05
"""A stock of finished samples that changes more makes a rate of training no rate of the run."""


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of medians over repeats, fastest first.

    Ratios are relative to the fastest split of colocate_sync with the same lengths. Without such an
    arm, they are relative to the slowest arm with the same lengths.
    """
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for run in figures:
        by_arm.setdefault(run["arm"], []).append(run)
    middle = {
        arm: {
            k: statistics.median(r[k] for r in runs)
            for k in runs[0]
            # One of several runs may lack a figure, such as the gain of its advice.
            if all(isinstance(r.get(k), float) for r in runs)
        }
        for arm, runs in by_arm.items()
    }
    rates = {arm: m["samples_per_s"] for arm, m in middle.items()}

    def baseline(uniform: bool) -> float:
        alike = {arm: rate for arm, rate in rates.items() if arm.endswith(", uniform") == uniform}
        base = [rate for arm, rate in alike.items() if by_arm[arm][0]["mode"] == "colocate_sync"]
        return max(base) if base else min(alike.values())

    head = (
        "| arm | samples/s | ratio | drawn tokens/s | trained tokens/s | stock | idle trainer | idle rollouter | version s | step s "
        "| transfer s | pause s | staleness | MFU in steps | of rollouts alone | read per drawn |"
    )
    rows = [head, "|---" + "|--:" * 15 + "|"]
    for arm in sorted(middle, key=lambda a: -rates[a]):
        m = middle[arm]
        ratio = m["samples_per_s"] / baseline(arm.endswith(", uniform"))
        rows.append(
            f"| {arm} | {m['samples_per_s']:.2f} | {ratio:.2f} | {m['drawn_tokens_per_s']:.0f} "
            f"| {m.get('trained_responses_per_s', 0):.0f} | {_stock(m)} | {m['trainer_idle']:.0%} "
            f"| {m['rollouter_idle']:.0%} | {m['version_s']:.2f} | {m['step_s']:.2f} "
            f"| {m['sync_transfer_s']:.3f} | {m['sync_pause_s']:.3f} | {m['staleness']:.2f} "
            f"| {m['mfu_in_steps']:.0%} | {m['share_of_alone']:.0%} "
            f"| {m['read_per_drawn']:.2f} |"
        )
    return "\n".join(rows)


def _stock(figures: dict[str, float]) -> str:
    """Return the change of the stock of finished samples, as a share of the trained ones."""
    return f"{figures['stock_share']:+.0%}" if "stock_share" in figures else "-"


def remarks(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return a warning for each run whose stock changed, and the advice for each arm."""
    lines = []
    for run in figures:
        share = run.get("stock_share", 0.0)
        if abs(share) > MOST_STOCK:
            side = "more" if share < 0 else "fewer"
            lines.append(
                f"warning: {run['arm']}: the stock of finished samples changed by "
                f"{run['more_ready']:+d}, {share:+.0%} of those trained in the counted versions. "
                f"The run trained {side} samples than it drew: compare drawn tokens, or take a "
                "longer run"
            )
    last = {run["arm"]: run for run in figures}
    lines += [
        f"advice: {arm}: {text}" for arm, run in last.items() for text in run.get("advice", [])
    ]
    return lines
