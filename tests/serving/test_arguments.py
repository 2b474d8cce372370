"""The arguments of the installed engine, as the driver reads them without an import of the engine."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from millrace.config import Config
from millrace.config.serving_checks import ARGUMENTS
from millrace.errors import ConfigError
from millrace.run.machine import check_machine
from tests.serving.engine import ENGINE

CLASSES = {
    "sglang": ("sglang.srt.server_args", "ServerArgs"),
    "vllm": ("vllm.engine.arg_utils", "AsyncEngineArgs"),
}
pytestmark = pytest.mark.xdist_group("engines")


def config(arguments: dict[str, Any]) -> Config:
    return Config.model_validate({"rollout": {"engine": ENGINE, "engine_kwargs": arguments}})


def test_the_driver_knows_each_argument_of_the_engine_and_no_other() -> None:
    module, name = CLASSES[ENGINE]
    known = inspect.signature(getattr(import_module(module), name)).parameters
    refused = {*ARGUMENTS[ENGINE].settings, *ARGUMENTS[ENGINE].fixed}
    given: dict[str, Any] = dict.fromkeys(known.keys() - refused)
    check_machine(config({name: {} if name == "hf_overrides" else None for name in given}))
    with pytest.raises(ConfigError, match=r"'max_tokenz': .* has no such argument"):
        check_machine(config({"max_tokenz": 1}))
