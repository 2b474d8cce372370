"""The vLLM rollout engine: one replica of vLLM's AsyncLLM, tokens in and tokens out.

vLLM runs in processes of its own. This class keeps what it does not: which version drew which token, interruption that
returns what was drawn, and the seconds of a pause.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any

from millrace.config import ModelConfig, Sides
from millrace.errors import INSTALL, MissingDependency, WorkerError
from millrace.models.model import folder_eos_ids
from millrace.models.tokenizer import text_of
from millrace.ports import RolloutStats
from millrace.rollout.requests import (
    check_request,
    completes_stop,
    cut_by_version,
    stop_window,
)
from millrace.types import (
    PolicyVersion,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    floats_of,
    tokens_of,
)

try:
    import vllm
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError
except ImportError as error:
    raise MissingDependency(f"rollout.engine=vllm needs vLLM. Fix: {INSTALL['vllm']}.") from error

from millrace.vllm.arguments import engine_arguments
from millrace.vllm.requests import Drawn, Live
from millrace.vllm.scheduler import LOG_PROBS
from millrace.vllm.start import start, stop

_STOPS = {"stop": Stop.EOS, "length": Stop.LENGTH, "string": Stop.STRING}
_DEAD = "vLLM's engine process has died; the worker's log says why"
_LOOK_S = 1.0
_QUIET_TURNS = (
    4  # of the event loop: from vLLM's queue to its output handler to the count of a request
)


class VllmRolloutEngine:
    """A RolloutEngine. `eos_ids` end a response; a prompt and its response have `max_len` tokens at most.

    A sampled response repeats with its seed and weights on the same vLLM, but one that was resumed goes on in another random
    stream than it would have uninterrupted.
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
        self._live: dict[str, Live] = {}
        self._gate = asyncio.Event()
        """Closed while weights change: what is asked for meanwhile is the new version's."""
        self._gate.set()
        self._asleep = False
        self._asleep_tags: list[str] = []
        """What vLLM has given up: "weights", "kv_cache"."""
        self._hollow = False
        """Weights were given up, and none have come since."""
        self._closed = False
        self._tokens = 0
        self._prefill_tokens = 0
        self._busy_slot_s = 0.0
        self._busy_since = perf_counter()

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """See the port. Raises DataError if `tokens` leave no room in max_len, WorkerError if the engine cannot serve."""
        check_request(
            tokens,
            params,
            max_len=self._max_len,
            closed=self._closed,
            asleep=self._asleep,
            has_tokenizer=self._decode is not None,
        )
        request = Live(tokens, params)
        while True:
            drawn = await self._draw(request)
            if drawn.reason == "abort" and request.again and not request.interrupted:
                request.again = False
                continue
            stop = (
                Stop.INTERRUPTED
                if drawn.reason == "abort" and request.interrupted
                else _STOPS.get(drawn.reason)
            )
            if stop is None:
                raise WorkerError(
                    f"vLLM ended a request by itself ({drawn.reason}); the worker's log says why"
                )
            self._tokens += len(drawn.tokens)
            return cut_by_version(drawn.tokens, drawn.log_probs, request.starts, stop)

    async def interrupt(self) -> None:
        """End every interruptible request; all of their calls have returned when this returns."""
        ends = [r for r in self._live.values() if r.params.interruptible]
        for request in ends:
            request.interrupted = True
        while left := [r for r in ends if r.id in self._live]:
            # Again, until they are gone: one that is just being handed over is not known yet, and the output of one that has ended
            # by itself is on its way.
            await self._llm.abort(await self._keep_log_probs(left))
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _keep_log_probs(self, requests: list[Live]) -> list[str]:
        """Of those that can be aborted now, whose ids it returns: vLLM drops their log-probs. What is drawn before the abort is
        there, within a turn of this loop, has none, and is not told."""
        known = self._llm.output_processor.external_req_ids
        inner = {r.id: known[r.id][0] for r in requests if known.get(r.id)}
        held: dict[str, bytes] = {}
        if inner:
            held = await self._answer(
                self._llm.engine_core.call_utility_async("held_log_probs", list(inner.values()))
            )
        found = [r for r in requests if r.id in inner and (r.params.stop or inner[r.id] in held)]
        for request in found:
            request.kept = held.get(inner[request.id], b"")
        return [request.id for request in found]

    async def join_sync(self, init_info: dict[str, Any]) -> None:
        """Every worker meets the trainer's ranks."""
        await self._answer(
            self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        )

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """The method of the worker extension, on every worker. Raises WorkerError if vLLM has died."""
        return list(await self._answer(self._llm.collective_rpc(method, args=args)))

    def check_alive(self) -> None:
        """Raises WorkerError if vLLM has died or was closed."""
        if self._llm.errored:
            raise WorkerError(_DEAD)
        if self._closed:
            raise WorkerError("the engine was closed while something was asked of it")

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """What vLLM's core says. It never answers what was asked before it died."""
        waiting = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([waiting], timeout=_LOOK_S))[0]:
                self.check_alive()
            return waiting.result()
        except EngineDeadError as error:
            raise WorkerError(_DEAD) from error
        finally:
            waiting.cancel()

    async def swap(self, version: PolicyVersion, prove: Callable[[Sequence[Any]], None]) -> float:
        """Make the staged weights live; tokens from now on are `version`'s. Returns the seconds without decoding.

        `prove` gets what every worker says of its new weights before any token is drawn from them; what it raises leaves the engine
        still.
        """
        self._gate.clear()
        try:
            while not all(self._known(r) for r in self._live.values()):  # noqa: ASYNC110 (vLLM has no event for it)
                await asyncio.sleep(0)
            # Not pause_generation: it sleeps for 20 ms so that outputs may arrive. Here they are waited for.
            await self._answer(
                self._llm.engine_core.pause_scheduler_async(
                    mode="keep", clear_cache=self._recompute
                )
            )
            start = perf_counter()  # until now the steps that had begun went on
            await self._settle()
            prove(await self.call_workers("activate_weights", version))
            self.version, self._hollow = version, False
            self._swaps += 1
            if fresh := self._change_version():
                await self._llm.abort(fresh)
            await self._answer(self._llm.resume_generation())
            return perf_counter() - start
        finally:
            self._gate.set()

    async def stats(self) -> RolloutStats:
        self._tick()
        tokens = self._tokens + sum(self._count(r) for r in self._live.values())
        return RolloutStats(tokens, self._prefill_tokens, self._busy_slot_s, self._slots)

    async def sleep(self, keep_weights: bool = True) -> None:
        """Give the GPU's memory back, with rollout.free_cache_engine. Raises WorkerError if anything is running."""
        if self._live:
            raise WorkerError(
                f"sleep() with {len(self._live)} requests under way. Fix: drain or interrupt the engine first."
            )
        if self._can_sleep and not self._asleep:
            await self._answer(self._llm.sleep(level=1 if keep_weights else 2))
            self._hollow = not keep_weights
            self._asleep_tags = ["weights", "kv_cache"]
        self._asleep = True

    async def wake_weights(self) -> None:
        """Take the memory of the weights again. If they were not kept, there are none in it before the next swap."""
        await self._wake(["weights"])

    async def wake(self) -> None:
        """Take all memory again. Raises WorkerError if weights that were not kept were not replaced."""
        if self._hollow:
            raise WorkerError(
                "wake() of an engine whose weights were given up. Fix: wake_weights(), then a weight sync"
            )
        await self._wake(["weights", "kv_cache"])
        self._asleep = False

    async def _wake(self, tags: list[str]) -> None:
        if due := [tag for tag in tags if tag in self._asleep_tags]:
            await self._answer(self._llm.wake_up(due))
            self._asleep_tags = [tag for tag in self._asleep_tags if tag not in due]

    async def close(self) -> None:
        """Stop vLLM; requests under way fail with WorkerError."""
        if not self._closed:
            self._closed = True
            await stop(self._llm)

    async def _draw(self, request: Live) -> Drawn:
        """One request to vLLM, to its end."""
        await self._gate.wait()
        request.id = str(next(self._numbers))
        request.starts = [(0, self.version)]
        # The salt keeps weights apart in the prefix cache: vLLM would serve KV of old ones to new requests. Not by their version:
        # another run on this engine begins at 0 again.
        prompt = {"prompt_token_ids": request.tokens.tolist(), "cache_salt": str(self._swaps)}
        self._tick()
        self._live[request.id] = request
        try:
            tokens, log_probs, end, output = tokens_of(), floats_of(), 0, None
            async with aclosing(
                self._llm.generate(prompt, self._sampling(request.params), request.id)
            ) as outputs:
                async for (
                    output
                ) in outputs:  # one, at the end; with stop strings, one for every token or few
                    found, seen = output.outputs[0], len(tokens)
                    tokens.extend(found.token_ids)
                    log_probs.extend(found.logprobs.logprobs if found.logprobs else ())
                    if request.params.stop and (end := self._stop_string(request, tokens, seen)):
                        break
            assert output is not None
            if tokens:
                self._prefill_tokens += len(request.tokens) - (output.num_cached_tokens or 0)
            if found.finish_reason == "abort":
                log_probs.frombytes(request.kept)
                tokens, log_probs = tokens[: len(log_probs)], log_probs[: len(tokens)]
            else:
                log_probs.frombytes((output.kv_transfer_params or {}).get(LOG_PROBS, b""))
            return (
                Drawn(tokens[:end], log_probs[:end], "string")
                if end
                else Drawn(tokens, log_probs, found.finish_reason)
            )
        except EngineDeadError as error:
            raise WorkerError(_DEAD) from error
        finally:
            self._tick()
            del self._live[request.id]

    def _stop_string(self, request: Live, drawn: Tokens, seen: int) -> int:
        """How many tokens were drawn when a stop string was complete, 0 if none is. `seen` tokens have been looked at."""
        assert self._decode is not None
        stop, offset = request.params.stop, request.params.offset
        window = stop_window(stop)
        # Only tokens of this response count, earlier calls' included.
        before = (
            request.tokens[len(request.tokens) - min(window, offset) :] if offset else tokens_of()
        )
        for end in range(seen + 1, len(drawn) + 1):
            tail = (before + drawn[max(0, end - window) : end])[-window:]
            if completes_stop(tail, stop, self._decode):
                return end
        return 0

    def _change_version(self) -> list[str]:
        """Tokens of running requests are from now on the new version's. Returns requests that have none yet.

        Their prompts may be found in the cache of the old weights, so they start over under the new version's salt.
        """
        fresh = []
        for request in self._live.values():
            if drawn := self._count(request):
                request.starts.append((drawn, self.version))
                if self._recompute:
                    self._prefill_tokens += len(request.tokens) + drawn
            else:
                request.again = True
                fresh.append(request.id)
        return fresh

    def _known(self, request: Live) -> bool:
        """Whether vLLM has taken it. One that is done is not known any more: it returns within a few turns of the loop."""
        return bool(self._llm.output_processor.external_req_ids.get(request.id))

    def _count(self, request: Live) -> int:
        """Tokens drawn so far, as vLLM counts them: it hands over the last output alone."""
        processor = self._llm.output_processor
        states = [
            processor.request_states[i] for i in processor.external_req_ids.get(request.id, ())
        ]
        return sum(state.detokenizer.num_output_tokens() for state in states)

    async def _settle(self) -> None:
        """Until every output that vLLM's core sent before its pause is counted."""
        queue = self._llm.engine_core.outputs_queue
        quiet, last = 0, -1
        while quiet < _QUIET_TURNS:
            await asyncio.sleep(0)
            count = sum(self._count(r) for r in self._live.values())
            quiet = quiet + 1 if queue.empty() and count == last else 0
            last = count

    def _sampling(self, params: SamplingParams) -> vllm.SamplingParams:
        return vllm.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            seed=(params.seed + params.offset) % (1 << 63),
            ignore_eos=params.ignore_eos,
            stop_token_ids=[] if params.ignore_eos else self._eos,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # An output for each token costs more than drawing it; only stop strings must see them.
            output_kind=RequestOutputKind.DELTA if params.stop else RequestOutputKind.FINAL_ONLY,
        )

    def _tick(self) -> None:
        """Account for the time since the last change of who is running."""
        now = perf_counter()
        self._busy_slot_s += (now - self._busy_since) * min(len(self._live), self._slots)
        self._busy_since = now


def build(sides: Sides, model: ModelConfig, model_folder: str) -> VllmRolloutEngine:
    """The engine of one replica, on this process's devices. Its weights are random until the first sync."""
    arguments = engine_arguments(sides, model, model_folder)
    llm = start(arguments)
    rollout, trust = sides.rollout, model.trust_remote_code
    return VllmRolloutEngine(
        llm,
        eos_ids=folder_eos_ids(model_folder, trust_remote_code=trust),
        slots=rollout.max_num_seqs,
        max_len=arguments["max_model_len"],
        kv_on_swap=rollout.kv_on_swap,
        can_sleep=arguments["enable_sleep_mode"],
        decode=text_of(model_folder, trust) if rollout.stop else None,
    )
