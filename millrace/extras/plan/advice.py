"""Advice on a run: its neighbours, simulated over the costs of its own accounts.

A gain is the ratio of two simulations over the same costs, so most errors of the costs cancel. Its
interval holds what the accounts leave open, the seconds that the simulation of the run lacks, and the
noise between two equal runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from millrace.errors import ConfigError
from millrace.extras.plan.costs import Costs
from millrace.extras.plan.fit import WALL, calibrate, steady
from millrace.extras.plan.search import DEVICES, SLOTS, Choice, Plan, Search
from millrace.extras.plan.simulation import simulate
from millrace.persist.run_reader import RunReader
from millrace.report.accounts import WAIT
from millrace.report.advice import Advice, none
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import OnSync

Rows = Sequence[Mapping[str, float]]

NEWEST = 60
"""Versions that count. Earlier ones had other lengths."""
CASES = 10
"""Simulations of a search. The intervals take a few more."""
SENTENCES = 3
NOISE, NOISE_OF_CORES = 0.06, 0.1
"""Least standard deviation of the logarithm of the speed of equal runs: GPUs, and shared cores."""
KEPT = 0.5
"""Exponent of a gain that a run keeps, from eight pairs of runs on cores and three on GPUs.

Sides that both compute slow each other down: they share cores, or a host that starts kernels.
"""
WIDTH = 1.645 * math.sqrt(2)
"""Standard deviations of one run that hold the ratio of two runs nine times in ten."""
LARGEST = 8_000
"""Requests of a simulation. With more, ten of them take too long at the end of a run."""
UNLIKE = 1.35
"""Largest ratio between the seconds of the run and of its simulation."""
LEAST_SHARE = 0.05
AIM, RARER = 0.01, 10
"""The share of the time that a rarer part should take, and the most by which it gets rarer."""
ALWAYS = 0.9
"""Share of the time from which on something is busy all the time."""
LEAST_WAIT, MOST_SLOTS = 0.2, 8
"""The share of the time that the trainer waits, and the most by which decode slots grow."""


def advise(run: RunReader) -> list[Advice]:
    """Return the advice on a run, or one sentence without overrides that says why there is none."""
    try:
        costs = calibrate([run], newest=NEWEST)
    except ConfigError as error:
        return none(f"the run {error.rule}")
    rows = steady(run)[-NEWEST:]
    if not rows:
        return none("the run has no version in which nothing fills or drains")
    try:
        predicted = _simulated(run, costs, rows)
    except ConfigError as error:
        predicted = none(str(error))
    found = [one for one in predicted if one.overrides]
    used = {key for one in found for key in one.keys}
    (flat,) = calibrate([run], newest=NEWEST, likely=-1).decode.values()
    found += [one for one in _of_shares(run, rows, flat.values) if not used & one.keys]
    return found[:SENTENCES] or predicted


def _share(rows: Rows, *parts: str) -> float:
    """Return the share of the time that parts of the trainer's time take."""
    spent = sum(row.get(f"timing_s/{part}", 0.0) for row in rows for part in parts)
    return spent / sum(row[WALL] for row in rows)


