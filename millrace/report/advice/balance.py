"""Rules of advice: on the balance of trainer, engines and ledger, and on what a run pays for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from millrace.report.advice.throughput import NOTHING, Change, Throughput
from millrace.schedule.schedule import OnSync

STALENESS = "async_training.staleness_threshold"
IDLE = 0.05
"""A side that idles less does not wait."""
FULL = 0.9
"""Share of busy decode slots from which on they limit the engines."""
SLOW_SCORE = 0.3
"""Share of a sample's time with the rollouts, from which on its scores are what it waits for."""
TRIES = 24
"""Values of a staleness_threshold that are tried."""
SAME = 0.03
"""Rates that differ less are the same."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence of advice."""

    text: str
    overrides: tuple[str, ...] = ()
    """The `key=value` that it names, in order. Empty if no key helps."""
    gain: float | None = None
    """The predicted change of the trained samples per second, as a share."""
    at_most: bool = False
    """Whether the gain is only a bound."""

    @property
    def key(self) -> str:
        return self.overrides[0].partition("=")[0] if self.overrides else ""

    def __str__(self) -> str:
        if self.gain is None:
            return self.text
        return f"{self.text} ({'at most ' if self.at_most else ''}{self.gain:+.0%})"


def _full(flow: Throughput) -> bool:
    return flow.m.busy_slots >= FULL * flow.m.setup.slots


def _drains(flow: Throughput) -> bool:
    return flow.schedule.on_sync is OnSync.DRAIN and flow.m.hold_s > IDLE * flow.m.seconds


def staleness_for(flow: Throughput, capacity: float) -> float:
    """Return the staleness_threshold that gives at least this capacity, in tenths."""
    window = flow.schedule.window
    return max(0.1, math.ceil((capacity / window - 1) * 10 - 1e-9) / 10)


def filling(flow: Throughput, change: Change = NOTHING) -> float:
    """Return the staleness_threshold with which no side waits for a slot of the ledger.

    A sync frees the slots of a window. Until then, the samples of the next step need slots too. With
    fewer, the sides take turns.
    """
    rate = flow.sides(change)
    most = flow.capacity_that_fills(rate, change)
    if flow.trainer_ceiling(change) < flow.engine_ceiling(change):
        # Engines that are full at every moment would draw more than can be trained.
        # A tenth more than that keeps some samples ready while the number of requests swings.
        aim = min(1.1 * rate, 0.98 * flow.engine_ceiling(change))
        low, high = 0.0, most
        for _ in range(30):
            middle = (low + high) / 2
            enough = flow.ledger_ceiling(replace(change, capacity=math.ceil(middle))) >= aim
            low, high = (low, middle) if enough else (middle, high)
        most = math.ceil(high)
    return staleness_for(flow, max(most, flow.least_capacity))


def fill_the_engines(flow: Throughput) -> Advice | None:
    """The ledger is full while engines idle: a larger staleness_threshold."""
    m = flow.m
    full = m.mean(*m.held) >= 0.95 * flow.schedule.capacity
    idle = m.rollouts_idle >= IDLE and m.starved >= IDLE
    if not (flow.asynchronous and full and idle) or flow.m.rewards_bind or _drains(flow):
        return None
    if train_out_of_order(flow) is not None:
        return None
    why = (
        f"The ledger is full while engines idle {m.rollouts_idle:.0%} of the time: "
        f"{_of_a_sample(flow)}"
    )
    rate, staleness = flow.sides(), filling(flow)
    if flow.step.queue > 0:
        rate, staleness = _best_below(flow, staleness)
        rate = flow.as_measured(rate)
        if flow.gain(rate) < SAME:
            return Advice(
                f"{why}. A larger {STALENESS} would gain nothing, because engines lose "
                f"{flow.step.queue:.0%} of their time while requests wait for a decode slot"
            )
    if staleness <= flow.schedule.staleness_threshold:
        return None
    enough = flow.trainer_ceiling() < flow.engine_ceiling()
    then = "would keep the trainer busy" if enough else "would fill them"
    if flow.step.queue > 0:
        then = "has the best rate"
    text = f"{why}. {STALENESS}={staleness:g} {then}"
    bound = replace(flow.schedule, staleness_threshold=staleness).lag_bound
    if bound > 1:
        text += f". Samples are then up to {bound} versions old"
    key = f"{STALENESS}={staleness:g}"
    return Advice(text, (key,), flow.gain(rate), at_most=m.step_cost is None)


