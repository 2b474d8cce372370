"""The keys of an optimizer and of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from millrace.config.facts import Fixed, Past, ReadWith, Switch
from millrace.config.section import Rule, Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate. With 0, nothing is trained: use it to measure speed."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up. The first step uses lr / lr_warmup_steps."""
    lr_warmup_steps_ratio: Annotated[
        float,
        Past(
            "the warm-up keeps its length in steps from the first start of the run",
            lambda now, before, key: not now.value_of(key),
            "another value than 0",
        ),
    ] = Field(0.0, ge=0, le=1)
    """Share of the run's optimizer steps that are warm-up, rounded down to a whole step.

    It is used if lr_warmup_steps is 0. Set only one of the two keys.
    """
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up. It ends at the run's last optimizer step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, as a share of lr."""
    optimizer: Annotated[
        Literal["adamw", "muon"], Switch(), Fixed("the checkpoint has its moments")
    ] = "adamw"
    """muon: Muon for the matrices inside the layers, and AdamW for all other weights.

    Its steps have the rms of AdamW's, so a learning rate of AdamW fits.
    """
    muon_momentum: Annotated[Decay, ReadWith({".optimizer": ("muon",)})] = 0.95
    """Decay rate of Muon's momentum."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay of AdamW. It applies to matrices only."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient.

    A larger gradient is scaled down to it. 0 disables clipping.
    """

    def warmup_steps(self, horizon: int) -> int:
        """Return the number of warm-up steps in a run of `horizon` optimizer steps."""
        # 1e-9 guards against rounding errors: 0.29 * 100 must be 29, not 28.
        return self.lr_warmup_steps or math.floor(self.lr_warmup_steps_ratio * horizon + 1e-9)

    def rules(self, here: str) -> Iterator[Rule]:
        yield (
            self.lr_warmup_steps and self.lr_warmup_steps_ratio,
            "lr_warmup_steps_ratio",
            f"{here}lr_warmup_steps is {self.lr_warmup_steps}, and both keys set the length of "
            "the warm-up",
            f"{here}lr_warmup_steps_ratio=0, or {here}lr_warmup_steps=0",
        )
