"""Advice: the constraint that binds a run, in words, with the number that lifts it.

`report/advice/throughput.py` has the arithmetic, and derives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace.config import recipe
from millrace.config.algorithm_keys import without_own_algorithm
from millrace.config.layers import Tree, expand, settings_of
from millrace.errors import ConfigError
from millrace.persist.run_reader import RunReader
from millrace.report.advice import balance
from millrace.report.advice.balance import Advice
from millrace.report.advice.measure import Measured, measure
from millrace.report.advice.throughput import Throughput

__all__ = ["Advice", "advise", "advise_run"]

LEAST_GAIN = 0.03
"""A smaller gain is within the error of the arithmetic."""

FAR = 0.5
"""A larger gain is a bound: with so many more samples, what did not bind before may bind."""
MOST_DROPS = 0.05
"""With a larger share of dropped tokens, the stock of samples swings more than is computed."""
LEAST_VERSIONS = 4
"""With fewer versions, the figures are those of a moment."""

RULES = (
    balance.fill_the_engines,
    balance.more_decode_slots,
    balance.move_a_device,
    balance.train_out_of_order,
    balance.advise_both_at_once,
    balance.interrupt_at_a_sync,
    balance.keep_kv_caches,
    balance.fewer_syncs,
    balance.fewer_hand_overs,
    balance.fewer_validations,
    balance.fewer_checkpoints,
    balance.more_reward_workers,
    balance.fewer_drops,
)


def advise_run(run: RunReader) -> list[Advice]:
    """Return advice on a run so far, or nothing if it has too few versions.

    If the configuration refuses the values of a sentence, it says why.
    """
    measured = measure(run)
    return [] if measured is None else checked(advise(measured), run.tree)


def checked(advice: Sequence[Advice], tree: Tree) -> list[Advice]:
    """Return the advice, with what the configuration `tree` says against its values, if anything."""
    found = []
    for one in advice:
        try:
            layers, *_ = expand([settings_of(one.overrides)])
            recipe.parse(recipe.resolve([without_own_algorithm(tree), *layers]))
        except ConfigError as error:
            one = replace(one, text=f"{one.text}. Change another key too: {error}")
        found.append(one)
    return found


def advise(measured: Measured) -> list[Advice]:
    """Return advice, the largest predicted gain first. There is always one sentence.

    A gain that its own rule calls a bound comes after the others. Turns come first if they gain more
    than all of them. Advice that takes more devices comes last.
    """
    flow = Throughput(measured)
    found = [advice for rule in RULES if (advice := rule(flow)) is not None]
    found = [one for one in found if one.gain is None or one.gain >= LEAST_GAIN]
    found.sort(key=lambda one: (one.at_most, -(one.gain or 0.0)))
    first: dict[str, Advice] = {}  # a key has one sentence
    for one in found:
        first.setdefault(one.key or one.text, one)
    found = list(first.values())
    turns, more = balance.with_turns(flow), balance.add_a_device(flow)
    best = max((one.gain or 0.0 for one in found), default=-1.0)
    if turns is not None:
        found = [turns, *found] if (turns.gain or 0.0) > best else [*found, turns]
    found = [
        replace(one, at_most=one.at_most or one.gain > FAR or _bounds(flow))
        if one.gain is not None
        else one
        for one in [*found, *more]
    ]
    return found or [balance.nothing(flow)]


def _bounds(flow: Throughput) -> bool:
    """Whether every gain of a run is only a bound.

    This does not change the order. It is so if one of these is true:

    - The stock of samples swings, or few versions were measured.
    - Both sides share the cores of one CPU.
    - Full engines lose time. How much depends on how often they are full.
    - Engines read many tokens again. Fuller engines read more.
    - Sides work at the same time, and no figure shows how a step grows. Then more requests cost nothing
      in the arithmetic.
    """
    unsteady = flow.schedule.overlap_sync or flow.m.drop_share > MOST_DROPS
    short = flow.m.versions < LEAST_VERSIONS
    alike = flow.asynchronous and flow.m.step_cost is None
    engines = flow.step.queue > 0 or flow.rereads or alike
    return unsteady or short or flow.setup.share_cores or engines
