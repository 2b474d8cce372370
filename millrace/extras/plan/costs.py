"""Costs with intervals, by least squares, and their file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.errors import bad_value
from millrace.process.files import replace_file
from millrace.schedule.schedule import Schedule
from millrace.simulate.cost import CostModel

Array = NDArray[Any]
COVERAGE = 0.9
"""Share of new measurements that an interval should hold."""
QUEUES = np.linspace(0.0, 0.9, 19)
"""Shares of its time that an engine may lose while requests wait. A larger one is no figure of it."""
LEAST_DRAWN = 0.25
"""Least share of an engine's seconds that its tokens take. Engines mostly draw."""
KNOWN = 0.02
"""Relative error of a version's tokens that needs no cause."""
FOLDS = 5
COLOCATED, SEPARATE = "colocated", "separate"


class Term(msgspec.Struct, frozen=True):
    """One fitted cost: a sum of coefficients times what is known before a run."""

    values: dict[str, float]
    low: float = 0.0
    high: float = 0.0
    """A measured value is from (1 + low) to (1 + high) times the predicted one, nine times in ten."""
    held_out: float = 0.0
    """Share of the versions that were not in the fit and fell into the interval of the others."""
    points: int = 0

    def scale(self, end: int) -> float:
        """Return the factor of the interval's end: -1 is its low end, 1 its high end, else 1."""
        return 1 + (self.low if end < 0 else self.high if end > 0 else 0.0)


class Costs(msgspec.Struct, frozen=True):
    """The costs of one model on one kind of machine."""

    machine: str
    model: str
    engine: str
    runs: list[str]
    decode: dict[str, Term]
    """By placement: the costs of `decode_term`."""
    train: dict[str, Term]
    """By placement: optimizer_step, token and row (device-seconds), and version."""
    transfer: dict[str, Term]
    pause: dict[str, Term]
    switch: Term
    """Seconds of one sleep or wake of an engine, four of which are a hand-over."""
    reward: Term
    lengths: list[tuple[float, float]]
    """Shares of the responses, and their longest length in tokens."""
    prompt: float
    """Mean tokens of a prompt."""
    device_bytes: int = 0
    """Memory of one device. 0 is unknown."""

    def of(self, terms: dict[str, Term], colocated: bool) -> Term:
        """Return the term of a placement, or the other placement's if no run shows it."""
        name = COLOCATED if colocated else SEPARATE
        return terms.get(name) or next(iter(terms.values()))

    def lacks(self, colocated: bool) -> bool:
        """Whether no run had this placement."""
        return (COLOCATED if colocated else SEPARATE) not in self.decode

    def model_of(
        self, schedule: Schedule, *, n: int, trainers: int, read: int, epochs: int = 1, end: int = 0
    ) -> CostModel:
        """Return the costs of a simulation. `read` is the tokens that an engine reads of a prompt.

        `end` is -1 or 1 for the low or the high end of all intervals.
        """
        decode, train, transfer, pause = (
            self.of(terms, schedule.colocated)
            for terms in (self.decode, self.train, self.transfer, self.pause)
        )
        part, slow = train.values, train.scale(end)
        rows = schedule.step_size * n
        unread = rows * max(0.0, self.prompt - read) * part.get("token", 0.0)
        step = part.get("optimizer_step", 0.0) * schedule.require_batches * epochs
        step += (part.get("row", 0.0) * rows + unread) / trainers
        step += part.get("version", 0.0) / schedule.trigger_parameter_sync_step
        drawn = decode.scale(end)
        return CostModel(
            token_s=decode.values["step_s"] * drawn,
            request_s=max(1e-12, decode.values["request_s"] * drawn),
            queue=min(QUEUES[-1], decode.values.get("queue", 0.0)),
            prefill_token_s=decode.values.get("read_s", 0.0) * drawn,
            start_s=decode.values.get("start_s", 0.0) * drawn,
            serial_reads=True,
            train_token_s=part.get("token", 0.0) / trainers * slow,
            step_s=step * slow,
            transfer_s=transfer.values["s"] * transfer.scale(end),
            pause_s=pause.values["s"] * pause.scale(end),
            switch_s=self.switch.values["s"] * self.switch.scale(end),
            reward_s=self.reward.values["s"] * self.reward.scale(end),
        )

    def shares(self) -> dict[str, Term]:
        """Return every term by a name for people."""
        kinds = {"decode": self.decode, "train": self.train, "sync": self.transfer}
        named = {f"{kind}, {p}": t for kind, terms in kinds.items() for p, t in terms.items()}
        return {k: t for k, t in (named | {"reward": self.reward}).items() if t.points}


