"""Adds up what micro-batches report, optimizer step by optimizer step, and makes a batch's metrics of it."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.engines.packing import MicroBatch
from millrace.engines.policy_loss import SUMS


class Meter:
    """Tensors until a step's end, so that a GPU is waited for once in each step; numbers from there."""

    def __init__(self) -> None:
        self.steps = 0
        self.finite = 0
        self.sums = dict.fromkeys(SUMS, 0.0)
        """Of all finite steps, global."""
        self.first_sums = dict.fromkeys(SUMS, 0.0)
        """Of the finite steps in the first pass over the batch."""
        self._largest = 0.0
        self._pending: list[Tensor] = []
        self._pending_largest: list[Tensor] = []
        self._norm = self._lr = 0.0
        self._cells = self._padded_cells = 0

    def add(self, sums: Tensor, largest: Tensor, micro: MicroBatch) -> None:
        """One micro-batch of this rank."""
        self._pending.append(sums)
        self._pending_largest.append(largest.detach().double().reshape(1))
        self._cells += micro.layout.num_cells
        self._padded_cells += micro.layout.num_padded_cells

    def take(self) -> tuple[Tensor, Tensor]:
        """This rank's sums [9] of the step so far, and its largest probability difference [1]; both float64."""
        sums, largest = torch.stack(self._pending).sum(0), torch.cat(self._pending_largest).max().reshape(1)
        self._pending, self._pending_largest = [], []
        return sums, largest

    def finish(self, sums: dict[str, float], largest: float, norm: float, lr: float, *, first_pass: bool) -> None:
        """An optimizer step was taken: its global sums, and this rank's largest probability difference."""
        self.steps += 1
        self.finite += 1
        self._norm += norm
        self._lr += lr
        for name, value in sums.items():
            self.sums[name] += value
            if first_pass:
                self.first_sums[name] += value
        if first_pass:
            self._largest = max(self._largest, largest)

    def skip(self) -> None:
        """An optimizer step was left out: its numbers are not finite, and in no mean."""
        self.steps += 1

    def ranks_own(self) -> Tensor:
        """[largest probability difference, cells, padded cells] of this rank, float64: to be reduced by max, sum, sum."""
        return torch.tensor([self._largest, self._cells, self._padded_cells], dtype=torch.float64)

    def step_means(self, prefix: str) -> dict[str, float]:
        """Means over the finite steps."""
        n = max(self.finite, 1)
        return {
            f"{prefix}grad_norm": self._norm / n,
            f"{prefix}lr": self._lr / n,
        }

    @property
    def nonfinite(self) -> float:
        """Optimizer steps that were left out."""
        return float(self.steps - self.finite)
