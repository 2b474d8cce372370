"""Metrics of a user's function, for the row of each version.

    def f(samples: tuple[Sample, ...], decode: Callable[[Tokens], str]) -> dict[str, float]

`samples` trained the version, in that order. A run outlives errors of the function: the first one is
a warning, and each row counts them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from millrace.errors import bad_value
from millrace.types import PolicyVersion, Sample, Tokens
from millrace.waits.registry import Event, part

KEY = "observe.metrics"
PREFIX = "user/"
PART = "user_metrics"
"""The state of the trainer while the function runs."""
OURS = ("errors", "seconds")
"""Names of metrics that are not the function's."""
_SLOW_S = 1.0

Decode = Callable[[Tokens], str]
Function = Callable[[tuple[Sample, ...], Decode], Any]
"""It should return numbers by name, and nobody can promise that."""


class UserMetrics:
    """The user's function, and the samples of the versions that have no row yet.

    It watches local steps.
    """

    names = frozenset({"stepped"})

    def __init__(
        self,
        spec: str,
        function: Function,
        decode: Decode,
        note: Callable[[str], None],
        failure: Callable[[BaseException], str],
    ) -> None:
        """`failure` describes an error of the function."""
        self._spec, self._function, self._decode = spec, function, decode
        self._note, self._failure = note, failure
        self._samples: dict[PolicyVersion, list[Sample]] = defaultdict(list)
        self._errors = 0
        self._is_slow = False

    def __call__(self, event: Event) -> None:
        self._samples[event.facts["version"] + 1] += event.facts["samples"]

    def row(self, version: PolicyVersion) -> dict[str, float]:
        """Return the metrics of a version. Call this once for each, in order."""
        samples, began = tuple(self._samples.pop(version, ())), time.perf_counter()
        with part(PART, "", f"{KEY}={self._spec}"):
            values, wrong = self._call(samples)
        seconds = time.perf_counter() - began
        if wrong:
            self._errors += 1
            if self._errors == 1:
                then = "the run goes on without these figures, and user/errors counts such versions"
                self._note(f"warning: {KEY}={self._spec}: for version {version} {wrong}: {then}")
        if seconds > _SLOW_S and not self._is_slow:
            self._is_slow = True
            rule = f"took {seconds:.1f} s for version {version}, and both loops wait for it"
            self._note(f"warning: {KEY}={self._spec} {rule}: user/seconds has the time")
        return values | {f"{PREFIX}errors": self._errors, f"{PREFIX}seconds": seconds}

    def try_out(self, samples: tuple[Sample, ...]) -> None:
        """Raise ConfigError if the function fails on these samples."""
        if wrong := self._call(samples)[1]:
            fix = "a function that returns numbers by name: dict[str, float]"
            raise bad_value(KEY, self._spec, f"on two made-up samples {wrong}", fix)

    def _call(self, samples: tuple[Sample, ...]) -> tuple[dict[str, float], str]:
        """Return what the function says, and what is wrong with it."""
        try:
            found = self._function(samples, self._decode)
        except Exception as error:  # noqa: BLE001 - the user's function
            return {}, f"it raised {self._failure(error)}"
        if not isinstance(found, Mapping):
            return {}, f"it returned {found!r:.80}, which is no dict"
        values, wrong = dict[str, float](), ""
        for name, value in found.items():
            number = _number(value)
            if not isinstance(name, str) or not name or not name.isprintable() or name in OURS:
                wrong = wrong or f"it names a metric {name!r:.80}, which is no name of its own"
            elif number is None:
                wrong = wrong or f"its {name!r} is {value!r:.80}, which is no number"
            else:
                values[PREFIX + name] = number
        return values, wrong


def _number(value: Any) -> float | None:
    """Return a number of any type, such as numpy's and torch's, and None for anything else."""
    if isinstance(value, str) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
