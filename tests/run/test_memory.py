"""The estimate of memory against measured peaks, saved tensors and the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from millrace.config import Config, recipe
from millrace.models.model import write_shape
from millrace.run.memory import Size, estimate, layer_bytes, size_of, size_of_model
from millrace.train.fsdp.policy import PackedPolicy
from millrace.train.packing import pack
from millrace.train.rows import rows_of_examples
from millrace.types import tokens_of

GIB = 2**30
SHORT = ["actor.ppo_max_token_len_per_gpu=16384", "model.compile=false"]
SMALL = Size(
    parameters=1000, hidden=8, intermediate=16, layers=3, kv_width=4, vocabulary=10, tied=True
)


def trainer_gib(shape: str, *overrides: str) -> float:
    limits = ["actor.ppo_max_token_len_per_gpu=32768", "rollout.max_response_length=2048"]
    config = recipe.load(f"shapes/{shape}", [*limits, *overrides])
    size = size_of(config.model)
    assert size is not None
    return sum(estimate(config, size, micro_batches=1)["trainer"].values()) / GIB


@pytest.mark.parametrize(
    ("shape", "overrides", "peak"),
    [
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=1"], 83.0),
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=2"], 74.4),
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=4"], 70.2),
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=2", "trainer.fsdp_size=1"], 83.0),
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=2", "model.lora_rank=32"], 68.1),
        (
            "qwen2_7b",
            [
                "trainer.n_gpus_per_node=4",
                "model.gradient_checkpointing=true",
                "model.gradient_checkpointing_share=0.5",
            ],
            100.2,
        ),
        ("qwen2_1.5b", SHORT, 64.8),
        (
            "qwen2_1.5b",
            [*SHORT, "trainer.engine=megatron", "model.gradient_checkpointing_share=1.0"],
            80.0,
        ),
    ],
)
def test_the_trainer_is_within_five_percent_of_the_measured_peaks(
    shape: str, overrides: list[str], peak: float
) -> None:
    assert trainer_gib(shape, *overrides) == pytest.approx(peak, rel=0.05)


WIDTHS: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [(LlamaConfig, {}), (Qwen3Config, {"head_dim": 24}), (Qwen3MoeConfig, EXPERTS)],
)
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_a_layer_keeps_the_bytes_of_the_estimate(
    kind: Any, keys: dict[str, Any], dtype: torch.dtype, width: int
) -> None:
    rows = rows_of_examples([(tokens_of([0]), tokens_of(range(16)))] * 3)
    batch = pack(rows, np.arange(3), torch.device("cpu"), padded=True)

    def saved(layers: int) -> int:
        hf = kind(**WIDTHS, **keys, num_hidden_layers=layers)
        policy = PackedPolicy(AutoModelForCausalLM.from_config(hf, dtype=dtype))
        own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            policy(batch, 1.0)
        return sum(storage.nbytes() for storage in kept.values())

    size = size_of_model(kind(**WIDTHS, **keys), 0)
    found = (saved(2) - saved(1)) / len(batch.input_ids)
    assert layer_bytes(size, width) == pytest.approx(found, rel=0.05)  # it leaves routes out


@pytest.mark.parametrize("more", [[], ["model.shape.num_experts=6"]])
def test_a_shape_has_the_parameters_of_the_model_that_is_built(
    tmp_path: Path, more: list[str]
) -> None:
    overrides = ["model.shape.vocab_size=101", "model.shape.tie_word_embeddings=false", *more]
    config = recipe.load("quickstart", overrides)
    size = size_of(config.model)
    write_shape(
        tmp_path,
        config.model.shape,
        vocab_size=101,
        eos_token_id=0,
        pad_token_id=0,
        max_position_embeddings=64,
        dtype="float32",
    )
    built = recipe.load("quickstart", [*overrides, f"model.path={tmp_path}"])
    assert size == size_of(built.model)
    assert size_of(recipe.load("quickstart").model) is None


@pytest.mark.parametrize(
    ("overrides", "state", "gradients"),
    [
        (["actor.use_kl_loss=true"], 16, 4),
        (["algorithm.adv_estimator=gae"], 24, 8),
        (["model.lora_rank=4", "actor.use_kl_loss=true"], 4, 0),
        (["model.lora_rank=4", "algorithm.adv_estimator=gae"], 16, 4),
    ],
)
def test_the_state_of_the_trainer_has_every_copy_of_the_model(
    overrides: list[str], state: int, gradients: int
) -> None:
    parts = estimate(recipe.load("quickstart", overrides), SMALL)["trainer"]
    assert parts["weights and moments"] == 1000 * state
    assert parts.get("gradients", 0) == 1000 * gradients


def test_one_micro_batch_has_its_peak_at_the_start_or_at_the_end_of_its_backward_pass() -> None:
    config = recipe.load("quickstart", ["model.dtype=bfloat16"])
    start = estimate(config, SMALL, micro_batches=1)["trainer"]
    assert start.keys() == {"weights and moments", "gathered weights", "activations", "logits"}
    wide = Size(parameters=10**9, hidden=8, intermediate=16, layers=3, kv_width=4, vocabulary=10)
    end = estimate(config, wide, micro_batches=1)["trainer"]
    assert end.keys() == {"weights and moments", "gathered weights", "gradients"}
    few = {"engine": "megatron"}
    step = estimate(Config(trainer=few, model={"dtype": "bfloat16"}), wide)["trainer"]
    assert step["AdamW"] == 4 * 10**9 and "activations" not in step


@pytest.mark.parametrize(
    ("own", "width"),
    [
        (GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11), 32),
        (GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_inner=24), 24),
        (OPTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, ffn_dim=20), 20),
    ],
)
def test_a_model_with_another_name_for_the_width_of_its_mlp_has_an_estimate(
    tmp_path: Path, own: PreTrainedConfig, width: int
) -> None:
    own.save_pretrained(tmp_path)
    size = size_of(recipe.load("quickstart", [f"model.path={tmp_path}"]).model)
    assert size is not None
    assert (size.intermediate, size.layers, size.kv_width) == (width, 2, 8)


def test_the_rollout_side_counts_weights_twice_and_every_sequence() -> None:
    config = recipe.load(
        "quickstart",
        [
            "rollout.max_num_seqs=10",
            "rollout.max_prompt_length=20",
            "rollout.max_response_length=12",
        ],
    )
    assert estimate(config, SMALL)["rollout"] == {
        "weights": 4000,
        "staged weights": 4000,
        "KV cache of all sequences": 10 * 32 * 2 * 3 * 4 * 4,
    }


def megatron(size: Size, tokens: int = 64, **sizes: Any) -> dict[str, int]:
    trainer = {"engine": "megatron", "n_gpus_per_node": 4, "megatron": sizes}
    actor = {"ppo_max_token_len_per_gpu": tokens}
    config = Config(trainer=trainer, model={"dtype": "bfloat16"}, actor=actor)
    return estimate(config, size)["trainer"]


@pytest.mark.parametrize(
    ("sizes", "per_parameter"),
    [
        ({}, 2 + 12 / 4),
        ({"use_distributed_optimizer": False}, 2 + 12),
        ({"tensor_model_parallel_size": 2}, 2 / 2 + 12 / 4),
        ({"context_parallel_size": 2}, 2 + 12 / 4),
    ],
)
def test_megatron_divides_only_the_optimizer_state_among_copies(
    sizes: dict[str, Any], per_parameter: float
) -> None:
    assert megatron(SMALL, **sizes)["weights and moments"] == 1000 * per_parameter


def test_ranks_of_experts_divide_experts_alone() -> None:
    size = Size(
        parameters=10_000, hidden=8, intermediate=16, layers=2, kv_width=4, experts=8, chosen=2
    )
    dense = 10_000 - size.of_experts
    found = megatron(size, expert_model_parallel_size=4)["gradients"]
    assert found == 4 * (dense + size.of_experts // 4)


def test_a_stage_has_its_layers_and_the_first_has_a_micro_batch_for_each_stage() -> None:
    size = Size(parameters=10_000, hidden=8, intermediate=16, layers=4, kv_width=4)
    whole, stages = megatron(size), megatron(size, pipeline_model_parallel_size=4)
    assert stages["gradients"] * 4 == whole["gradients"]
    assert stages["activations"] == whole["activations"]


def test_what_is_recomputed_is_kept_for_one_layer_alone() -> None:
    kept = {
        key: megatron(SMALL, recompute_granularity=granularity, **keys)["activations"]
        for key, granularity, keys in (
            ("none", None, {}),
            ("mlp", "selective", {"recompute_modules": ["mlp"]}),
            ("block", "full", {"recompute_method": "block"}),
            ("all", "full", {}),
        )
    }
    assert kept["all"] < kept["mlp"] < kept["none"] and kept["all"] < kept["block"] < kept["none"]


@pytest.mark.parametrize(
    ("overrides", "tokens", "micro_batches"),
    [
        ([], 8 * (192 + 4 * 48), 1),
        (["trainer.n_gpus_per_node=2"], 4 * (192 + 4 * 48), 1),
        (["actor.ppo_max_token_len_per_gpu=2048"], 2048, 2),
        (["agents.environment=sums"], 16384, 2),
    ],
)
def test_a_micro_batch_is_no_larger_than_the_rows_of_a_step(
    overrides: list[str], tokens: int, micro_batches: int
) -> None:
    config = Config.model_validate(
        {
            "rollout": {"n": 4, "max_prompt_length": 192, "max_response_length": 48},
            "actor": {"ppo_mini_batch_size": 8},
        }
    )
    for key, _, value in (override.partition("=") for override in overrides):
        section, name = key.split(".")
        old = getattr(config, section)
        new = old.model_copy(update={name: int(value) if value.isdigit() else value})
        config = config.model_copy(update={section: new})
    assert config.largest_batch == {"tokens": tokens, "micro_batches": micro_batches}
    few = estimate(config, SMALL, tokens=tokens)["trainer"]["activations"]
    assert few * 16384 == estimate(config, SMALL, tokens=16384)["trainer"]["activations"] * tokens
