"""What things cost in a simulation, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds by cause."""

    token_s: float = 0.01
    """One decode step, whatever the number of requests and devices: decoding is bound by memory, a long tail by latency."""
    prefill_token_s: float = 0.0
    train_token_s: float = 0.0005
    step_s: float = 0.05
    """Overhead of one local step."""
    transfer_s: float = 0.2
    pause_s: float = 0.05
    switch_s: float = 0.5
    """Sleep or wake of an engine in colocated placement."""
    reward_s: float = 0.0
    share: float = 1.0
    """Share of the devices that train: training takes 1 / share as long. The rollout side's share is its slots."""
