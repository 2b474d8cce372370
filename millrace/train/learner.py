"""A model under training, whatever its engine: when it steps, at which rate, and when it must stop."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.config import OptimConfig
from millrace.errors import MillraceError, NotFinite
from millrace.train.layout import Ints
from millrace.train.metrics import Meter
from millrace.train.optim import lr_at
from millrace.train.packing import MicroBatch, Outputs
from millrace.train.routing import Routed
from millrace.train.rows import Rows
from millrace.waits.registry import count, doing

LossOf = Callable[[Outputs, MicroBatch], tuple[Tensor, Tensor]]
"""(outputs, micro-batch) -> its share of the loss, and the meter's sums [S] float64."""


class Learner(ABC):
    """A policy or a critic. All ranks make the same calls with the same arguments.

    An engine implements what depends on where weights and gradients are.
    """

    device: torch.device

    def __init__(self, name: str, optim: OptimConfig) -> None:
        self.name = name
        self.optim = optim
        self.horizon = 1
        self.began = False
        self.steps = 0
        """Optimizer steps since `begin`, skipped ones included. The LR schedule uses this count."""
        self.lr_scale = 1.0
        """Factor on the learning rate of the schedule."""
        self.nonfinite_in_a_row = 0
        self.max_skipped_steps = 3
        """The run ends after this number of steps in a row without a finite loss and gradient."""
        self.routed: Routed | None = None
        """The experts of all tokens in the last pass of `tokens` with the option `record`."""

    def router_sums(self) -> Tensor | None:
        """Return the sums that `router_metrics` reads, since the last call. None without any."""
        return None

    def begin(self, optim: OptimConfig, horizon: int) -> None:
        """Start a new AdamW and LR schedule for `horizon` optimizer steps. Keep the weights."""
        self.optim, self.horizon, self.steps, self.nonfinite_in_a_row = optim, horizon, 0, 0
        self.began = True

    @abstractmethod
    def accumulate(
        self, rows: Rows, members: Ints, temperature: float, loss_of: LossOf, meter: Meter
    ) -> None:
        """Compute the gradients of the rows `members`, summed over all ranks.

        The meter gets the sums of each micro-batch once, on one of the ranks that compute it.
        """

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank."""

    @abstractmethod
    def apply(self, lr: float, norm: float) -> None:
        """Clip a gradient of norm `norm`, and step at learning rate `lr`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float, **options: bool
    ) -> list[Tensor]:
        """Return the model's outputs for the trained tokens of `members`, or of all rows if None.

        Each output is [K] float64 on the host, and 0 for the tokens of other rows. Every rank has
        the whole output.
        """

    @abstractmethod
    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Combine `value` over all ranks, in place, and return it."""

    def train_on(
        self,
        rows: Rows,
        members: Ints,
        temperature: float,
        loss_of: LossOf | None,
        meter: Meter,
        *,
        first_pass: bool,
    ) -> None:
        """Take one optimizer step on the rows `members`.

        A step without a loss counts for the LR schedule, and does not change weights and moments.
        """
        if loss_of is None:
            self.steps += 1
            meter.empty += 1
            return
        self.accumulate(rows, members, temperature, loss_of, meter)
        self.optimizer_step(meter, first_pass=first_pass)

    def optimizer_step(self, meter: Meter, *, first_pass: bool) -> None:
        """Clip the gradients and step, or skip the step if the loss or the norm is not finite.

        The loss and the norm are global, so all ranks decide alike. Raises MillraceError before
        `begin`, and NotFinite after `max_skipped_steps` steps in a row without a finite loss and
        gradient.
        """
        if not self.began:
            raise MillraceError(
                "the train engine has no optimizer. "
                "Fix: call begin(optim, horizon) before the first step"
            )
        lr = self.lr_scale * lr_at(self.optim, self.horizon, self.steps)
        count("passes")
        with doing(f"optimizer step {self.steps + 1} of the {self.name}"):
            self._clip_and_step(meter, lr, first_pass)

    def _clip_and_step(self, meter: Meter, lr: float, first_pass: bool) -> None:
        # A rank that counts no token has its zeros on the host.
        sums = self.reduce(meter.take().to(self.device), dist.ReduceOp.SUM)
        # This is the only place in an optimizer step where the host waits for the device.
        *values, norm = torch.cat([sums, self.gradient_norm().to(sums).reshape(1)]).tolist()
        self.steps += 1
        if math.isfinite(norm) and math.isfinite(values[0]):
            self.nonfinite_in_a_row = 0
            self.apply(lr, norm)
            meter.finish(values, norm, lr, first_pass=first_pass)
        else:
            self.nonfinite_in_a_row += 1
            meter.skip_nonfinite()
        self.clear()
        if self.nonfinite_in_a_row >= self.max_skipped_steps:
            raise NotFinite(
                f"{self.nonfinite_in_a_row} optimizer steps in a row had a loss of the {self.name} "
                f"or a gradient that is not finite (the last: loss {values[0]}, norm {norm}). "
                f"Limit: trainer.max_skipped_steps. "
                f"Fix: a lower {self.name}.optim.lr, or model.dtype=float32"
            )
