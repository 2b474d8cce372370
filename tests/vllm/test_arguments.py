"""What millrace asks of vLLM's engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.config import Config, ModelConfig, ModelShape
from millrace.errors import ConfigError
from millrace.models.shape import write_shape
from millrace.serving.vllm.caches import graph_sizes, lasting_folder

pytestmark = pytest.mark.xdist_group("engines")


def asked(tmp_path: Path, heads: int = 2, **settings: Any) -> dict[str, Any]:
    """Return the arguments on a GPU, for a model of 128 numbers in `heads` heads."""
    from millrace.serving.vllm import arguments

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


def test_graphs_are_those_of_vllm_for_fewer_sizes(tmp_path: Path) -> None:
    assert asked(tmp_path, rollout={"max_num_seqs": 3})["compilation_config"] == {
        "cudagraph_capture_sizes": [1, 2, 3, 4, 6]
    }
    assert "compilation_config" not in asked(tmp_path, rollout={"enforce_eager": True})
    own = {"max_cudagraph_capture_size": 256}
    given = asked(tmp_path, rollout={"engine_kwargs": {"compilation_config": own}})
    assert given["compilation_config"] == own
    assert "compilation_config" not in asked(tmp_path, rollout={"engine_kwargs": own})


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


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 33, 64, 100, 256, 512, 1024])
def test_graphs_are_few_and_pad_little(slots: int) -> None:
    sizes = graph_sizes(slots)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and len(sizes) <= 24
    assert sizes[-1] == min(2 * slots, 512), "as vLLM's"
    assert slots > 512 or slots in sizes
    for smaller, larger in itertools.pairwise(sizes):
        assert larger - smaller <= max(8, smaller / 4)


def test_the_path_of_a_new_model_is_the_same_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM finds compiled code by it."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    paths = []
    for run, layers in (("a", 1), ("b", 1), ("c", 2)):
        write_shape(tmp_path / run, ModelShape(num_hidden_layers=layers), vocab_size=8)
        paths.append(lasting_folder(ModelConfig(), str(tmp_path / run)))
    first, second, other = paths
    assert first == second != other
    assert (Path(other) / "config.json").read_text() == (tmp_path / "c/config.json").read_text()
    own = ModelConfig(path=str(tmp_path / "a"))
    assert lasting_folder(own, str(tmp_path / "a")) == str(tmp_path / "a")
