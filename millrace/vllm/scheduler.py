"""vLLM's scheduler, in vLLM's core process. Log-probs stay there until their response ends, and then go out in one piece.

vLLM sends each token's on its own, as three arrays, and unpacks them on one thread of the process that asked. That takes five times
what the rest of a token's output takes, and that thread's speed is the most a replica can have: benchmarks/bench_log_probs.py.
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
"""Key in the kv_transfer_params of a last output, a field that vLLM passes through untouched: float32s."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Holding(Scheduler):
    """Keeps the log-probs of requests that have one output, at their end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[str, array[float]] = {}

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        wanted = request.sampling_params
        if wanted and wanted.output_kind == RequestOutputKind.FINAL_ONLY:
            self.held[request.request_id] = array("f")

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        found = super().update_from_output(*args, **kwargs)
        for batch in found.values():
            for output in batch.outputs:
                held = self.held.get(output.request_id)
                if held is None:
                    continue
                if output.new_logprobs is not None:
                    held.extend(
                        output.new_logprobs.logprobs[:, 0].tolist()
                    )  # the drawn token's own is the first
                    output.new_logprobs = None
                if output.finish_reason is not None:
                    output.kv_transfer_params = {
                        LOG_PROBS: self.held.pop(output.request_id).tobytes()
                    }
        return found

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        found = super().finish_requests(*args, **kwargs)
        for request in found:
            self.held.pop(request.request_id, None)
        return found


class _HoldingAsync(_Holding, AsyncScheduler):
    pass


def scheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """What vLLM calls where it would make its own."""
    kind = _HoldingAsync if vllm_config.scheduler_config.async_scheduling else _Holding
    return kind(vllm_config=vllm_config, **kwargs)


def held_log_probs(core: EngineCore, ids: list[str] | None) -> dict[str, bytes]:
    """float32s of all that these requests have drawn so far, None for all of them; of one that has ended or not begun nothing."""
    held: dict[str, array[float]] = core.scheduler.held
    return {i: held[i].tobytes() for i in (held if ids is None else ids) if i in held}


_serve = EngineCoreProc.run_busy_loop


def serve_through_signals(core: Any) -> None:
    """Serve, and leave SIGTERM and SIGINT to the driver: it gets them too, and saves first."""
    core.own_handlers = {n: signal.signal(n, signal.SIG_IGN) for n in _STOP_SIGNALS}
    _serve(core)


def heed_signals(core: Any) -> None:
    """Give vLLM its handlers back. Its host asks for this, then ends it by SIGTERM."""
    for number, handler in core.own_handlers.items():
        signal.signal(number, handler)


# A call to a core names a method of it.
EngineCore.held_log_probs = held_log_probs
EngineCoreProc.heed_signals = heed_signals
EngineCoreProc.run_busy_loop = serve_through_signals
