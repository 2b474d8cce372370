"""Mixtures of experts in SGLang: the experts of each token, and a head that is the embedding.

SGLang keeps experts by the place of a token's K and V, and returns them with a finished request.
`replace` changes five of its names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.state_capturer import base
from sglang.srt.state_capturer.routed_experts import (
    RoutedExpertsCapturer,
    get_global_experts_capturer,
)
from torch import Tensor

from millrace.serving.requests import packed

_KEPT = "millrace_experts"
"""Name of the experts of a request's tokens before its last retraction."""


class _HostCache(base.BaseHostCache):  # type: ignore[misc]
    """SGLang's cache of experts on a CPU. SGLang's own needs memory that a GPU has pinned."""

    def __init__(self, *shape: int, **_: Any) -> None:
        self.buffer = torch.zeros(shape, dtype=torch.int32)


def _copied(capturer: Any, *args: Any) -> Tensor:
    """Return the experts of a step, in memory that the next step does not overwrite.

    SGLang copies them to the host beside the next step, and on a CPU not at all.
    """
    return _local_slice(capturer, *args).clone()


def _read(request: Any, pool: Any) -> Tensor:
    """Return the experts of a request's tokens but the last: those of each token's first pass."""
    kept = request.__dict__.get(_KEPT)
    start = request.routed_experts_start_len + (0 if kept is None else len(kept))
    length = len(request.origin_input_ids) + len(request.output_ids_through_stop)
    holder = request if hasattr(request, "req_pool_idx") else request.kv  # in 0.5.23
    new = get_global_experts_capturer().get_topk(holder.req_pool_idx, length, pool, start)
    return new if kept is None else torch.cat([kept, new])


def _release(*, req: Any, req_to_token_pool: Any, **more: Any) -> Any:
    """Retract a request, and keep its experts: SGLang reads its tokens again, with newer weights."""
    if req.return_routed_experts and req.output_ids:
        req.__dict__[_KEPT] = _read(req, req_to_token_pool)
    return _release_req(req=req, req_to_token_pool=req_to_token_pool, **more)


def _collect(processor: Any, request: Any) -> None:
    """Add its experts to a finished request, as `experts_of` takes them."""
    if request.return_routed_experts:
        rows = _read(request, processor.req_to_token_pool)
        request.routed_experts = _packed(rows, processor.model_config)


def collect_kept(scheduler: Any, request: Any) -> None:
    """Add its experts to a request that is aborted after a retraction, before it is read again."""
    if (kept := request.__dict__.get(_KEPT)) is not None:
        request.routed_experts = _packed(kept, scheduler.model_config)


def _packed(rows: Tensor, model: Any) -> Tensor:
    shape = model.hf_text_config
    count = getattr(shape, "num_experts", None) or shape.num_local_experts
    kind = np.min_scalar_type(count - 1)
    return torch.frombuffer(bytearray(packed(rows.numpy().astype(kind))), dtype=torch.uint8)


def _load(runner: Any) -> None:
    """Load the model. SGLang's mixtures have a head that no weights reach if it is the embedding."""
    _load_model(runner)
    model, head = runner.model, getattr(runner.model, "lm_head", None)
    tied = getattr(model.config, "tie_word_embeddings", False)
    if tied and isinstance(head, ParallelLMHead):
        head.tie_weights(model.model.embed_tokens)


_load_model = ModelRunner.load_model
_local_slice = RoutedExpertsCapturer._get_local_slice
_release_req = schedule_batch.release_req


def replace() -> None:
    """Replace SGLang's names in this process."""
    ModelRunner.load_model = _load
    RoutedExpertsCapturer._get_local_slice = _copied
    SchedulerBatchResultProcessor._maybe_collect_routed_experts = _collect
    schedule_batch.release_req = _release
    if not torch.cuda.is_available():
        base.BaseHostCache = _HostCache
