"""Tests that unsupported models are refused by name, from a folder with only a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.data import hub
from millrace.errors import ConfigError
from millrace.models.checks import REFUSED, VLLM_ALONE
from millrace.run import problems
from tests.run.test_folder import config_of


def load(folder: Path, shape: dict[str, Any], *overrides: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    problems.load(config_of(f"model.path={folder}", *overrides))


@pytest.mark.parametrize("kind", sorted(kind for kinds in REFUSED.values() for kind in kinds))
def test_a_type_that_cannot_work_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model.path = .*{kind}: it.*Fix: a causal model"):
        load(tmp_path / "model", {"model_type": kind})


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling"),
        ({"model_type": "new", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "new", "text_config": {"logit_scale": 0.5}}, "logit_scale"),
        ({"model_type": "new", "is_encoder_decoder": True}, "not a causal language model"),
        (
            {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]},
            "not a causal language model",
        ),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, "not a causal"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "not a causal",
        ),
    ],
)
def test_a_shape_that_cannot_work_is_refused(
    tmp_path: Path, shape: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model.path = .*{why}"):
        load(tmp_path / "model", shape)


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"model_type": "qwen3", "architectures": ["Qwen3Model"]},
        {"model_type": "llama"},
        {"model_type": "granite", "logits_scaling": 1.0},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        {"model_type": "chatglm", "architectures": ["ChatGLM"], "auto_map": {}},
    ],
)
def test_nothing_else_is_refused(tmp_path: Path, shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the folder has no tokenizer"):
        load(tmp_path / "model", shape)


@pytest.mark.parametrize("kind", VLLM_ALONE)
def test_what_the_torch_engine_cannot_draw_from_needs_vllm(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"Fix: rollout.engine=vllm"):
        load(tmp_path / "model", {"model_type": kind})
    with pytest.raises(ConfigError, match="the folder has no tokenizer"):
        load(tmp_path / "model", {"model_type": kind}, "rollout.engine=vllm")


def test_a_model_of_the_hub_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "refusal", lambda *_: "")
    monkeypatch.setattr(hub, "model_config", lambda name: {"model_type": "gpt_oss"})
    with pytest.raises(ConfigError, match=r"model.path = 'openai/gpt-oss-20b': .*gpt_oss"):
        problems.load(config_of("model.path=openai/gpt-oss-20b"))


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_weights_that_are_cut_off_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^model.path = .*model.safetensors is damaged: .*Fix: "):
        load(tmp_path, {"model_type": "qwen2"})
