"""The draws of a proof: conversations with single replicas, through interruptions and losses.

waits for  the tokens of replicas; the end of a pause
produces   requests with their segments, and the arrays of what they drew
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from millrace.errors import ReplicaLost
from millrace.observe import gap as gaps
from millrace.observe.gap import Drawn
from millrace.ports import RolloutStats
from millrace.replicas.pool import RolloutPool
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

SMALL = 8
"""Steps between numbers of requests, at the least: engines capture a graph for each eighth."""
_POLL_S = 0.001


@dataclass(slots=True, eq=False)
class Request:
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


class Draws:
    """Requests on single replicas. They continue after an interruption, until the end of the draws."""

    def __init__(self, pool: RolloutPool, params: SamplingParams, schedule: Schedule) -> None:
        self._pool, self._schedule = pool, schedule
        self._params = replace(params, stop=(), ignore_eos=True)
        self.tokens = Counter[int]()
        """Tokens drawn so far, by replica."""
        self._gate, self._idle = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._idle.set()
        self._flying = 0
        self._over = False
        """Whether requests end with what they have."""
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}

    def begin(self, replica: int, requests: Iterable[Request]) -> None:
        for request in requests:
            self.start(replica, self.draw(replica, request))

    def start(self, replica: int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.setdefault(replica, []).append(asyncio.create_task(work, name="proof"))

    def live(self, replica: int) -> int:
        return sum(not task.done() for task in self._tasks.get(replica, ()))

    async def draw(self, replica: int, request: Request) -> None:
        """Draw all turns of a request, through interruptions, until the end of the draws."""
        known = 0
        for number, length in enumerate(request.lengths):
            if number:
                context = request.prompt[: min(SMALL, request.lengths[0])]
                request.segments.append(Segment(context, Author.ENVIRONMENT))
            drawn = 0
            while drawn < length:
                await self._gate.wait()
                if self._over:
                    return
                whole = request.tokens()
                params = replace(
                    self._params,
                    max_tokens=length - drawn,
                    offset=drawn,
                    seed=request.seed + number,
                )
                if params.experts_from is not None:
                    params = replace(params, experts_from=max(known - 1, 0))
                got = await self._generate(replica, whole, params, request.session)
                if got is None:
                    return
                request.segments += got
                fresh = sum(len(s.tokens) for s in got)
                if fresh:  # Without a token, the replica has returned no experts of the context.
                    known = len(whole) + fresh
                drawn += fresh
                self.tokens[replica] += fresh
                if not got:
                    await asyncio.sleep(0)

    async def _generate(
        self, replica: int, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...] | None:
        """Return what a replica draws, or None if it is lost."""
        self._flying += 1
        self._idle.clear()
        try:
            call = self._pool.draw_on(replica, tokens, params, session)
            return await self._asked(replica, call)
        finally:
            self._flying -= 1
            if not self._flying:
                self._idle.set()

    async def stats(self, replica: int) -> RolloutStats:
        """Return the totals of a replica. One that is lost has no slots."""
        return await self._asked(replica, self._pool.stats_of(replica)) or RolloutStats()

    async def _asked(self, replica: int, call: Awaitable[T]) -> T | None:
        """Return the answer of a replica, or None if it is lost."""
        incarnation = self._pool.roster.incarnation(replica)
        try:
            return await call
        except ReplicaLost as error:
            self._pool.roster.lose(replica, incarnation, str(error))
            return None

    async def reach(self, replica: int, goal: int, until: float) -> None:
        """Wait until a replica has drawn `goal` tokens since its start, or nothing runs there."""
        clock = asyncio.get_running_loop().time
        while self.live(replica) and clock() < until:
            if (await self.stats(replica)).tokens >= goal:
                return
            await asyncio.sleep(_POLL_S)

    async def interrupt(self, replicas: Iterable[int]) -> None:
        await asyncio.gather(*(self._asked(k, self._pool.interrupt_on(k)) for k in replicas))

    async def finish(self, until: float) -> None:
        """Wait for all draws. Those that run at `until` end with what they have."""
        tasks = [task for own in self._tasks.values() for task in own]
        left = until - asyncio.get_running_loop().time()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=max(0.0, left))
            if late:
                self._over = True
                while not all(task.done() for task in late):
                    await self.interrupt([k for k in self._tasks if self.live(k)])
                    await asyncio.sleep(0)
                self._over = False
        for task in tasks:
            task.result()
        self._tasks.clear()

    def cancel(self) -> None:
        for task in [task for own in self._tasks.values() for task in own]:
            task.cancel()
        self._tasks.clear()

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Pause the draws while the body runs, as the run pauses its rollouts at a sync."""
        schedule = self._schedule
        if schedule.on_sync is OnSync.SWAP and not schedule.colocated:
            yield
            return
        self._gate.clear()
        if schedule.on_sync is not OnSync.DRAIN:
            await self.interrupt([k for k in self._tasks if self.live(k)])
        await self._idle.wait()
        try:
            yield
        finally:
            self._gate.set()


