"""The keys of the rollout side."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from millrace.config.section import Section
from millrace.errors import bad_value


class ValidationConfig(Section):
    n: int = Field(1, ge=1)
    """Responses for each problem: the k of mean@k, best@k and maj@k."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature of validation; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of validation."""
    greedy: bool = True
    """Also draw one greedy response for each problem, reported as val/<data_source>/greedy."""


class DrawnLengthsConfig(Section):
    enable: bool = False
    """Workloads without weights: each response ends at a length drawn from a log-normal
    distribution, whatever the model says, and rollout.max_response_length cuts it. Training only;
    the same lengths in every mode."""
    median: float = Field(0.0, ge=0)
    """Tokens."""
    sigma: float = Field(1.0, ge=0)
    """Standard deviation of the lengths' natural logarithm: 0 makes all alike, 1 has 5 % over five
    medians."""


class RolloutConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Nodes of the rollout side."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Devices (GPUs; processes on a CPU) of the rollout side on each of its nodes. A replica of the
    engine takes tensor_model_parallel_size of them."""
    engine: Literal["torch", "vllm"] = "torch"
    """Rollout engine: torch decodes with the transformers model in the worker; vllm needs vLLM
    (docs/vllm.md)."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    """Devices of one replica, over which the model is split; above 1 with engine=vllm alone."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """vllm: share of a GPU's memory for weights and KV cache. Staged weights of the next version
    come on top."""
    enforce_eager: bool = False
    """vllm: no CUDA graphs."""
    enable_prefix_caching: bool = True
    """vllm: requests of one policy version share the KV cache of equal prefixes; siblings of a
    sample read their prompt once."""
    max_num_batched_tokens: int = Field(8192, ge=1)
    """vllm: tokens of one engine step, prefill and decode together."""
    free_cache_engine: bool = True
    """vllm, colocated: weights and KV cache give their memory back while training runs. false keeps
    them on the GPU: no time is lost, and gpu_memory_utilization must leave room for training."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """vllm: further arguments of its AsyncEngineArgs."""
    n: int = Field(8, ge=1, le=65536)
    """Trajectories for each sample."""
    total_rollout_steps: int = Field(100, ge=1)
    """Samples that the run trains in all. Dropped samples are replaced and do not count."""
    test_freq: int = Field(0, ge=0)
    """Versions between two validations; the same key as trainer.test_freq, which it fills where
    that is 0."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of sampling; log-probs are those of this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; must be 1 in training."""
    top_k: int = Field(0, ge=0)
    """Most likely tokens kept; must be 0 (all) in training."""
    max_prompt_length: int = Field(512, ge=1)
    """Tokens; a longer prompt is an error, or left out where data.filter_overlong_prompts is on."""
    max_response_length: int = Field(512, ge=1)
    """Tokens of a response, of all its segments together."""
    max_num_seqs: int = Field(64, ge=1)
    """Decode slots of each replica: requests that decode together."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the end-of-sequence token."""
    ignore_eos: bool = False
    """Decode to the length limit whatever is drawn: for workloads with set lengths."""
    drawn_lengths: DrawnLengthsConfig = DrawnLengthsConfig()
    """Responses of lengths drawn from a distribution."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """KV caches of running requests when on_sync=swap changes the weights: kept, or read again with
    the new weights."""
    val_kwargs: ValidationConfig = ValidationConfig()
    """Sampling of validation."""

    @property
    def devices(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    @property
    def replicas(self) -> int:
        """Rollout engines."""
        return self.devices // self.tensor_model_parallel_size

    @property
    def max_len(self) -> int:
        """Most tokens of a prompt and its response."""
        return self.max_prompt_length + self.max_response_length

    def check(self) -> None:
        self._check_sampling()
        self._check_lengths()
        self._check_replicas()

    def _check_sampling(self) -> None:
        for key, value, cut, fix in (
            ("top_p", self.top_p, self.top_p < 1, "1 (rollout.val_kwargs.top_p may be less)"),
            ("top_k", self.top_k, self.top_k > 0, "0"),
        ):
            if cut:
                name = "a nucleus" if key == "top_p" else "a top-k cut"
                raise bad_value(
                    f"rollout.{key}",
                    value,
                    f"training needs log-probs of the full distribution, and {name} renormalises them",
                    f"rollout.{key}={fix}",
                )

    def _check_lengths(self) -> None:
        drawn, limit = self.drawn_lengths, self.max_response_length
        if drawn.enable and not 1 <= drawn.median <= limit:
            raise bad_value(
                "rollout.drawn_lengths.median",
                drawn.median,
                "half of the responses are longer, and none may be over "
                f"rollout.max_response_length = {limit}",
                f"rollout.drawn_lengths.median={max(1, limit // 8)}",
            )

    def _check_replicas(self) -> None:
        size, key = self.tensor_model_parallel_size, "rollout.tensor_model_parallel_size"
        if size > 1 and self.engine == "torch":
            rule = "engine=torch has each replica on one device"
            raise bad_value(key, size, rule, f"rollout.engine=vllm, or {key}=1")
        if self.n_gpus_per_node % size:
            raise bad_value(
                key,
                size,
                "a replica's devices are on one node, and a node has "
                f"rollout.n_gpus_per_node = {self.n_gpus_per_node}",
                f"a divisor of {self.n_gpus_per_node}",
            )
