"""Checks of serving engines: the arguments that users may set, and those that millrace sets."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from millrace.config.rollout_keys import RolloutConfig
from millrace.config.section import Rule
from millrace.config.trainer_keys import TrainerConfig
from millrace.errors import bad_value


class Arguments(NamedTuple):
    """The arguments of an engine that rollout.engine_kwargs must not have."""

    label: str
    """The engine's name in messages."""
    settings: dict[str, str]
    """Arguments that have a key in millrace, and that key. Other parts of millrace read it too."""
    fixed: dict[str, str]
    """Arguments that users cannot change, and the reason."""
    source: tuple[str, ...]
    """The file of the engine's package that has all arguments, and their classes there."""


_BOTH = {
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
}
_BOTH_FIXED = {
    "skip_tokenizer_init": "millrace sends and receives tokens",
    "load_format": "the first weights come from the trainer",
}
ARGUMENTS = {
    "vllm": Arguments(
        "vLLM",
        _BOTH
        | {
            "model": "model.path",
            "seed": "trainer.seed",
            "tensor_parallel_size": "rollout.tensor_model_parallel_size",
            "data_parallel_size": "rollout.n_gpus_per_node and rollout.nnodes, which give the "
            "replicas",
            "max_model_len": "rollout.max_prompt_length and rollout.max_response_length",
            "max_num_seqs": "rollout.max_num_seqs",
            "max_num_batched_tokens": "rollout.max_num_batched_tokens",
            "enable_prefix_caching": "rollout.enable_prefix_caching",
            "enforce_eager": "rollout.enforce_eager",
            "gpu_memory_utilization": "rollout.gpu_memory_utilization",
            "enable_sleep_mode": "rollout.free_cache_engine",
            "enable_return_routed_experts": "model.router_replay",
            "quantization": "rollout.quantization",
            "quantization_config": "rollout.quantization",
        },
        _BOTH_FIXED
        | {
            "generation_config": "the model's own defaults would change the sampling",
            "logprobs_mode": "training needs the log-probs of the distribution that was sampled",
            "weight_transfer_config": "millrace transfers the weights itself",
            "worker_extension_cls": "millrace transfers the weights itself",
            "moe_backend": "other kernels permute the weights of experts, which a sync overwrites "
            "in order",
            "scheduler_cls": "millrace's scheduler keeps log-probs until their response ends",
        }
        | dict.fromkeys(
            ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
            "with n-grams, its CPU build draws tokens that the model does not, and no other way of "
            "speculation is proven",
        ),
        ("engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs"),
    ),
    "sglang": Arguments(
        "SGLang",
        _BOTH
        | {
            "model_path": "model.path",
            "random_seed": "trainer.seed",
            "device": "trainer.device",
            "tp_size": "rollout.tensor_model_parallel_size",
            "dp_size": "rollout.n_gpus_per_node and rollout.nnodes, which give the replicas",
            "context_length": "rollout.max_prompt_length and rollout.max_response_length",
            "max_running_requests": "rollout.max_num_seqs",
            "chunked_prefill_size": "rollout.max_num_batched_tokens",
            "disable_radix_cache": "rollout.enable_prefix_caching",
            "disable_cuda_graph": "rollout.enforce_eager",
            "mem_fraction_static": "rollout.gpu_memory_utilization",
            "enable_memory_saver": "rollout.free_cache_engine",
            "enable_return_routed_experts": "model.router_replay",
        },
        _BOTH_FIXED
        | {
            "sampling_backend": "SGLang's other backends take no seed for each request",
            "grammar_backend": "millrace asks for no grammars",
            "enable_fp32_lm_head": "logits are float32, as in the train engine",
            "tokenizer_worker_num": "one process counts the tokens of a request",
            "pp_size": "a sync reaches the ranks of one stage alone",
            "nnodes": "a replica is on one node",
            "custom_sigquit_handler": "millrace reports an engine that died",
            "skip_server_warmup": "the engine has no weights before the first sync",
            "tokenizer_path": "millrace sends and receives tokens",
            "incremental_streaming_output": "millrace reads all tokens of a response at once",
            "preferred_sampling_params": "the keys of the run say how a token is drawn",
            "speculative_algorithm": "millrace has no speculative decoding with SGLang",
            "quantization": "millrace has no rollouts in 8 bits with SGLang",
            "torchao_config": "millrace has no rollouts in 8 bits with SGLang",
            "enable_lora": "adapters are merged into the weights that arrive",
            "lora_paths": "adapters are merged into the weights that arrive",
            "moe_runner_backend": "other kernels permute the weights of experts, and return none",
            "disaggregation_mode": "a replica reads prompts and draws",
            "enable_dp_attention": "a replica is one data-parallel rank",
        },
        ("srt/server_args.py", "ServerArgs"),
    ),
}
"""The arguments of each serving engine: of AsyncEngineArgs and of ServerArgs."""
SGLANG_RELEASES = ("0.5.17", "0.5.23")
"""The releases whose names millrace replaces. Engines of the first alone were run."""
SCRATCH = "MILLRACE_SCRATCH"
"""Environment variable: the folder for the files of an engine, which the driver removes."""
HOST_PID = "MILLRACE_VLLM_HOST"
"""Environment variable of vLLM's processes: the process that started them. They end with it."""


