"""The proof of engines on the virtual clock: every mode, lost and joining replicas, wrong engines."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from millrace.errors import GapError, ReplicaLost
from millrace.observe.gap import DISPLACED, TRUE
from millrace.pipeline.proof import BUDGET_S, Limits, Proof, rising
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.replicas.pool import RolloutPool
from millrace.replicas.roster import Roster
from millrace.rollout.episode import SingleTurn
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import Schedule
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.train.rows import rows_of_samples
from millrace.types import Floats, Sample, SamplingParams, Segment, floats_of
from tests.pipeline.simulated import RUNS, LongTail, Record, schedule_of

pytestmark = pytest.mark.virtual_clock
COST = CostModel()


class Displaced(SimTrainEngine):
    """A trainer whose log-probs follow its weights."""

    def __init__(self) -> None:
        super().__init__(COST)
        self.away, self.bits = False, 0.0
        self.changes: list[bool] = []

    async def displace(self, away: bool) -> None:
        self.away = away
        self.changes.append(away)

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        value = -0.7 if self.away else -0.5
        return [[value] * t.num_policy_tokens for s in samples for t in s.trajectories]

    async def reference_log_probs(
        self, samples: tuple[Sample, ...], seconds: float, eight_bit: bool = False
    ) -> list[list[list[float]]]:
        exact, moved = await super().reference_log_probs(samples, seconds), self.bits * eight_bit
        return [[[x - moved for x in own], ranks] for own, ranks in exact]


@dataclass
class Engine(SimRolloutEngine):
    """A replica whose log-probs follow the weights that it got."""

    train: Displaced
    wrong: Callable[[int], float] = lambda version: 0.0
    """What it adds to its log-probs, by version."""
    weights: bool = False
    drawn_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        SimRolloutEngine.__init__(self, COST, slots=24)

    async def swap(self, version: int) -> float:
        paused = await super().swap(version)
        self.weights = self.train.away
        return paused

    async def generate(self, tokens: Any, params: SamplingParams, session: str) -> Any:
        self.drawn_at.append(self._running + 1)
        segments = await super().generate(tokens, params, session)
        return tuple(replace(s, log_probs=self._log_probs(s)) for s in segments)

    def _log_probs(self, segment: Segment) -> Floats:
        value = -0.7 if segment.version % 2 else -0.5  # Version 1 is the displaced one.
        return floats_of([value + self.wrong(segment.version)] * len(segment.tokens))


@dataclass
class World:
    train: Displaced
    engines: list[Engine]
    pool: RolloutPool
    proof: Proof
    refused: list[GapError]
    notes: list[str]


class Routed(Engine):
    """A replica that returns an expert for each token that it read, from `experts_from` on.

    An interruption ends the first call of each turn before a token is drawn.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begun: set[tuple[str, int]] = set()

    async def generate(self, tokens: Any, params: SamplingParams, session: str) -> Any:
        if (turn := (session, len(tokens))) not in self.begun:
            self.begun.add(turn)
            return ()
        segments = await super().generate(tokens, params, session)
        if not segments:
            return segments
        assert params.experts_from is not None
        read = len(tokens) - 1 + sum(len(s.tokens) for s in segments) - params.experts_from
        return (replace(segments[0], experts=array("B", [1] * read)), *segments[1:])


async def world(
    schedule: Schedule | None = None,
    engines: int = 2,
    *,
    kind: type[Engine] = Engine,
    params: SamplingParams = SamplingParams(64),  # noqa: B008 - immutable
    limits: Limits = Limits("float32", 1e-5, 128, 48),  # noqa: B008 - immutable
    swapped: bool = True,
    **options: Any,
) -> World:
    schedule = schedule or schedule_of("async_partial")
    train = Displaced()
    replicas = [kind(train) for _ in range(engines)]
    pool = RolloutPool(replicas, Roster(engines, max_restarts=1))
    refused: list[GapError] = []
    notes: list[str] = []
    proof = Proof(
        train,
        pool,
        SimWeightSync(COST, replicas),
        turns_of(schedule.colocated, pool, train),
        LongTail(),
        params,
        schedule,
        limits,
        note=notes.append,
        refuse=refused.append,
        **options,
    )
    for engine in replicas * swapped:
        await engine.swap(0)
    return World(train, replicas, pool, proof, refused, notes)


async def refusal(one: World) -> GapError:
    with pytest.raises(GapError) as caught:
        await one.proof.run(0)
    return caught.value


@pytest.mark.parametrize("mode", [m for m in RUNS if "+" not in m])
async def test_every_mode_proves_all_replicas_in_both_rounds_and_brings_the_weights_back(
    mode: str,
) -> None:
    one = await world(schedule_of(mode))
    since = asyncio.get_running_loop().time()
    verdict = await one.proof.run(0)
    assert asyncio.get_running_loop().time() - since < BUDGET_S
    assert not one.proof.due()
    assert verdict and verdict.error() is None and verdict.gap.worst < 1e-6
    assert all(verdict.rounds[name].tokens > 500 for name in (TRUE, DISPLACED))
    assert one.train.changes == [True, False]
    for engine in one.engines:
        assert engine.version == 0 and not engine.weights and not engine.asleep
        assert {1, 2, 4, 8, 16, 24} <= set(engine.drawn_at)
    assert one.proof.limit == 1e-5
    assert "engines proven" in one.notes[0]


