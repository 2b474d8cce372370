"""Synthetic workloads: a distribution sets the length of each response."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Log-normal lengths: `median` in tokens, `sigma` of the natural logarithm, cut at `limit`."""

    median: float
    sigma: float
    limit: int

    def of(self, seed: int) -> int:
        """Return the length, from 1 to `limit`, of the response with this seed.

        It is the same in every mode and on every machine.
        """
        z = random.Random(f"length/{seed}").gauss(0.0, 1.0)
        return max(1, min(self.limit, round(self.median * math.exp(self.sigma * z))))
