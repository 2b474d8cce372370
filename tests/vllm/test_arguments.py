"""What millrace asks of vLLM's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.config import Config

pytestmark = pytest.mark.xdist_group("engines")


def asked(*, hopper: bool = True, **settings: Any) -> Any:
    """Return the compilation_config on a GPU."""
    from millrace.vllm import arguments

    config = Config.model_validate(
        {
            "data": {"train_files": "math:"},
            "rollout": {"engine": "vllm"} | settings.pop("rollout", {}),
            "model": settings,
        }
    )
    platform = SimpleNamespace(
        is_cuda_alike=lambda: True, is_device_capability_family=lambda family: hopper
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "current_platform", platform)
        return arguments.engine_arguments(config.sides, config.model, "model").get(
            "compilation_config"
        )


def test_hopper_gets_graphs_of_steps_that_read_prompts() -> None:
    assert asked() == {"cudagraph_mode": "FULL"}
    assert asked(hopper=False) is None
    assert asked(router_replay="R3") is None
    assert asked(rollout={"enforce_eager": True}) is None
    flex = {"attention_backend": "FLEX_ATTENTION"}
    assert asked(rollout={"engine_kwargs": flex}) is None, "it has no such graphs, and would raise"


def test_the_settings_of_the_user_win() -> None:
    own: dict[str, Any] = {"max_cudagraph_capture_size": 256}
    assert asked(rollout={"engine_kwargs": {"compilation_config": own}}) == own | {
        "cudagraph_mode": "FULL"
    }
    own = {"cudagraph_mode": "PIECEWISE"}
    assert asked(rollout={"engine_kwargs": {"compilation_config": own}}) == own
    assert asked(rollout={"engine_kwargs": {"compilation_config": 2}}) == 2
