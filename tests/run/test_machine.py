"""The checks of a machine and of a model's sizes, before a worker starts."""

from __future__ import annotations

import ast
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from millrace import __version__
from millrace.config import Config
from millrace.errors import ConfigError, MissingDependency
from millrace.run import machine


def megatron(device: str = "auto", **sizes: Any) -> Config:
    trainer = {"engine": "megatron", "device": device, "n_gpus_per_node": 3, "megatron": sizes}
    return Config(trainer=trainer)


@pytest.mark.parametrize(("device", "gpu"), [("cpu", True), ("auto", False)])
def test_megatron_without_a_gpu_is_refused(
    device: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "NVIDIA", tmp_path if gpu else tmp_path / "none")
    with pytest.raises(ConfigError, match=r"Fix: trainer\.engine=fsdp"):
        machine.check_machine(megatron(device))


@pytest.mark.parametrize("version", ["", "0.17.0"])
def test_another_megatron_or_none_is_refused_with_the_extra(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(machine, "NVIDIA", tmp_path)
    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(MissingDependency, match=r"millrace\[megatron\].*megatron-core==") as error:
        machine.check_machine(megatron())
    assert version in str(error.value)


@pytest.mark.parametrize("package", ["transformer_engine", "apex"])
def test_packages_that_bring_another_adamw_are_refused(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "NVIDIA", tmp_path)
    monkeypatch.setattr(metadata, "version", lambda name: "0.16.1")
    with pytest.raises(ConfigError, match=rf"pip uninstall {package}"):
        machine.check_machine(megatron())


def test_a_model_that_megatron_cannot_divide_is_refused_before_a_worker_starts(
    tmp_path: Path,
) -> None:
    Qwen2Config(num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    config = megatron(tensor_model_parallel_size=3)
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size.*the heads, 4"):
        machine.check_shape(config.model, config.actor, config.trainer, str(tmp_path))
    machine.check_shape(config.model, config.actor, Config().trainer, "no folder: FSDP reads none")
    shared = Config(actor={"ulysses_sequence_parallel_size": 3})
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size.*heads.*, 4"):
        machine.check_shape(shared.model, shared.actor, shared.trainer, str(tmp_path))


@pytest.mark.parametrize(
    ("replay", "coef", "key"),
    [("R2", 0.0, "model.router_replay"), ("disabled", 0.1, "actor.router_aux_loss_coef")],
)
def test_a_model_without_routers_is_refused_before_a_worker_starts(
    replay: str, coef: float, key: str, tmp_path: Path
) -> None:
    Qwen2Config().save_pretrained(tmp_path)
    config = Config(model={"router_replay": replay}, actor={"router_aux_loss_coef": coef})
    with pytest.raises(ConfigError, match=f"{key}.*mixtral.*of type qwen2.*Fix: {key}="):
        machine.check_shape(config.model, config.actor, config.trainer, str(tmp_path))


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17"])
def test_another_release_of_sglang_is_refused_before_a_worker_starts(
    release: str, tmp_path: Path
) -> None:
    for name in ("sglang", "millrace"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"__version__ = {__version__!r}\n")
    about = tmp_path / "sglang.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    (about / "top_level.txt").write_text("sglang\n")
    (tmp_path / "sglang" / "srt").mkdir()
    arguments = "class ServerArgs:\n    page_size: int = 1\n    max_total_tokens: int = 0\n"
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(arguments)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = Config(rollout={"engine": "sglang", "python": str(python)})
    if release == "0.5.17":
        machine.check_machine(config)
        given = {"engine_kwargs": {"page_size": 2, "max_totl_tokens": 9}}
        unknown = Config(rollout={**config.rollout.model_dump(), **given})
        with pytest.raises(ConfigError, match=r"totl.*no such argument.*Fix: max_total_tokens"):
            machine.check_machine(unknown)
        return
    with pytest.raises(
        ConfigError, match=r"has SGLang 0\.5\.16.*Fix: pip install sglang==0\.5\.17"
    ):
        machine.check_machine(config)


def test_an_old_python_can_say_that_it_is_old() -> None:
    lines = machine._VERSIONS.strip().splitlines()
    assert lines[1].startswith("if sys.version_info < (3, 11)")
    ast.parse(machine._VERSIONS, feature_version=(3, 6))
