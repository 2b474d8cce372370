"""Stand-ins and records in all processes of verl: VERL_USE_EXTERNAL_MODULES=verl_hooks.

| changed | why |
|---|---|
| `trl` cannot be imported | verl takes a class from TRL that TRL 1.16 no longer has |
| attention | torch's varlen kernels stand in for flash-attn |
| log-probs | without flash-attn, verl loops over single tokens in Python |
| records | the begin, each step and the held-out scores go to EVENTS |
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

LOGGED = {
    "critic/score/mean": "reward",
    "timing_s/gen": "gen_s",
    "timing_s/update_actor": "update_s",
    "timing_s/update_weights": "sync_s",
    "timing_s/param_sync": "sync_s",
    "fully_async/count/stale_trajectory_processed": "stale_rows",
    "fully_async/count/dropped_stale_samples": "dropped",
}
_last: list[Any] = [None, None, 0]


def torch_varlen(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    position_ids: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attend inside each of the sequences that lie side by side in one row."""
    if _last[0] is not position_ids:  # the first layer of a forward pass
        flat = position_ids.reshape(-1)
        starts = (flat == 0).nonzero().reshape(-1).to(torch.int32)
        end = torch.tensor([flat.numel()], dtype=torch.int32, device=flat.device)
        bounds = torch.cat([starts, end])
        _last[:] = [position_ids, bounds, int(bounds.diff().max())]
    _, bounds, longest = _last
    q, k, v = (x.transpose(1, 2)[0].to(torch.bfloat16).contiguous() for x in (query, key, value))
    out: Any = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0)
    )
    return out.unsqueeze(0), None


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of `labels` in float32."""
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    parts = [
        -cross_entropy(some.float(), right, reduction="none")
        for some, right in zip(rows.split(8192), targets.split(8192), strict=True)
    ]
    return torch.cat(parts).view(labels.shape)


def record(event: str, t: float | None = None, **fields: Any) -> None:
    with open(os.environ["EVENTS"], "a") as file:
        file.write(json.dumps({"event": event, "t": t or time.time(), **fields}) + "\n")


def record_steps(trainer: Any, first: str, synced: str, computed: str) -> None:
    """Record the first call of `first`, and each step when `computed` has its metrics.

    A step ends when `synced` is called: after the weight sync, before a validation.
    """
    begin, sync, compute = (getattr(trainer, name) for name in (first, synced, computed))

    def on_first(self: Any, *args: Any, **options: Any) -> Any:
        if not hasattr(self, "arm_ended"):
            self.arm_ended = time.time()
            record("begin")
        return begin(self, *args, **options)

    def on_synced(self: Any, *args: Any, **options: Any) -> Any:
        self.arm_ended = time.time()
        return sync(self, *args, **options)

    def on_computed(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        out = compute(self, batch, *args, **options)
        metrics = args[0] if args else self.metrics
        rows = len(getattr(batch, "keys", batch) if args else batch)
        tokens = round(rows * float(metrics.get("response_length/mean", 0)))
        logged = {short: float(metrics[name]) for name, short in LOGGED.items() if name in metrics}
        step = int(self.global_steps)
        record("step", self.arm_ended, step=step, steps=1, rows=rows, tokens=tokens, **logged)
        return out

    setattr(trainer, first, on_first)
    setattr(trainer, synced, on_synced)
    setattr(trainer, computed, on_computed)


def change_sync(module: Any) -> None:
    # The first dispatch, before `_step_once`, waits 17 s for the start of the agents' workers.
    record_steps(module.PPOTrainer, "_step_once", "_consume_sync_metrics", "_compute_metrics")


def change_async(module: Any) -> None:
    names = "_fit_start_profile", "_fit_dump_data", "_fit_collect_metrics"
    record_steps(module.SeparateRayPPOTrainer, *names)


def change_tracking(module: Any) -> None:
    log = module.Tracking.log

    def on_log(self: Any, data: dict[str, Any], *args: Any, **options: Any) -> Any:
        values = {
            k: float(v) for k, v in data.items() if k.startswith("val-core/") and "/mean@" in k
        }
        if values:
            record("val", values=values)
        return log(self, data, *args, **options)

    module.Tracking.log = on_log


def change_log_probs(module: Any) -> None:
    module.logprobs_from_logits_v2 = log_probs


CHANGES: dict[str, Callable[[Any], None]] = {
    "verl.trainer.ppo.v1.trainer_base": change_sync,
    "verl.experimental.separation.ray_trainer": change_async,
    "verl.utils.tracking": change_tracking,
    "verl.utils.torch_functional": change_log_probs,
}


class Finder(importlib.abc.MetaPathFinder):
    """Hides TRL, and changes a module after its execution: verl imports this module first."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "trl":
            raise ModuleNotFoundError(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in CHANGES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


AttentionInterface.register("torch_varlen", torch_varlen)
AttentionMaskInterface.register("torch_varlen", lambda **_: None)
for loaded in CHANGES.keys() & sys.modules.keys():
    CHANGES[loaded](sys.modules[loaded])
sys.meta_path.insert(0, Finder())
