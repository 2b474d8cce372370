"""The vLLM rollout engine: one replica of vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from time import perf_counter
from typing import Any

from millrace.config import ModelConfig, Sides
from millrace.errors import INSTALL, MissingDependency, ReplicaLost
from millrace.models.model import folder_eos_ids
from millrace.models.tokenizer import text_of
from millrace.serving.engine import ServingEngine
from millrace.serving.requests import ActiveRequest, Drawn, stop_string_end
from millrace.types import floats_of, tokens_of
from millrace.waits.registry import current, waiting

try:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    from vllm.inputs import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError
except ImportError as error:
    raise MissingDependency(f"rollout.engine=vllm needs vLLM. Fix: {INSTALL['vllm']}.") from error

from millrace.serving.vllm.arguments import engine_arguments
from millrace.serving.vllm.requests import drawn_of, sampling_params
from millrace.serving.vllm.start import start, stop

_DEAD = "vLLM's engine process has died; the worker's log has the reason"
_POLL_S = 1.0
_IDLE_TURNS = 4
"""Turns of the event loop until an output of vLLM's queue is in a request's count of tokens."""


class VllmRolloutEngine(ServingEngine):
    """A ServingEngine with vLLM's AsyncLLM.

    A resumed response continues with another random stream than an uninterrupted one.
    """

    name = "vLLM"

    def __init__(self, llm: AsyncLLM, **settings: Any) -> None:
        self._llm = llm
        super().__init__(**settings)

    async def _abort(self, requests: list[ActiveRequest]) -> None:
        interrupted = [r for r in requests if r.interrupted]
        ready = await self._save_log_probs(interrupted) if interrupted else []
        await self._llm.abort(ready + [r.id for r in requests if not r.interrupted])

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

    def _failure(self) -> str | None:
        return _DEAD if self._llm.errored else None

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

    async def _pause(self) -> float:
        while not all(map(self._states, self._active.values())):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        # pause_generation would sleep for 20 ms, so that outputs can arrive. _settle waits only as
        # long as they need.
        await self._answer(
            self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._recompute)
        )
        start = perf_counter()  # vLLM finished its current steps before this time
        await self._settle()
        return start

    async def _resume(self) -> None:
        await self._answer(self._llm.resume_generation())

    async def _free(self, keep_weights: bool) -> None:
        await self._answer(self._llm.sleep(level=1 if keep_weights else 2))

    async def _allocate(self, tags: list[str]) -> None:
        await self._answer(self._llm.wake_up(tags))

    async def _stop(self) -> None:
        await stop(self._llm)

    async def _result(self, request: ActiveRequest) -> Drawn:
        tokens, log_probs, end, output = tokens_of(), floats_of(), 0, None
        params, state = sampling_params(request.params, self._eos), None
        # A raw prompt would pass vLLM's parser, and a thread.
        prompt = tokens_input(request.tokens.tolist(), cache_salt=str(request.salt.number))
        try:
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
        except EngineDeadError as error:
            raise ReplicaLost(_DEAD) from error
        assert output is not None
        if tokens:
            self._read(request, output.num_cached_tokens or 0)
        found = drawn_of(request, tokens, log_probs, end, output, state)
        request.drawn = len(found.tokens)
        return found

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
