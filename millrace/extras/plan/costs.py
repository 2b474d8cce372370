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
MOST_QUEUE = 0.9
"""A larger loss of waiting requests is no figure of an engine."""
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
            queue=min(MOST_QUEUE, decode.values.get("queue", 0.0)),
            prefill_token_s=decode.values.get("read_s", 0.0) * drawn,
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
    likely: int = 0,
    *,
    waits: bool = True,
) -> Term:
    """Return the costs of an engine: `step_s`, `request_s`, `queue` and `read_s`.

    Each version has its loads as (seconds, mean requests, whether others wait for a slot), the
    tokens that it drew, and those that it read. For a given ratio of the two parts of a step, drawn
    tokens are linear in the rest: X / f - (q / f) Y - (p / f) X reads / B. X are the tokens of steps
    of one second, Y those of them that were drawn while requests waited, and B the seconds. The ratio
    is searched. Relative errors count, and the sum of the tokens is that of the versions. q is 0 without `waits`, and unless it explains the tokens clearly better.

    With `likely` of -1 or 1, the ratio is the smallest or the largest that is likely: its squared
    error is within two standard deviations of the least one.
    """
    top = max(load for one in loads for _, load, _ in one)
    ratios = np.concatenate([[0.0], np.geomspace(0.01, 100, 60) / top])
    seconds = np.array([sum(s for s, *_ in one) for one in loads])
    drawn = [[(s * b / (1 + ratios * b), full) for s, b, full in one] for one in loads]
    x = np.stack([sum(n for n, _ in one) for one in drawn], axis=1)
    y = np.stack([sum(n * full for n, full in one) for one in drawn], axis=1)
    columns = np.stack([x, -y, -x * reads / seconds], axis=2) / tokens[:, None]

    def solve(rows: Array, parts: tuple[int, ...]) -> tuple[Array, Array, Array]:
        """Return squared errors, (1, q, p) / f, and predicted over drawn tokens, by ratio."""
        found = np.zeros((len(ratios), 3))
        found[:, parts] = np.linalg.pinv(columns[:, rows][:, :, parts], rcond=1e-9).sum(axis=2)
        shares = (columns @ found[:, :, None])[:, :, 0]
        right = (found >= 0).all(axis=1) & (found[:, 0] > 0)
        return np.where(right, ((shares[:, rows] - 1) ** 2).sum(axis=1), np.inf), found, shares

    def best(rows: Array, likely: int = 0) -> tuple[float, Array, Array]:
        """Return a ratio, (1, q, p) / f, and predicted over drawn tokens."""
        parts = [(0,), (0, 2), (0, 1), (0, 1, 2)]
        tried = [solve(rows, some) for some in parts]
        least = [min(e.min() for e, *_ in some) for some in (tried[:2], tried)]
        most, known = 1 + 4 / max(1, len(tokens) - 2), KNOWN**2 * len(tokens)
        clearly = waits and least[0] + known > most * (least[1] + known)
        errors, found, shares = min(
            tried[2:] if clearly else tried[:2], key=lambda one: one[0].min()
        )
        near = np.flatnonzero(errors <= most * errors.min() + 1e-9)
        k = near[0] if likely < 0 else near[-1] if likely > 0 else errors.argmin()
        scale = tokens[rows].sum() / (shares[k] * tokens)[rows].sum()
        return float(ratios[k]), found[k] * scale, shares[k] * scale

    ratio, found, _ = best(np.ones(len(tokens), bool), likely)
    times, share = held_out(len(tokens), lambda rows: best(rows)[2])
    step = 1 / float(found[0])
    values = {"step_s": step, "request_s": step * ratio, "read_s": float(found[2]) * step}
    return Term(values | {"queue": float(found[1]) * step}, *band(times), share, len(tokens))


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
