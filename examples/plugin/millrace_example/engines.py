"""Engines that add a few lines to those of millrace."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from millrace.config import Config, ModelConfig, Sides
from millrace.decode import engine as torch_engine
from millrace.ports import StepReport, TrainBatch
from millrace.train.fsdp import engine as fsdp_engine
from millrace.types import SamplingParams, Segment, Tokens


class CountingEngine(torch_engine.TorchRolloutEngine):
    """The torch engine. Its log counts the requests."""

    drawn = 0

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self.drawn += 1
        print(f"request {self.drawn}", flush=True)
        return await super().generate(tokens, params, session)


class MeasuredEngine(fsdp_engine.FsdpTrainEngine):
    """The FSDP engine, with the norm of all weights as the metric `actor/weight_norm`."""

    async def step(self, batch: TrainBatch) -> StepReport:
        report = await super().step(batch)
        norm = get_total_norm(list(self.policy.parameters()))
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        report.metrics["actor/weight_norm"] = float(norm)
        return report


def build_rollout_engine(
    sides: Sides, model: ModelConfig, model_folder: str
) -> torch_engine.TorchRolloutEngine:
    return torch_engine.build(sides, model, model_folder, CountingEngine)


def build_train_engine(
    config: Config, model_folder: str, **place: Any
) -> fsdp_engine.FsdpTrainEngine:
    return fsdp_engine.build(config, model_folder, **place, kind=MeasuredEngine)
