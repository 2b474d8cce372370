"""What new ranks of the trainer must make again, and the sentences of states that are lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace import codec
from millrace.errors import NotRestorable
from millrace.pipeline import journal
from millrace.pipeline.checkpoint import Checkpoints
from millrace.pipeline.journal import Journal
from millrace.pipeline.journal_file import FORMAT, Batch, Finished, Header, Sealed, Step, checksum
from millrace.pipeline.replay import Replay
from millrace.pipeline.sample_queue import SampleQueue
from millrace.ports import StepReport, TrainBatch
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import Schedule
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimTrainEngine
from millrace.types import Prompt, Sample, tokens_of
from tests.pipeline.journals import HEADER, PROMPT, drawn


class NotingEngine(SimTrainEngine):
    """A train engine that notes the batch of each step."""

    def __init__(self) -> None:
        super().__init__(CostModel())
        self.batches: list[TrainBatch] = []

    async def step(self, batch: TrainBatch) -> StepReport:
        self.batches.append(batch)
        return await super().step(batch)


class Run:
    """A run of one step for each version, whose trainer is lost."""

    def __init__(self, folder: Path, *, attempt: int = 1, keeps: bool = True) -> None:
        (folder / "checkpoints").mkdir(exist_ok=True)
        self.ledger, self.folder = Ledger(Schedule(ppo_mini_batch_size=1)), folder
        self.journal: Journal | None = None
        if keeps:
            header = Header(FORMAT, attempt, 0, HEADER.samples, HEADER.training)
            place = folder / "journal"
            self.journal = journal.resume(place, self.ledger, header, save_freq=100, note=print)
        self.queue = SampleQueue(self.ledger, deadline_s=1.0, journal=self.journal)

    def train(
        self, prompt: Prompt | None = None, *, lr_scale: float = 1.0, publishes: bool = True
    ) -> None:
        """Draw and train one sample."""
        do, ledger = self.queue.do, self.ledger
        i = do(ledger.admit, prompt or Prompt(ledger.admitted, PROMPT.tokens, "", "sim"))
        sample = Sample(do(ledger.start, i).prompt, (drawn(ledger.version),))
        if self.journal is not None:
            self.journal.finished(i, sample)
        do(ledger.finish, i, sample)
        batch = TrainBatch(tuple(do(ledger.take)), ledger.trainer_version, lr_scale)
        do(ledger.trained)
        if self.journal is not None:
            self.journal.stepped(batch)
        do(ledger.seal)
        if publishes:
            do(ledger.published)

    def again(self, kept: int | None = None, *, fresh: bool = True) -> tuple[Any, ...]:
        """Return the version of the checkpoint, the number of steps, and what they were."""
        engine, keeps = NotingEngine(), list[tuple[int, int]]()

        async def keep(version: int) -> None:
            keeps.append((version, len(engine.batches)))

        prompts = {i: Prompt(i, PROMPT.tokens, "", "sim") for i in range(9)}
        since = self.journal.since if self.journal is not None else None
        checkpoints = Checkpoints(self.folder, keep=1)
        one = Replay(checkpoints, self.ledger, since, prompts, horizon=1, origin=None, fresh=fresh)
        return *asyncio.run(one.replay(engine, kept, keep)), engine.batches, keeps


def test_nothing_was_trained_so_nothing_is_trained_again(tmp_path: Path) -> None:
    assert Run(tmp_path).again() == Run(tmp_path, keeps=False).again() == (0, 0, [], [])


def test_steps_that_no_journal_has_name_the_keys_that_help(tmp_path: Path) -> None:
    run = Run(tmp_path, keeps=False)
    run.train()
    run.train(publishes=False)
    with pytest.raises(
        NotRestorable, match=r"2 samples .*version 0.*trainer\.journal=true.*save_freq"
    ):
        run.again()


def test_a_warm_up_without_a_checkpoint_cannot_be_made_again(tmp_path: Path) -> None:
    with pytest.raises(NotRestorable, match="no whole checkpoint of the start state"):
        Run(tmp_path).again(fresh=False)


def test_a_step_is_made_again_with_its_samples_version_and_learning_rate(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for scale in (1.0, 0.5, 0.25):
        run.train(lr_scale=scale, publishes=scale > 0.25)
    version, steps, batches, keeps = run.again(kept=3)
    assert (version, steps, keeps) == (0, 3, [(3, 3)])
    assert [(b.version, b.lr_scale) for b in batches] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert [s.prompt.index for b in batches for s in b.samples] == [0, 1, 2]
    assert [b.samples[0].trajectories for b in batches] == [(drawn(v),) for v in range(3)]


def test_a_kept_version_is_kept_before_the_steps_after_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.train()
    assert run.again(kept=1)[-1] == [(1, 1)]


def earlier(folder: Path, versions: int) -> None:
    """Write what an earlier attempt left, with one step for each version."""
    ids = range(versions)
    done = [Finished(i, checksum(PROMPT.tokens), (drawn(i),), None) for i in ids]
    facts = (
        Batch(finished=done),
        Batch(
            steps=[Step(i + 1, [i], 0.1) for i in ids],
            sealed=[Sealed(i + 1, i + 1, [i]) for i in ids],
        ),
    )
    journal.write(folder / "journal" / "000001-000000.log", HEADER, facts)


def test_steps_of_an_earlier_attempt_that_were_not_made_yet_are_left_out(tmp_path: Path) -> None:
    earlier(tmp_path, 3)
    run = Run(tmp_path, attempt=2)
    assert run.journal is not None and run.journal.past.plan == [0, 1, 2]
    run.train(lr_scale=0.5)
    version, steps, batches, _ = run.again()
    assert (version, steps, [b.lr_scale for b in batches]) == (0, 1, [0.5])


def test_steps_of_an_earlier_attempt_are_not_made_again(tmp_path: Path) -> None:
    """They may have had other settings. The checkpoint that has them is lost."""
    run = Run(tmp_path)
    for _ in range(2):
        run.train()
    later = Header(FORMAT, 2, 2, HEADER.samples, "others")
    run.journal = Journal(tmp_path / "journal", run.ledger, later, run.journal.past, save_freq=9)  # type: ignore[union-attr]
    with pytest.raises(NotRestorable, match=r"2 samples .*since version 0"):
        run.again()


def test_other_data_under_the_same_number_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(Prompt(0, tokens_of([9]), "", "sim"))
    with pytest.raises(NotRestorable, match=r"prompt 0 .* Fix: data that do not change"):
        run.again()


def test_a_prompt_that_is_not_at_its_sample_in_the_stream_comes_from_the_journal(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.train(Prompt(7, tokens_of([9]), "", "sim"))
    batches = run.again()[2]
    assert [s.prompt.tokens for s in batches[0].samples] == [tokens_of([9])]


def test_a_step_of_an_earlier_version_of_millrace_is_read() -> None:
    old = codec.pack([[], [], [], [], [[1, [4, 5]]], []])
    assert codec.decoder(Batch).decode(old) == Batch(steps=[Step(1, [4, 5], 1.0, {})])
