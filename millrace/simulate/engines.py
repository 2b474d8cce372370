"""Engines that sleep for the seconds of a cost model.

The real loops, the Ledger and the routing run on them unchanged.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millrace.ports import Phase, RolloutStats, StepReport, TrainBatch, TransferReport
from millrace.simulate.cost import CostModel
from millrace.simulate.decode_speed import DecodeSpeed
from millrace.types import (
    Author,
    Completion,
    PolicyVersion,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Tokens,
    floats_of,
    tokens_of,
)


def target_length(tokens: Tokens, params: SamplingParams) -> int:
    """Return the response length of a simulated trajectory.

    It is the prompt's first token times 0.5 to 1.5, by the request's seed, within 1 and the limit.
    With ignore_eos, it is the limit.
    """
    limit = params.offset + params.max_tokens
    spread = 0.5 + (params.seed % 1000) / 1000
    return limit if params.ignore_eos else max(1, min(limit, round(tokens[0] * spread)))


@dataclass(slots=True, eq=False)
class _Draw:
    """A request in a slot. From the time `start` on, it draws at most `limit` tokens."""

    start: float
    limit: int
    steps: float = 0.0
    """The engine's steps at `start`, if the number of requests changes their speed."""


class SimRolloutEngine:
    """A rollout engine that draws one token for every running request in each `token_s`.

    With `request_s`, a step takes longer the more requests draw. At most `slots` requests run. The others wait in order.
    """

    def __init__(self, cost: CostModel, *, slots: int = 64, version: PolicyVersion = -1) -> None:
        self.version = version
        self.asleep = False
        self._cost = cost
        self._slots = slots
        self._in_use = 0
        self._queue: deque[tuple[asyncio.Future[bool], bool]] = deque()
        """The waits for a slot, in order, each with whether `interrupt` may end it."""
        self._waits: dict[asyncio.Future[bool], None] = {}
        """The waits that an interruption or a swap ends, in order."""
        self._draws: dict[_Draw, None] = {}
        self._interrupting = False
        self._running = 0
        self._tokens = self._prefill = self._cancelled = 0
        self._busy = 0.0
        speed = DecodeSpeed(cost.token_s, cost.request_s, cost.queue)
        self._pace = speed if cost.request_s else None
        self._reads_until = 0.0

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        if self.asleep or self.version < 0:
            raise RuntimeError(
                f"generate on an engine that is {'asleep' if self.asleep else 'without weights'}"
            )
        length = target_length(tokens, params) - params.offset
        self._count(1)
        try:
            if not await self._slot(params.interruptible):
                return ()
            try:
                return await self._generate(len(tokens), max(1, length), params)
            finally:
                self._release()
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        """Count a request that comes or leaves."""
        self._running += more
        if self._pace is not None:
            self._pace.wait(self._running > self._slots)

    async def _generate(
        self, context: int, length: int, params: SamplingParams
    ) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        reads = context * self._cost.prefill_token_s
        reads += 0.0 if params.offset else self._cost.start_s
        self._prefill += context
        if not await self._read(reads, params.interruptible):
            return ()
        total = 0
        while total < length:
            version = self.version
            drawn = await self._draw(length - total, total)
            first, total = params.offset + total, total + drawn
            stop = None
            if total == length:
                stop = Stop.LENGTH if length >= params.max_tokens else Stop.EOS
            elif self._interrupting and params.interruptible:
                stop = Stop.INTERRUPTED
            if drawn:
                segments.append(_segment(range(first, first + drawn), params, version, stop))
            elif stop and segments:
                segments[-1] = replace(segments[-1], stop=stop)
            if stop:
                break
        return tuple(segments)

    async def _read(self, seconds: float, interruptible: bool) -> bool:
        """Wait for the prefill. Return False if an interruption came first."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        if self._cost.serial_reads and self._pace is not None:
            begin = max(clock(), self._reads_until)
            end = self._reads_until = begin + seconds
            self._pace.stall(end)
        while clock() < end and not (self._interrupting and interruptible):
            await self._wait(end - clock())
        return not (self._interrupting and interruptible)

    async def _draw(self, limit: int, before: int) -> int:
        """Draw up to `limit` tokens, fewer after an interruption or a swap. Return their number.

        `before` is the number of tokens that this call has drawn already.
        """
        draw = _Draw(
            asyncio.get_running_loop().time(), limit, self._pace.now() if self._pace else 0.0
        )
        self._draws[draw] = None
        drawn = limit
        try:
            if await self._decode(limit):
                drawn = self._so_far(draw)
        except asyncio.CancelledError:
            drawn = self._so_far(draw)
            self._cancelled += before + drawn
            raise
        finally:
            del self._draws[draw]
            self._tokens += drawn
            self._busy += asyncio.get_running_loop().time() - draw.start
        return drawn

    async def _decode(self, limit: int) -> bool:
        """Wait for `limit` steps. Return whether an interruption or a swap ended the wait."""
        if self._pace is None:
            return await self._wait(limit * self._cost.token_s)
        woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pace.begin(limit, woken)
        self._waits[woken] = None
        try:
            return await woken
        finally:
            self._pace.end()
            del self._waits[woken]

    def _so_far(self, draw: _Draw) -> int:
        if self._pace is not None:
            return min(draw.limit, int(self._pace.now() - draw.steps + 1e-6))
        elapsed = asyncio.get_running_loop().time() - draw.start
        return min(draw.limit, int(elapsed / self._cost.token_s + 1e-6))

    async def _wait(self, seconds: float) -> bool:
        """Wait for `seconds`. Return whether an interruption or a swap ended the wait."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(seconds, _resolve, woken, False)
        self._waits[woken] = None
        try:
            return await woken
        finally:
            timer.cancel()
            del self._waits[woken]

    async def _slot(self, interruptible: bool) -> bool:
        """Wait for a decode slot, in order of arrival.

        Return False if an interruption came first.
        """
        if self._in_use < self._slots:
            self._in_use += 1
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((waiter, interruptible))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self._release()  # the slot and the cancellation came in the same step of the loop
            raise

    def _release(self) -> None:
        while self._queue:
            waiter, _ = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(True)
                return
        self._in_use -= 1

    async def interrupt(self) -> None:
        self._interrupting = True
        for waiter, interruptible in self._queue:
            if interruptible:
                _resolve(waiter, False)
        self._reads_until = asyncio.get_running_loop().time()
        if self._pace is not None:
            self._pace.stall(self._reads_until)
        self._wake_all()
        await asyncio.sleep(0)  # the interrupted calls return before this task continues
        self._interrupting = False

    async def swap(self, version: PolicyVersion) -> float:
        await asyncio.sleep(self._cost.pause_s)
        self._wake_all()  # the segments of the old version end at this token
        self.version = version
        return self._cost.pause_s

    def _wake_all(self) -> None:
        for woken in self._waits:
            _resolve(woken, True)

    async def stats(self) -> RolloutStats:
        now = asyncio.get_running_loop().time()
        return RolloutStats(
            self.drawn(),
            self._prefill,
            self._busy + sum(now - d.start for d in self._draws),
            self._slots,
            cancelled_tokens=self._cancelled,
        )

    def drawn(self) -> int:
        """Return the tokens drawn so far."""
        return self._tokens + sum(map(self._so_far, self._draws))

    async def sleep(self, keep_weights: bool = True) -> None:
        if self._running:
            raise RuntimeError(f"sleep with {self._running} requests running")
        self.asleep = True
        await asyncio.sleep(self._cost.switch_s)

    async def wake_weights(self) -> None:
        return None

    async def wake(self) -> None:
        await asyncio.sleep(self._cost.switch_s)
        self.asleep = False

    async def close(self) -> None:
        return None


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


