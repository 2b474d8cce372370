"""A scheduler for vLLM's core process that keeps log-probs until their response ends.

vLLM's own scheduler sends three arrays of log-probs for each token, and one thread of the calling
process unpacks them. That costs five times as much as the rest of a token's output, and the speed
of that thread limits a replica. benchmarks/bench_log_probs.py measures this.
"""

from __future__ import annotations

import signal
from array import array
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc

LOG_PROBS = "millrace_log_probs"
"""Key of the float32 log-probs in the kv_transfer_params of a request's last output.

vLLM passes that field through unchanged.
"""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _LogProbScheduler(Scheduler):
    """A scheduler that keeps the log-probs of requests whose only output is at their end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_probs: dict[str, array[float]] = {}

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        params = request.sampling_params
        if params and params.output_kind == RequestOutputKind.FINAL_ONLY:
            self.log_probs[request.request_id] = array("f")

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        for batch in outputs.values():
            for output in batch.outputs:
                log_probs = self.log_probs.get(output.request_id)
                if log_probs is None:
                    continue
                if output.new_logprobs is not None:
                    # Column 0 belongs to the drawn token.
                    log_probs.extend(output.new_logprobs.logprobs[:, 0].tolist())
                    output.new_logprobs = None
                if output.finish_reason is not None:
                    del self.log_probs[output.request_id]
                    output.kv_transfer_params = {LOG_PROBS: log_probs.tobytes()}
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        for request in finished:
            self.log_probs.pop(request.request_id, None)
        return finished


class _AsyncLogProbScheduler(_LogProbScheduler, AsyncScheduler):
    pass


def scheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler that vLLM uses in place of its own."""
    runs_async = vllm_config.scheduler_config.async_scheduling
    kind = _AsyncLogProbScheduler if runs_async else _LogProbScheduler
    return kind(vllm_config=vllm_config, **kwargs)


def drawn_log_probs(core: EngineCore, ids: list[str] | None) -> dict[str, bytes]:
    """Return the float32 log-probs of running requests so far, by id. None means all requests.

    The result has no entry for a request that has ended or has not begun.
    """
    drawn: dict[str, array[float]] = core.scheduler.log_probs
    return {i: drawn[i].tobytes() for i in (drawn if ids is None else ids) if i in drawn}


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
EngineCore.drawn_log_probs = drawn_log_probs
EngineCoreProc.restore_signal_handlers = restore_signal_handlers
EngineCoreProc.run_busy_loop = serve_through_signals
