"""The GPUs of reward models: their own, or those of a side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.config import RewardConfig, recipe
from millrace.errors import ConfigError
from millrace.rewards.pool import RewardPool
from millrace.run import rewards
from millrace.run.rewards import make_reward

GPUS = "3,5,7,8"
"""The trainer has GPU 3, and the rollouts have GPU 5."""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folders of two models in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("m", "n"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")


def placed(
    monkeypatch: pytest.MonkeyPatch, *overrides: str, gpus: str = GPUS
) -> dict[str, list[str]]:
    """Return the device and the GPUs of the workers of each reward model."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    config = recipe.load("quickstart", list(overrides))
    reward = make_reward(config.reward, config.agents, config.sides)
    return {
        name: [pool.job.spec["device"], *(e.get("CUDA_VISIBLE_DEVICES", "") for e in pool.environments)]
        for name, pool in reward.parts.items()
        if isinstance(pool, RewardPool) and pool.job.kind == "model"
    }  # fmt: skip


def test_workers_take_gpus_of_their_own_share_them_or_stay_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = "reward.model={path: m, num_workers: 2, %s}"
    assert placed(monkeypatch, two % "") == {"model": ["cuda", "7", "8"]}
    assert placed(monkeypatch, two % "share: rollout") == {"model": ["cuda", "5", "5"]}
    assert placed(monkeypatch, two % "share: trainer") == {"model": ["cuda", "3", "3"]}
    assert placed(monkeypatch, two % "device: cpu") == {"model": ["cpu", "", ""]}
    assert placed(monkeypatch, two % "", gpus="") == {"model": ["cpu", "", ""]}
    assert placed(monkeypatch, two % "", "trainer.device=cpu") == {"model": ["cpu", "", ""]}


def test_parts_of_a_mix_take_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = "reward.mix={a: {model: {path: m}}, b: {}, c: {model: {path: n, device: cuda}}}"
    assert placed(monkeypatch, mix) == {"a": ["cuda", "7"], "c": ["cuda", "8"]}


def test_colocated_sides_leave_more_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["mode=colocate_sync", "reward.model.path=m"]
    assert placed(monkeypatch, *said) == {"model": ["cuda", "5"]}


def test_a_machine_with_too_few_gpus_is_refused_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    match = (
        r"reward\.model\.num_workers = 3: trainer and rollouts take 2 of this machine's 4 GPUs, "
        r"and 2 are left\. Fix: .*reward\.model\.share=rollout"
    )
    with pytest.raises(ConfigError, match=match):
        placed(monkeypatch, "reward.model={path: m, num_workers: 3}")
    match = r"reward\.model\.share = 'rollout': .* need 2 GPUs, and this machine has 1\. Fix: "
    with pytest.raises(ConfigError, match=match):
        placed(monkeypatch, "reward.model={path: m, share: rollout}", gpus="3")


def test_beside_ray_a_reward_model_uses_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto means GPUs on this node, and Ray may have given them to others."""
    said = ["trainer.runtime=ray", "reward.model={path: m}"]
    assert placed(monkeypatch, *said, gpus="") == {"model": ["cpu", ""]}
    assert placed(monkeypatch, *said, "reward.model.device=cpu") == {"model": ["cpu", ""]}
    for more in ([], ["reward.model.share=trainer"]):
        with pytest.raises(ConfigError, match=r"reward\.model\.device = 'auto': Ray reserves"):
            placed(monkeypatch, *said, *more)


def test_an_answer_of_a_trial_ends_as_a_response_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function may divide by the length of completion_ids, which is never 0 in a run."""
    given: list[Any] = []

    async def tried(_parts: Any, _rows: Any, encode: Any, _note: Any) -> None:
        given.append(encode(""))

    class Stream(list[Any]):
        chat = SimpleNamespace(encode=lambda _text: [], eos_ids=(7, 8))

    monkeypatch.setattr(rewards, "try_functions", tried)
    config = RewardConfig(function="mine.py:f")
    parts = SimpleNamespace(parts={"reward": object()})
    asyncio.run(rewards.try_rewards(config, parts, Stream(), given.append))  # type: ignore[arg-type]
    assert given == [[7]]


def test_a_teacher_takes_gpus_that_reward_models_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS)

    def of(*overrides: str) -> list[str]:
        c = recipe.load(
            "quickstart", ["teachers.a={path: n, place: own}", "reward.model.path=m", *overrides]
        )
        device, variables = rewards.devices_of(rewards.placed(c.reward, c.teachers), c.sides)[
            "teachers.a"
        ]
        return [device, *(v["CUDA_VISIBLE_DEVICES"] for v in variables)]

    assert of() == ["cuda", "8"]
    assert of("teachers.a.share=trainer") == ["cuda", "3"]
    assert of("teachers.a.device=cpu") == ["cpu"]
    with pytest.raises(ConfigError, match=r"^teachers\.a\.num_workers = 2: .* and 1 are left"):
        of("teachers.a.num_workers=2")
    with pytest.raises(ConfigError, match=r"^teachers\.a\.share = 'trainer': .*a teacher takes no"):
        of("teachers.a.share=trainer", "mode=colocate_sync")
