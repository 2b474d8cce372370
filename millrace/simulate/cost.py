"""The costs of a simulation, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """The seconds of each operation."""

    token_s: float = 0.01
    """One decode step, for any number of requests and devices.

    Memory bounds decoding, and latency bounds a long tail.
    """
    prefill_token_s: float = 0.0
    train_token_s: float = 0.0005
    step_s: float = 0.05
    """Overhead of one local step."""
    transfer_s: float = 0.2
    pause_s: float = 0.05
    switch_s: float = 0.5
    """One sleep or wake of an engine in colocated placement."""
    reward_s: float = 0.0
    share: float = 1.0
    """Share of the devices that train. Training takes 1 / share as long.

    The number of slots stands for the share of the rollout side.
    """
