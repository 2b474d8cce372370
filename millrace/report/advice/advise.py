"""Advice: the constraint that binds a run, in words, with the number that lifts it.

`report/advice/throughput.py` has the arithmetic, and derives it.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.report.advice import balance, costs
from millrace.report.advice.measured import Measured
from millrace.report.advice.sentence import Advice
from millrace.report.advice.throughput import Throughput

__all__ = ["Advice", "advise"]

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
    costs.interrupt_at_a_sync,
    costs.keep_kv_caches,
    costs.fewer_syncs,
    costs.fewer_hand_overs,
    costs.fewer_validations,
    costs.fewer_checkpoints,
    costs.more_reward_workers,
    costs.fewer_drops,
)


def advise(measured: Measured) -> list[Advice]:
    """Return advice, the largest predicted gain first. There is always one sentence.

    A gain that its own rule calls a bound comes after the others. Turns come first if they gain more
    than all of them. Advice that takes more devices comes last.
    """
    flow = Throughput(measured)
    found = [advice for rule in RULES if (advice := rule(flow)) is not None]
    found = [one for one in found if one.gain is None or one.gain >= LEAST_GAIN]
    found.sort(key=lambda one: (one.at_most, -(one.gain or 0.0)))
    found = _once(found)
    turns, more = balance.with_turns(flow), balance.add_a_device(flow)
    best = max((one.gain or 0.0 for one in found), default=-1.0)
    if turns is not None:
        found = [turns, *found] if (turns.gain or 0.0) > best else [*found, turns]
    found = [_marked(flow, one) for one in [*found, *more]]
    return found or [balance.nothing(flow)]


def _marked(flow: Throughput, one: Advice) -> Advice:
    """Mark a gain as a bound if the run would be far from what was measured.

    This does not change the order. Every gain of a run is a bound if one of these is true:

    - Both sides share the cores of one CPU.
    - Full engines lose time. How much depends on how often they are full.
    - Engines read many tokens again. Fuller engines read more.
    - Sides work at the same time, and no figure shows how a step grows. Then more requests cost nothing
      in the arithmetic.
    """
    if one.gain is None:
        return one
    far = one.gain > FAR
    unsteady = flow.schedule.overlap_sync or flow.m.drop_share > MOST_DROPS
    short = flow.m.versions < LEAST_VERSIONS
    alike = flow.asynchronous and flow.m.step_cost is None
    engines = flow.step.queue > 0 or flow.rereads or alike
    bound = far or unsteady or short or flow.setup.share_cores or engines
    return replace(one, at_most=True) if bound else one


def _once(advice: list[Advice]) -> list[Advice]:
    """Return the advice without sentences on a key that an earlier one names first."""
    found: dict[str, Advice] = {}
    for one in advice:
        found.setdefault(one.key if one.overrides else one.text, one)
    return list(found.values())
