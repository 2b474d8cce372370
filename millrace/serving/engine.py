"""A rollout engine whose model runs in processes of its own, tokens in and tokens out.

vLLM and SGLang are such engines. This class adds what they lack: the version of each token,
interruption that returns the drawn tokens, and the duration of a pause.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from millrace.errors import ReplicaLost, WorkerError
from millrace.ports import RolloutStats
from millrace.rollout.requests import check_request, cut_by_version
from millrace.serving.receiver import check_unchanged
from millrace.serving.requests import ActiveRequest, Drawn, Salts
from millrace.types import PolicyVersion, SamplingParams, Segment, Stop, Tokens
from millrace.waits.registry import gauge

_STOPS = {"stop": Stop.EOS, "length": Stop.LENGTH, "string": Stop.STRING}


class ServingEngine(ABC):
    """A RolloutEngine. `eos_ids` end a response.

    A prompt and its response together have at most `max_len` tokens. The same seed and weights give
    the same response on the same release of the engine.
    """

    name = "the engine"
    """The engine's name in messages."""

    def __init__(
        self,
        *,
        eos_ids: Sequence[int],
        slots: int,
        max_len: int,
        kv_on_swap: str = "keep",
        can_sleep: bool = False,
        decode: Callable[[Tokens], str] | None = None,
        version: PolicyVersion = 0,
    ) -> None:
        self.version = version
        self._eos = list(eos_ids)
        self._slots = slots
        self._max_len = max_len
        self._recompute = kv_on_swap == "recompute"
        self._can_sleep = can_sleep
        self._decode = decode
        self._numbers = itertools.count()
        self._swaps = 0
        self._salts = Salts()
        self._oldest_kv: PolicyVersion = 0
        """No K and V are older than this version."""
        self._interrupted = False
        """Whether requests were interrupted since the last swap."""
        self._active: dict[str, ActiveRequest] = {}
        self._gate = asyncio.Event()
        """Closed while weights change. A request that waits here starts under the new version."""
        self._gate.set()
        self._asleep = self._closed = False
        self._asleep_tags: list[str] = []
        """The memory that the engine has freed: "weights", "kv_cache"."""
        self._lacks_weights = False
        """Whether the weights were discarded and not yet replaced."""
        self._tokens = self._cancelled = 0
        self._prefill_tokens = self._reused_tokens = 0
        self._busy_slot_s, self._busy_since = 0.0, perf_counter()
        gauge("tokens", self._drawn)

    @abstractmethod
    async def join_sync(self, init_info: dict[str, Any]) -> None:
        """Connect every process of the model with the trainer's ranks."""

    @abstractmethod
    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method in every process of the model. Raise ReplicaLost if one has died."""

    @abstractmethod
    def _failure(self) -> str | None:
        """Return why the engine's processes are dead, or None while they live."""

    @abstractmethod
    async def _result(self, request: ActiveRequest) -> Drawn:
        """Send a request and return its result. Raise ReplicaLost if the engine dies."""

    @abstractmethod
    async def _abort(self, requests: list[ActiveRequest]) -> None:
        """End requests. Their results have the tokens so far."""

    @abstractmethod
    def _count(self, request: ActiveRequest) -> int:
        """Return the drawn tokens of a running request. Between `_pause` and `_resume`, exactly."""

    @abstractmethod
    async def _pause(self) -> float:
        """Stop between two tokens, and return since when. With `_recompute`, discard all K and V."""

    @abstractmethod
    async def _resume(self) -> None:
        """Go on with all requests."""

    @abstractmethod
    async def _free(self, keep_weights: bool) -> None:
        """Free the memory of weights and KV cache."""

    @abstractmethod
    async def _allocate(self, tags: list[str]) -> None:
        """Allocate memory that `_free` has freed."""

    @abstractmethod
    async def _stop(self) -> None:
        """End the engine's processes."""

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Draw a response.

        Raise DataError if the prompt is too long, and WorkerError if the engine fails.
        """
        check_request(
            tokens,
            params,
            max_len=self._max_len,
            closed=self._closed,
            asleep=self._asleep,
            has_tokenizer=self._decode is not None,
        )
        request = ActiveRequest(tokens, params, session)
        while True:
            drawn = await self._draw(request)
            if drawn.reason == "abort" and request.restart and not request.interrupted:
                request.restart = False
                self._cancelled += len(drawn.tokens)
                continue
            stop = (
                Stop.INTERRUPTED
                if drawn.reason == "abort" and request.interrupted
                else _STOPS.get(drawn.reason)
            )
            if stop is None:
                cause = f"{self.name} ended a request by itself ({drawn.reason})"
                raise WorkerError(f"{cause}; the worker's log has the reason")
            self._tokens += len(drawn.tokens)
            salt = request.salt._replace(version=max(request.salt.version, self._oldest_kv))
            self._salts.remember(request.session, tokens + drawn.tokens, salt)
            first = params.experts_from
            context = 0 if first is None else len(tokens) - 1 - first
            result = (drawn.tokens, drawn.log_probs, request.starts, stop)
            return cut_by_version(*result, drawn.experts, context)

    async def interrupt(self) -> None:
        """End every interruptible request. All of their calls return before this returns."""
        self._interrupted = True
        interrupted = [r for r in self._active.values() if r.params.interruptible]
        for request in interrupted:
            request.interrupted = True
        while active := [r for r in interrupted if r.id in self._active]:
            # Repeat until none is active. The engine may not know a new request yet, and a request
            # that ended by itself may still wait for its output.
            await self._abort(active)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.check_alive()

    def check_alive(self) -> None:
        """Raise ReplicaLost if the engine has died, and WorkerError if it was closed."""
        if failure := self._failure():
            raise ReplicaLost(failure)
        if self._closed:
            raise WorkerError("the engine was closed during a call")

    async def swap(self, version: PolicyVersion, prove: Callable[[Sequence[Any]], None]) -> float:
        """Make the staged weights live as `version`. Return the seconds without decoding.

        `prove` checks every worker's report on its new weights before the next token is drawn. If
        `prove` raises, the engine stays paused.
        """
        self._salts.check()
        self._gate.clear()
        try:
            start = await self._pause()
            prove(await self.call_workers("activate_weights", version))
            before, self.version, self._lacks_weights = self.version, version, False
            self._swaps += 1
            self._oldest_kv = version if self._recompute else min(self._oldest_kv, version)
            # After an interruption, responses read their tokens again with the new weights, and so
            # do idle sessions. Another run, which starts at version 0 again, has the same names.
            if self._recompute or self._interrupted or version <= before:
                self._salts.drop_all(0 if self._active else self._swaps)
            self._interrupted = False
            if without_tokens := self._change_version():
                await self._abort(without_tokens)
            await self._resume()
            return perf_counter() - start
        finally:
            self._gate.set()

    async def stats(self) -> RolloutStats:
        self._tick()
        own = self._prefill_tokens, self._busy_slot_s, self._slots, self._reused_tokens
        return RolloutStats(self._drawn(), *own, cancelled_tokens=self._cancelled)

    def _drawn(self) -> int:
        return self._tokens + self._cancelled + sum(map(self._count, [*self._active.values()]))

    async def sleep(self, keep_weights: bool = True) -> None:
        """Free the GPU's memory, if rollout.free_cache_engine is set.

        Raise WorkerError if a request is running.
        """
        if self._active:
            raise WorkerError(
                f"sleep() with {len(self._active)} running requests. "
                "Fix: drain or interrupt the engine first."
            )
        if self._can_sleep and not self._asleep:
            if not keep_weights:  # no later sync can prove them
                check_unchanged(await self.call_workers("changed_weights"))
            await self._free(keep_weights)
            self._lacks_weights = not keep_weights
            self._asleep_tags = ["weights", "kv_cache"]
        self._salts.drop_all()
        self._asleep = True

    async def wake_weights(self) -> None:
        """Allocate the memory of the weights. It has those that were kept, or none until a swap."""
        await self._wake(["weights"])

    async def wake(self) -> None:
        """Allocate all memory again. Raise WorkerError if discarded weights were not replaced."""
        if self._lacks_weights:
            raise WorkerError(
                "wake() of an engine without weights. Fix: wake_weights(), then a weight sync."
            )
        await self._wake(["weights", "kv_cache"])
        self._asleep = False

    async def _wake(self, tags: list[str]) -> None:
        if due := [tag for tag in tags if tag in self._asleep_tags]:
            await self._allocate(due)
            self._asleep_tags = [tag for tag in self._asleep_tags if tag not in due]

    async def close(self) -> None:
        """Stop the engine. Running requests fail with WorkerError."""
        if not self._closed:
            self._closed = True
            await self._stop()

    async def _draw(self, request: ActiveRequest) -> Drawn:
        """Send one request and return its result. Count the tokens of a cancelled one."""
        await self._gate.wait()
        request.id = f"{next(self._numbers):012}"  # no id begins with another
        # Without a salt, the engine would use the KV of old weights for new requests.
        request.begin(self._salts, self._swaps, self.version)
        self._tick()
        self._active[request.id] = request
        # A task of its own: the engine may forget a cancelled request before its caller could
        # count.
        drawing = asyncio.ensure_future(self._result(request))
        try:
            await asyncio.wait([drawing])
            return drawing.result()
        except asyncio.CancelledError:
            try:
                await self._cancel(request, drawing)
            finally:
                self._cancelled += request.drawn
            raise
        finally:
            self._tick()
            del self._active[request.id]

    async def _cancel(self, request: ActiveRequest, drawing: asyncio.Future[Drawn]) -> None:
        """End a request whose caller is gone. Set its drawn tokens."""
        request.drawn = self._count(request)
        drawing.cancel()
        await asyncio.wait([drawing])

    def _read(self, request: ActiveRequest, cached: int) -> None:
        """Count the tokens of a prompt that were read, and the `cached` ones that were not."""
        cached = request.found(cached)
        self._prefill_tokens += len(request.tokens) - cached
        self._reused_tokens += cached

    def _change_version(self) -> list[ActiveRequest]:
        """Record that running requests continue under the new version.

        Return the requests without a token. They must restart under the new salt, because their
        prompts may use the KV cache of the old weights. Until then, the new version may draw.
        """
        without_tokens = []
        for request in filter(self._runs, self._active.values()):
            drawn = self._count(request)
            request.swapped(drawn, self.version, recompute=self._recompute)
            if not drawn:
                request.restart = True
                without_tokens.append(request)
            elif self._recompute:
                self._prefill_tokens += len(request.tokens) + drawn
        return without_tokens

    def _runs(self, request: ActiveRequest) -> bool:
        """Return whether the paused engine has the request, and not only its result on the way."""
        return True

    def _tick(self) -> None:
        """Add the time since the last `_tick` to the busy time of the running requests."""
        now = perf_counter()
        self._busy_slot_s += (now - self._busy_since) * min(len(self._active), self._slots)
        self._busy_since = now
