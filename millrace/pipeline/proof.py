"""The proof of a run's engines: what replicas draw, the trainer must give the same log-probs.

    waits for  draws of real prompts on every replica; the trainer's log-probs of them; two syncs
    produces   a limit for the gap of every version, or a GapError before the first step

The draws are no samples: the Ledger does not know them, and nothing trains on them. Requests rise
to all slots and fall again, so every captured graph of an engine runs. The weights are the true
ones, then displaced ones, so that a part that no sync reaches shows itself, then the true ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import GapError
from millrace.observe import gap as gaps
from millrace.observe.gap import Drawn, Verdict
from millrace.pipeline.proof_draws import (
    Draws,
    Request,
    drawn_by,
    drawn_of,
    rising,
    spread,
)
from millrace.pipeline.turns import DeviceSharing, Pause
from millrace.ports import Prompts, TrainEngine, WeightSync
from millrace.replicas.pool import RolloutPool
from millrace.schedule.schedule import Schedule
from millrace.types import PolicyVersion, SamplingParams, Tokens, joined

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
_PROBE = 8
_PROBE_TOKENS = 32
_RARELY = 200.0
"""A probe may take one part in this many of the time."""
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of a run that its proof needs."""

    dtype: str
    """That of rollouts, whose noise is larger: a model's, or fp8."""
    least: float
    """The smallest limit of a gap, nats."""
    max_len: int
    """Tokens of a prompt and its response."""
    at_once: int
    """The largest number of trajectories that the run draws at once."""
    gap: float | None = None
    """The limit that a user set."""
    quantization: float | None = None
    """The largest gap that 8 bits alone may make, if rollouts draw with them."""