async def test_every_token_that_the_proof_reads_has_its_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []

    async def log_probs(self: Displaced, samples: tuple[Sample, ...]) -> list[list[float]]:
        rows = rows_of_samples(samples)  # It refuses samples that lack experts.
        assert rows.experts is not None
        for start, length in zip(rows.starts, rows.inputs, strict=True):
            assert (rows.experts[start : start + length] == 1).all()
            read.append(int(length))
        return await old(self, samples)

    old = Displaced.log_probs
    monkeypatch.setattr(Displaced, "log_probs", log_probs)
    one = await world(kind=Routed, params=SamplingParams(64, experts_from=0))
    verdict = await one.proof.run(0)
    assert verdict and verdict.error() is None and len(read) > 50


@pytest.mark.parametrize(("version", "where"), [(0, TRUE), (1, DISPLACED)])
async def test_a_replica_that_is_wrong_with_some_weights_ends_the_run_before_training(
    version: int, where: str
) -> None:
    one = await world()
    one.engines[1].wrong = lambda drawn: 0.1 * (drawn == version)
    error = await refusal(one)
    assert f"({where})" in str(error) and "guard.on_gap=warn" in str(error)
    assert error.exit_code == 3 and one.train.changes == [True, False]


async def test_one_wrong_replica_of_eight_is_found_although_the_mean_is_within_the_limit() -> None:
    """Its gap is 4 limits, so the mean of all is half a limit. A probe must find it, too."""
    one = await world(engines=8)
    one.engines[3].wrong = lambda version: 4e-5
    error = await refusal(one)
    await one.proof.probe(0, one.proof.draws.pause)
    assert one.proof.limit == 1e-5
    assert [name in str(error) for name in ("replica 3", "replica 4")] == [True, False]
    assert len(one.refused) == 1 and "replica 3" in str(one.refused[0])


async def test_with_warn_the_run_says_it_and_goes_on() -> None:
    one = await world(stops=False)
    one.engines[0].wrong = lambda version: 0.1
    verdict = await one.proof.run(0)
    assert verdict and verdict.error() is not None and one.notes[0].startswith("warning: ")


async def eight_bits(bits: float, **options: Any) -> World:
    """Return a world whose engines draw in 8 bits, as they should."""
    one = await world(limits=Limits("fp8", 1e-3, 128, 48, quantization=0.1), **options)
    one.train.bits = bits
    for engine in one.engines:
        engine.wrong = lambda version: -bits
    return one


@pytest.mark.parametrize(
    ("bits", "version", "stops", "limit", "note"),
    [
        (0.08, 0, True, 0.15, "8 bits alone 0.08 (limit 0.1)"),  # not three floors
        # Otherwise a resume would refuse what the run trained with.
        (0.13, 4, True, 0.15, "8 bits alone 0.13 (limit 0.15)"),
        (0.2, 0, False, 3 * 0.2, "warning: "),
    ],
    ids=["near enough", "resumed", "too far, with warn"],
)
async def test_rollouts_in_8_bits_train(
    bits: float, version: int, stops: bool, limit: float, note: str
) -> None:
    one = await eight_bits(bits, stops=stops)
    for engine in one.engines:
        await engine.swap(version)
    verdict = await one.proof.run(version)
    assert verdict and (verdict.error() is None) == stops
    assert note in one.notes[0] and one.proof.limit == pytest.approx(limit)


async def test_rollouts_in_8_bits_that_are_too_far_end_the_run_before_training() -> None:
    one = await eight_bits(0.13)
    error = str(await refusal(one))
    assert "guard.max_quantization_gap" in error and "guard.on_gap=warn" in error
    assert one.train.changes == [True, False] and "engines proven" not in str(one.notes)


async def test_a_probe_without_a_proof_limits_the_gap_of_8_bits_too() -> None:
    """Assumed floors would allow 0.6 nats."""
    one = await eight_bits(0.3)
    roster = one.pool.roster
    roster.max_restarts = 10**9
    for replica in (0, 1):
        roster.lose(replica, 0, "it died")
    await one.proof.run(0)
    roster.restarted(0)
    roster.proven(0, 1)
    await one.proof.probe(0, one.proof.draws.pause)
    assert len(one.refused) == 1


async def test_a_replica_that_is_lost_meanwhile_does_not_end_the_proof() -> None:
    one = await world()
    draws = one.engines[1].generate

    async def dies(*request: Any) -> Any:
        if len(one.engines[1].drawn_at) == 9:
            raise ReplicaLost("it died")
        return await draws(*request)

    one.engines[1].generate = dies  # type: ignore[method-assign, assignment]
    verdict = await one.proof.run(0)
    assert verdict and verdict.error() is None and one.pool.roster.live == [0]


