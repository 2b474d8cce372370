"""The accounts of simulated runs: of one attempt, and of three with a stop and a kill between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.report.accounts import DeviceAccount, FlowAccount, TokenAccount
from millrace.schedule.ledger import Ledger, LedgerSnapshot, State
from millrace.schedule.schedule import Schedule
from millrace.simulate.cost import CostModel
from millrace.types import Sample
from millrace.waits.registry import Event
from tests.pipeline.simulated import Outcome, simulate

COST = CostModel(reward_s=0.3, log_prob_token_s=0.0001)


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
    options = {"cost": COST, "replicas": accounts.replicas, **options}
    outcome = simulate(schedule, samples, watchers=accounts.watchers, **options)
    accounts.check_time()
    return outcome


def held(snapshot: LedgerSnapshot) -> int:
    """Return the tokens that a checkpoint has, counted from its trajectories."""
    count = 0
    for _, slot in snapshot.slots:
        sample = slot.sample
        trajectories = list(sample.trajectories if sample else slot.progress)
        trajectories += [sample.greedy] if sample and sample.greedy else []
        count += sum(len(s.tokens) for t in trajectories for s in t.segments)
    return count


def check_a_stop_and_a_kill(
    schedule: Schedule,
    samples: int,
    stop_at: float,
    cut: Callable[[int], int],
    held: Callable[[LedgerSnapshot], int] = held,
    **options: Any,
) -> None:
    """One attempt stops. A second one resumes, is killed after some version, and a third resumes.

    `cut` chooses one of so many checkpoints of the second attempt. `held` counts those of a snapshot.
    """

    def trained(done: list[Sample]) -> int:
        return sum(t.num_policy_tokens for s in done for t in s.trajectories)

    first = Accounts(options.pop("replicas", 1))
    stopped = run(schedule, samples, first, stop_at=stop_at, **options)
    snapshot = stopped.record.saved or stopped.ledger.snapshot()
    first.tokens.end(snapshot)
    totals = first.tokens.totals()
    assert sum(totals.values()) == first.tokens.generated
    assert totals.get("held", 0) == held(snapshot)

    second = Accounts(first.replicas, first.tokens.counts(snapshot), first.tokens.generated)
    resumed = run(schedule, samples, second, start=snapshot, **options)
    totals = second.tokens.totals()
    assert "held" not in totals and "lost" not in totals
    done = [s for o in (stopped, resumed) for _, s in o.trained]
    every = [t for s in done for t in (*s.trajectories, *([s.greedy] if s.greedy else []))]
    assert totals["trained"] == trained(done)
    assert totals.get("dead", 0) == sum(t.dead_tokens for t in every)

    # The second attempt is killed at its end instead. The third one resumes from some version.
    if not second.cuts:
        return
    at, kept, _ = second.cuts[cut(len(second.cuts))]
    third = Accounts(first.replicas, kept, second.tokens.generated)
    repeated = run(schedule, samples, third, start=at, **options)
    totals = third.tokens.totals()
    assert totals["trained"] == trained([*done[: at.retired], *(s for _, s in repeated.trained)])
    survives = sum(int(n) for n in kept.values()) + held(at)
    assert totals.get("lost", 0) == second.tokens.generated - survives and "held" not in totals