_TOKENS = tokens_of(1 + place * 17 % 97 for place in range(97))
_LOG_PROB = floats_of([-0.5])


def _segment(
    places: range, params: SamplingParams, version: PolicyVersion, stop: Stop | None
) -> Segment:
    """Return a segment whose tokens depend on the seed and on their places in the response.

    Greedy tokens depend only on their places, not on the seed.
    """
    seed = params.seed if params.temperature else 0
    first, number = (seed * 76 + places.start) % len(_TOKENS), len(places)
    tokens = (_TOKENS * ((first + number) // len(_TOKENS) + 1))[first : first + number]
    return Segment(tokens, Author.POLICY, version, _LOG_PROB * number, stop)


class SimTrainEngine:
    """A train engine whose step sleeps in proportion to the tokens, and records the batch."""

    def __init__(self, cost: CostModel) -> None:
        self.trained: list[tuple[PolicyVersion, tuple[Sample, ...]]] = []
        self._cost = cost

    async def begin(self, phase: Phase, horizon: int) -> None:
        return None

    async def sft_step(self, examples: list[tuple[Tokens, ...]]) -> StepReport:
        return StepReport(1)

    async def export(self, folder: str) -> None:
        return None

    async def step(self, batch: TrainBatch) -> StepReport:
        tokens = sum(
            len(s.prompt.tokens if thread.opening is None else thread.opening)
            + sum(len(segment.tokens) for segment in thread.segments)
            for s in batch.samples
            for t in s.trajectories
            for thread in t.threads
        )
        cost = self._cost
        seconds = {
            "old_log_prob": tokens * cost.log_prob_token_s / cost.share,
            "ref": tokens * cost.ref_token_s / cost.share,
            "update_actor": (cost.step_s + tokens * cost.train_token_s) / cost.share,
        }
        await asyncio.sleep(sum(seconds.values()))
        self.trained.append((batch.version, batch.samples))
        ran = {name: value for name, value in seconds.items() if value}
        going_on = [t for s in batch.samples for t in s.trajectories if t.goes_on]
        values = tuple(floats_of(map(float, t.tokens)) for t in going_on)
        return StepReport(1, {"train/tokens": float(tokens)}, seconds=ran, values=values)

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        return [[-0.5] * t.num_policy_tokens for s in samples for t in s.trajectories]

    async def reference_log_probs(
        self, samples: tuple[Sample, ...], seconds: float, eight_bit: bool = False
    ) -> list[list[list[float]]]:
        return [[own, [0.5] * len(own)] for own in await self.log_probs(samples)]

    async def displace(self, away: bool) -> None:
        return None

    async def save(self, folder: str, staged: bool = False) -> None:
        return None

    async def saved(self) -> None:
        return None

    async def load(self, folder: str) -> None:
        return None

    async def sleep(self) -> None:
        await asyncio.sleep(self._cost.switch_s)

    async def wake(self) -> None:
        await asyncio.sleep(self._cost.switch_s)

    async def close(self) -> None:
        return None


class SimWeightSync:
    """A weight sync that takes `transfer_s` for a transfer and `pause_s` at every replica."""

    def __init__(self, cost: CostModel, replicas: Sequence[SimRolloutEngine]) -> None:
        self._cost = cost
        self._replicas = replicas

    async def keep(self, version: PolicyVersion) -> None:
        await asyncio.sleep(self._cost.keep_s)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        await asyncio.sleep(self._cost.transfer_s)
        return TransferReport(0, self._cost.transfer_s)

    async def activate(self, version: PolicyVersion) -> float:
        return max(await asyncio.gather(*(r.swap(version) for r in self._replicas)))


class SimReward:
    """A reward that takes `reward_s` for each call.

    A response scores 1 with the probability `chance` of its prompt, else 0. The draw depends only
    on the prompt and the text.
    """

    def __init__(
        self, cost: CostModel, chance: Callable[[Prompt], float] = lambda prompt: 1.0
    ) -> None:
        self._cost = cost
        self._chance = chance

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        await asyncio.sleep(self._cost.reward_s)
        chance = self._chance(prompt)
        if chance >= 1:
            return [Score(1.0) for _ in completions]
        drawn = [random.Random(f"{prompt.index}/{one.text}").random() for one in completions]
        return [Score(float(one < chance)) for one in drawn]

    async def close(self) -> None:
        return None
