"""A train engine that outlasts the death of its ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from millrace import codec
from millrace.errors import DeadlineError, NotFinite, SaveLost, WorkerError
from millrace.ports import StepReport, TrainBatch
from millrace.runtime.remote import RemoteTrainEngine
from millrace.runtime.trainer_group import TrainerGroup


class RecoveringTrainEngine(RemoteTrainEngine):
    """A TrainEngine and a Sleeper. A call that a lost rank breaks is made again.

    An error that the engine itself raises is not a loss. It ends the call as in any engine.
    """

    def __init__(self, ranks: TrainerGroup) -> None:
        super().__init__(ranks.peers)
        self.ranks = ranks
        self.folder: Path | None = None
        """The run's folder, for a batch that cannot be trained."""
        self._staged: int | None = None
        """The incarnation that writes a staged save."""

    async def step(self, batch: TrainBatch) -> StepReport:
        """Train on `batch`. If the run ends because nothing is finite, the batch is saved."""
        try:
            return await super().step(batch)
        except NotFinite as error:
            if self.folder is None:
                raise
            raise NotFinite(f"{error}. {_saved(batch, self.folder)}") from error

    async def save(self, folder: str, staged: bool = False) -> None:
        self._staged = None
        await super().save(folder, staged)
        if staged:
            self._staged = self.ranks.incarnation
        else:
            self.ranks.saved()

    async def saved(self) -> None:
        """Wait for a staged save. Raises SaveLost if its ranks are lost: their copy is gone."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        try:
            if staged == self.ranks.incarnation:
                await super()._all("saved")
                self.ranks.saved()
                return
        except (WorkerError, DeadlineError):
            if not self.ranks.able or (staged == self.ranks.incarnation and not self.ranks.death):
                raise
        raise SaveLost("a rank of the trainer was lost before the checkpoint was written")

    async def sleep(self) -> None:
        await self.ranks.give_room(partial(super()._all, "sleep"))

    async def wake(self) -> None:
        self.ranks.take_room()
        await super().wake()

    async def _all(
        self, method: str, args: tuple[object, ...] = (), result: object = None
    ) -> list[Any]:
        return await self.ranks.call_with_recovery(partial(super()._all, method, args, result))


def _saved(batch: TrainBatch, folder: Path) -> str:
    """Save a batch as JSON. Return the place, or why it could not be saved."""
    path = folder / f"nonfinite-{batch.version:06d}.json"
    try:
        path.write_bytes(codec.to_json(batch))
    except (OSError, TypeError) as error:
        return f"The batch could not be saved: {error}"
    return f"The last batch is in {path}"
