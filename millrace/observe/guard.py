"""The guard on learning: alarms on the metrics row of each version, each with its cause and fix.

The guard is a state machine without I/O. Rows go in, and alarms come out. Its state (the first
entropies, the last gradient norms) comes from rows alone. So a resumed run restores its guard from
the rows of metrics.jsonl.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from millrace.config import GuardConfig
from millrace.observe.gap import limit_of_few
from millrace.observe.metrics import GAP, GAP_LIMIT, GAP_TOKENS

PREFIX = "alarm/"
_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Alarm:
    """A metric past its limit."""

    name: str
    value: float
    """The value of the metric. For equal_rewards it is the number of versions in a row."""
    limit: float
    cause: str
    """The likely cause, and the keys of the configuration to change."""
    since: int
    """The version at which the alarm began."""

    def __str__(self) -> str:
        figures = f"{self.value:.4g}, limit {self.limit:.4g}"
        return f"{self.name} since version {self.since}: {figures}. {self.cause}"


CAUSES = {
    "zero_variance": (
        "Nearly all groups have equal rewards, so there is nothing to learn from: the problems are "
        "too easy or too hard for the policy. Change data.train_files, raise rollout.n or "
        "rollout.temperature, or set algorithm.filter_groups.enable=true."
    ),
    "truncation": (
        "Many responses reach the length limit before they can earn a reward. Raise "
        "rollout.max_response_length, or check that responses can end (rollout.stop, "
        "rollout.ignore_eos)."
    ),
    "entropy_collapse": (
        "The policy hardly explores and gives nearly the same response to every prompt. Raise "
        "actor.clip_ratio_high or actor.entropy_coeff, or lower actor.optim.lr; resume from an "
        "earlier checkpoint."
    ),
    "low_ess": (
        "A few tokens have most of the importance weight, or no token is kept: samples are too "
        "stale, or the engines disagree. Lower async_training.staleness_threshold, "
        "async_training.trigger_parameter_sync_step or actor.optim.lr, or leave the oldest tokens "
        "out with algorithm.rollout_correction.max_token_age."
    ),
    "gradient_spike": (
        "One update is far larger than earlier ones: the batch is unusual, or the policy begins to "
        "diverge. If the alarm comes again, lower actor.optim.lr or actor.optim.clip_grad."
    ),
    "log_prob_gap": (
        "The rollout engine and the trainer compute different log-probs with the same weights, by "
        "more than the dtype explains: wrong kernels or graphs, old KV, or incomplete weights. "
        "rollout.enforce_eager=true, rollout.enable_prefix_caching=false and model.dtype=float32 "
        "show which; rollout.engine=torch needs none of them."
    ),
    "equal_rewards": (
        "All trajectories get the same reward: the reward function is broken, no response earns a "
        "reward, or every problem is solved. Check reward.function and the ground truths of "
        "data.train_files on a few responses."
    ),
}
"""The likely cause and the fix of every alarm."""


class Guard:
    """The state of all alarms. Call `check` with the row of every version, in order."""

    def __init__(self, options: GuardConfig) -> None:
        self.options = options
        self.began: list[Alarm] = []
        """Alarms that the last `check` began. Log them once."""
        self.ended: list[Alarm] = []
        """Alarms that the last `check` ended, with their last values. Log them once."""
        self._active: dict[str, Alarm] = {}
        self._entropies: list[float] = []
        self._norms: deque[float] = deque(maxlen=options.grad_rows)
        self._equal = 0

    def check(self, version: int, row: Mapping[str, float | None]) -> list[Alarm]:
        """Return the active alarms at this version.

        An alarm keeps its state if its metric is missing, None or NaN in this row.
        """
        before = self._active
        judged = self._judge(row)
        now = {name: alarm for name, alarm in before.items() if name not in judged}
        for name, (value, limit, passed) in judged.items():
            # An active alarm ends a tenth inside its limit. Otherwise a metric near the limit would
            # begin and end it again and again.
            if passed or (name in before and abs(value - limit) <= _MARGIN * abs(limit)):
                since = before[name].since if name in before else version
                now[name] = Alarm(name, value, limit, CAUSES[name], since)
        self.began = [alarm for name, alarm in now.items() if name not in before]
        self.ended = [alarm for name, alarm in before.items() if name not in now]
        self._active = now
        return list(now.values())

    def as_metrics(self) -> dict[str, float]:
        """Return `alarm/NAME` of every alarm after the last `check`: 1 if active, else 0."""
        return {PREFIX + name: float(name in self._active) for name in CAUSES}

    def _judge(self, row: Mapping[str, float | None]) -> dict[str, tuple[float, float, bool]]:
        """Return (value, limit, passed) of every alarm whose metric is in `row`."""
        o = self.options
        judged: dict[str, tuple[float, float, bool]] = {}
        for name, key, limit in (
            ("zero_variance", "train/zero_advantage_share", o.max_zero_variance_share),
            ("truncation", "response_length/clip_ratio", o.max_clip_ratio),
        ):
            if (value := _get(row, key)) is not None:
                judged[name] = value, limit, value > limit
        most, value = _get(row, GAP_LIMIT), _get(row, GAP)
        if most is not None and value is not None:
            most = limit_of_few(most, _get(row, GAP_TOKENS) or math.inf)
            judged["log_prob_gap"] = value, most, value > most
        if (ess := _get(row, "rollout_corr/rollout_is_eff_sample_size")) is not None:
            judged["low_ess"] = ess, o.min_ess, ess < o.min_ess
        if (entropy := _get(row, "actor/entropy")) is not None:
            limit = o.min_entropy
            if len(self._entropies) == o.entropy_rows:
                limit = max(limit, o.min_entropy_share * statistics.fmean(self._entropies))
            else:
                self._entropies.append(entropy)
            judged["entropy_collapse"] = entropy, limit, entropy < limit
        if (norm := _get(row, "actor/grad_norm")) is not None:
            # Against the median of earlier norms. While it is 0, the usual size is unknown.
            known = len(self._norms) >= o.min_grad_rows
            median = statistics.median(self._norms) if known else 0.0
            most = o.max_grad_spike * median if median else math.inf
            self._norms.append(norm)
            judged["gradient_spike"] = norm, most, norm > most
        if (std := _get(row, "reward/std")) is not None:
            self._equal = 0 if std else self._equal + 1
            most = o.equal_reward_versions
            judged["equal_rewards"] = float(self._equal), float(most), self._equal >= most
        return judged


def _get(row: Mapping[str, float | None], key: str) -> float | None:
    value = row.get(key)
    return None if value is None or math.isnan(value) else value
