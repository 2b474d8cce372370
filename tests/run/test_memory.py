"""The estimate of memory against measured peaks and against the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config, OPTConfig, PreTrainedConfig

from millrace.config import Config, recipe
from millrace.models.model import write_shape
from millrace.run.memory import Size, estimate, size_of

GIB = 2**30
TOKENS = "actor.ppo_max_token_len_per_gpu=32768"


def trainer_gib(shape: str, *overrides: str) -> float:
    config = recipe.load(
        f"shapes/{shape}", [TOKENS, "rollout.max_response_length=2048", *overrides]
    )
    size = size_of(config)
    assert size is not None
    return sum(estimate(config, size)["trainer"].values()) / GIB


@pytest.mark.parametrize(
    ("shape", "overrides", "peak"),
    [
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=1"], 83.0),
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=2"], 74.4),
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=4"], 70.2),
        ("qwen2_1.5b", ["trainer.n_gpus_per_node=2", "trainer.fsdp_size=1"], 83.0),
        (
            "qwen2_7b",
            [
                "trainer.n_gpus_per_node=4",
                "model.gradient_checkpointing=true",
                "model.gradient_checkpointing_share=0.5",
            ],
            100.2,
        ),
    ],
)
def test_the_trainer_is_within_six_percent_of_the_measured_peaks(
    shape: str, overrides: list[str], peak: float
) -> None:
    assert trainer_gib(shape, *overrides) == pytest.approx(peak, rel=0.06)


def test_a_shape_has_the_parameters_of_the_model_that_is_built(tmp_path: Path) -> None:
    overrides = ["model.shape.vocab_size=101", "model.shape.tie_word_embeddings=false"]
    config = recipe.load("quickstart", overrides)
    size = size_of(config)
    write_shape(
        tmp_path,
        config.model.shape,
        vocab_size=101,
        eos_token_id=0,
        pad_token_id=0,
        max_position_embeddings=64,
        dtype="float32",
    )
    assert size == size_of(recipe.load("quickstart", [*overrides, f"model.path={tmp_path}"]))
    assert size_of(recipe.load("quickstart")) is None


@pytest.mark.parametrize(
    ("overrides", "per_parameter"),
    [
        (["actor.use_kl_loss=true"], 20),
        (["algorithm.adv_estimator=gae"], 32),
        (["model.lora_rank=4", "actor.use_kl_loss=true"], 4),
        (["model.lora_rank=4", "algorithm.adv_estimator=gae"], 20),
    ],
)
def test_the_state_of_the_trainer_has_every_copy_of_the_model(
    overrides: list[str], per_parameter: int
) -> None:
    size = Size(parameters=1000, hidden=8, intermediate=16, layers=3, kv_width=4)
    state = estimate(recipe.load("quickstart", overrides), size)["trainer"]["state"]
    assert state == 1000 * per_parameter


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
    size = size_of(recipe.load("quickstart", [f"model.path={tmp_path}"]))
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
    size = Size(parameters=1000, hidden=8, intermediate=16, layers=3, kv_width=4)
    assert estimate(config, size)["rollout"] == {
        "weights": 4000,
        "staged weights": 4000,
        "KV cache of all sequences": 10 * 32 * 2 * 3 * 4 * 4,
    }


@pytest.mark.parametrize(
    ("sizes", "per_parameter"),
    [
        ({}, 2 + 4 + 12 / 4),
        ({"use_distributed_optimizer": False}, 2 + 4 + 12),
        ({"tensor_model_parallel_size": 2}, (2 + 4) / 2 + 12 / 4),
    ],
)
def test_megatron_divides_only_the_optimizer_state_among_copies(
    sizes: dict[str, object], per_parameter: float
) -> None:
    trainer = {"engine": "megatron", "n_gpus_per_node": 4, "megatron": sizes}
    config = Config(trainer=trainer, model={"dtype": "bfloat16"})
    size = Size(1000, 8, 8, 1, 8)
    assert estimate(config, size)["trainer"]["state"] == 1000 * per_parameter
