"""vLLM's scheduler, in vLLM's core process. Log-probs stay there until their response ends, and then go out in one piece.

vLLM sends each token's on its own, as three arrays, and unpacks them in the process that asked: some 25 microseconds for every
token, five times what the rest of its output takes, which caps a replica at 30 to 40 thousand tokens/s whatever its GPU can do.
"""

from __future__ import annotations

from array import array
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

LOG_PROBS = "millrace_log_probs"
"""Among the kv_transfer_params of a last output, the one field that vLLM hands through as it is: float32s."""


class _Holding(Scheduler):
    """Of requests whose output is wanted at their end alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[str, array[float]] = {}

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        wanted = request.sampling_params
        if wanted and wanted.logprobs == 0 and wanted.output_kind == RequestOutputKind.FINAL_ONLY:
            self.held[request.request_id] = array("f")

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        found = super().update_from_output(*args, **kwargs)
        for batch in found.values():
            for output in batch.outputs:
                held = self.held.get(output.request_id)
                if held is None:
                    continue
                if output.new_logprobs is not None:
                    held.extend(output.new_logprobs.logprobs[:, 0].tolist())  # the drawn token's own is the first
                    output.new_logprobs = None
                if output.finish_reason is not None:
                    output.kv_transfer_params = {LOG_PROBS: self.held.pop(output.request_id).tobytes()}
        return found

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        found = super().finish_requests(*args, **kwargs)
        for gone in self.held.keys() - self.requests.keys():
            del self.held[gone]
        return found


class _HoldingAsync(_Holding, AsyncScheduler):
    pass


def scheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """What vLLM calls where it would make its own."""
    kind = _HoldingAsync if vllm_config.scheduler_config.async_scheduling else _Holding
    return kind(vllm_config=vllm_config, **kwargs)


def held_log_probs(core: EngineCore, ids: list[str] | None) -> dict[str, bytes]:
    """float32s of all that these requests, or all, have drawn so far; of one that is not known nothing."""
    held: dict[str, array[float]] = core.scheduler.held
    return {i: held[i].tobytes() for i in (held if ids is None else ids) if i in held}


EngineCore.held_log_probs = held_log_probs  # a call to a core names a method of it
