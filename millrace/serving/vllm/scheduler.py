"""A scheduler for vLLM's core process that costs less for each token.

One thread of the core schedules every token, and with a small model it limits a replica. vLLM's own
scheduler also sends three arrays of log-probs for each token, and one thread of the calling process
unpacks them. This one keeps log-probs and experts until a response ends.
benchmarks/bench_log_probs.py and bench_scheduler.py measure both.
"""

from __future__ import annotations

import signal
from array import array
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec

from millrace.serving.requests import packed

LOG_PROBS = "millrace_log_probs"
"""Key of the float32 log-probs in the kv_transfer_params of a request's last output.

vLLM passes that field through unchanged.
"""
EXPERTS = "millrace_experts"
"""Key of the `packed` experts there, if vLLM returns any."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _LogProbScheduler(Scheduler):
    """A scheduler that keeps the log-probs of requests whose only output is at their end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_return_routed_experts: bool
        self.log_probs: dict[str, array[float]] = {}
        self.experts: dict[str, bytearray] = {}
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec:
            self._skip_open_blocks()

    def _skip_open_blocks(self) -> None:
        """Return at once for a drawn token that neither begins nor fills a block.

        vLLM looks for blocks to allocate, to free and to hash for every token.
        """
        manager, size = self.kv_cache_manager, self.block_size
        allocate, cache, none = (
            manager.allocate_slots,
            manager.cache_blocks,
            manager.empty_kv_cache_blocks,
        )

        def allocate_slots(request: Any, new: int, **more: Any) -> Any:
            draws = new == 1 and more == {"num_lookahead_tokens": 0}
            if draws and (request.num_computed_tokens + 1) % size > 1:
                return none
            return allocate(request, new, **more)

        def cache_blocks(request: Any, computed: int) -> None:
            if computed % size == 0:
                cache(request, computed)

        manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        params = request.sampling_params
        if params and params.output_kind == RequestOutputKind.FINAL_ONLY:
            self.log_probs[request.request_id] = array("f")
            self.experts[request.request_id] = bytearray()

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # vLLM lists the blocks of every request in every step, to read the experts of its prompt.
        # Only a request without a drawn token needs them.
        replays: bool = self.enable_return_routed_experts
        self.enable_return_routed_experts = False
        super()._update_after_schedule(scheduler_output)
        self.enable_return_routed_experts = replays
        for name in scheduler_output.num_scheduled_tokens if replays else ():
            if not self.requests[name].num_output_tokens:
                blocks = self.kv_cache_manager.get_blocks(name).get_block_ids()
                self._re_block_ids[name] = blocks[self.routed_experts_mgr.attn_gid]

    def update_from_output(self, scheduler_output: Any, found: Any) -> Any:
        # vLLM would make arrays of each request's part.
        drawn, found.logprobs = found.logprobs, None
        outputs = super().update_from_output(scheduler_output, found)
        # Column 0 belongs to the drawn token.
        rows = drawn.logprobs[:, 0].tolist() if drawn else []
        for batch in outputs.values():
            for output in batch.outputs:
                log_probs = self.log_probs.get(output.request_id)
                if drawn and (count := len(output.new_token_ids)):
                    row = found.req_id_to_index[output.request_id]
                    if log_probs is None:
                        output.new_logprobs = drawn.slice_request(row, count)
                    else:
                        ends = drawn.cu_num_generated_tokens
                        first = row if ends is None else ends[row]
                        log_probs.extend(rows[first : first + count])
                if log_probs is None:
                    continue
                if (routed := output.routed_experts) is not None:
                    own = self.experts[output.request_id]
                    own += routed.tobytes() if own else packed(routed)
                    output.routed_experts = None
                if output.finish_reason is not None:
                    del self.log_probs[output.request_id]
                    output.kv_transfer_params = {LOG_PROBS: log_probs.tobytes()}
                    if own := self.experts.pop(output.request_id):
                        output.kv_transfer_params[EXPERTS] = bytes(own)
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        for request in finished:
            self.log_probs.pop(request.request_id, None)
            self.experts.pop(request.request_id, None)
        return finished


class _AsyncLogProbScheduler(_LogProbScheduler, AsyncScheduler):
    pass


def scheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler that vLLM uses in place of its own."""
    runs_async = vllm_config.scheduler_config.async_scheduling
    kind = _AsyncLogProbScheduler if runs_async else _LogProbScheduler
    return kind(vllm_config=vllm_config, **kwargs)


def drawn_so_far(core: EngineCore, ids: list[str] | None) -> dict[str, tuple[bytes, bytes]]:
    """Return the float32 log-probs and the experts of running requests, by id. None means all.

    The result has no entry for a request that has ended or has not begun.
    """
    drawn, experts = core.scheduler.log_probs, core.scheduler.experts
    return {
        i: (drawn[i].tobytes(), bytes(experts[i]))
        for i in (drawn if ids is None else ids)
        if i in drawn
    }


_serve = EngineCoreProc.run_busy_loop


def serve_through_signals(core: Any) -> None:
    """Serve, and ignore SIGTERM and SIGINT. Only the driver acts on them, after it has saved."""
    core.own_handlers = {n: signal.signal(n, signal.SIG_IGN) for n in _STOP_SIGNALS}
    _serve(core)


def restore_signal_handlers(core: Any) -> None:
    """Install vLLM's own handlers again. The host then ends the core by SIGTERM."""
    for number, handler in core.own_handlers.items():
        signal.signal(number, handler)


# vLLM calls a core's methods by name, so these functions become methods.
EngineCore.drawn_so_far = drawn_so_far
EngineCoreProc.restore_signal_handlers = restore_signal_handlers
EngineCoreProc.run_busy_loop = serve_through_signals