def non_negative(x: Array, y: Array) -> Array:
    """Return the coefficients, none below 0, with the least relative errors.

    The most negative coefficient is left out, again and again. It is exact for the few columns here
    unless they are nearly alike.
    """
    weighted = x / np.maximum(np.abs(y), 1e-12)[:, None]
    kept = [k for k in range(x.shape[1]) if np.any(x[:, k])]
    found = np.zeros(x.shape[1])
    while kept:
        some, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(y)), rcond=1e-9)
        if some.min() >= 0:
            found[kept] = some
            break
        kept.pop(int(some.argmin()))
    return found


def band(ratios: Array) -> tuple[float, float]:
    """Return the ends that hold a new ratio nine times in ten, each minus 1.

    They are order statistics. With few ratios they are the smallest and the largest.
    """
    if not len(ratios):
        return 0.0, 0.0
    ordered, tail = np.sort(ratios), (1 - COVERAGE) / 2
    below = max(0, math.floor(tail * (len(ordered) + 1)) - 1)
    return float(ordered[below] - 1), float(ordered[len(ordered) - 1 - below] - 1)


def held_out(count: int, ratios_of: Callable[[Array], Array]) -> tuple[Array, float]:
    """Return measured over predicted values, and the share of them in the interval of the others.

    `ratios_of` has those of all rows, fitted to some. Each fold of the rows is predicted from the
    others. Too few rows are predicted from themselves.
    """
    if count < 2 * FOLDS:
        return ratios_of(np.ones(count, bool)), 0.0
    folds, ratios, inside = np.arange(count) % FOLDS, np.ones(count), 0
    for out in (folds == fold for fold in range(FOLDS)):
        every = ratios_of(~out)
        low, high = band(every[~out])
        ratios[out] = every[out]
        inside += int(np.sum((every[out] >= 1 + low) & (every[out] <= 1 + high)))
    return ratios, inside / count


def fit(names: Sequence[str], x: Array, y: Array, keep_sum: bool = False) -> Term:
    """Return the least squares of y over the columns of x, with the interval of held-out rows.

    With `keep_sum`, they are scaled to the sum of y: relative errors of rows that scatter prefer the
    small ones.
    """

    def solve(rows: Array) -> Array:
        found = non_negative(x[rows], y[rows])
        scale = y[rows].sum() / max(1e-12, (x[rows] @ found).sum()) if keep_sum else 1.0
        return found * scale

    ratios, share = held_out(len(y), lambda rows: y / np.maximum(x @ solve(rows), 1e-12))
    values = dict(zip(names, map(float, solve(np.ones(len(y), bool))), strict=True))
    return Term(values, *band(ratios), share, len(y))


def constant(values: Sequence[float]) -> Term:
    """Return the mean of values as a term, with its interval. It is 0 without values."""
    if not len(values) or not any(values):
        return Term({"s": 0.0}, points=len(values))
    y = np.maximum(1e-9, np.array(values))
    _, share = held_out(len(y), lambda rows: y / y[rows].mean())
    return Term({"s": float(y.mean())}, *band(y / y.mean()), share, points=len(values))


