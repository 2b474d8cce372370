"""The checks of a machine and of a model's sizes, before a worker starts."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

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
