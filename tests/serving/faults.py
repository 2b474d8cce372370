"""Faults of the weights of a serving engine, in the process of its model."""

from __future__ import annotations

import os

import torch

from millrace.serving.live_weights import LiveWeights


class Faults:
    """Methods that tests call in each process of a model."""

    @property
    def weights(self) -> LiveWeights:
        raise NotImplementedError

    def flip_staged_bit(self, name: str) -> None:
        self.weights.inbox.staged[name].view(torch.int32).view(-1)[3] ^= 4

    def change(self, name: str) -> None:
        """Change a live weight behind the replica's back."""
        weights = dict(self.weights.model.named_parameters())
        weights[name].data.view(-1)[0] += 1e-3

    def exchange_rows(self, name: str) -> None:
        """Exchange the halves of a live weight. Its sum of bits stays the same."""
        weight = dict(self.weights.model.named_parameters())[name].data
        weight.copy_(weight.roll(len(weight) // 2, 0))

    def leave_out(self, name: str) -> None:
        """Make the next load leave one weight as it is."""
        engine, load = self.weights, self.weights.load

        def partly() -> None:
            del engine.load
            weight = dict(engine.model.named_parameters())[name].data
            before = weight.clone()
            load()
            weight.copy_(before)

        engine.load = partly  # type: ignore[method-assign]

    def load_nothing(self) -> None:
        """Make the next load change no weight.

        vLLM's own load does the same on a CPU after linear weights were packed.
        """
        engine = self.weights

        def deaf() -> None:
            del engine.load

        engine.load = deaf  # type: ignore[method-assign]

    def copies_of_a_load(self) -> int:
        """Return the number of copies that a load repeats.

        It is 0 if each load uses the model's loader.
        """
        return sum(len(targets) for targets, _ in self.weights._copies or ())

    def set_nccl(self, settings: dict[str, str]) -> None:
        """Set NCCL variables, as vLLM does for reproducible results."""
        os.environ.update(settings)

    def nccl_settings(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
