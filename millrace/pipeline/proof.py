"""The proof of a run's engines: what replicas draw, the trainer must give the same log-probs.

    waits for  draws of real prompts on every replica; the trainer's log-probs of them; two syncs
    produces   a limit for the gap of every version, or a GapError before the first step

The draws are no samples: the Ledger does not know them, and nothing trains on them. Requests rise
to all slots and fall again, so every captured graph of an engine runs. The weights are the true
ones, then displaced ones, so that a part that no sync reaches shows itself, then the true ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from millrace.errors import GapError, ReplicaLost
from millrace.observe import gap as gaps
from millrace.observe.gap import Drawn, Verdict
from millrace.observe.stopwatch import Parts, untimed
from millrace.pipeline.turns import Pause, Turns
from millrace.ports import RolloutStats, TrainEngine, WeightSync
from millrace.rollout.pool import RolloutPool
from millrace.schedule.schedule import OnSync, Schedule
from millrace.types import (
    Author,
    PolicyVersion,
    Prompt,
    Sample,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    joined,
)

T = TypeVar("T")

BUDGET_S = 20.0
"""The time of a proof, about. A slow engine gets fewer requests."""
_RISE, _FALL, _SWAPPED = 0.15, 0.3, 0.12
"""Shares of it: until no more requests begin, until all end, and for draws after the swap."""
_COMPARE, _REFERENCE = 0.12, 0.03
"""Shares of it for the trainer's log-probs of one round, and for those of an independent model."""
_TOKENS = 128
"""Tokens of a request, if the run allows them."""
_PROMPTS = 64
_ASKED = 4
"""How often each prompt is asked at once."""
_LONG = 16384
_SMALL = 8
"""Steps between numbers of requests, at the least: engines capture a graph for each eighth."""
_PROBE = 8
_PROBE_TOKENS = 32
_RARELY = 200.0
"""A probe may take one part in this many of the time."""
_TRIES = 3
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of a run that its proof needs."""

    dtype: str
    least: float
    """The smallest limit of a gap, nats."""
    max_prompt_length: int
    max_len: int
    """Tokens of a prompt and its response."""
    at_once: int
    """The largest number of trajectories that the run draws at once."""
    gap: float | None = None
    """The limit that a user set."""


class Prompts(Protocol):
    """The prompt stream."""

    def __getitem__(self, index: int) -> Prompt: ...


@dataclass(slots=True, eq=False)
class _Request:
    """A conversation of one or two turns with a replica."""

    session: str
    prompt: Tokens
    seed: int
    lengths: tuple[int, ...]
    kinds: frozenset[str]
    beside: float = 0.0
    """The share of its replica's requests that ran at its start."""
    segments: list[Segment] = field(default_factory=list)

    def tokens(self) -> Tokens:
        return joined([self.prompt, *(s.tokens for s in self.segments)])

    def sample(self, index: int) -> Sample:
        whole = Trajectory.of(tuple(self.segments))
        return Sample(Prompt(index, self.prompt, "", "proof"), (whole,))

    @property
    def drawn(self) -> list[Segment]:
        return [s for s in self.segments if s.author is Author.POLICY]