@pytest.mark.parametrize("lost", ["from the start", "in each try"])
async def test_engines_without_a_proof_are_not_called_proven_and_are_probed_once_they_serve(
    lost: str,
) -> None:
    one = await world()
    roster, draw = one.pool.roster, one.engines[0].generate
    roster.max_restarts = 10**9

    def returns() -> None:
        roster.restarted(0)
        roster.proven(0, roster.incarnation(0))

    async def dies(*request: Any) -> Any:
        roster.lose(0, roster.incarnation(0), "it died")
        returns()
        return await draw(*request)

    one.engines[0].wrong = lambda version: 0.1
    roster.lose(1, 0, "it died")
    if lost == "from the start":
        roster.lose(0, 0, "it died")
    else:
        one.engines[0].generate = dies  # type: ignore[method-assign, assignment]
    verdict = await one.proof.run(0)
    if lost == "from the start":
        returns()
    one.engines[0].generate = draw  # type: ignore[method-assign]
    assert verdict is None and one.proof.due() and one.proof.limit
    await one.proof.probe(0, one.proof.draws.pause)
    assert one.notes[0].startswith("warning: ") and len(one.refused) == 1


async def test_a_replica_that_drew_no_token_is_not_proven_by_the_others() -> None:
    one = await world()
    stats = one.engines[1].stats

    async def no_slots() -> Any:
        return replace(await stats(), slots=0)

    one.engines[1].stats = no_slots  # type: ignore[method-assign]
    await one.proof.run(0)
    assert one.proof.due() and not one.engines[1].drawn_at


async def test_a_replica_that_draws_nothing_in_a_probe_does_not_cost_one_at_every_version() -> None:
    one = await world()
    await one.proof.run(0)
    roster, interrupted = one.pool.roster, asyncio.Event()
    roster.lose(1, 0, "it died")
    roster.restarted(1)
    roster.proven(1, 1)

    async def nothing(*request: Any) -> tuple[()]:
        await interrupted.wait()
        return ()

    async def interrupt() -> None:
        interrupted.set()

    one.engines[1].generate = nothing  # type: ignore[method-assign, assignment]
    one.engines[1].interrupt = interrupt  # type: ignore[method-assign]
    await one.proof.probe(0, one.proof.draws.pause)
    assert not one.proof.due()
    await asyncio.sleep(36_000)
    assert one.proof.due() and "rollout-1" in one.notes[-1]


@pytest.mark.parametrize("mode", ["async_partial", "colocate_sync"])
async def test_a_replica_that_joins_is_proven_before_the_next_step(mode: str) -> None:
    one = await world(schedule_of(mode))
    await one.proof.run(0)
    roster = one.pool.roster
    roster.lose(1, 0, "it died")
    roster.restarted(1)
    assert not one.proof.due(), "it has no weights yet"
    roster.proven(1, 1)
    assert one.proof.due()
    one.engines[1].wrong = lambda version: 0.1
    drawn = len(one.engines[1].drawn_at)
    await one.proof.probe(0, one.proof.draws.pause)
    assert not one.proof.due() and len(one.engines[1].drawn_at) - drawn == 8
    assert len(one.refused) == 1 and "version 0" in str(one.refused[0])


async def test_a_mode_without_tokens_of_the_live_version_draws_some_for_a_small_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulated trainer reports no gap. So the trainer has the replicas probed."""
    schedule = schedule_of("one_step_off")
    one = await world(schedule, swapped=False)
    ledger = Ledger(schedule, 4000)
    queue = SampleQueue(ledger, deadline_s=1e8)
    params = SamplingParams(max_tokens=1000)
    roller = SampleRoller(SingleTurn(), SimReward(COST), str, params, 4, seed=0)
    rollouter = Rollouter(queue, LongTail(), one.pool, roller)
    for engine in one.engines:
        engine.wrong = lambda version: 0.2 * (version % 2)  # Undo what `Engine` adds.
    probes: list[float] = []
    now, probe = asyncio.get_running_loop().time, one.proof.probe

    async def timed(*args: Any) -> None:
        since = now()
        await probe(*args)
        probes.append(now() - since)

    async def nothing(version: int) -> None: ...

    monkeypatch.setattr(one.proof, "probe", timed)
    monkeypatch.setattr(one.proof, "run", nothing)
    one.proof.floor = 0.0
    turns = turns_of(schedule.colocated, one.pool, one.train)
    sync = SimWeightSync(COST, one.engines)
    trainer = Trainer(queue, rollouter, one.train, turns, sync, Record(ledger), one.proof)
    await trainer.begin()
    since = now()
    await run_pipeline(rollouter, trainer)
    assert not one.refused and len(probes) > 2 and sum(probes) / (now() - since) < 0.02


@pytest.mark.parametrize(
    ("top", "most"), [(1, 64), (7, 64), (64, 2), (512, 64), (1024, 64), (256, 2)]
)
def test_numbers_of_requests_rise_to_the_top_in_so_many_steps(top: int, most: int) -> None:
    sizes = rising(top, most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == top and len(sizes) <= most + 4