class Proof:
    """Proves the engines at the start of a run, and replicas that join later."""

    def __init__(
        self,
        engine: TrainEngine,
        pool: RolloutPool,
        sync: WeightSync,
        turns: DeviceSharing,
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
        self._params, self.draws = params, Draws(pool, params, schedule)
        self.floor: float | None = None
        self._incarnation, self._note, self._refuse = incarnation, note, refuse
        self._stops, self._budget_s = stops, budget_s
        self._proven: set[tuple[int, int]] = set()
        self._silent: set[tuple[int, int]] = set()
        """Replicas that drew nothing in a probe. They wait for the next one that is due by time."""
        self._displaced = False
        self._begun = seed
        self._probe_at, self._probe_s = 0.0, 0.0
        self._sizes: set[int] = set()

    @property
    def limit(self) -> float | None:
        """Return the limit of a version's gap, once it is known."""
        if self.limits.gap is not None or self.floor is None:
            return self.limits.gap
        limit = gaps.limit_of(self.floor, self.limits.least, gaps.LATER_FACTOR)
        most = self._most_bits(1)
        if most is None or self.floor > most:  # a run that trains in spite of it
            return limit
        return min(limit, most)

    def _most_bits(self, version: PolicyVersion) -> float | None:
        """Return the largest gap that 8 bits alone may make, which is larger once a policy trained."""
        most = self.limits.quantization
        return most * gaps.LATER_FACTOR / gaps.FACTOR if most and version else most

    # -- the start of a run

    async def run(self, version: PolicyVersion) -> Verdict | None:
        """Prove all replicas, which have the weights of `version`. Rollouts have the devices.

        Return None if workers were lost again and again meanwhile, or if none drew a token. The
        first probe then proves those that serve. Raises GapError.
        """
        clock = asyncio.get_running_loop().time
        since = clock()
        for _ in range(_TRIES):
            before = self._workers()
            self.draws.tokens.clear()
            self._sizes = set()
            try:
                verdict = await self._rounds(version)
            finally:
                self.draws.cancel()
            if self._workers() == before:
                break
        if self._workers() != before or not verdict.gap.tokens:
            assumed, most = gaps.ASSUMED[self.limits.dtype], self._most_bits(version)
            self.floor = assumed if most is None else min(assumed, most)
            why = (
                "workers were lost meanwhile" if self._workers() != before else "no token was drawn"
            )
            self._note(f"warning: the engines are not proven yet: {why}. A probe follows")
            return None
        self.floor = verdict.floor
        self._proven |= self._drew(before)
        self.saw_gap()
        if error := verdict.error():
            if self._stops:
                raise error
            self._note(f"warning: {error}")
            return verdict
        sizes = f"1 to {max(self._sizes, default=0)} requests at once"
        unread = "" if verdict.explained else ", assumed: no room for an independent model"
        most, bits = self._most_bits(version), verdict.bits
        alone = "" if bits is None else f"8 bits alone {bits:.2g} (limit {most:g}), "
        self._note(
            f"engines proven: {self.draws.tokens.total():,} tokens in {clock() - since:.1f} s "
            f"({sizes}), gap {verdict.gap.mean:.2g} (limit {verdict.limit:.2g}{unread}), {alone}"
            f"worst token {verdict.gap.worst:.2g}"
        )
        return verdict

    def _workers(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        roster = self.pool.roster
        live = tuple((i, roster.incarnation(i)) for i in roster.live)
        return self._incarnation(), live

    def _drew(self, workers: tuple[int, tuple[tuple[int, int], ...]]) -> set[tuple[int, int]]:
        """Return the replicas that drew tokens. The others are not proven."""
        return {worker for worker in workers[1] if self.draws.tokens[worker[0]]}

    async def _rounds(self, version: PolicyVersion) -> Verdict:
        clock, budget = asyncio.get_running_loop().time, self._budget_s
        live = self.pool.roster.live
        first = await self._rise_and_fall(live, clock())
        self._displaced = False
        lasting = [await self._last(k) for k in live]
        async with self.turns.window(self.draws.pause):
            true = await self._compared(first, version)
            await self.engine.displace(True)
            await self.turns.wake_rollout_weights()
            await self.sync.transfer(version + 1)
            async with self.turns.activation(self.draws.pause):
                await self.sync.activate(version + 1)
            self._displaced = True
        until = clock() + budget * _SWAPPED
        second = self._again(live, first)
        for k, requests in second.items():
            self.draws.begin(k, requests)
        await self.draws.finish(until)
        drawn = [r for part in (*second.values(), *lasting) for r in part]
        async with self.turns.window(self.draws.pause):
            displaced = await self._compared(drawn, version + 1, undo=True)
            await self.turns.wake_rollout_weights()
            await self.sync.transfer(version)
            async with self.turns.activation(self.draws.pause):
                await self.sync.activate(version)
        rounds = {gaps.TRUE: true, gaps.DISPLACED: displaced}
        rounds = {name: d for name, d in rounds.items() if len(d.engine)}
        options: dict[str, Any] = {"dtype": self.limits.dtype, "least": self.limits.least}
        options["most_bits"] = self._most_bits(version)
        verdict = gaps.judge(rounds, **options)
        if verdict.findings and live:
            verdict = gaps.judge(rounds, **options, alone=await self._alone(live[0], version))
        return verdict

    async def _alone(self, replica: int, version: PolicyVersion) -> float | None:
        """Return the gap of a request that runs alone, for the causes of an error."""
        request = self._request(replica, 0, (min(_PROBE_TOKENS, self._params.max_tokens),))
        self.draws.begin(replica, [request])
        await self.draws.finish(asyncio.get_running_loop().time() + self._budget_s)
        async with self.turns.window(self.draws.pause, keep_weights=True):
            drawn = await self._compared([request], version, reference=False)
        return gaps.gap(drawn.engine, drawn.trainer).mean if len(drawn.engine) else None

    # -- later

    def due(self) -> bool:
        """Whether a replica is not proven, or no version has shown its gap for long."""
        if self.floor is None:
            return False
        late = asyncio.get_running_loop().time() >= self._probe_at
        return late or bool(set(self._workers()[1]) - self._proven - self._silent)

    def saw_gap(self) -> None:
        """Put the next probe off, because the gap of a version is known."""
        self._probe_at = asyncio.get_running_loop().time() + max(1.0, self._probe_s) * _RARELY

    async def probe(self, version: PolicyVersion, pause: Pause) -> None:
        """Compare a few tokens of every replica with the trainer, which has the same weights."""
        clock = asyncio.get_running_loop().time
        since, workers = clock(), self._workers()
        self.draws.tokens.clear()
        requests = []
        for k, _ in workers[1]:
            length = min(_PROBE_TOKENS, self._params.max_tokens)
            own = [self._request(k, i, (length,)) for i in range(_PROBE)]
            self.draws.begin(k, own)
            requests += own
        await self.draws.finish(clock() + self._budget_s)
        async with self.turns.window(pause, keep_weights=True):
            drawn = await self._compared(requests, version, reference=False)
        self._probe_s = clock() - since
        self.saw_gap()
        if self._workers() != workers:
            return
        self._proven |= self._drew(workers)
        if silent := {*workers[1]} - self._proven - self._silent:
            self._silent |= silent
            names = ", ".join(f"rollout-{replica}" for replica, _ in sorted(silent))
            until_s = self._probe_at - clock()
            self._note(f"warning: no token of {names} in a probe; the next is in {until_s:.0f} s")
        limit = self.limit
        if len(drawn.engine) and limit is not None:
            found = gaps.gap(drawn.engine, drawn.trainer)
            if findings := gaps.of_kinds(gaps.TRUE, drawn, gaps.Gap(), limit):
                figures = f"version {version}: {gaps.worst(findings)}; a probe: {found}"
                causes = gaps.causes({gaps.TRUE: drawn}, findings)
                self._refuse(gaps.disagreement(figures, causes))

    # -- draws

    async def _rise_and_fall(self, replicas: Sequence[int], since: float) -> list[Request]:
        """Draw for prompts of the run on every replica, with rising and falling numbers."""
        rise, fall = since + self._budget_s * _RISE, since + self._budget_s * _FALL
        parts = await asyncio.gather(*(self._rise(k, len(replicas), rise) for k in replicas))
        await self.draws.interrupt(replicas)
        await self.draws.finish(fall)
        return [request for part in parts for request in part]

    async def _rise(self, replica: int, replicas: int, until: float) -> list[Request]:
        clock = asyncio.get_running_loop().time
        slots = (await self.draws.stats(replica)).slots
        top = max(1, min(slots, -(-self.limits.at_once // max(1, replicas))))
        room = min(self._params.max_tokens, 2 * _TOKENS)
        if not slots:
            return []
        sizes = rising(top, max(1, room // 4))
        requests: list[Request] = []
        since = clock()
        for number, size in enumerate(sizes):
            # Earlier ones last longer, so that all of them run at the top.
            length = min(room, _TOKENS + len(sizes) - number)
            part = length // 3
            # Every eighth has a second turn. The context before it takes the rest, or less.
            group = [
                self._request(replica, i, (part, part) if i % 8 == 7 and part else (length,))
                for i in range(len(requests), size)
            ]
            if number == len(sizes) - 1 and clock() - since < (until - since) / 2:
                long = self._long(replica, size - 1)
                group = group[: len(group) - len(long)] + long
            for request in group:
                request.beside = size / slots
            requests += group
            goal = (await self.draws.stats(replica)).tokens + self.draws.live(replica) + len(group)
            self.draws.begin(replica, group)
            self._sizes.add(self.draws.live(replica))
            await self.draws.reach(replica, goal, until)
            if clock() >= until:
                break
        return requests

    def _request(
        self, replica: int, number: int, lengths: tuple[int, ...], prompt: Tokens | None = None
    ) -> Request:
        asked = number % _ASKED
        kinds = {gaps.OF_REPLICA.format(replica)}
        if prompt is None:
            kinds.add(gaps.ASKED_AGAIN if asked else gaps.ASKED_FIRST)
            prompt = self.prompts[number // _ASKED % _PROMPTS].tokens
        self._begun += 1 << 16  # vLLM adds to a seed what is drawn, and turns add to it, too
        # The names of a validation: nothing that counts samples counts these.
        return Request(
            f"val/proof/{replica}/{number}", prompt, self._begun, lengths, frozenset(kinds)
        )

    def _long(self, replica: int, number: int) -> list[Request]:
        """Return a request with the longest context that the run allows, made of real prompts.

        A response may be long, and its last tokens have positions that no other request reaches.
        """
        length = min(self._params.max_tokens, 2 * _PROBE_TOKENS)
        longest = min(self.limits.max_len - length, _LONG)
        if longest < 2 * len(self.prompts[0].tokens):
            return []
        parts = joined([self.prompts[i].tokens for i in range(_PROMPTS)])
        prompt = parts * (longest // len(parts) + 1)
        request = self._request(replica, number, (length,), prompt[:longest])
        request.kinds |= {gaps.LONG}
        return [request]

    async def _last(self, replica: int) -> list[Request]:
        """Keep requests running until the weights are displaced. Return those that last."""
        slots = (await self.draws.stats(replica)).slots
        lasting: list[Request] = []

        async def keep(number: int) -> None:
            while not self._displaced and replica in self.pool.roster.live:
                request = self._request(replica, number, (min(self._params.max_tokens, _TOKENS),))
                lasting[number] = request
                await self.draws.draw(replica, request)
                await asyncio.sleep(0)

        count = min(slots, _PROBE)
        lasting += [self._request(replica, i, (1,)) for i in range(count)]
        for i in range(count):
            self.draws.start(replica, keep(i))
        return lasting

    def _again(self, replicas: Sequence[int], first: Sequence[Request]) -> dict[int, list[Request]]:
        """Return requests like the first ones, in the same sessions. Some continue those."""
        found: dict[int, list[Request]] = {k: [] for k in replicas}
        length = min(self._params.max_tokens, _PROBE_TOKENS)
        for old in first:
            replica, number = map(int, old.session.split("/")[2:])
            if replica not in found or gaps.LONG in old.kinds:
                continue
            request = self._request(replica, number, (length,))
            whole = old.tokens()
            if number % _ASKED == 1 and len(whole) + length <= self.limits.max_len:
                request.prompt = whole
                request.kinds = frozenset({gaps.OF_REPLICA.format(replica), gaps.SECOND})
            found[replica].append(request)
        return found

    # -- comparison

    async def _compared(
        self,
        requests: Sequence[Request],
        version: PolicyVersion,
        *,
        reference: bool = True,
        undo: bool = False,
    ) -> Drawn:
        """Return the tokens that `version` drew, with the trainer's log-probs and the reference's.

        On a slow trainer, these are some of the requests. `undo` ends the displacement.
        """
        chosen = [r for r in spread(requests) if any(drawn_by(s, version) for s in r.drawn)]
        samples = [r.sample(i) for i, r in enumerate(chosen)]
        clock, budget = asyncio.get_running_loop().time, self._budget_s
        trainer: list[list[float]] = []
        size, taken, until = 1, 0.0, clock() + budget * _COMPARE
        while len(trainer) < len(samples) and (not trainer or clock() + 2 * taken < until):
            part, since = tuple(samples[len(trainer) : len(trainer) + size]), clock()
            trainer += await self.engine.log_probs(part)
            taken, size = clock() - since, 2 * size
        compared = tuple(samples[: len(trainer)])
        own: list[list[list[float]]] = []
        quantised: list[list[list[float]]] | None = None
        unchanged: list[list[float]] | None = None
        if reference and compared:
            own = await self.engine.reference_log_probs(compared, budget * _REFERENCE)
            if self.limits.dtype == "fp8":
                seconds = budget * _REFERENCE
                quantised = await self.engine.reference_log_probs(compared, seconds, True)
        if undo:
            await self.engine.displace(False)
            unchanged = [log_probs for log_probs, _ in own]
            read = [i for i, row in enumerate(unchanged) if np.isfinite(row).any()]
            found = await self.engine.log_probs(tuple(compared[i] for i in read)) if read else []
            for i, log_probs in zip(read, found, strict=True):
                unchanged[i] = log_probs
        return drawn_of(chosen[: len(trainer)], version, trainer, own, unchanged, quantised)