def _of_shares(run: RunReader, rows: Rows, flat: Mapping[str, float]) -> Iterator[Advice]:
    """Yield the advice that needs no simulation, because the accounts have the share of its cause.

    `flat` has the costs of the engine's step that grows least with its requests, of the likely ones.
    """
    config = run.config
    assert config is not None
    trainer = config.trainer
    test = "trainer.test_freq" if trainer.test_freq else "rollout.test_freq"
    for part, cause, key, freq in (
        ("wait_validation", "Syncs wait for validations", test, config.test_freq),
        (
            "save_checkpoint",
            "The trainer saves checkpoints",
            "trainer.save_freq",
            trainer.save_freq,
        ),
    ):
        if freq and (share := _share(rows, part)) >= LEAST_SHARE:
            line = f"{key}={freq * min(RARER, math.ceil(share / AIM))}"
            yield Advice(f"{cause} {share:.0%} of the time. {line} makes it rarer", (line,))
    last, parts = run.attempt[-1], list(config.reward.parts.values())
    workers = parts[0].num_workers if len(parts) == 1 and parts[0].kind == "function" else 0
    calls = last.scores.seconds / max(last.seconds, 1e-9)
    if 0 < workers <= calls and last.scores.busy >= ALWAYS * last.seconds:
        line = f"reward.num_workers={math.ceil(1.1 * calls)}"
        busy = f"All {workers} reward workers are busy, and {calls - workers:.0f} responses wait"
        yield Advice(f"{busy}. {line} would keep up", (line,))
    rollout, drawing = config.rollout, sum(seconds for seconds, _ in last.loads.values())
    full = last.loads.get(WAIT, (0.0, 0.0))[0] / max(drawing, 1e-9)
    waits, slots = _share(rows, "wait_samples", "wait_prev_gen"), rollout.max_num_seqs
    gains = flat["step_s"] >= flat["request_s"] * slots and not flat["queue"]
    if gains and full >= ALWAYS and waits >= LEAST_WAIT:
        needed = math.ceil(config.schedule.capacity * rollout.n / rollout.replicas)
        line = f"{SLOTS}={min(MOST_SLOTS * slots, needed)}"
        why = f"Requests wait for a decode slot {full:.0%} of the time, and the trainer {waits:.0%}"
        more = "gives them one, if the memory of an engine allows it; the run cannot show the gain"
        yield Advice(f"{why}. {line} {more}", (line,))


def _simulated(run: RunReader, costs: Costs, rows: Rows) -> list[Advice]:
    """Return the advice of a search around the setting of the run."""
    if run.mode not in MODES:
        return none(f"the run is {run.mode}, and the search knows the modes of the table alone")
    config = run.config
    assert config is not None
    trainer, rollout, schedule = config.trainer, config.rollout, config.schedule
    devices = trainer.ranks + (0 if schedule.colocated else rollout.devices)
    search = Search(str(run.path / "config.yaml"), [], costs, devices)
    share_cores = run.attempt[-1].share_cores
    if share_cores or trainer.nnodes > 1 or rollout.nnodes > 1:
        search.pinned |= dict.fromkeys(DEVICES)  # no other split
    own = Choice(
        run.mode,
        trainer.ranks,
        rollout.devices,
        rollout.max_num_seqs,
        schedule.staleness_threshold,
        schedule.require_batches,
        schedule.trigger_parameter_sync_step,
        schedule.lookahead,
    )
    search.own = search.lines(own)
    case, *_ = search.case_of()
    small = case.smaller()
    if (size := small.schedule.window * small.n * small.whole_versions) > LARGEST:
        return none(
            f"its simulation has {size:,} requests, and {LARGEST:,} are the most: millrace plan"
        )
    seen, base = dict[Choice, Plan](), Plan(own, (), schedule, simulate(case), {})
    seen[own] = best = base
    actual = sum(row[WALL] for row in rows) / len(rows)
    actual *= 1 - _share(rows, "wait_validation", "save_checkpoint")
    if abs(math.log(base.outcome.seconds / actual)) > math.log(UNLIKE):
        unlike = (
            f"a version took {actual:.3g} s, and {base.outcome.seconds:.3g} s in its simulation"
        )
        return none(unlike)
    noise = _noise(rows, NOISE_OF_CORES if share_cores else NOISE)
    least = noise ** (1 / KEPT)
    waits = base.outcome.wait_s / base.outcome.seconds
    while waits > 1 - 1 / least or len(search.splits(own.mode)) > 1:
        for choice in dict.fromkeys(_near(search, best.choice)):
            if choice in seen or len(seen) >= CASES or (one := search.case(choice)) is None:
                continue
            seen[choice] = Plan(choice, one[1], one[0].schedule, simulate(one[0]), {})
        before, best = best, search.ranked(seen.values())[0]
        if best is before or len(seen) >= CASES:
            break
    ranked = [plan for plan in search.ranked(seen.values()) if base.gpu_s / plan.gpu_s > least]
    return _sentences(run, search, [base, *ranked], actual, noise)


