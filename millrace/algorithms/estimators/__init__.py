"""The advantage estimators of the package by name. An estimator is one file, found by its presence.

**Outcome estimators** give one number for each trajectory, from the rewards. **Token estimators**
are rewards to go, GAE, ReMax and the optimal token baseline.

All functions compute in float64, without a gradient. Results of the formulas are float64 if the
first argument is, else float32. N = 0 and T = 0 give empty tensors.
"""

from __future__ import annotations

from millrace.algorithms.advantage import Estimator
from millrace.algorithms.discovery import found_in

ESTIMATORS: dict[str, Estimator] = {x.name: x for x in found_in(__name__, Estimator)}
"""The estimators by their names in algorithm.adv_estimator."""
