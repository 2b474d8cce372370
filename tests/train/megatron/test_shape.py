"""Sizes and places of the Megatron engine, and the refusals before a model loads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from millrace.config import Config, MegatronConfig, ModelConfig, TrainerConfig
from millrace.config.checks import check
from millrace.config.explain import check_unread
from millrace.errors import ConfigError

pytest.importorskip("megatron.core")

from megatron.core.parallel_state import RankGenerator

from millrace.extras.megatron.checks import check_model
from millrace.extras.megatron.shape import Shape, transformer_config
from tests.train.megatron.cases import EP, MODELS, PP, SP, TP

ORDER = "tp-cp-ep-dp-pp"


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "expert": 4},
        {"tensor": 2, "pipeline": 2, "context": 2, "expert": 2, "expert_tensor": 2},
        {"context": 4, "expert": 2, "expert_tensor": 4},
    ],
)
def test_a_rank_has_the_place_that_megatron_gives_it(sizes: dict[str, Any]) -> None:
    shape = Shape(world_size=16, **sizes)
    dense = RankGenerator(
        tp=shape.tensor, cp=shape.context, ep=1, dp=shape.data, pp=shape.pipeline, order=ORDER
    )
    experts = RankGenerator(
        tp=shape.expert_tensor,
        cp=1,
        ep=shape.expert,
        dp=shape.expert_data,
        pp=shape.pipeline,
        order=ORDER,
    )
    for generator, kinds in (
        (dense, {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}),
        (experts, {"tp": "expert_tensor", "ep": "expert", "dp": "expert_data"}),
    ):
        for kind, name in kinds.items():
            for group in generator.get_ranks(kind):
                assert [getattr(shape.place(r), name) for r in group] == list(range(len(group)))


def config(megatron: dict[str, Any], **sections: Any) -> Config:
    trainer = {"engine": "megatron", "device": "cpu", "n_gpus_per_node": 2, "megatron": megatron}
    trainer |= sections.pop("trainer", {})
    return Config(trainer=trainer, **sections)


@pytest.mark.parametrize(
    ("megatron", "sections", "said"),
    [
        ({"tensor_model_parallel_size": 4}, {}, "tensor_model_parallel_size"),
        (TP | PP, {}, "pipeline_model_parallel_size"),
        (EP | {"expert_tensor_parallel_size": 2}, {}, "expert_model_parallel_size"),
        ({}, {"actor": {"ulysses_sequence_parallel_size": 2}}, "megatron.context_parallel_size=2"),
        ({}, {"model": {"lora_rank": 4}}, "model.lora_rank"),
        ({}, {"model": {"compile": True}}, "model.compile"),
        ({}, {"algorithm": {"adv_estimator": "gae"}}, "algorithm.adv_estimator"),
        ({}, {"trainer": {"fsdp_size": 1}}, "trainer.fsdp_size"),
        ({}, {"trainer": {"offload_policy": True}}, "trainer.offload_policy"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(
    megatron: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(config(megatron, **sections))


def test_parts_that_only_transformer_engine_recomputes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"core_attn.*mlp"):
        config({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]})


@pytest.mark.parametrize(
    ("megatron", "said"),
    [
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"overlap_param_gather": True}, "overlap_param_gather"),
        # Megatron would train experts wrongly: nobody adds their gradients over tensor ranks.
        (TP | {"expert_tensor_parallel_size": 1}, "expert_tensor_parallel_size"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(megatron: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(megatron)


def test_keys_of_megatron_are_not_ignored_by_another_engine() -> None:
    fsdp = Config(trainer={"megatron": {"pipeline_model_parallel_size": 2}})
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size"):
        check_unread(fsdp.value_of)


@pytest.mark.parametrize(
    ("model", "sizes", "change", "said"),
    [
        ("qwen2", {"tensor_model_parallel_size": 8}, {}, "the heads"),
        (
            "qwen2",
            {"tensor_model_parallel_size": 3},
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            "of keys",
        ),
        ("qwen2", {"pipeline_model_parallel_size": 4}, {}, "the layers"),
        ("qwen2", {"tensor_model_parallel_size": 4}, {"intermediate_size": 46}, "MLP"),
        (
            "qwen2",
            {"context_parallel_size": 4, "tensor_model_parallel_size": 2},
            {},
            "tensor-parallel rank",
        ),
        (
            "mixtral",
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            {},
            "mlp",
        ),
        ("qwen2", {"recompute_num_layers": 3}, {}, "the layers of a stage, 2"),
        ("qwen2", {"expert_model_parallel_size": 2}, {}, "no experts"),
        ("mixtral", {"expert_model_parallel_size": 3}, {}, "the experts"),
        (
            "qwen3_moe",
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
            {},
            "sequence_parallel",
        ),
        ("qwen3_moe", {}, {"mlp_only_layers": [0]}, "only some"),
        ("mixtral", {}, {"sliding_window": 8}, "window"),
        ("llama", {}, {"attention_bias": True}, "attention_bias"),
        ("llama", {}, {"model_type": "gemma"}, "gemma"),
        ("llama", {}, {"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_a_model_that_megatron_cannot_divide_is_refused(
    model: str, sizes: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    hf = copy.deepcopy(MODELS[model])
    for name, value in change.items():
        setattr(hf, name, value)
    with pytest.raises(ConfigError, match=said):
        check_model(hf, TrainerConfig(megatron=MegatronConfig(**sizes)))


def test_weights_are_marked_and_tokens_are_exchanged() -> None:
    """Without the first, ranks count wrong gradients. Without the second, they wait for ever."""
    own, device = MegatronConfig(**SP), torch.device("cpu")
    shape = Shape(world_size=2, tensor=2, expert_tensor=2, sequence_parallel=True)
    made = transformer_config(MODELS["qwen3_moe"], shape, ModelConfig(), own, device)
    assert made.perform_initialization and made.moe_token_dispatcher_type == "alltoall"
