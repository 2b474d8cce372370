"""What millrace asks of vLLM's engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.config import Config, ModelShape
from millrace.errors import ConfigError
from millrace.models.model import write_shape

pytestmark = pytest.mark.xdist_group("engines")


def asked(tmp_path: Path, heads: int = 2, **settings: Any) -> dict[str, Any]:
    """Return the arguments on a GPU, for a model of 128 numbers in `heads` heads."""
    from millrace.vllm import arguments

    shape = ModelShape(hidden_size=128, num_attention_heads=heads, num_key_value_heads=1)
    write_shape(tmp_path, shape, vocab_size=8)
    config = Config.model_validate(
        {
            "data": {"train_files": "math:"},
            "rollout": {"engine": "vllm"} | settings.pop("rollout", {}),
            "model": settings,
        }
    )
    platform = SimpleNamespace(is_cuda_alike=lambda: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "current_platform", platform)
        return arguments.engine_arguments(config.sides, config.model, str(tmp_path))


def test_graphs_are_those_of_vllm(tmp_path: Path) -> None:
    assert "compilation_config" not in asked(tmp_path)
    own = {"max_cudagraph_capture_size": 256}
    given = asked(tmp_path, rollout={"engine_kwargs": {"compilation_config": own}})
    assert given["compilation_config"] == own


def test_graphs_that_draw_wrong_tokens_are_refused(tmp_path: Path) -> None:
    full = {"engine_kwargs": {"compilation_config": {"cudagraph_mode": "full"}}}
    with pytest.raises(ConfigError) as refused:
        asked(tmp_path, rollout=full)
    for part in ("rollout.engine_kwargs.compilation_config", "head size 64", "cudagraph_mode"):
        assert part in str(refused.value)
    assert asked(tmp_path, heads=1, rollout=full)["compilation_config"]["cudagraph_mode"] == "full"


def test_overrides_of_the_user_join_those_of_millrace(tmp_path: Path) -> None:
    own = {"engine_kwargs": {"hf_overrides": {"rope_theta": 7.0}}}
    assert asked(tmp_path, rollout=own)["hf_overrides"] == {
        "head_dtype": "float32",
        "rope_theta": 7.0,
    }
