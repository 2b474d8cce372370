"""Faults inside vLLM's workers, on demand."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader import get_model

from millrace.serving.vllm.worker import WorkerExtension


class FaultyExtension(WorkerExtension):
    """millrace's extension of the workers, with faults for tests."""

    model_runner: Any

    def flip_staged_bit(self, name: str) -> None:
        self.weight_transfer_engine.inbox.staged[name].view(torch.int32).view(-1)[3] ^= 4

    def change(self, name: str) -> None:
        """Change a live weight behind the replica's back."""
        weights = dict(self.model_runner.model.named_parameters())
        weights[name].data.view(-1)[0] += 1e-3

    def load_nothing(self) -> None:
        """Make the next load change no weight.

        vLLM's own load does the same on a CPU after linear weights were packed.
        """
        engine = self.weight_transfer_engine

        def deaf(inbox: Any) -> None:
            del engine.load

        engine.load = deaf  # type: ignore[method-assign]

    def copies_of_a_load(self) -> int:
        """Return the number of copies that a load repeats.

        It is 0 if each load uses the model's loader.
        """
        return len(self.weight_transfer_engine._copies or ())

    def linear_weights(self) -> int:
        """Return the count of numbers in the live parameters of linear layers.

        It is 0 if vLLM has packed them.
        """
        return sum(
            p.numel()
            for name, p in self.model_runner.model.named_parameters()
            if "proj.weight" in name
        )

    def set_nccl(self, settings: dict[str, str]) -> None:
        """Set NCCL variables, as vLLM does for reproducible results."""
        os.environ.update(settings)

    def nccl_settings(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}

    def dtypes_of_a_model(self, arguments: dict[str, Any]) -> list[str]:
        """Build the model of other engine arguments in this worker.

        Return the dtypes of its head and of the logits that it computes from a hidden state.
        """
        config = AsyncEngineArgs(**arguments).create_engine_config()
        with set_current_vllm_config(config), torch.inference_mode():
            model: Any = get_model(vllm_config=config)
            head = model.lm_head.weight.dtype
            logits = model.compute_logits(torch.zeros(1, model.config.hidden_size, dtype=head))
        return [str(head), str(logits.dtype)]
