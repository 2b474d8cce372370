"""Advice on what the run pays for: syncs, hand-overs, validations, checkpoints, rewards, drops."""

from __future__ import annotations

import math

from millrace.report.advice.balance import IDLE, STALENESS, Advice
from millrace.report.advice.throughput import Change, Throughput
from millrace.schedule.schedule import OnSync

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


def _seconds(flow: Throughput, *parts: str) -> float:
    """Return the seconds of these parts in each version."""
    return sum(flow.m.trainer.get(part, 0.0) for part in parts) / flow.m.versions


def interrupt_at_a_sync(flow: Throughput) -> Advice | None:
    """A sync waits for the longest response: interrupt it."""
    m, schedule = flow.m, flow.schedule
    pause = max(0.0, m.hold_s - m.trainer.get("sync_activate", 0.0)) / m.versions
    drains = schedule.on_sync is OnSync.DRAIN and not schedule.colocated
    if not drains or not schedule.staleness_threshold or pause < IDLE * m.version_s:
        return None
    waits = _seconds(flow, "wait_rollouts")
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
    sync = _seconds(flow, "sync_keep", "sync_transfer", "sync_activate", "wait_rollouts")
    share = sync / m.version_s
    if share < LEAST_SHARE or schedule.overlap_sync:
        return None
    why = f"Syncs take {share:.0%} of the trainer's time"
    if schedule.staleness_threshold and not schedule.colocated:
        if flow.setup.share_cores:
            return None  # the sync then takes the same cores from the steps that it overlaps
        own = _seconds(flow, "sync_keep", "sync_transfer", "sync_activate")
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
    seconds = _seconds(flow, *ONCE)
    trigger = flow.schedule.trigger_parameter_sync_step * factor
    key = f"async_training.trigger_parameter_sync_step={trigger}"
    text = f"{why}. {key} pays them once for {factor} windows, whose responses are drawn together"
    # If responses go on after a sync, windows overlap already. Larger ones then save less.
    overlaps = flow.schedule.staleness_threshold > 0
    gain = flow.gain(flow.larger_window(factor, seconds))
    return Advice(text, (key,), gain, at_most=overlaps)


def fewer_hand_overs(flow: Throughput) -> Advice | None:
    """Shared devices change hands slowly: a larger window."""
    switch = _seconds(flow, "switch")
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
    saving = _seconds(flow, "save_checkpoint")
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
    seconds = _seconds(flow, part)
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
