"""The steps of a trainer that was lost, made again by a new one.

consumes   the newest whole checkpoint; the finished samples of the journal
produces   the weights that the lost trainer had. On a CPU they are the same bit for bit

The driver outlasts the trainer, so it knows which samples each step had. It remembers only their
ids: the samples themselves are in the journal, or in the ledger of the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from millrace.errors import NotRestorable
from millrace.pipeline.checkpoint import Checkpoints, read_ledger, read_manifest
from millrace.pipeline.journal import NullJournal
from millrace.pipeline.journal_file import Finished, checksum
from millrace.ports import TrainBatch, TrainEngine
from millrace.types import PolicyVersion, Prompt, Sample


class Prompts(Protocol):
    """The prompts of a run by the ids of their samples."""

    def __getitem__(self, index: int, /) -> Prompt: ...


class TrainedStep(NamedTuple):
    """One local step."""

    version: PolicyVersion
    """The version of its batch. A checkpoint has all steps of earlier versions."""
    ids: tuple[int, ...]
    lr_scale: float = 1.0
    prompts: Mapping[int, Prompt] = {}
    """The prompts that the stream does not have at the number of their sample."""


class Replay:
    """The steps that the trainer made since the oldest checkpoint."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        journal: NullJournal,
        prompts: Prompts,
        *,
        version: PolicyVersion,
        horizon: int,
        origin: Path | None,
        fresh: bool,
    ) -> None:
        """`version` is the one that the attempt begins with, and `origin` its checkpoint.

        `fresh` says that the state without a checkpoint is that of a new engine.
        """
        self._checkpoints, self._journal, self._prompts = checkpoints, journal, prompts
        self._horizon, self._origin, self._fresh = horizon, origin, fresh
        self._first = version
        """The steps of batches of this version, and of later ones, are known."""
        self._steps: deque[TrainedStep] = deque()

    def stepped(self, batch: TrainBatch) -> None:
        """Note a batch that is trained."""
        if self._steps and self._steps[-1].version != batch.version:
            self._forget()
        ids = tuple(sample.prompt.index for sample in batch.samples)
        own = {s.prompt.index: s.prompt for s in batch.samples if s.prompt.position is not None}
        self._steps.append(TrainedStep(batch.version, ids, batch.lr_scale, own))

    def _forget(self) -> None:
        """Forget the steps that every checkpoint has."""
        with suppress(OSError):
            if folders := self._checkpoints.all():
                oldest = int(folders[0].name.rpartition("-")[2])
                self._first = max(self._first, oldest)
        while self._steps and self._steps[0].version < self._first:
            self._steps.popleft()

    async def replay(
        self,
        engine: TrainEngine,
        kept: PolicyVersion | None,
        keep: Callable[[PolicyVersion], Awaitable[object]],
    ) -> tuple[PolicyVersion, int]:
        """Bring a new engine to the state of the lost one.

        Call `keep` where the weights are those of the version `kept`. Return the version of the
        checkpoint, and the number of steps since then. Raises NotRestorable if something is
        missing.
        """
        async with self._checkpoints.using:
            folder = await asyncio.to_thread(self._newest)
            version = 0 if folder is None else read_manifest(folder).version
            await engine.begin("rl", self._horizon)
            if folder is not None:
                await engine.load(str(folder / "engine"))
            steps = [step for step in self._steps if step.version >= version]
            await self._journal.flush()
            known = await asyncio.to_thread(self._known, folder, version, steps)
        for step in steps:
            if kept is not None and kept <= step.version:
                await keep(kept)
                kept = None
            samples = tuple(self._sample(known.pop(i), step) for i in step.ids)
            await engine.step(TrainBatch(samples, step.version, step.lr_scale))
        if kept is not None:
            await keep(kept)
        return version, len(steps)

    def _newest(self) -> Path | None:
        """Return the checkpoint to begin with, or None for a new engine."""
        folder = self._checkpoints.newest()[0] or self._origin
        if folder is None and not self._fresh:
            raise NotRestorable("there is no whole checkpoint of the start state")
        version = 0 if folder is None else read_manifest(folder).version
        if version < self._first:
            raise NotRestorable(
                f"the newest whole checkpoint has version {version}, and the steps before version "
                f"{self._first} are not known any more"
            )
        return folder

    def _known(
        self, folder: Path | None, version: PolicyVersion, steps: Iterable[TrainedStep]
    ) -> dict[int, Sample | Finished]:
        """Return the samples of the steps by their ids."""
        wanted = {i for step in steps for i in step.ids}
        known: dict[int, Sample | Finished] = {}
        if wanted and folder is not None:
            slots = ((i, slot.sample) for i, slot in read_ledger(folder).slots)
            known = {i: sample for i, sample in slots if i in wanted and sample is not None}
        if wanted:
            found = self._journal.finished_since(version)
            known |= {one.sample_id: one for one in found if one.sample_id in wanted}
        if missing := len(wanted - known.keys()):
            raise NotRestorable(
                f"{missing} samples that were trained since version {version} are not in the "
                "journal. Fix: trainer.journal=true with a trainer.save_freq over 0, and a disk "
                "that takes the journal"
            )
        return known

    def _sample(self, known: Sample | Finished, step: TrainedStep) -> Sample:
        """Return a sample as it was trained. No step reads the version of its admission."""
        if isinstance(known, Sample):
            return known
        prompt = step.prompts.get(known.sample_id) or self._prompts[known.sample_id]
        if checksum(prompt.tokens) != known.prompt:
            raise NotRestorable(
                f"prompt {known.sample_id} is not the one of the journal. "
                "Fix: data that do not change during a run"
            )
        return Sample(prompt, known.trajectories, step.version, known.greedy)
