"""Predicts the published rows of asynchronous training from the synchronous rows alone.

    python benchmarks/published_tables.py [--out FILE.jsonl] [--scale K]

The published rows are those of verl's recipes: Qwen2.5-Math-7B, DAPO, 28K tokens, n = 16, 512
prompts a version, mini-batches of 32, on H20s. Costs come from three synchronous rows, by least
squares. No asynchronous row is read before its error is printed. `--scale K` divides windows and
engines by K: it is faster, and a little wrong in the tail.

What the rows do not say is assumed, and stays assumed:

| number | assumed | reason |
|---|--:|---|
| mean and spread of lengths | log-normal, median 850, sigma 1, cut at 28,672 | training 8,192 responses on 32 H20s in 270 s at a third of their peak gives 1,400 tokens on average; the longest of so many then reach the cut |
| GPUs of an engine | 4 | the published script |
| slots of an engine | 256 asynchronous, all of the window synchronous | the published script; verl's default |
| a weight sync | 0.3 s | verl's own figure for 7B |
| require_batches with K | K x require_batches = 16 | a version keeps its 512 prompts |

A token that is read again costs what the old log-probs of a token cost.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from millrace.extras.plan.costs import SEPARATE, Costs, Term, fit
from millrace.extras.plan.simulation import Case, Outcome, simulate
from millrace.rollout.lengths import DrawnLengths
from millrace.schedule.schedule import OnSync, Placement, Schedule

N, WINDOW, MINI, LIMIT, TENSOR, SLOTS = 16, 512, 32, 28672, 4, 256
LENGTHS = DrawnLengths(850, 1.0, LIMIT)
SYNCHRONOUS = {
    32: (790.10, 357.41, 107.71, 269.80),
    64: (365.28, 150.72, 70.26, 133.41),
    128: (356.30, 177.85, 53.92, 113.81),
}
"""By GPUs: seconds of a step, of drawing, of old log-probs, and of the update."""
SMALL_SYNCHRONOUS = {"FSDP2, 20K": (749.0, 20480), "Megatron, 8K": (699.0, 8192)}
"""One-step-off's base on 16 GPUs: seconds of a step, and the longest response."""
FITS = 0.15


@dataclass(frozen=True)
class Row:
    """A published row to predict."""

    name: str
    trainers: int
    rollouts: int
    published: float | None
    """Seconds of a step. None if the table leaves them blank."""
    mode: OnSync = OnSync.INTERRUPT
    staleness: float = 0.5
    require_batches: int = 4


ROWS = [
    Row("fully async 16+16", 16, 16, 294.77),
    Row("fully async 32+32", 32, 32, 189.26),
    Row("fully async 64+64", 64, 64, 150.63),
    Row("stream off policy, staleness 0", 64, 64, 231.34, OnSync.DRAIN, 0.0),
    Row("staleness 0.5 without partial rollout", 64, 64, None, OnSync.DRAIN),
    Row("staleness 0.1", 64, 64, 171.30, staleness=0.1),
    Row("staleness 0.3", 64, 64, 146.11, staleness=0.3),
    Row("staleness 0.5", 64, 64, 150.63),
    Row("require_batches 1", 64, 64, 203.47, require_batches=1),
    Row("require_batches 2", 64, 64, 158.72, require_batches=2),
    Row("require_batches 4, 300 steps", 64, 64, 124.64),
]
SMALL = [
    Row("one step off 4+12, FSDP2, 20K", 12, 4, 520.0, OnSync.DRAIN, 1.0),
    Row("one step off 4+12, Megatron, 8K", 12, 4, 566.0, OnSync.DRAIN, 1.0),
]
"""Their seconds are trainers first: 12 train, and 4 draw."""


def responses(limit: int = LIMIT) -> list[int]:
    lengths = DrawnLengths(LENGTHS.median, LENGTHS.sigma, limit)
    return [lengths.of(seed) for seed in range(WINDOW * N)]


def calibrated() -> Costs:
    """Return the costs that explain the synchronous rows best.

    All responses of a window start at once. An engine draws its longest one for `length` steps, and
    each of its tokens adds `request_s`.
    """
    drawn = responses()
    total, longest = sum(drawn), max(drawn)
    gpus = np.array(list(SYNCHRONOUS), float)
    _, gen, old, update = (np.array(column) for column in zip(*SYNCHRONOUS.values(), strict=True))
    one = np.ones(len(gpus))
    decode = fit(
        ["step_s", "request_s"], np.stack([one * longest, total * TENSOR / gpus], axis=1), gen
    )
    read = fit(["token", "version"], np.stack([total / gpus, one], axis=1), old)
    train = fit(
        ["token", "optimizer_step"], np.stack([total / gpus, one * WINDOW / MINI], axis=1), update
    )
    decode = Term(
        decode.values | {"read_s": read.values["token"] / TENSOR}, decode.low, decode.high, 0, 3
    )
    sync = {SEPARATE: Term({"s": 0.3})}
    nothing = Term({"s": 0.0})
    return Costs(
        machine="H20", model="Qwen2.5-Math-7B", engine="vllm", runs=["synchronous rows"],
        decode={SEPARATE: decode}, train={SEPARATE: train}, transfer=sync, pause={SEPARATE: nothing},
        switch=nothing, reward=nothing,
        lengths=[], prompt=0.0,
    )  # fmt: skip


