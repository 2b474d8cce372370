"""The settings that both ends of a weight sync share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """The settings of a weight sync. The driver makes them, and every end gets the same ones."""

    ranks: int
    """Trainer ranks. Each tells which rows it sends. Some send none."""
    devices: int
    """Devices of one replica."""
    bucket_bytes: int
    timeout_s: float
    wait_deadline_s: float
    """How long an end waits for the store of trainer rank 0. A rank may first load a model."""
    stall_s: float
    """rollout.stall_s: how long the engine's workers may owe an answer."""
    colocated: bool
    gloo: bool
    """Whether GPUs send through host memory too."""
    serving: bool
    """Whether the model of a replica runs in processes of its own, which fuse its tensors."""
    adapter_scale: float | None
    """The scale of low-rank adapters. None if the policy has none."""
