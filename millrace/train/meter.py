"""Adds up what micro-batches report, optimizer step by optimizer step, and makes a batch's metrics of it."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.train.packing import MicroBatch


class Meter:
    """Tensors until a step's end, so that a GPU is waited for once in each step; numbers from there.

    `names` are those of the sums that each micro-batch reports, in their order; the first is the loss.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.sums = dict.fromkeys(names, 0.0)
        """Of all finite steps, global."""
        self.finite = 0
        self.nonfinite = 0
        """Optimizer steps left out for a loss or gradient that is not finite."""
        self.empty = 0
        """Optimizer steps left out because there was nothing to train."""
        self._norm = self._lr = 0.0
        self._pending: list[Tensor] = []
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._step_seen: list[tuple[Tensor, Tensor]] = []
        self._cells = self._padded_cells = 0

    @property
    def steps(self) -> int:
        return self.finite + self.nonfinite + self.empty

    def add(self, sums: Tensor, output: Tensor, micro: MicroBatch) -> None:
        """One micro-batch of this rank: its sums [S], and what the module said of its tokens [M]."""
        self._pending.append(sums)
        self._step_seen.append((micro.source, output))
        self._cells += micro.layout.num_cells
        self._padded_cells += micro.layout.num_padded_cells

    def take(self) -> Tensor:
        """This rank's sums [S] float64 of the step so far."""
        sums = torch.stack(self._pending).sum(0)
        self._pending = []
        return sums

    def finish(self, sums: list[float], norm: float, lr: float, *, first_pass: bool) -> None:
        """An optimizer step was taken: its global sums."""
        self.finite += 1
        self._norm += norm
        self._lr += lr
        for name, value in zip(self.sums, sums, strict=True):
            self.sums[name] += value
        if first_pass:
            self._seen += self._step_seen
        self._step_seen = []

    def skip_nonfinite(self) -> None:
        self.nonfinite += 1
        self._step_seen = []

    def seen(self, num_tokens: int, device: torch.device) -> Tensor:
        """[2, K + 2] float64: what the module said of each token in the finite steps of the first pass, and whether it was
        among them; the last two columns of the first row are cells and padded cells. This rank's: to be summed.
        """
        flat = torch.zeros(2, num_tokens + 2, dtype=torch.float64)
        for source, output in self._seen:
            flat[0, source], flat[1, source] = output.double().cpu(), 1.0
        flat[0, -2:] = self.cells()
        return flat.to(device)

    def cells(self) -> Tensor:
        """[cells, padded cells] of this rank's attention batches, float64."""
        return torch.tensor([self._cells, self._padded_cells], dtype=torch.float64)

    def step_means(self, prefix: str) -> dict[str, float]:
        """Means over the finite steps."""
        n = max(self.finite, 1)
        return {f"{prefix}grad_norm": self._norm / n, f"{prefix}lr": self._lr / n}