def schedule_of(row: Row) -> Schedule:
    """Return the Schedule of a row. verl trains samples in the order of their completion."""
    free = row.staleness > 0
    return Schedule(
        ppo_mini_batch_size=MINI,
        require_batches=row.require_batches,
        trigger_parameter_sync_step=WINDOW // MINI // row.require_batches,
        staleness_threshold=row.staleness,
        on_sync=row.mode,
        placement=Placement.SEPARATE,
        lookahead=2 * WINDOW if free else WINDOW,
    )


def predict(costs: Costs, row: Row, scale: int, end: int = 0) -> Outcome:
    schedule, replicas = schedule_of(row), row.rollouts // TENSOR
    cost = costs.model_of(schedule, n=N, trainers=row.trainers, read=1, end=end)
    by = max(k for k in (1, 2, 4, 8) if k <= scale and replicas % k == 0)
    mini = replace(schedule, ppo_mini_batch_size=MINI // by, lookahead=schedule.lookahead // by)
    cost = replace(cost, train_token_s=cost.train_token_s * by)
    return simulate(
        Case(schedule=mini, n=N, replicas=replicas // by, slots=SLOTS, cost=cost, lengths=LENGTHS,
             versions=4, divide=False)
    )  # fmt: skip


def synchronous(costs: Costs, gpus: float, tokens: float, longest: float) -> dict[str, float]:
    """Return the seconds of the parts of a synchronous step, by the fitted costs."""
    d, t = costs.decode[SEPARATE].values, costs.train[SEPARATE].values
    return {
        "gen": d["step_s"] * longest + d["request_s"] * tokens * TENSOR / gpus,
        "train": t["token"] * tokens / gpus + t["optimizer_step"] * WINDOW / MINI,
        "old": d["read_s"] * TENSOR * tokens / gpus,
    }


def one_step_off(costs: Costs, name: str, row: Row, end: int = 0) -> float:
    """Return the seconds of a step: the larger of both sides, and the sync.

    The synchronous row has no parts. So one factor of the tokens fits its whole step.
    """
    base, limit = SMALL_SYNCHRONOUS[name]
    drawn = responses(limit)
    total, longest = sum(drawn), max(drawn)
    low, high = 0.01, 100.0
    for _ in range(60):
        factor = (low * high) ** 0.5
        more = sum(synchronous(costs, 16, factor * total, longest).values()) > base
        low, high = (low, factor) if more else (factor, high)
    draws = synchronous(costs, row.rollouts, low * total, longest)["gen"]
    trains = synchronous(costs, row.trainers, low * total, longest)
    scales = costs.decode[SEPARATE].scale(end), costs.train[SEPARATE].scale(end)
    return max(draws * scales[0], (trains["train"] + trains["old"]) * scales[1]) + 0.3


def table(scale: int) -> list[dict[str, object]]:
    """Return every row with its prediction, the interval and the error."""
    costs, rows = calibrated(), []
    total, longest = sum(responses()), max(responses())
    for gpus, (step, *parts) in SYNCHRONOUS.items():
        # The rest, hand-overs and the like, is the row's own: it is no cost of separate devices.
        seconds = sum(synchronous(costs, gpus, total, longest).values()) + step - sum(parts)
        rows.append({"row": f"colocated {gpus} (fitted)", "published": step, "predicted": seconds})
    for row in track(ROWS, "simulating", console=Console(stderr=True), transient=True):
        middle, low, high = (predict(costs, row, scale, end) for end in (0, -1, 1))
        rows.append({
            "row": row.name, "published": row.published, "predicted": middle.seconds,
            "low": low.seconds, "high": high.seconds, "wait": middle.wait_s,
            "trainer idle": middle.trainer_idle, "rollouts idle": middle.rollouts_idle,
        })  # fmt: skip
    for name, row in zip(SMALL_SYNCHRONOUS, SMALL, strict=True):
        ends = [one_step_off(costs, name, row, end) for end in (0, -1, 1)]
        rows.append({"row": row.name, "published": row.published, "predicted": ends[0],
                     "low": ends[1], "high": ends[2]})  # fmt: skip
    for one in rows:
        if one["published"]:
            one["error"] = float(one["predicted"]) / float(one["published"]) - 1  # type: ignore[arg-type]
    return rows


def markdown(rows: list[dict[str, object]]) -> str:
    head = "| row | published s | predicted s | interval | error | within 15 % |"
    lines = [head, "|---|--:|--:|--:|--:|---|"]
    for one in rows:
        error, published = one.get("error"), one["published"]
        interval = f"{one['low']:.0f} to {one['high']:.0f}" if "low" in one else "-"
        lines.append(
            f"| {one['row']} | {f'{published:.0f}' if published else 'blank'} "
            f"| {one['predicted']:.0f} | {interval} "
            f"| {f'{error:+.0%}' if error is not None else '-'} "
            f"| {'-' if error is None else 'yes' if abs(float(error)) <= FITS else 'no'} |"  # type: ignore[arg-type]
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON lines too")
    parser.add_argument("--scale", type=int, default=1, help="1, 2, 4 or 8")
    options = parser.parse_args()
    rows = table(options.scale)
    print(markdown(rows))
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
