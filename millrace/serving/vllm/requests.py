"""The parameters and the result of a request to vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import vllm
from vllm.sampling_params import RequestOutputKind

from millrace.serving.requests import ActiveRequest, Drawn, experts_of, packed
from millrace.serving.vllm.scheduler import EXPERTS, LOG_PROBS
from millrace.types import Floats, SamplingParams, Tokens


def drawn_of(
    request: ActiveRequest, tokens: Tokens, log_probs: Floats, end: int, output: Any, state: Any
) -> Drawn:
    """Return the result of a request.

    end     the number of tokens up to the end of a stop string, or 0
    output  vLLM's last output
    state   what vLLM's output processor has of the request, if it runs on
    """
    part, more = output.outputs[0], output.kv_transfer_params or {}
    experts = more.get(EXPERTS, b"")
    if part.finish_reason == "abort":
        log_probs.frombytes(request.log_probs)
        tokens, log_probs = tokens[: len(log_probs)], log_probs[: len(tokens)]
        experts = request.experts
    else:
        log_probs.frombytes(more.get(LOG_PROBS, b""))
    if end:
        tokens, log_probs = tokens[:end], log_probs[:end]
    routed = part.routed_experts
    if routed is None and state is not None and state.routed_experts_chunks:
        routed = np.concatenate(state.routed_experts_chunks)
    if routed is not None:
        experts = packed(routed)
    reason = "string" if end else part.finish_reason
    return Drawn(tokens, log_probs, reason, experts_of(request, experts, len(tokens)))


def sampling_params(params: SamplingParams, eos_ids: list[int]) -> vllm.SamplingParams:
    """Return vLLM's parameters of a request."""
    return vllm.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or -1,
        seed=(params.seed + params.offset) % (1 << 63),
        ignore_eos=params.ignore_eos,
        stop_token_ids=[] if params.ignore_eos else eos_ids,
        routed_experts_prompt_start=params.experts_from or 0,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,  # a deep copy takes a quarter of the time in which a request is sent
        # An output for each token costs more than drawing the token. Only stop strings need one.
        output_kind=RequestOutputKind.DELTA if params.stop else RequestOutputKind.FINAL_ONLY,
    )


def warm_up_params() -> vllm.SamplingParams:
    """Return the parameters that need every kernel of a request."""
    return vllm.SamplingParams(
        max_tokens=4, temperature=0.9, top_p=0.9, top_k=50, seed=0, logprobs=0, flat_logprobs=True
    )
