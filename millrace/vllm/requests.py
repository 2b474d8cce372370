"""A request to vLLM: its parameters, its state while it runs, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

import vllm
from vllm.sampling_params import RequestOutputKind

from millrace.types import Floats, PolicyVersion, SamplingParams, Tokens


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One call of `generate`."""

    tokens: Tokens
    params: SamplingParams
    id: str = ""
    starts: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    """(number of tokens drawn before the version, version) for each version."""
    interrupted: bool = False
    log_probs: bytes = b""
    """The log-probs of an interrupted request, as float32, saved before vLLM discards them."""
    restart: bool = False
    """vLLM aborted the request before its first token. It restarts under the new version."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The result of one request to vLLM."""

    tokens: Tokens
    log_probs: Floats
    reason: str
    """vLLM's finish_reason, or "string" for a stop string."""


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
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # An output for each token costs more than drawing the token. Only stop strings need one.
        output_kind=RequestOutputKind.DELTA if params.stop else RequestOutputKind.FINAL_ONLY,
    )
