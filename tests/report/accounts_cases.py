"""The accounts of simulated runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millrace.report.accounts.devices import DeviceAccount
from millrace.report.accounts.flow import FlowAccount
from millrace.report.accounts.tokens import TokenAccount
from millrace.schedule.ledger import Ledger, LedgerSnapshot, State
from millrace.schedule.schedule import Schedule
from millrace.waits.stream import Event
from tests.pipeline.simulated import Outcome, simulate


@dataclass
class Accounts:
    """The accounts of one simulated attempt, and their checks at every event."""

    replicas: int = 1
    counts: dict[str, float] = field(default_factory=dict)
    before: int = 0
    """Tokens that earlier attempts have recorded."""
    tokens: TokenAccount = field(init=False)
    flow: FlowAccount = field(init=False)
    devices: DeviceAccount = field(init=False)
    begin: float = 0.0
    now: float = 0.0
    cuts: list[tuple[LedgerSnapshot, dict[str, float], int]] = field(default_factory=list)
    """Each checkpoint that the run could save: ledger, counts, and tokens recorded then."""
    ledger: Ledger = field(init=False)
    _cut: LedgerSnapshot | None = None

    def watchers(self, now: float, ledger: Ledger) -> list[Any]:
        self.begin, self.ledger = now, ledger
        self.tokens = TokenAccount(self.counts, ledger.snapshot().slots, self.before)
        self.flow = FlowAccount(now)
        self.devices = DeviceAccount(
            now,
            ledger.schedule,
            self.flow,
            trainers=1,
            replicas={f"rollout-{i}": 1 for i in range(self.replicas)},
            limit=ledger.limit,
            retired=ledger.retired,
        )
        return [self.tokens, self.flow, self.devices, self.check]

    def check(self, event: Event) -> None:
        """Check the identities at every moment of the run."""
        self.now = event.time
        totals = self.tokens.totals()
        assert sum(totals.values()) == self.tokens.generated
        assert all(count > 0 for count in totals.values())
        trainers = (State.TAKEN, State.TRAINED, State.SEALED)
        if event.name == "published" and not self.ledger.count(*trainers):
            self._cut = self.ledger.snapshot()
        elif event.name == "stats" and self._cut is not None:  # the trainer saves after this
            counts = self.tokens.counts(self._cut)
            self.cuts.append((self._cut, counts, self.tokens.generated))
            self._cut = None

    def check_time(self) -> None:
        for _, seconds in self.devices.seconds(self.now).values():
            assert abs(seconds.total() - (self.now - self.begin)) <= 1e-6 * max(1.0, self.now)
            assert all(value >= 0 for value in seconds.values())


def run(schedule: Schedule, samples: int, accounts: Accounts, **options: Any) -> Outcome:
    return simulate(
        schedule, samples, replicas=accounts.replicas, watchers=accounts.watchers, **options
    )


def held(snapshot: LedgerSnapshot) -> int:
    """Return the tokens that a checkpoint has, counted from its trajectories."""
    count = 0
    for _, slot in snapshot.slots:
        sample = slot.sample
        trajectories = list(sample.trajectories if sample else slot.progress)
        trajectories += [sample.greedy] if sample and sample.greedy else []
        count += sum(len(s.tokens) for t in trajectories for s in t.segments)
    return count