def _best_below(flow: Throughput, most: float) -> tuple[float, float]:
    """Return the best rate of a staleness_threshold up to `most`, and the first that has it.

    Where full engines lose time, the best one lies between.
    """
    window = flow.schedule.window
    least = max(flow.schedule.staleness_threshold, staleness_for(flow, flow.least_capacity))
    tries = [least + (most - least) * k / TRIES for k in range(TRIES + 1)]
    rates = {
        (staleness := max(0.1, round(one, 1))): flow.rate(
            Change(capacity=math.floor(window * (1 + staleness)))
        )
        for one in tries
    }
    best = max(rates.values())
    return best, next(one for one, rate in rates.items() if rate >= (1 - SAME / 3) * best)


def _of_a_sample(flow: Throughput) -> str:
    """Return what a sample in the ledger waits for."""
    m = flow.m
    longest = m.mean("running") / m.rate
    scoring = m.score_s / max(1.0, m.scores)
    if m.tool_s > m.request_s:
        waiting, drawing = m.tool_s / m.seconds, m.request_s / m.seconds
        return f"{waiting:.3g} sessions wait for tools while {drawing:.3g} draw"
    if scoring >= SLOW_SCORE * longest:
        return f"a sample waits {scoring:.3g} s for its scores"
    return f"a sample waits for the longest of its {m.setup.n} responses"


def more_decode_slots(flow: Throughput) -> Advice | None:
    """Requests wait for a decode slot: a larger max_num_seqs."""
    m, setup = flow.m, flow.setup
    waiting = flow.requests - m.busy_slots
    if not _full(flow) or m.starved < IDLE or waiting < 0.1 * m.busy_slots:
        return None
    demand = min(flow.demand, flow.natural_demand)
    change = Change(slots=math.ceil(flow.requests), demand=demand)
    rate = flow.rate(change)
    running = flow.schedule.capacity - flow.ready - rate * flow.with_trainer_s()
    peak = demand * running + flow.schedule.window * setup.n / 2
    each = math.ceil(min(flow.requests, peak) / setup.replicas / 8) * 8
    if each * setup.replicas <= setup.slots:
        return None
    rate = flow.rate(replace(change, slots=each * setup.replicas))
    text = (
        f"The decode slots are full: {waiting:.0f} requests wait for one, and the trainer waits "
        f"{m.starved:.0%} of the time. rollout.max_num_seqs={each} would start them, if the "
        "memory of an engine allows it"
    )
    key = f"rollout.max_num_seqs={each}"
    return Advice(text, (key,), flow.gain(rate), at_most=m.step_cost is None)


def _split(
    flow: Throughput, trainers: int, rollouts: int, base: Change = NOTHING
) -> tuple[Change, tuple[str, ...]]:
    """Return the change and the overrides that give the sides so many devices."""
    setup = flow.setup
    replicas = setup.replicas * rollouts // setup.rollouts
    keys = setup.override("trainer", trainers), setup.override("rollout", rollouts)
    return replace(base, trainers=trainers, replicas=replicas), keys


