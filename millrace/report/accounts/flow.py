"""The account of waiting: how long samples are in each state, and how long requests take."""

from __future__ import annotations

from millrace.observe.timing import Integral
from millrace.report.accounts.tokens import VALIDATION
from millrace.schedule.ledger import State
from millrace.waits.stream import Event


class FlowAccount:
    """A watcher of samples, requests, rewards and teachers. Validations do not count."""

    names = frozenset({"request", "score", "log_probs", "retired", "dropped", *map(str, State)})

    def __init__(self, now: float) -> None:
        self.slots = {state: Integral(now) for state in State}
        """Sample-seconds by state, and the number of samples in it."""
        self.drawing, self.scoring = Integral(now), Integral(now)
        """Seconds of all requests, and of all calls of the reward."""
        self.reading = Integral(now)
        """Seconds of all calls of teachers outside of the trainer."""
        self.any_score = Integral(now)
        """Seconds with at least one call of the reward."""
        self.requests = self.tokens = self.scores = self.retired = 0
        """Requests and their tokens, calls of the reward, and samples that have come to an end."""
        self._states: dict[str, State] = {}

    def __call__(self, event: Event) -> None:
        now, track, name, phase, key, facts = event
        by = 1 if phase == "begin" else -1
        if track == "samples":
            self._move(event)
        elif key.startswith(VALIDATION):
            return
        elif name == "request":
            self.drawing.change(now, by)
            if phase == "end":
                self.requests += 1
                self.tokens += facts.get("tokens", 0)
        elif name == "log_probs":
            self.reading.change(now, by)
        elif name == "score":
            self.scoring.change(now, by)
            if (self.scoring.level > 0) != self.any_score.level:
                self.any_score.change(now, 1 if self.scoring.level > 0 else -1)
            self.scores += phase == "end"

    def _move(self, event: Event) -> None:
        ends = event.name in ("retired", "dropped")
        if not ends and event.name not in self.slots:
            return
        if (before := self._states.pop(event.key, None)) is not None:
            self.slots[before].change(event.time, -1)
        if ends:
            self.retired += event.name == "retired"
        else:
            self._states[event.key] = state = State(event.name)
            self.slots[state].change(event.time, 1)

    @property
    def occupied(self) -> int:
        """The number of samples in a slot."""
        return len(self._states)

    def count(self, one: State, other: State) -> int:
        """Return the number of samples in one of two states."""
        return self.slots[one].level + self.slots[other].level
