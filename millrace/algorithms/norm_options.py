"""The options of `normalize`. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["batch", "group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions:
    """Options of `normalize`, in AReaL's words. Raises ValueError unless eps is over 0."""

    mean_level: Level | None
    """The values whose mean is subtracted: of the batch, or of the group. None subtracts none."""
    mean_leave1out: bool
    """Leave each value out of its own mean."""
    std_level: Level | None
    """The values whose standard deviation divides. None divides by none."""
    std_unbiased: bool
    """Divide the squares by n - 1, and not by n."""
    eps: float
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"eps must be over 0, got {self.eps}")

    @property
    def active(self) -> bool:
        """Whether the normalisation does anything."""
        return self.mean_level is not None or self.std_level is not None
