"""What a lost trainer must train again, and the sentences of states that cannot be made again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import NotRestorable
from millrace.pipeline.checkpoint import Checkpoints
from millrace.pipeline.journal import NullJournal
from millrace.pipeline.journal_file import Finished, checksum
from millrace.pipeline.replay import Replay
from millrace.ports import StepReport, TrainBatch
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimTrainEngine
from millrace.types import Prompt, Sample, tokens_of


def batch(version: int, *ids: int, lr_scale: float = 1.0) -> TrainBatch:
    samples = (Sample(Prompt(i, tokens_of([1]), "", "sim"), ()) for i in ids)
    return TrainBatch(tuple(samples), version, lr_scale)


def replay(folder: Path, **options: Any) -> Replay:
    (folder / "checkpoints").mkdir(exist_ok=True)
    settings = {"version": 0, "horizon": 1, "origin": None, "fresh": True} | options
    parts: dict[str, Any] = {"journal": NullJournal(), "prompts": {}} | settings
    return Replay(Checkpoints(folder, keep=1), **parts)


def again(past: Replay) -> tuple[int, int]:
    async def keep(version: int) -> None: ...

    return asyncio.run(past.replay(SimTrainEngine(CostModel()), None, keep))


def test_nothing_was_trained_so_nothing_is_trained_again(tmp_path: Path) -> None:
    assert again(replay(tmp_path)) == (0, 0)


def test_steps_that_no_journal_has_name_the_keys_that_help(tmp_path: Path) -> None:
    past = replay(tmp_path)
    past.stepped(batch(0, 3, 4))
    with pytest.raises(
        NotRestorable, match=r"2 samples .*version 0.*trainer\.journal=true.*save_freq"
    ):
        again(past)


def test_a_warm_up_without_a_checkpoint_cannot_be_made_again(tmp_path: Path) -> None:
    with pytest.raises(NotRestorable, match="no whole checkpoint of the start state"):
        again(replay(tmp_path, fresh=False))


def test_steps_that_every_checkpoint_has_are_forgotten(tmp_path: Path) -> None:
    past = replay(tmp_path)
    for version in (0, 1, 2):
        past.stepped(batch(version, version))
    (tmp_path / "checkpoints" / "version-000002").mkdir()
    past.stepped(batch(3, 3))
    assert [step.version for step in past._steps] == [2, 3]
    with pytest.raises(NotRestorable, match="before version 2 are not known any more"):
        again(past)


class NotingEngine(SimTrainEngine):
    """A train engine that notes the factor of each step."""

    def __init__(self) -> None:
        super().__init__(CostModel())
        self.scales: list[float] = []

    async def step(self, batch: TrainBatch) -> StepReport:
        self.scales.append(batch.lr_scale)
        return await super().step(batch)


def test_a_step_is_made_again_at_its_learning_rate(tmp_path: Path) -> None:
    class Known(NullJournal):
        def finished_since(self, version: int) -> Iterator[Finished]:
            for i in range(3):
                yield Finished(i, checksum(tokens_of([1])), (), None)

    prompts = {i: batch(0, i).samples[0].prompt for i in range(3)}
    past = replay(tmp_path, journal=Known(), prompts=prompts)
    for i, scale in enumerate((1.0, 0.5, 0.25)):
        past.stepped(batch(i, i, lr_scale=scale))
    engine = NotingEngine()

    async def keep(version: int) -> None: ...

    assert asyncio.run(past.replay(engine, None, keep)) == (0, 3)
    assert engine.scales == [1.0, 0.5, 0.25]
