"""The settings that both ends of a weight sync share."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """The settings of a weight sync. Every end computes the same ones from the configuration."""

    ranks: int
    """Trainer ranks. Each tells which rows it sends. Some send none."""
    devices: int
    """Devices of one replica."""
    bucket_bytes: int
    timeout_s: float
    colocated: bool
    gloo: bool
    """Whether GPUs send through host memory too."""
    vllm: bool
    adapter_scale: float | None
    """The scale of low-rank adapters. None if the policy has none."""

    @classmethod
    def of(cls, config: Config) -> SyncOptions:
        model, sync = config.model, config.sync
        return cls(
            ranks=config.trainer.ranks,
            devices=config.rollout.tensor_model_parallel_size,
            bucket_bytes=sync.bucket_mb << 20,
            timeout_s=sync.timeout_s,
            colocated=config.async_training.colocated,
            gloo=sync.backend == "gloo",
            vllm=config.rollout.engine == "vllm",
            adapter_scale=model.lora_scale if model.lora_rank else None,
        )