def serving_rules(rollout: RolloutConfig, trainer: TrainerConfig) -> Iterator[Rule]:
    """Yield the rules of engines, of their arguments and of the replicas' interpreter."""
    given, key, engine = rollout.engine_kwargs, "rollout.engine_kwargs", rollout.engine
    if rollout.python:
        rule = "Ray starts the replicas in its own environment"
        fix = "trainer.runtime=local, or remove the key"
        yield trainer.runtime == "ray", "rollout.python", rule, fix
        check_program(rollout.python)
    rule, fix = "engine=torch takes no arguments", "rollout.engine=vllm, or remove the key"
    yield given and engine == "torch", key, rule, fix
    if engine not in ARGUMENTS:
        return
    label, settings, fixed, _ = ARGUMENTS[engine]
    yield (
        trainer.deterministic,
        "trainer.deterministic",
        f"{label}'s results depend on which requests share a batch, so the same seed does not give "
        "the same bits",
        "rollout.engine=torch, or trainer.deterministic=false",
    )
    own = "has a key of its own"
    for name in given:
        yield name in settings, f"{key}.{name}", own, settings.get(name, "")
        yield name in fixed, f"{key}.{name}", f"is fixed: {fixed.get(name)}", "remove it"
    size = given.get("page_size", 1) if engine == "sglang" else 1
    rule = "must be a whole number of tokens, at least 1"
    yield type(size) is not int or size < 1, f"{key}.page_size", rule, "1, or leave it out"
    overrides = given.get("hf_overrides", {}) if engine == "vllm" else {}
    rule = "must be a mapping of settings of the model's config.json"
    fix = f"{key}.hf_overrides.KEY=VALUE"
    yield not isinstance(overrides, dict), f"{key}.hf_overrides", rule, fix
    name = "quantization_config"
    yield name in overrides, f"{key}.hf_overrides.{name}", own, "rollout.quantization"


def check_known(engine: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError for an argument that the installed engine does not have."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            rule = f"{ARGUMENTS[engine].label}'s engine has no such argument"
            raise bad_value("rollout.engine_kwargs", key, rule, near[0] if near else "leave it out")


def check_program(path: str) -> None:
    """Raise ConfigError unless the path, which rollout.python has, is that of a program."""
    if shutil.which(path):
        return
    rule = "there is no such program, or it cannot be run"
    fix, inside = "the python of an environment, such as `make sglang` makes", f"{path}/bin/python"
    if shutil.which(inside):
        rule, fix = "is the folder of an environment", inside
    raise bad_value("rollout.python", path, rule, fix)


def check_sglang(found: str) -> None:
    """Raise ConfigError if millrace is not made for this release of SGLang."""
    if found not in SGLANG_RELEASES:
        right = SGLANG_RELEASES[0]
        rule = f"its environment has SGLang {found}, and millrace is made for {right}"
        raise bad_value("rollout.engine", "sglang", rule, f"pip install sglang=={right} there")