class Proof:
    """Proves the engines at the start of a run, and replicas that join later."""

    def __init__(
        self,
        engine: TrainEngine,
        pool: RolloutPool,
        sync: WeightSync,
        turns: Turns,
        prompts: Prompts,
        params: SamplingParams,
        schedule: Schedule,
        limits: Limits,
        *,
        incarnation: Callable[[], int] = lambda: 0,
        note: Callable[[str], None] = lambda text: None,
        refuse: Callable[[GapError], None],
        stops: bool = True,
        budget_s: float = BUDGET_S,
        seed: int = 0,
    ) -> None:
        """`stops` says whether `run` raises an error or notes it. `incarnation` counts the trainers of the run. `refuse` gets the error of a later probe."""
        self.engine, self.sync, self.turns = engine, sync, turns
        self.pool, self.prompts, self.schedule, self.limits = pool, prompts, schedule, limits
        self.params = replace(params, stop=(), ignore_eos=True)
        self.floor: float | None = None
        self._incarnation, self._note, self._refuse = incarnation, note, refuse
        self._stops, self._budget_s = stops, budget_s
        self._proven: set[tuple[int, int]] = set()
        self._gate, self._idle = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._idle.set()
        self._flying = 0
        self._over = False
        """Whether draws end with what they have."""
        self._displaced = False
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._begun = seed
        self._probe_at, self._probe_s = 0.0, 0.0
        self._drawn_tokens = 0
        self._sizes: set[int] = set()

    @property
    def limit(self) -> float | None:
        """Return the limit of a version's gap, once it is known."""
        if self.limits.gap is not None or self.floor is None:
            return self.limits.gap
        return gaps.limit_of(self.floor, self.limits.least)

    # -- the start of a run

    async def run(self, version: PolicyVersion) -> Verdict | None:
        """Prove all replicas, which have the weights of `version`. Rollouts have the devices.

        Return None if workers were lost again and again meanwhile. Raises GapError.
        """
        clock = asyncio.get_running_loop().time
        since = clock()
        for _ in range(_TRIES):
            before = self._workers()
            self._drawn_tokens, self._sizes = 0, set()
            try:
                verdict = await self._rounds(version)
            finally:
                self._cancel()
            if self._workers() == before:
                break
        else:
            self._note("warning: the engines are not proven: workers were lost meanwhile")
            return None
        self.floor = verdict.floor
        self._proven |= set(before[1])
        self._put_off()
        if error := verdict.error():
            if self._stops:
                raise error
            self._note(f"warning: {error}")
            return verdict
        self._note(self._line(verdict, clock() - since))
        return verdict

    def _line(self, verdict: Verdict, seconds: float) -> str:
        sizes = f"1 to {max(self._sizes, default=0)} requests at once"
        assumed = "" if verdict.explained else ", assumed: no room for an independent model"
        return (
            f"engines proven: {self._drawn_tokens:,} tokens in {seconds:.1f} s ({sizes}), "
            f"gap {verdict.gap.mean:.2g} (limit {verdict.limit:.2g}{assumed}), "
            f"worst token {verdict.gap.worst:.2g}"
        )

    def _workers(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        roster = self.pool.roster
        live = tuple((i, roster.incarnation(i)) for i in roster.live)
        return self._incarnation(), live

    async def _rounds(self, version: PolicyVersion) -> Verdict:
        clock, budget = asyncio.get_running_loop().time, self._budget_s
        live = self.pool.roster.live
        first = await self._rise_and_fall(live, clock())
        self._displaced = False
        lasting = [await self._last(k) for k in live]
        async with self.turns.window(self._pause, untimed):
            true = await self._compared(first, version)
            await self.engine.displace(True)
            await self.turns.make_room()
            await self.sync.transfer(version + 1)
            async with self.turns.activation(self._pause):
                await self.sync.activate(version + 1)
            self._displaced = True
        until = clock() + budget * _SWAPPED
        second = self._again(live, first)
        for k, requests in second.items():
            self._begin(k, requests)
        await self._finish(until)
        drawn = [r for part in (*second.values(), *lasting) for r in part]
        async with self.turns.window(self._pause, untimed):
            displaced = await self._compared(drawn, version + 1, undo=True)
            await self.turns.make_room()
            await self.sync.transfer(version)
            async with self.turns.activation(self._pause):
                await self.sync.activate(version)
        rounds = {gaps.TRUE: true, gaps.DISPLACED: displaced}
        rounds = {name: d for name, d in rounds.items() if len(d.engine)}
        options: dict[str, Any] = {"dtype": self.limits.dtype, "least": self.limits.least}
        verdict = gaps.judge(rounds, **options)
        if verdict.findings and live:
            verdict = gaps.judge(rounds, **options, alone=await self._alone(live[0], version))
        return verdict

    async def _alone(self, replica: int, version: PolicyVersion) -> float | None:
        """Return the gap of a request that runs alone, for the causes of an error."""
        request = self._request(replica, 0, (min(_PROBE_TOKENS, self.params.max_tokens),))
        self._begin(replica, [request])
        await self._finish(asyncio.get_running_loop().time() + self._budget_s)
        async with self.turns.window(self._pause, untimed, keep_weights=True):
            drawn = await self._compared([request], version, reference=False)
        return gaps.gap(drawn.engine, drawn.trainer).mean if len(drawn.engine) else None

    # -- later

    def due(self) -> bool:
        """Whether a replica is not proven, or no version has shown its gap for long."""
        if self.floor is None:
            return False
        late = asyncio.get_running_loop().time() >= self._probe_at
        return late or bool(set(self._workers()[1]) - self._proven)

    def saw_gap(self) -> None:
        """Note that the gap of a version is known from its samples."""
        self._put_off()

    def _put_off(self) -> None:
        self._probe_at = asyncio.get_running_loop().time() + max(1.0, self._probe_s) * _RARELY

    async def probe(self, version: PolicyVersion, pause: Pause, part: Parts) -> None:
        """Compare a few tokens of every replica with the trainer, which has the same weights."""
        clock = asyncio.get_running_loop().time
        since, workers = clock(), self._workers()
        requests = []
        for k, _ in workers[1]:
            length = min(_PROBE_TOKENS, self.params.max_tokens)
            own = [self._request(k, i, (length,)) for i in range(_PROBE)]
            self._begin(k, own)
            requests += own
        await self._finish(clock() + self._budget_s)
        async with self.turns.window(pause, part, keep_weights=True):
            drawn = await self._compared(requests, version, reference=False)
        self._probe_s = clock() - since
        self._put_off()
        if self._workers() != workers:
            return
        self._proven |= set(workers[1])
        limit = self.limit
        if len(drawn.engine) and limit is not None:
            found = gaps.gap(drawn.engine, drawn.trainer)
            limit = gaps.limit_of_few(limit, found.tokens)
            if found.mean > limit:
                finding = gaps.Finding(gaps.TRUE, "the gap of a probe", found.mean, limit)
                causes = gaps.causes({gaps.TRUE: drawn}, [finding])
                figures = f"version {version}: {found}, limit {limit:.3g}"
                self._refuse(gaps.disagreement(figures, causes))

    # -- draws

    async def _rise_and_fall(self, replicas: Sequence[int], since: float) -> list[_Request]:
        """Draw for prompts of the run on every replica, with rising and falling numbers."""
        rise, fall = since + self._budget_s * _RISE, since + self._budget_s * _FALL
        parts = await asyncio.gather(*(self._rise(k, len(replicas), rise) for k in replicas))
        await self._interrupt(replicas)
        await self._finish(fall)
        return [request for part in parts for request in part]

    async def _rise(self, replica: int, replicas: int, until: float) -> list[_Request]:
        clock = asyncio.get_running_loop().time
        slots = (await self._stats(replica)).slots
        top = max(1, min(slots, -(-self.limits.at_once // max(1, replicas))))
        room = min(self.params.max_tokens, 2 * _TOKENS)
        if not slots:
            return []
        sizes = rising(top, max(1, room // 4))
        requests: list[_Request] = []
        since = clock()
        for number, size in enumerate(sizes):
            # Earlier ones last longer, so that all of them run at the top.
            length = min(room, _TOKENS + len(sizes) - number)
            group = [
                self._request(replica, i, self._turns(i, length))
                for i in range(len(requests), size)
            ]
            if number == len(sizes) - 1 and clock() - since < (until - since) / 2:
                long = self._long(replica, size - 1)
                group = group[: len(group) - len(long)] + long
            for request in group:
                request.beside = size / slots
            requests += group
            goal = (await self._stats(replica)).tokens + self._live(replica) + len(group)
            self._begin(replica, group)
            self._sizes.add(self._live(replica))
            await self._reach(replica, goal, until)
            if clock() >= until:
                break
        return requests

    def _turns(self, number: int, length: int) -> tuple[int, ...]:
        """Return the tokens of the turns of a request. Every eighth has a second turn.

        The context before it takes the rest of `length`, or less.
        """
        part = length // 3
        return (part, part) if number % 8 == 7 and part else (length,)

    def _request(
        self, replica: int, number: int, lengths: tuple[int, ...], prompt: Tokens | None = None
    ) -> _Request:
        asked = number % _ASKED
        kinds = {gaps.ASKED_AGAIN if asked else gaps.ASKED_FIRST} if prompt is None else set[str]()
        if prompt is None:
            prompt = self.prompts[number // _ASKED % _PROMPTS].tokens
        self._begun += 1
        # The names of a validation: nothing that counts samples counts these.
        return _Request(
            f"val/proof/{replica}/{number}", prompt, self._begun, lengths, frozenset(kinds)
        )

    def _long(self, replica: int, number: int) -> list[_Request]:
        """Return a request with the longest prompt that the run allows, made of real prompts."""
        longest, parts = min(self.limits.max_prompt_length, _LONG), [self.prompts[0].tokens]
        if longest < 2 * len(parts[0]):
            return []
        while sum(map(len, parts)) < longest and len(parts) < 4 * _PROMPTS:
            parts.append(self.prompts[len(parts) % _PROMPTS].tokens)
        length = min(self.params.max_tokens, _PROBE_TOKENS)
        request = self._request(replica, number, (length,), joined(parts)[:longest])
        request.kinds = frozenset({gaps.LONG})
        return [request]

    async def _last(self, replica: int) -> list[_Request]:
        """Keep requests running until the weights are displaced. Return those that last."""
        slots = (await self._stats(replica)).slots
        lasting: list[_Request] = []

        async def keep(number: int) -> None:
            while not self._displaced and replica in self.pool.roster.live:
                request = self._request(replica, number, (min(self.params.max_tokens, _TOKENS),))
                lasting[number] = request
                await self._draw(replica, request)
                await asyncio.sleep(0)

        count = min(slots, _PROBE)
        lasting += [self._request(replica, i, (1,)) for i in range(count)]
        for i in range(count):
            self._start(replica, keep(i))
        return lasting

    def _again(
        self, replicas: Sequence[int], first: Sequence[_Request]
    ) -> dict[int, list[_Request]]:
        """Return requests like the first ones, in the same sessions. Some continue those."""
        found: dict[int, list[_Request]] = {k: [] for k in replicas}
        length = min(self.params.max_tokens, _PROBE_TOKENS)
        for old in first:
            replica, number = map(int, old.session.split("/")[2:])
            if replica not in found or gaps.LONG in old.kinds:
                continue
            request = self._request(replica, number, (length,))
            whole = old.tokens()
            if number % _ASKED == 1 and len(whole) + length <= self.limits.max_len:
                request.prompt, request.kinds = whole, frozenset({gaps.SECOND})
            found[replica].append(request)
        return found

    def _begin(self, replica: int, requests: Iterable[_Request]) -> None:
        for request in requests:
            self._start(replica, self._draw(replica, request))

    def _start(self, replica: int, work: Any) -> None:
        self._tasks.setdefault(replica, []).append(asyncio.create_task(work, name="proof"))

    def _live(self, replica: int) -> int:
        return sum(not task.done() for task in self._tasks.get(replica, ()))

    async def _draw(self, replica: int, request: _Request) -> None:
        """Draw all turns of a request, through interruptions, until the end of the draws."""
        known = 0
        for number, length in enumerate(request.lengths):
            if number:
                context = request.prompt[: min(_SMALL, request.lengths[0])]
                request.segments.append(Segment(context, Author.ENVIRONMENT))
            drawn = 0
            while drawn < length:
                await self._gate.wait()
                if self._over:
                    return
                whole = request.tokens()
                params = replace(
                    self.params, max_tokens=length - drawn, offset=drawn, seed=request.seed + number
                )
                if params.experts_from is not None:
                    params = replace(params, experts_from=max(known - 1, 0))
                got = await self._generate(replica, whole, params, request.session)
                if got is None:
                    return
                request.segments += got
                drawn += sum(len(s.tokens) for s in got)
                known = len(whole) + sum(len(s.tokens) for s in got)
                self._drawn_tokens += sum(len(s.tokens) for s in got)
                if not got:
                    await asyncio.sleep(0)

    async def _generate(
        self, replica: int, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...] | None:
        """Return what a replica draws, or None if it is lost."""
        self._flying += 1
        self._idle.clear()
        try:
            call = self.pool.engines[replica].generate(tokens, params, session)
            return await self._asked(replica, call)
        finally:
            self._flying -= 1
            if not self._flying:
                self._idle.set()

    async def _stats(self, replica: int) -> RolloutStats:
        """Return the totals of a replica. One that is lost has no slots."""
        return await self._asked(replica, self.pool.engines[replica].stats()) or RolloutStats()

    async def _asked(self, replica: int, call: Awaitable[T]) -> T | None:
        """Return the answer of a replica, or None if it is lost."""
        incarnation = self.pool.roster.incarnation(replica)
        try:
            return await call
        except ReplicaLost as error:
            self.pool.roster.lose(replica, incarnation, str(error))
            return None

    async def _reach(self, replica: int, goal: int, until: float) -> None:
        """Wait until a replica has drawn `goal` tokens since its start, or nothing runs there."""
        clock = asyncio.get_running_loop().time
        while self._live(replica) and clock() < until:
            if (await self._stats(replica)).tokens >= goal:
                return
            await asyncio.sleep(_POLL_S)

    async def _interrupt(self, replicas: Iterable[int]) -> None:
        await asyncio.gather(*(self._asked(k, self.pool.engines[k].interrupt()) for k in replicas))

    async def _finish(self, until: float) -> None:
        """Wait for all draws. Those that run at `until` end with what they have."""
        tasks = [task for own in self._tasks.values() for task in own]
        left = until - asyncio.get_running_loop().time()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=max(0.0, left))
            if late:
                self._over = True
                while not all(task.done() for task in late):
                    await self._interrupt([k for k in self._tasks if self._live(k)])
                    await asyncio.sleep(0)
                self._over = False
        for task in tasks:
            task.result()
        self._tasks.clear()

    def _cancel(self) -> None:
        for task in [task for own in self._tasks.values() for task in own]:
            task.cancel()
        self._tasks.clear()

    @asynccontextmanager
    async def _pause(self) -> AsyncIterator[float | None]:
        """Pause the draws while the body runs, as the run pauses its rollouts at a sync."""
        schedule = self.schedule
        if schedule.on_sync is OnSync.SWAP and not schedule.colocated:
            yield None
            return
        self._gate.clear()
        if schedule.on_sync is not OnSync.DRAIN:
            await self._interrupt([k for k in self._tasks if self._live(k)])
        await self._idle.wait()
        try:
            yield None
        finally:
            self._gate.set()

    # -- comparison

    async def _compared(
        self,
        requests: Sequence[_Request],
        version: PolicyVersion,
        *,
        reference: bool = True,
        undo: bool = False,
    ) -> Drawn:
        """Return the tokens that `version` drew, with the trainer's log-probs and the reference's.

        On a slow trainer, these are some of the requests. `undo` ends the displacement.
        """
        chosen = [r for r in spread(requests) if any(_own(s, version) for s in r.drawn)]
        samples = [r.sample(i) for i, r in enumerate(chosen)]
        clock, budget = asyncio.get_running_loop().time, self._budget_s
        trainer: list[list[float]] = []
        size, rate, taken, until = 1, 0.0, 0.0, clock() + budget * _COMPARE
        while len(trainer) < len(samples) and (not trainer or clock() + 2 * taken < until):
            part, since = tuple(samples[len(trainer) : len(trainer) + size]), clock()
            trainer += await self.engine.log_probs(part)
            taken, size = clock() - since, 2 * size
            rate = sum(_cells(part)) / taken if taken else float("inf")
        own: list[list[float]] = []
        unchanged: list[list[float]] | None = None
        some: tuple[Sample, ...] = ()
        if reference and trainer:
            cells = np.cumsum(_cells(samples[: len(trainer)]))
            count = max(1, int((cells <= rate * budget * _REFERENCE / 4).sum()))
            some = tuple(samples[: min(count, len(trainer))])
            own = await self.engine.reference_log_probs(some)
        if undo:
            await self.engine.displace(False)
            unchanged = await self.engine.log_probs(some) if own else None
        return drawn_of(chosen[: len(trainer)], version, trainer, own, unchanged)


def rising(top: int, most: int) -> list[int]:
    """Return at most `most` rising numbers of requests, about. The last one is `top`."""
    step = max(_SMALL, -(-top // most))
    small = [size for size in (1, 2, 4) if most > _SMALL]
    return sorted({size for size in (*small, *range(step, top, step)) if size < top} | {top})


def spread(requests: Sequence[_Request]) -> list[_Request]:
    """Return the requests in a fixed order in which the first ones stand for all."""
    order = sorted(range(len(requests)), key=lambda i: i * 2654435761 % 2**32)
    return [requests[i] for i in order]


def _cells(samples: Sequence[Sample]) -> list[int]:
    return [len(s.prompt.tokens) + s.trajectories[0].num_tokens for s in samples]


def _own(segment: Segment, version: PolicyVersion) -> bool:
    """Return whether a segment was drawn with one version's weights and KV alone."""
    return segment.version == version and segment.kv_version is None and bool(segment.tokens)


def drawn_of(
    requests: Sequence[_Request],
    version: PolicyVersion,
    trainer: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]],
    unchanged: Sequence[Sequence[float]] | None,
) -> Drawn:
    """Return the tokens of requests as arrays. `reference` and `unchanged` have the first ones."""
    count = sum(len(s.tokens) for r in requests for s in r.drawn)
    engine = np.concatenate(
        [np.asarray(s.log_probs, np.float64) for r in requests for s in r.drawn] or [np.zeros(0)]
    )
    keep = np.zeros(count, dtype=bool)
    names = (
        *(gaps.EARLY, "tokens 8 to 63", gaps.LATE, gaps.FEW, gaps.MANY, gaps.ASKED_FIRST),
        *(gaps.ASKED_AGAIN, gaps.STRAIGHT, gaps.CONTINUED, gaps.LONG, gaps.SECOND),
    )
    kinds = {name: np.zeros(count, dtype=bool) for name in names}
    at = 0
    for request in requests:
        place, interrupted = 0, False
        for segment in request.drawn:
            size = len(segment.tokens)
            here = slice(at, at + size)
            keep[here] = _own(segment, version)
            places = np.arange(place, place + size)
            kinds[gaps.EARLY][here] = places < _SMALL
            kinds["tokens 8 to 63"][here] = (places >= _SMALL) & (places < 64)
            kinds[gaps.LATE][here] = places >= 64
            if request.beside:
                near = (
                    gaps.FEW
                    if request.beside <= 0.125
                    else gaps.MANY
                    if request.beside > 0.5
                    else ""
                )
                if near:
                    kinds[near][here] = places < _SMALL
            kinds[gaps.CONTINUED if interrupted else gaps.STRAIGHT][here] = True
            for name in request.kinds:
                kinds[name][here] = True
            interrupted |= segment.stop in (None, Stop.INTERRUPTED)
            place, at = place + size, at + size

    def filled(rows: Sequence[Sequence[float]]) -> Any:
        flat = np.full(count, np.nan)
        known = [x for row in rows for x in row]
        flat[: len(known)] = known
        return flat[keep]

    return Drawn(
        engine[keep],
        filled(trainer),
        filled(reference),
        {name: mask[keep] for name, mask in kinds.items()},
        None if unchanged is None else filled(unchanged),
    )
