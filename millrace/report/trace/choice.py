"""Which samples a trace draws: all of them, or one in 2, 4, ... 64.

A sample is drawn with its states, its requests and its scores, or not at all. Requests and scores of
validations are chosen in the same way. They are almost all events of a fast run.

The loop chooses, because an event that waits in a queue costs more than one that is thrown away.
"""

from __future__ import annotations

from zlib import crc32

from millrace.report.accounts.tokens import VALIDATION

SAMPLES = "samples"
"""The track of samples."""
STATES = frozenset({"waiting", "running", "ready", "taken", "trained", "sealed"})
ENDS = frozenset({"retired", "dropped"})
CALLS = frozenset({"request", "score", "log_probs"})
"""The names of requests to replicas, and of calls of the reward and of teachers."""
MOST_EVERY = 64
"""At least one sample in so many is drawn."""

_ALL = 2**32 - 1
"""The largest hash."""


class SampleChoice:
    """Chooses the samples that are drawn. All of it runs on the event loop, but `draw`."""

    def __init__(self) -> None:
        self.calls = 0
        """All requests and scores so far."""
        self._least = _ALL
        """A sample is drawn if the hash of its number is not above this."""
        self._samples: set[str] = set()
        """The samples in slots that are drawn. One that has begun to be drawn is drawn to its end."""
        self._running: dict[str, int] = {}
        """How many calls of a key run and are drawn. Scores of one sample share a key."""

    def draw(self, every: int) -> None:
        """Draw one sample in `every` from now on. A larger number draws some of the same samples."""
        self._least = _ALL // every

    def moves(self, name: str, key: str) -> bool:
        """Return whether an event of a sample is drawn."""
        if key in self._samples:
            if name in ENDS:
                self._samples.remove(key)
            return True
        chosen = self._chosen(key)
        if chosen and name in STATES:
            self._samples.add(key)
        return chosen

    def calls_for(self, phase: str, key: str) -> bool:
        """Return whether the begin or the end of a request or a score is drawn."""
        running = self._running
        if phase == "begin":
            self.calls += 1
            number = key[len(VALIDATION) :] if key.startswith(VALIDATION) else key
            sample = number.partition("/")[0]
            if sample not in self._samples and not self._chosen(sample):
                return False
            running[key] = running.get(key, 0) + 1
            return True
        if key not in running:
            return False
        running[key] -= 1
        if not running[key]:
            del running[key]
        return True

    def _chosen(self, number: str) -> bool:
        # A remainder instead of a hash would be biased if every second row is easy.
        return crc32(number.encode("utf-8", "replace")) <= self._least