def _noise(rows: Rows, least: float) -> float:
    """Return the ratio that two equal runs exceed once in ten times, from the quarters of a run."""
    cuts = [len(rows) * k // 4 for k in range(5)]
    parts = [[row[WALL] for row in rows[a:b]] for a, b in itertools.pairwise(cuts)]
    spread = stdev(math.log(fmean(part)) for part in parts if part) if len(rows) > 3 else 0.0
    return math.exp(WIDTH * max(least, spread / 2))


def _near(search: Search, c: Choice) -> Iterator[Choice]:
    """Yield the choices with the same placement that may be faster.

    If requests that wait cost an engine time, no run shows what more of its slots would do.
    """
    base, decode = search.base, search.costs.of(search.costs.decode, MODES[c.mode].colocated)
    more_slots = not decode.values.get("queue")
    if more_slots:
        needed = base.schedule.capacity * base.rollout.n / base.rollout.replicas
        yield replace(
            c, slots=c.slots * 2 ** math.ceil(math.log2(min(MOST_SLOTS, max(2, needed / c.slots))))
        )
    for name, mode in MODES.items():
        alike = mode.default_staleness and mode.placement is MODES[c.mode].placement
        if alike and (name == c.mode or mode.on_sync is OnSync.INTERRUPT):
            # With this staleness, a window trains while the next step is drawn.
            both = max(c.staleness, mode.default_staleness or 0.0, 1 / c.trigger)
            ahead = c.lookahead if c.staleness else 0
            yield replace(c, mode=name, staleness=both, lookahead=ahead)
    for one in search.near(c):
        slower = one.slots < c.slots or one.staleness < c.staleness
        if (
            not slower
            and (more_slots or one.slots == c.slots)
            and bool(one.lookahead) >= bool(c.lookahead)
        ):
            yield one


def _sentences(
    run: RunReader, search: Search, plans: Sequence[Plan], actual: float, noise: float
) -> list[Advice]:
    """Return sentences on different keys, with gains over the first plan whose intervals are above 0."""
    base, *ranked = plans
    ends = [calibrate([run], newest=NEWEST, likely=end) for end in (-1, 1)] if ranked else []

    def seconds(plan: Plan) -> list[float]:
        found = [plan.outcome.seconds]
        for search.costs in ends:
            found.append(simulate(search.case_of(plan.overrides)[0]).seconds)
        return found

    found, used, unsure = list[Advice](), set[str](), ""
    before = seconds(base)
    for plan in ranked:
        keys = {line.partition("=")[0] for line in plan.overrides}
        if keys & used or len(found) == SENTENCES:
            continue
        used |= keys
        ratios = [
            r for b, a in zip(before, seconds(plan), strict=True) for r in _ratios(b, a, actual)
        ]
        low, high = min(ratios) ** KEPT / noise - 1, max(ratios) * noise - 1
        lines, gain = " ".join(plan.overrides), (ratios[0] * ratios[1]) ** (KEPT / 2) - 1
        memory = plan.choice.slots > base.choice.slots
        text = f"Bound by {base.constraint}. {lines} is faster"
        text += ", if the memory of an engine allows it" if memory else ""
        if low > 0:
            found.append(Advice(text, plan.overrides, gain, low, high))
        else:
            unsure = unsure or f"{lines} gains from {low:+.0%} to {high:+.0%}, which may be nothing"
    least = noise ** (1 / KEPT) - 1
    why = (
        unsure
        or f"no setting near this one is predicted to gain over {least:.0%}, the noise of such runs"
    )
    return found or none(f"{why}. The run is bound by {base.constraint}")


def _ratios(before: float, after: float, actual: float) -> list[float]:
    """Return the gain if the seconds that the simulation lacks scale, and if they stay."""
    lacks = max(actual - before, -after / 2)
    return [before / after, (before + lacks) / (after + lacks)]
