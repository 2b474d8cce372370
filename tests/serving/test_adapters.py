"""vLLM serves a policy with adapters: the trainer sends them alone, vLLM stages whole weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config import Config
from millrace.sync.table import Shards
from millrace.types import SamplingParams, tokens_of
from tests.serving.replica import PROMPT, Replica, gap

pytestmark = pytest.mark.xdist_group("engines")

RANK = 4


class Adapted(Replica):
    """A replica whose trainer has one base model, and different adapters for each seed."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        super().__init__(folder, **keys)
        tree = self.config.model_dump(mode="json")
        tree["model"] |= {"lora_rank": RANK, "lora_alpha": 8.0}
        self.config = Config.model_validate(tree)
        self.base = {name: p.detach().clone() for name, p in self.models[1].named_parameters()}
        self.low_rank = {seed: self.draw(seed) for seed in self.models}
        for seed, model in self.models.items():
            for name, p in model.named_parameters():
                ends = [self.low_rank[seed].get(f"{name}.lora_{which}") for which in "BA"]
                added = (
                    2.0 * ends[0] @ ends[1] if ends[0] is not None and ends[1] is not None else 0.0
                )
                p.data = (self.base[name].float() + added).to(p.dtype)

    def draw(self, seed: int) -> dict[str, torch.Tensor]:
        noise, tensors = torch.Generator().manual_seed(seed), {}
        for name, tensor in self.base.items():
            if name.endswith("proj.weight"):
                tensors[f"{name}.lora_A"] = torch.randn(RANK, tensor.shape[1], generator=noise) / 8
                tensors[f"{name}.lora_B"] = torch.randn(tensor.shape[0], RANK, generator=noise) / 8
        return tensors

    def shards(self) -> Shards:
        yield from ((name, tuple(t.shape), t.dtype, 0, t) for name, t in self.base.items())

    def adapters(self) -> Shards:
        seed = next(seed for seed, model in self.models.items() if model is self.current)
        yield from (
            (name, tuple(t.shape), t.dtype, 0, t) for name, t in self.low_rank[seed].items()
        )


async def test_what_is_drawn_is_of_the_base_with_the_adapters_that_were_sent_last(
    replica: Replica, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """A trainer with adapters takes over the engine, and gives it back."""
    adapted = Adapted(tmp_path)
    adapted.engine = replica.engine
    await adapted.join()
    for version, seed in ((0, 1), (1, 2), (2, 3), (3, 2)):
        await adapted.publish(version, seed)
        params = SamplingParams(30, ignore_eos=True, seed=version)
        segments = await adapted.engine.generate(tokens_of(PROMPT), params, f"r{version}")
        assert max(gap(adapted, seed, PROMPT, segments)) < 1e-4
        other = seed % 3 + 1
        assert max(gap(adapted, other, PROMPT, segments)) > 0.1
    await replica.join()