def rising(top: int, most: int) -> list[int]:
    """Return at most `most` rising numbers of requests, about. The last one is `top`."""
    step = max(SMALL, -(-top // most))
    small = [size for size in (1, 2, 4) if most > SMALL]
    return sorted({size for size in (*small, *range(step, top, step)) if size < top} | {top})


def spread(requests: Sequence[Request]) -> list[Request]:
    """Return the requests in a fixed order in which the first ones stand for all."""
    order = sorted(range(len(requests)), key=lambda i: i * 2654435761 % 2**32)
    return [requests[i] for i in order]


def drawn_by(segment: Segment, version: PolicyVersion) -> bool:
    """Return whether a segment was drawn with one version's weights and KV alone."""
    return segment.version == version and segment.kv_version is None and bool(segment.tokens)


def drawn_of(
    requests: Sequence[Request],
    version: PolicyVersion,
    trainer: Sequence[Sequence[float]],
    reference: Sequence[Sequence[Sequence[float]]],
    unchanged: Sequence[Sequence[float]] | None,
    quantised: Sequence[Sequence[Sequence[float]]] | None = None,
) -> Drawn:
    """Return the tokens of requests as arrays. A token that a model did not read is NaN there.

    `quantised` is like `reference`, of a model in 8 bits. Its ranks are then those of the engine.
    """
    count = sum(len(s.tokens) for r in requests for s in r.drawn)
    engine = np.concatenate(
        [np.asarray(s.log_probs, np.float64) for r in requests for s in r.drawn] or [np.zeros(0)]
    )
    keep = np.zeros(count, dtype=bool)
    names = (
        *(gaps.EARLY, "tokens 8 to 63", gaps.LATE, gaps.FEW, gaps.MANY),
        *(gaps.STRAIGHT, gaps.CONTINUED),
        *sorted({name for r in requests for name in r.kinds}),
    )
    kinds = {name: np.zeros(count, dtype=bool) for name in names}
    at = 0
    for request in requests:
        place, interrupted = 0, False
        for segment in request.drawn:
            size = len(segment.tokens)
            here = slice(at, at + size)
            keep[here] = drawn_by(segment, version)
            places = np.arange(place, place + size)
            kinds[gaps.EARLY][here] = places < SMALL
            kinds["tokens 8 to 63"][here] = (places >= SMALL) & (places < 64)
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
                    kinds[near][here] = places < SMALL
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
        filled([log_probs for log_probs, _ in reference]),
        {name: mask[keep] for name, mask in kinds.items()},
        None if unchanged is None else filled(unchanged),
        filled([ranks for _, ranks in (reference if quantised is None else quantised)]),
        None if quantised is None else filled([log_probs for log_probs, _ in quantised]),
    )
