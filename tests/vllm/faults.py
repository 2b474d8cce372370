"""What can go wrong inside vLLM's workers, on call."""

from __future__ import annotations

import os
from typing import Any

import torch

from millrace.vllm.worker import WorkerExtension


class FaultyExtension(WorkerExtension):
    """millrace's extension of the workers, and faults for tests."""

    model_runner: Any

    def flip_staged_bit(self, name: str) -> None:
        self.weight_transfer_engine.inbox.staged[name].view(torch.int32).view(-1)[3] ^= 4

    def load_nothing(self) -> None:
        """The next load changes no weight, as vLLM's own does on a CPU where linear weights were packed away."""
        engine = self.weight_transfer_engine

        def deaf(inbox: Any) -> None:
            del engine.load

        engine.load = deaf  # type: ignore[method-assign]

    def copies_of_a_load(self) -> int:
        """Copies that a load repeats: 0 where it goes through the model's loader each time."""
        return len(self.weight_transfer_engine._copies or ())

    def linear_weights(self) -> int:
        """Numbers in the live parameters of linear layers: none where vLLM has packed them away."""
        return sum(
            p.numel()
            for name, p in self.model_runner.model.named_parameters()
            if "proj.weight" in name
        )

    def set_nccl(self, settings: dict[str, str]) -> None:
        """As vLLM does where it wants the same bits each time."""
        os.environ.update(settings)

    def nccl_settings(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}

    def logits_dtype(self) -> str:
        """Of the logits that the live model makes of a hidden state."""
        model = self.model_runner.model
        hidden = torch.zeros(1, model.config.hidden_size, dtype=model.lm_head.weight.dtype)
        with torch.inference_mode():
            return str(model.compute_logits(hidden).dtype)
