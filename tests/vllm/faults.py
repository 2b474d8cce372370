"""What can go wrong inside vLLM's workers, on call."""

from __future__ import annotations

from typing import Any

import torch

from millrace.sync.vllm_worker import WorkerExtension


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
        return sum(p.numel() for name, p in self.model_runner.model.named_parameters() if "proj.weight" in name)
