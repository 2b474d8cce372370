"""The costs of a simulation, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """The seconds of each operation."""

    token_s: float = 0.01
    """One decode step, for any number of requests and devices.

    Memory bandwidth limits decoding, and latency limits the last few requests.
    """
    request_s: float = 0.0
    """Further seconds of a decode step for each request that takes part in it."""
    queue: float = 0.0
    """Share of its time that an engine loses while requests wait for a slot, with a `request_s`."""
    prefill_token_s: float = 0.0
    start_s: float = 0.0
    """Seconds of the first read of a response, besides its tokens."""
    serial_reads: bool = False
    """Whether an engine reads one context after the other, and draws nothing meanwhile.

    If not, all requests read at once, and the others draw meanwhile. It needs a `request_s` over 0.
    """
    train_token_s: float = 0.0005
    log_prob_token_s: float = 0.0
    """The policy's forward pass before a local step."""
    ref_token_s: float = 0.0
    """The reference's forward pass before a local step."""
    step_s: float = 0.05
    """Overhead of one local step."""
    keep_s: float = 0.0
    """A copy of the weights, with overlap_sync."""
    transfer_s: float = 0.2
    pause_s: float = 0.05
    switch_s: float = 0.5
    """One sleep or wake of an engine in colocated placement."""
    reward_s: float = 0.0
    share: float = 1.0
    """Share of the devices that train. It divides the time of a step.

    The number of decode slots represents the share of the rollout side.
    """