def decode_term(
    loads: Sequence[Sequence[tuple[float, float, bool]]],
    tokens: Array,
    reads: Array,
    responses: Array,
    likely: int = 0,
    *,
    waits: bool = True,
) -> Term:
    """Return the costs of an engine: `step_s`, `request_s`, `queue`, `read_s` and `start_s`.

    Each version has its loads as (seconds, mean requests, whether others wait for a slot), the
    tokens that it drew and those that it read, and its responses. The seconds of the loads are
    f tokens / (X - q Y) + p reads + r responses. X are the tokens of steps of one second, over the
    seconds, and Y those of them that are drawn while requests wait. q, and the ratio of the two
    parts of a step, are searched, and the rest is linear. Relative errors count, and the sum of the
    seconds is that of the versions. q, p and r are 0 unless they explain the seconds clearly
    better, and q is 0 without `waits`.

    With `likely` of -1 or 1, the ratio is the smallest or the largest that is likely: its squared
    error is within two standard deviations of the least one.
    """
    top = max(load for one in loads for _, load, _ in one)
    queues = QUEUES if waits and any(full for one in loads for *_, full in one) else QUEUES[:1]
    ratios = np.concatenate([[0.0], np.geomspace(0.01, 100, 60) / top])
    ratios, queues = (axis.ravel() for axis in np.meshgrid(ratios, queues))
    seconds = np.array([sum(s for s, *_ in one) for one in loads])
    x = np.stack(
        [
            sum(s * b / (1 + ratios * b) * (1 - queues * full) for s, b, full in one)
            for one in loads
        ],
        axis=1,
    )
    rates = [np.broadcast_to(total / seconds, x.shape) for total in (reads, responses)]
    columns = np.stack([tokens / x, *rates], axis=2)
    most, known = 1 + 4 / max(1, len(tokens) - 2), KNOWN**2 * len(tokens)

    def solve(rows: Array, parts: Sequence[int]) -> tuple[Array, Array, Array]:
        """Return squared errors, (f, p, r), and predicted over true seconds, for each (ratio, q)."""
        found = np.zeros((len(ratios), 3))
        found[:, parts] = np.linalg.pinv(columns[:, rows][:, :, parts], rcond=1e-9).sum(axis=2)
        shares = (columns @ found[:, :, None])[:, :, 0]
        errors = ((shares[:, rows] - 1) ** 2).sum(axis=1)
        # Seconds that hardly vary fit the responses of steady versions, and leave none for tokens.
        drawn = (columns[:, rows, 0] * found[:, :1]).mean(axis=1)
        right = (found >= 0).all(axis=1) & ((drawn >= LEAST_DRAWN) | (len(parts) == 1))
        return np.where(right, errors, np.inf), found, shares

    def best(rows: Array, likely: int = 0) -> tuple[int, Array, Array]:
        """Return the place of (ratio, q), then (f, p, r), and true over predicted seconds."""
        least, chosen = np.inf, None
        for parts in ([0], [0, 1], [0, 2], [0, 1, 2]):
            errors, found, shares = solve(rows, parts)
            # Each cost has to lower the squared error by two standard deviations.
            weighed = (errors + known) * most ** (len(parts) + (queues > 0))
            if weighed.min() < least:
                least, k = weighed.min(), weighed.argmin()
                alike = (queues == queues[k]) & (errors <= most * errors[k] + 1e-9)
                near = np.flatnonzero(alike)
                k = near[0] if likely < 0 else near[-1] if likely > 0 else k
                chosen = k, found[k], shares[k]
        assert chosen is not None
        k, values, shares = chosen
        scale = seconds[rows].sum() / (shares * seconds)[rows].sum()
        return int(k), values * scale, 1 / (shares * scale)

    k, (step, read, start), _ = best(np.ones(len(tokens), bool), likely)
    times, share = held_out(len(tokens), lambda rows: best(rows)[2])
    values = {
        "step_s": step,
        "request_s": step * ratios[k],
        "read_s": read,
        "start_s": start,
        "queue": queues[k],
    }
    return Term({n: float(v) for n, v in values.items()}, *band(times), share, len(tokens))


def save(costs: Costs, path: Path) -> None:
    """Write a file of costs. Raises ConfigError if it has something else, or cannot be written."""
    try:
        if path.exists():
            msgspec.json.decode(path.read_bytes(), type=Costs)
        replace_file(path, msgspec.json.format(msgspec.json.encode(costs)) + b"\n")
    except OSError as error:
        raise bad_value(
            "--out", str(path), error.strerror or "not writable", "another file"
        ) from error
    except msgspec.MsgspecError as error:
        rule = "exists, and is no file of costs"
        raise bad_value("--out", str(path), rule, "another file, or remove this one") from error


def load(path: Path) -> Costs:
    """Return the costs of a file. Raises ConfigError if it is missing or damaged."""
    fix = "millrace calibrate RUN_FOLDER --out FILE"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Costs)
    except OSError as error:
        raise bad_value("--costs", str(path), error.strerror or "not readable", fix) from error
    except msgspec.MsgspecError as error:
        raise bad_value("--costs", str(path), f"not a file of costs: {error}", fix) from error
