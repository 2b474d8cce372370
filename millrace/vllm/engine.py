"""The vLLM rollout engine: one replica of vLLM's AsyncLLM, tokens in and tokens out.

vLLM runs in separate processes. This class adds what vLLM lacks: the version of each token,
interruption that returns the drawn tokens, and the duration of a pause.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any

from millrace.config import ModelConfig, Sides
from millrace.errors import INSTALL, MissingDependency, ReplicaLost, WorkerError
from millrace.models.model import folder_eos_ids
from millrace.models.tokenizer import text_of
from millrace.ports import RolloutStats
from millrace.rollout.requests import check_request, cut_by_version
from millrace.types import (
    PolicyVersion,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    floats_of,
    tokens_of,
)
from millrace.waits.registry import current, gauge, waiting

try:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    from vllm.inputs import TokensInput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError
except ImportError as error:
    raise MissingDependency(f"rollout.engine=vllm needs vLLM. Fix: {INSTALL['vllm']}.") from error

from millrace.vllm.arguments import engine_arguments
from millrace.vllm.receiver import check_unchanged
from millrace.vllm.requests import (
    ActiveRequest,
    Drawn,
    Salts,
    drawn_of,
    sampling_params,
    stop_string_end,
)
from millrace.vllm.start import start, stop

_STOPS = {"stop": Stop.EOS, "length": Stop.LENGTH, "string": Stop.STRING}
_SEE_LOG = "the worker's log has the reason"
_DEAD = f"vLLM's engine process has died; {_SEE_LOG}"
_POLL_S = 1.0
_IDLE_TURNS = 4
"""Turns of the event loop until an output of vLLM's queue is in a request's count of tokens."""


class VllmRolloutEngine:
    """A RolloutEngine. `eos_ids` end a response.

    A prompt and its response together have at most `max_len` tokens. The same seed and weights give
    the same response on the same vLLM. A resumed response continues with another random stream than
    an uninterrupted one.
    """

    def __init__(
        self,
        llm: AsyncLLM,
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
        self._llm = llm
        self._eos = list(eos_ids)
        self._slots = slots
        self._max_len = max_len
        self._recompute = kv_on_swap == "recompute"
        self._can_sleep = can_sleep
        self._decode = decode
        self._numbers = itertools.count()
        self._swaps = 0
        self._salts = Salts()
        self._interrupted = False
        """Whether requests were interrupted since the last swap."""
        self._active: dict[str, ActiveRequest] = {}
        self._gate = asyncio.Event()
        """Closed while weights change. A request that waits here starts under the new version."""
        self._gate.set()
        self._asleep = self._closed = False
        self._asleep_tags: list[str] = []
        """The memory that vLLM has freed: "weights", "kv_cache"."""
        self._lacks_weights = False
        """Whether the weights were discarded and not yet replaced."""
        self._tokens = self._cancelled = 0
        self._prefill_tokens = self._reused_tokens = 0
        self._busy_slot_s, self._busy_since = 0.0, perf_counter()
        gauge("tokens", self._drawn)

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Draw a response.

        Raise DataError if the prompt is too long, and WorkerError if vLLM fails.
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
                continue
            stop = (
                Stop.INTERRUPTED
                if drawn.reason == "abort" and request.interrupted
                else _STOPS.get(drawn.reason)
            )
            if stop is None:
                raise WorkerError(f"vLLM ended a request by itself ({drawn.reason}); {_SEE_LOG}")
            self._tokens += len(drawn.tokens)
            self._salts.remember(request.session, tokens + drawn.tokens, request.salt)
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
            # Repeat until none is active. vLLM may not know a new request yet, and a request that
            # ended by itself may still wait for its output.
            await self._llm.abort(await self._save_log_probs(active))
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _save_log_probs(self, requests: list[ActiveRequest]) -> list[str]:
        """Save the log-probs of requests that can be aborted now. Return the requests' ids.

        vLLM discards log-probs at an abort. Tokens that vLLM draws after this call and before the
        abort have no log-probs, and the engine does not return them.
        """
        known = self._llm.output_processor.external_req_ids
        inner = {r.id: known[r.id][0] for r in requests if known.get(r.id)}
        drawn: dict[str, tuple[bytes, bytes]] = {}
        if inner:
            drawn = await self._answer(
                self._llm.engine_core.call_utility_async("drawn_so_far", list(inner.values()))
            )
        ready = [r for r in requests if r.id in inner and (r.params.stop or inner[r.id] in drawn)]
        for request in ready:
            request.log_probs, request.experts = drawn.get(inner[request.id], (b"", b""))
        return [request.id for request in ready]

    async def join_sync(self, init_info: dict[str, Any]) -> None:
        """Connect every worker with the trainer's ranks."""
        await self._answer(
            self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        )

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker's extension. Raise ReplicaLost if vLLM has died."""
        return list(await self._answer(self._llm.collective_rpc(method, args=args)))

    def check_alive(self) -> None:
        """Raise ReplicaLost if vLLM has died, and WorkerError if it was closed."""
        if self._llm.errored:
            raise ReplicaLost(_DEAD)
        if self._closed:
            raise WorkerError("the engine was closed during a call")

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """Return the answer of vLLM's core. Raise ReplicaLost within a second if the core dies."""
        answering = asyncio.ensure_future(call)
        try:
            with waiting(f"{current().registry.name}-core-*|vLLM's core", "its answer"):
                while not (await asyncio.wait([answering], timeout=_POLL_S))[0]:
                    self.check_alive()
            return answering.result()
        except EngineDeadError as error:
            raise ReplicaLost(_DEAD) from error
        finally:
            answering.cancel()

    async def swap(self, version: PolicyVersion, prove: Callable[[Sequence[Any]], None]) -> float:
        """Make the staged weights live as `version`. Return the seconds without decoding.

        `prove` checks every worker's report on its new weights before the next token is drawn. If
        `prove` raises, the engine stays paused.
        """
        self._salts.check()
        self._gate.clear()
        try:
            while not all(map(self._known, self._active.values())):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
            # pause_generation would sleep for 20 ms, so that outputs can arrive. _settle waits only
            # as long as they need.
            await self._answer(
                self._llm.engine_core.pause_scheduler_async(
                    mode="keep", clear_cache=self._recompute
                )
            )
            start = perf_counter()  # vLLM finished its current steps before this time
            await self._settle()
            prove(await self.call_workers("activate_weights", version))
            before, self.version, self._lacks_weights = self.version, version, False
            self._swaps += 1
            # After an interruption, responses read their tokens again with the new weights, and so
            # do idle sessions. Another run, which starts at version 0 again, has the same names.
            if self._recompute or self._interrupted or version <= before:
                self._salts.drop_all(0 if self._active else self._swaps)
            self._interrupted = False
            if without_tokens := self._change_version():
                await self._llm.abort(without_tokens)
            await self._answer(self._llm.resume_generation())
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
            await self._answer(self._llm.sleep(level=1 if keep_weights else 2))
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
            await self._answer(self._llm.wake_up(due))
            self._asleep_tags = [tag for tag in self._asleep_tags if tag not in due]

    async def close(self) -> None:
        """Stop vLLM. Running requests fail with WorkerError."""
        if not self._closed:
            self._closed = True
            await stop(self._llm)

    async def _draw(self, request: ActiveRequest) -> Drawn:
        """Send one request to vLLM and return its result. Count the tokens of a cancelled one."""
        await self._gate.wait()
        request.id = str(next(self._numbers))
        # Without a salt, vLLM would use the KV of old weights for new requests.
        prompt = request.begin(self._salts, self._swaps, self.version)
        self._tick()
        self._active[request.id] = request
        # A task of its own: vLLM forgets a cancelled request before its caller could count.
        drawing = asyncio.ensure_future(self._result(request, prompt))
        try:
            await asyncio.wait([drawing])
            return drawing.result()
        except EngineDeadError as error:
            raise ReplicaLost(_DEAD) from error
        except asyncio.CancelledError:
            request.drawn = self._count(request)
            drawing.cancel()
            try:
                await asyncio.wait([drawing])
            finally:
                self._cancelled += request.drawn
            raise
        finally:
            self._tick()
            del self._active[request.id]

    async def _result(self, request: ActiveRequest, prompt: TokensInput) -> Drawn:
        tokens, log_probs, end, output = tokens_of(), floats_of(), 0, None
        params, state = sampling_params(request.params, self._eos), None
        async with aclosing(self._llm.generate(prompt, params, request.id)) as outputs:
            # There is one output at the end, or with stop strings one for a few tokens each.
            async for output in outputs:
                part, checked = output.outputs[0], len(tokens)
                tokens.extend(part.token_ids)
                log_probs.extend(part.logprobs.logprobs if part.logprobs else ())
                if request.params.stop:
                    assert self._decode is not None
                    if end := stop_string_end(request, tokens, checked, self._decode):
                        state = next(iter(self._states(request)), None)
                        break
        assert output is not None
        cached = request.found(output.num_cached_tokens or 0)
        if tokens:
            self._prefill_tokens += len(request.tokens) - cached
            self._reused_tokens += cached
        found = drawn_of(request, tokens, log_probs, end, output, state)
        request.drawn = len(found.tokens)
        return found

    def _change_version(self) -> list[str]:
        """Record that running requests continue under the new version.

        Return the ids of requests without a token. They must restart under the new salt, because
        their prompts may use the KV cache of the old weights.
        """
        without_tokens = []
        for request in self._active.values():
            if drawn := self._count(request):
                request.swapped(drawn, self.version, recompute=self._recompute)
                if self._recompute:
                    self._prefill_tokens += len(request.tokens) + drawn
            else:
                request.restart = True
                without_tokens.append(request.id)
        return without_tokens

    def _known(self, request: ActiveRequest) -> bool:
        """Return whether vLLM knows the request. The call of one that it forgot returns soon."""
        return bool(self._states(request))

    def _count(self, request: ActiveRequest) -> int:
        """Return the number of drawn tokens by vLLM's count: vLLM returns only the last output."""
        states = self._states(request)
        return sum(s.detokenizer.num_output_tokens() for s in states) if states else request.drawn

    def _states(self, request: ActiveRequest) -> list[Any]:
        """Return what vLLM's output processor has of a request that runs."""
        processor = self._llm.output_processor
        ids = processor.external_req_ids.get(request.id, ())
        return [processor.request_states[i] for i in ids]

    async def _settle(self) -> None:
        """Wait until every output that vLLM's core sent before its pause is counted."""
        queue = self._llm.engine_core.outputs_queue
        idle, last = 0, -1
        while idle < _IDLE_TURNS:
            await asyncio.sleep(0)
            count = sum(self._count(r) for r in self._active.values())
            idle = idle + 1 if queue.empty() and count == last else 0
            last = count

    def _tick(self) -> None:
        """Add the time since the last `_tick` to the busy time of the running requests."""
        now = perf_counter()
        self._busy_slot_s += (now - self._busy_since) * min(len(self._active), self._slots)
        self._busy_since = now


def build(sides: Sides, model: ModelConfig, model_folder: str) -> VllmRolloutEngine:
    """Build one replica's engine on this process's devices, with random weights until a sync."""
    arguments = engine_arguments(sides, model, model_folder)
    rollout = sides.rollout
    return VllmRolloutEngine(
        start(arguments),
        eos_ids=folder_eos_ids(model_folder, trust_remote_code=model.trust_remote_code),
        slots=rollout.max_num_seqs,
        max_len=arguments["max_model_len"],
        kv_on_swap=rollout.kv_on_swap,
        can_sleep=arguments["enable_sleep_mode"],
        decode=text_of(model_folder, model.trust_remote_code),
    )