def move_a_device(flow: Throughput) -> Advice | None:
    """One side waits for the other: move devices to the other."""
    setup, m = flow.setup, flow.m
    if not flow.asynchronous or flow.m.rewards_bind or setup.share_cores:
        return None

    def moving(moved: int) -> tuple[Change, tuple[str, ...]]:
        """Move devices to training, or back if negative."""
        demand = min(flow.demand, flow.natural_demand) if moved < 0 else None
        sides = setup.trainers + moved, setup.rollouts - moved
        return _split(flow, *sides, Change(demand=demand))

    best: tuple[float, int] = (m.rate, 0)
    for moved in range(-(setup.trainers // setup.step) * setup.step, setup.rollouts, setup.step):
        if moved and setup.trainers + moved > 0 and setup.rollouts - moved > 0:
            best = max(best, (flow.sides(moving(moved)[0]), moved))
    rate, moved = best
    starved = m.starved >= IDLE if moved < 0 else m.rollouts_idle >= IDLE
    if not moved or not starved:
        return None
    change, overrides = moving(moved)
    if (staleness := filling(flow, change)) > flow.schedule.staleness_threshold:
        overrides += (f"{STALENESS}={staleness:g}",)
    who = (
        f"Rollouts wait for the trainer: {m.mean('ready'):.0f} samples are ready"
        if moved > 0
        else f"The trainer waits for rollouts {m.starved:.0%} of the time"
    )
    side = "training" if moved > 0 else "rollouts"
    text = f"{who}. Move {_devices(abs(moved))} to {side}: {' '.join(overrides)}"
    return Advice(text, overrides, flow.gain(rate))


def _devices(count: int) -> str:
    return "a device" if count == 1 else f"{count} devices"


def add_a_device(flow: Throughput) -> list[Advice]:
    """One side binds, and the other has no device to give: one more."""
    setup, m = flow.setup, flow.m
    if not flow.asynchronous or flow.m.rewards_bind or setup.share_cores:
        return []
    step = setup.step
    if _full(flow) and m.starved >= 2 * IDLE and setup.trainers <= step:
        change = Change(replicas=setup.replicas * (setup.rollouts + step) // setup.rollouts)
        key, what = setup.override("rollout", setup.rollouts + step), "rollouts"
        why = f"The engines draw all the time, and the trainer waits {m.starved:.0%} of it"
    elif m.trainer_idle < IDLE and setup.rollouts <= step:
        change = Change(trainers=setup.trainers + step)
        key, what = setup.override("trainer", setup.trainers + step), "training"
        why = (
            f"The trainer computes {1 - m.trainer_idle:.0%} of the time: only a faster trainer or "
            "more devices help"
        )
    else:
        return []
    gain = flow.gain(flow.sides(change))
    text = f"{why}. {_devices(step).capitalize()} more for {what}: {key}"
    return [Advice(text, (key,), gain)] if gain >= SAME else []


def train_out_of_order(flow: Throughput) -> Advice | None:
    """Samples are ready, but the trainer waits for the oldest: a larger lookahead."""
    m, schedule = flow.m, flow.schedule
    ready = m.mean("ready")
    strict = schedule.lookahead < schedule.window
    if not (flow.asynchronous and strict) or m.starved < IDLE:
        return None
    if ready < 0.75 * schedule.step_size or _drains(flow):
        return None
    key = f"async_training.lookahead={schedule.window}"
    text = (
        f"The trainer waits for the oldest sample while {ready:.0f} samples are ready. "
        f"{key} lets it train them first"
    )
    return Advice(text, (key,), flow.gain(flow.rate(Change(ready=flow.least_ready))))


def _best_split(flow: Throughput, base: Change) -> tuple[float, Change, tuple[str, ...]] | None:
    """Return the best rate of shared devices that are split, or None if there is only one."""
    setup, tries = flow.setup, []
    switch = flow.m.each("switch")
    for rollouts in range(setup.step, setup.devices, setup.step):
        change, keys = _split(flow, setup.devices - rollouts, rollouts, base)
        tries.append((flow.sides(replace(change, saved_s=switch)), change, keys))
    return max(tries, key=lambda one: one[0]) if tries else None


def advise_both_at_once(flow: Throughput) -> Advice | None:
    """The sides take turns: let both work at the same time."""
    m, schedule = flow.m, flow.schedule
    if flow.asynchronous or (schedule.colocated and schedule.staleness_threshold):
        return None
    if schedule.colocated and m.setup.share_cores:
        return None
    # All versions of such a run have the same load. If nothing shows how a step grows, engines
    # draw no more at once than a window has.
    slots = min(m.setup.slots, schedule.window * m.setup.n) if m.step_cost is None else None
    change = Change(slots=slots, ready=flow.least_ready)
    if schedule.colocated:
        split = _best_split(flow, change)
        if split is None:
            return None
        rate, change, overrides = split
        why = "The sides take turns on the same devices"
    else:
        rate, overrides, why = flow.sides(change), (), "The sides take turns"
    staleness = filling(flow, change)
    overrides = ("mode=async_partial", *overrides, f"{STALENESS}={staleness:g}")
    text = (
        f"{why}: the trainer waits {m.starved:.0%} of the time, the engines "
        f"{m.rollouts_idle:.0%}. {' '.join(overrides)} lets both work at the same time"
    )
    return Advice(text, overrides, flow.gain(rate))


def with_turns(flow: Throughput) -> Advice | None:
    """Asynchrony gains nothing: the plain mode."""
    if not flow.asynchronous:
        return None
    if flow.m.drop_share > 0.05 or flow.m.rewards_bind or flow.setup.share_cores:
        return None
    gain = flow.gain(flow.in_turns())
    if gain < -SAME:
        return None
    setup = flow.setup
    sides = (setup.override(side, setup.devices) for side in ("trainer", "rollout"))
    overrides = ("mode=colocate_sync", *sides)
    spare = flow.m.version_s - flow.schedule.window / flow.in_turns()
    text = (
        "Nothing to gain from asynchrony here: the sides can take turns on all devices, and every "
        f"sample is new. {' '.join(overrides)}"
    )
    text += (
        f" is faster if a hand-over takes less than {spare / 2:.2g} s"
        if gain >= SAME
        else " is as fast if a hand-over takes no time"
    )
    return Advice(text, overrides, gain, at_most=True)


def nothing(flow: Throughput) -> Advice:
    """Return the sentence for a run that no number makes faster."""
    m, schedule = flow.m, flow.schedule
    on_cpu = m.setup.share_cores
    text = "No number of the schedule would make this run more than 3 % faster"
    measure = "Only a measurement shows whether {} faster: millrace bench modes"
    if m.trainer_idle < 2 * IDLE:
        helps = "helps" if on_cpu else "or more devices help"
        busy = f"The trainer computes {1 - m.trainer_idle:.0%} of the time"
        text = f"{busy}: only a faster trainer {helps}"
    elif flow.asynchronous and _full(flow):
        helps = "help" if on_cpu else "or more devices help"
        busy = f"The engines draw with {m.busy_slots / m.setup.slots:.0%} of their decode slots"
        text = f"{busy}: only faster engines {helps}"
    elif schedule.colocated and on_cpu:
        text = "The sides take turns on the cores of one CPU. "
        text += measure.format("separate sides are")
    elif schedule.colocated and not schedule.staleness_threshold:
        text = "Nothing to gain from asynchrony here: separate sides would be no faster than turns "
        text += "on all devices"
    elif on_cpu:
        text = "Both sides share the cores of one CPU. " + measure.format("other numbers are")
    return Advice(text)


LEAST_SHARE = 0.03
"""A part with a smaller share of the time is no constraint."""
AIM = 0.01
"""The share to which a rarer validation or checkpoint brings it down."""
MOST = 10
"""The largest factor of a frequency that one sentence advises."""
AIM_OF_TURNS = 0.05
"""The share to which larger windows bring syncs and hand-overs down."""
MOST_WINDOWS = 8
ONCE = (
    *("sync_keep", "sync_transfer", "sync_activate", "wait_rollouts"),
    *("switch", "save_checkpoint", "wait_validation"),
)
"""What a version pays once, however large its window is."""
SURE = 0.25
"""A larger gain from a sync's overlap is a bound: samples stay longer with the trainer."""


def interrupt_at_a_sync(flow: Throughput) -> Advice | None:
    """A sync waits for the longest response: interrupt it."""
    m, schedule = flow.m, flow.schedule
    pause = max(0.0, m.hold_s - m.trainer.get("sync_activate", 0.0)) / m.versions
    drains = schedule.on_sync is OnSync.DRAIN and not schedule.colocated
    if not drains or not schedule.staleness_threshold or pause < IDLE * m.version_s:
        return None
    waits = flow.m.each("wait_rollouts")
    change = Change(held_s=pause, saved_s=waits, ready=min(flow.ready, flow.least_ready))
    share = pause / m.version_s
    overrides = ("mode=async_partial", _same_staleness(flow))
    text = (
        f"Each sync waits {pause:.2g} s, {share:.0%} of the time, until the longest response is "
        f"drawn. {' '.join(overrides)} interrupts responses and continues them"
    )
    return Advice(text, overrides, flow.gain(flow.rate(change)))


def keep_kv_caches(flow: Throughput) -> Advice | None:
    """Engines read interrupted responses again: change the weights while they run."""
    m = flow.m
    if not flow.rereads or m.starved < IDLE:
        return None
    overrides = ("mode=async_swap", _same_staleness(flow))
    text = (
        f"Engines read {m.read_again:.1f} tokens again for each token that they draw, because syncs "
        f"interrupt responses. {' '.join(overrides)} keeps their KV caches"
    )
    return Advice(text, overrides)


def _same_staleness(flow: Throughput) -> str:
    return f"{STALENESS}={flow.schedule.staleness_threshold:g}"


def fewer_syncs(flow: Throughput) -> Advice | None:
    """The sync takes the trainer's time: overlap it, or sync less often."""
    m, schedule = flow.m, flow.schedule
    sync = flow.m.each("sync_keep", "sync_transfer", "sync_activate", "wait_rollouts")
    share = sync / m.version_s
    if share < LEAST_SHARE or schedule.overlap_sync:
        return None
    why = f"Syncs take {share:.0%} of the trainer's time"
    if schedule.staleness_threshold and not schedule.colocated:
        if flow.setup.share_cores:
            return None  # the sync then takes the same cores from the steps that it overlaps
        own = flow.m.each("sync_keep", "sync_transfer", "sync_activate")
        # A sync begins after the one before it.
        sync_ceiling = m.samples / m.versions / max(1e-9, own)
        rate = min(flow.trainer_ceiling(Change(saved_s=own)), flow.ledger_ceiling(), sync_ceiling)
        text = f"{why}. async_training.overlap_sync=true trains the next samples meanwhile"
        gain = max(0.0, flow.gain(flow.as_measured(rate)))
        return Advice(text, ("async_training.overlap_sync=true",), gain, at_most=gain > SURE)
    return _larger_window(flow, why, max(2, math.ceil(share / AIM_OF_TURNS)))


def _larger_window(flow: Throughput, why: str, factor: int) -> Advice:
    """Advise a window that is `factor` times as large, so that it pays more rarely."""
    factor = min(MOST_WINDOWS, factor)
    seconds = flow.m.each(*ONCE)
    trigger = flow.schedule.trigger_parameter_sync_step * factor
    key = f"async_training.trigger_parameter_sync_step={trigger}"
    text = f"{why}. {key} pays them once for {factor} windows, whose responses are drawn together"
    # If responses go on after a sync, windows overlap already. Larger ones then save less.
    overlaps = flow.schedule.staleness_threshold > 0
    gain = flow.gain(flow.larger_window(factor, seconds))
    return Advice(text, (key,), gain, at_most=overlaps)


def fewer_hand_overs(flow: Throughput) -> Advice | None:
    """Shared devices change hands slowly: a larger window."""
    switch = flow.m.each("switch")
    share = switch / flow.m.version_s
    if not flow.schedule.colocated or share < AIM_OF_TURNS:
        return None
    factor = max(2, math.ceil(share / AIM_OF_TURNS))
    why = f"Hand-overs of the shared devices take {share:.0%} of the time"
    return _larger_window(flow, why, factor)


def fewer_validations(flow: Throughput) -> Advice | None:
    """A sync waits for a validation: validate less often."""
    setup, why = flow.setup, "Syncs wait for validations"
    return _rarer(flow, "wait_validation", setup.test_freq, setup.test_key, why)


def fewer_checkpoints(flow: Throughput) -> Advice | None:
    """The trainer waits for checkpoints: write them meanwhile, or less often."""
    saving = flow.m.each("save_checkpoint")
    share = saving / flow.m.version_s
    if share >= LEAST_SHARE and not flow.setup.async_save:
        text = (
            f"The trainer waits for checkpoints {share:.0%} of the time. trainer.async_save=true "
            "writes them while it trains"
        )
        return Advice(text, ("trainer.async_save=true",), flow.gain(flow.without(saving)))
    why, freq = "The trainer waits for checkpoints", flow.setup.save_freq
    return _rarer(flow, "save_checkpoint", freq, "trainer.save_freq", why)


def _rarer(flow: Throughput, part: str, freq: int, key: str, why: str) -> Advice | None:
    """Advise a longer time between two things, so that their share falls to AIM."""
    seconds = flow.m.each(part)
    share = seconds / flow.m.version_s
    if share < LEAST_SHARE or not freq:
        return None
    factor = min(MOST, math.ceil(share / AIM))
    rate = flow.without(seconds * (1 - 1 / factor))
    text = f"{why} {share:.0%} of the time. {key}={freq * factor} makes them rarer"
    return Advice(text, (f"{key}={freq * factor}",), flow.gain(rate))


def more_reward_workers(flow: Throughput) -> Advice | None:
    """Every reward worker is busy: more of them."""
    m, workers = flow.m, flow.setup.reward_workers
    if not m.rewards_bind or m.starved < IDLE:
        return None
    if flow.asynchronous or (flow.schedule.colocated and flow.schedule.staleness_threshold):
        score_s = workers * m.seconds / max(1.0, m.scores)
        rate = flow.rate(Change(demand=flow.scored_demand(score_s)))
    else:  # in turns, scores cost the time in which nothing else is under way
        rate = flow.without(m.reward_wait_s / m.versions)
    needed = math.ceil(workers * rate / m.rate * 1.1)
    queue = m.score_s / m.seconds - workers
    busy = f"All {workers} reward workers are busy" if workers > 1 else "The reward worker is busy"
    text = (
        f"{busy}, and {queue:.0f} responses wait for one. reward.num_workers={needed} would keep up"
    )
    return Advice(text, (f"reward.num_workers={needed}",), flow.gain(rate))


def fewer_drops(flow: Throughput) -> Advice | None:
    """Engines draw samples that are dropped: other problems, or a reward that does not fail."""
    m = flow.m
    if m.drop_share < 0.1 or m.starved < IDLE:
        return None
    change = Change(tokens=1 - m.drop_share)
    rate = min(flow.trainer_ceiling(), m.rate * flow.engine_ceiling(change) / flow.engine_ceiling())
    reason = max(m.dropped_tokens, key=lambda name: m.dropped_tokens[name])
    text = (
        f"{m.drop_share:.0%} of the tokens are those of dropped samples, most of them for "
        f"{reason}, and the trainer waits."
    )
    fix = "The reward fails: mend reward.function, or raise reward.timeout_s"
    if reason == "equal_outcomes":
        fix = "Problems that the policy solves sometimes, or a larger rollout.n, would waste fewer"
    return Advice(f"{text} {fix}", (), flow.gain(rate), at_most=True)
