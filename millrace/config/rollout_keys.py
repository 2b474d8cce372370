"""The keys of the rollout side."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.plugins import Named
from millrace.config.section import Fixed, Home, NoEffectOnWeights, ReadWith, Rule, Section, Switch
from millrace.errors import bad_value

SERVING = ("vllm", "sglang")
"""The engines whose model runs in processes of its own."""
_SERVING = ReadWith({".engine": SERVING})
_LONGER = "its responses in flight may be longer"
_ENDED = Fixed("its responses in flight may already contain what would end them now")
_DRAWN = Fixed(
    _LONGER,
    lambda now, before, key: not now.rollout.drawn_lengths.enable,
    "another value with drawn lengths",
)


def _no_shorter_responses(now: Any, before: Any, key: str) -> bool:
    return bool(now.rollout.max_response_length > before.rollout.max_response_length)


def _longer_prompts(now: Any, before: Any, key: str) -> bool:
    longer = now.rollout.max_prompt_length > before.rollout.max_prompt_length
    return longer and not now.data.filter_overlong_prompts


class ValidationConfig(Section):
    n: int = Field(1, ge=1)
    """Responses to each problem: the k of mean@k, best@k and maj@k."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature of validation. 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus (top-p) of validation."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the most likely tokens in validation. 0 means all tokens."""
    greedy: bool = True
    """Also draw one greedy response to each problem. It is reported as val/<data_source>/greedy."""


class DrawnLengthsConfig(Section):
    enable: Annotated[bool, Fixed(_LONGER)] = False
    """Draw the length of each training response from a log-normal distribution.

    The model's end-of-sequence tokens are ignored. rollout.max_response_length cuts the length. The
    lengths are the same in every mode. Use them for benchmarks without trained weights.
    """
    median: Annotated[float, _DRAWN] = Field(0.0, ge=0)
    """Median length, in tokens."""
    sigma: Annotated[float, _DRAWN] = Field(1.0, ge=0)
    """Standard deviation of the natural logarithm of the lengths.

    With 0 all lengths are equal. With 1, 5 % of the lengths are over five medians.
    """


class RolloutConfig(Section):
    nnodes: Annotated[int, NoEffectOnWeights()] = Field(1, ge=1)
    """Nodes of the rollout side."""
    n_gpus_per_node: Annotated[int, NoEffectOnWeights()] = Field(1, ge=1)
    """Devices of the rollout side on each of its nodes: GPUs, or processes on a CPU.

    A replica of the engine takes tensor_model_parallel_size devices.
    """
    engine: Annotated[str, Named("rollout_engines"), Switch()] = "torch"
    """Rollout engine.

    torch decodes with the transformers model and needs nothing else. vllm decodes with vLLM
    (docs/vllm.md), and sglang with SGLang (docs/sglang.md).
    """
    python: Annotated[str, Home, NoEffectOnWeights(), _SERVING] = ""
    """vllm, sglang: the Python interpreter of the replicas' processes. Empty means that of the run.

    SGLang and vLLM pin packages that do not fit together, nor with millrace's. `make sglang` makes
    an environment whose python goes here. The local runtime alone uses it.
    """
    tensor_model_parallel_size: int = Field(1, ge=1)
    """Devices over which one replica splits the model. Values over 1 need a serving engine."""
    gpu_memory_utilization: Annotated[float, _SERVING] = Field(0.85, gt=0, le=1)
    """vllm, sglang: share of a GPU's memory for weights and KV cache.

    The staged weights of the next version need further memory.
    """
    enforce_eager: Annotated[bool, _SERVING] = False
    """vllm, sglang: do not use CUDA graphs."""
    enable_prefix_caching: Annotated[bool, _SERVING] = True
    """vllm, sglang: share the KV cache of equal prefixes between requests of one policy version.

    The trajectories of a sample then read their prompt once.
    """
    max_num_batched_tokens: Annotated[int, _SERVING] = Field(8192, ge=1)
    """vllm, sglang: tokens of one engine step, prefill and decode together."""
    free_cache_engine: Annotated[bool, _SERVING] = True
    """vllm, sglang, colocated: free the memory of weights and KV cache while training runs.

    false keeps both on the GPU and saves the time to load them. gpu_memory_utilization must then
    leave room for training.
    """
    quantization: Annotated[Literal["fp8"] | None, ReadWith({".engine": ("vllm",)})] = None
    """vllm: fp8 draws with 8-bit numbers in linear layers (docs/eight_bit.md).

    Weights get a scale for each output channel, and activations one for each token. Embeddings, norms
    and the head keep model.dtype. The trainer is as without it. It needs model.dtype=bfloat16, and a
    loss or a correction that bounds the difference of both policies.
    """
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """vllm, sglang: further arguments of AsyncEngineArgs or ServerArgs."""
    n: Annotated[int, Fixed("its samples in flight have that many trajectories")] = Field(
        8, ge=1, le=65536
    )
    """Trajectories of each sample."""
    total_rollout_steps: int | None = Field(None, ge=0)
    """Samples that the run trains. A dropped sample is replaced and does not count.

    null sets no limit if trainer.total_epochs or trainer.total_training_steps sets one, and means
    100 otherwise. 0 sets no limit: one of the other two keys must then end the run.
    """
    test_freq: Annotated[int, NoEffectOnWeights()] = Field(0, ge=0)
    """Another name of trainer.test_freq, which is used if trainer.test_freq is 0."""
    temperature: Annotated[
        float, Fixed("its tokens in flight have log-probs at that temperature")
    ] = Field(1.0, gt=0)
    """Softmax temperature of sampling. Log-probs are computed at this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus (top-p) of sampling. Must be 1 in training."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the most likely tokens. Must be 0 (all tokens) in training."""
    max_prompt_length: Annotated[
        int,
        Fixed(
            "its prompts in flight may be longer, or the data is filtered by this length",
            _longer_prompts,
            "a smaller value",
        ),
    ] = Field(512, ge=1)
    """Largest number of tokens of a prompt.

    A longer prompt is an error, or is left out with data.filter_overlong_prompts=true.
    """
    max_response_length: Annotated[
        int, Fixed(_LONGER, _no_shorter_responses, "a smaller value")
    ] = Field(512, ge=1)
    """Largest number of tokens of a response, over all its segments."""
    max_num_seqs: int = Field(64, ge=1)
    """Decode slots of each replica: the largest number of requests that decode together."""
    stop: Annotated[
        tuple[str, ...],
        _ENDED,
    ] = ()
    """Strings that end a response. The end-of-sequence token always ends it."""
    ignore_eos: Annotated[bool, _ENDED] = False
    """Decode every response to the length limit. Use it for benchmarks with fixed lengths."""
    drawn_lengths: DrawnLengthsConfig = DrawnLengthsConfig()
    """Response lengths from a distribution, for benchmarks."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """KV caches of running requests and sessions when on_sync=swap changes the weights.

    keep keeps them. recompute computes them again with the new weights. After an interruption they
    are always computed again.
    """
    session_kv_slots: Annotated[
        int | None, ReadWith({".engine": ("torch",), "trainer.deterministic": (False,)})
    ] = Field(None, ge=0)
    """torch: memory for the KV of sessions that wait for a tool, in full sequences of max_len.

    Their next turn then reads only its new tokens. The KV used least recently makes room. 0 keeps
    none, and so does trainer.deterministic=true. Unset, it is max_num_seqs where agents play.
    """
    val_kwargs: Annotated[ValidationConfig, NoEffectOnWeights()] = ValidationConfig()
    """Sampling in validation."""
    heartbeat_s: Annotated[float, NoEffectOnWeights()] = Field(1.0, gt=0)
    """Seconds between heartbeats of a replica. One that misses three of them is lost.

    A thread of its own sends them, so a long engine step is no silence.
    """
    stall_s: Annotated[float, NoEffectOnWeights()] = Field(10.0, gt=0)
    """Seconds without a token after which a replica that has requests is lost.

    Tokens of any request count, and so do tokens of prompts. On a slow or busy device the limit is
    four times the replica's longest step of late, if that is longer. A sync, sleep and the first
    token after a start, which may wait for compiled kernels, may take longer. During a transfer of weights, vLLM's workers must answer in this time too.
    """
    max_restarts: Annotated[int, NoEffectOnWeights()] = Field(5, ge=0)
    """How often in a row a lost replica is started anew, after 1, 2, 4 and more seconds.

    The count begins again once the replica has served a version. After the last try the run goes on
    without the replica. A run without any replica saves and ends.
    """

    max_replicas: Annotated[int, NoEffectOnWeights()] = Field(0, ge=0)
    """trainer.runtime=ray: add replicas on free devices of the cluster, up to this number.

    They join as nodes join. 0 keeps the number of the start. `millrace scale` sets it anew.
    """

    @property
    def devices(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    @property
    def replicas(self) -> int:
        """Number of rollout engines."""
        return self.devices // self.tensor_model_parallel_size

    @property
    def serves(self) -> bool:
        """Whether the model of a replica runs in processes of its own."""
        return self.engine in SERVING

    @property
    def max_len(self) -> int:
        """Largest number of tokens of a prompt with its response."""
        return self.max_prompt_length + self.max_response_length

    def rules(self, here: str) -> Iterator[Rule]:
        whole = "training needs the log-probs of the full distribution, and"
        rule, fix = f"{whole} a nucleus renormalises them", "rollout.top_p=1"
        yield self.top_p < 1, "top_p", rule, f"{fix} (rollout.val_kwargs.top_p may be less)"
        rule = f"{whole} a top-k cut renormalises them"
        yield self.top_k > 0, "top_k", rule, "rollout.top_k=0"
        drawn, limit = self.drawn_lengths, self.max_response_length
        yield (
            drawn.enable and not 1 <= drawn.median <= limit,
            "drawn_lengths.median",
            f"must be from 1 to rollout.max_response_length = {limit}",
            f"rollout.drawn_lengths.median={max(1, limit // 8)}",
        )
        size, key = self.tensor_model_parallel_size, "tensor_model_parallel_size"
        split = size > 1 and self.engine == "torch"
        rule = "a replica of engine=torch has one device"
        yield split, key, rule, f"rollout.engine=vllm or sglang, or rollout.{key}=1"
        yield (
            self.n_gpus_per_node % size,
            key,
            "the devices of a replica must be on one node, and a node has "
            f"rollout.n_gpus_per_node = {self.n_gpus_per_node} devices",
            f"a divisor of {self.n_gpus_per_node}",
        )
        # The policy would have to draw both characters.
        if text := next((s for s in self.stop if re.fullmatch(r"(?:\\[nrt])+", s)), ""):
            rule = "is a backslash and a letter: YAML reads them as one in double quotes alone"
            raise bad_value("rollout.stop", text, rule, f"'rollout.stop=[\"{text}\"]'")
