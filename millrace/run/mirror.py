"""The mirror: a copy of each checkpoint in a store.

    consumes   whole checkpoints of the run's folder
    waits for  the store, in a thread; no loop of the run waits for it
    produces   the same checkpoints in the store

A store that fails costs an alarm. The next checkpoint tries again. If checkpoints come faster than
the store takes them, the newest one is copied next, and those between are left out.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from millrace.config import TrainerConfig
from millrace.observe.progress import Progress
from millrace.persist import ownership
from millrace.run.store import Store
from millrace.sync.background import abandonable
from millrace.waits.registry import acting, doing, waiting

STAGED = ".mirror"
"""The folder of a run with the checkpoint that is copied next. Its files are links."""


class Mirror:
    """The copies of one run."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        keep: int,
        deadline_s: float,
        note: Callable[[str], None],
    ) -> None:
        """`deadline_s` limits each copy."""
        self.copied = self.refused = 0
        """Checkpoints that the store has, and those that it refused."""
        self.version = -1
        """The newest version that the store has from this attempt."""
        self._store, self._staged, self._keep = store, folder / STAGED, keep
        self._deadline_s, self._note = deadline_s, note
        self._loop = asyncio.get_running_loop()
        self._some, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._next: Path | None = None
        self._failing = False
        ownership.remove(self._staged)

    def offer(self, folder: Path) -> None:
        """Take a complete checkpoint, which may be deleted after the return. Any thread calls it.

        Links to its files keep them until the copy is made.
        """
        with self._lock:
            staged = self._staged / folder.name
            ownership.remove(staged)
            try:
                shutil.copytree(folder, staged, copy_function=_link)
            except OSError as error:
                ownership.remove(staged)
                self._loop.call_soon_threadsafe(self._refuse, error)
                return
            older, self._next = self._next, staged
            if older is not None and older != staged:
                ownership.remove(older)
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._idle.clear()
        self._some.set()

    async def run(self) -> None:
        """Copy what is offered, until the run cancels this task."""
        with acting("mirror"):
            while True:
                await self._some.wait()
                self._some.clear()
                await self._copy_next()
                if not self._some.is_set():
                    self._idle.set()

    async def finish(self) -> None:
        """Wait until the last checkpoint is copied or refused."""
        await asyncio.sleep(0)  # An offer of another thread has arrived.
        with waiting("mirror", "the copy of the last checkpoint"):
            await self._idle.wait()

    def figures(self) -> dict[str, float]:
        """Return what the rows have of the copies."""
        found = {"mirror/copied": float(self.copied), "mirror/refused": float(self.refused)}
        return found | ({"mirror/version": float(self.version)} if self.copied else {})

    async def _copy_next(self) -> None:
        with self._lock:
            staged, self._next = self._next, None
            if staged is None:
                return
            taken = staged.rename(staged.with_name(f"copying-{staged.name}"))
        version = int(staged.name.rpartition("-")[2])
        try:
            with doing(f"the copy of version {version}", by="the store"):
                async with asyncio.timeout(self._deadline_s):
                    await abandonable(self._store.put, taken, self._keep)
        except TimeoutError:
            self._refuse(TimeoutError(f"no end after trainer.wait_deadline_s = {self._deadline_s}"))
        except Exception as error:  # noqa: BLE001 - a run does not fail because its mirror does
            self._refuse(error)
        else:
            self.copied, self.version = self.copied + 1, version
            if self._failing:
                self._failing = False
                self._note(f"alarm over: {self._store.address} takes checkpoints again")
        finally:
            ownership.remove(taken)

    def _refuse(self, error: Exception) -> None:
        self.refused += 1
        if not self._failing:
            self._failing = True
            self._note(
                f"alarm: {self._store.address} refuses a checkpoint: {type(error).__name__}: "
                f"{error}. The run goes on, and the next checkpoint is tried again"
            )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


@asynccontextmanager
async def open_mirror(
    store: Store | None, trainer: TrainerConfig, folder: Path, progress: Progress
) -> AsyncIterator[Mirror | None]:
    """Copy checkpoints while the body runs. At its end, wait for the last copy.

    A cancelled body does not wait.
    """
    if store is None:
        yield None
        return
    mirror = Mirror(
        store,
        folder,
        keep=trainer.max_ckpt_to_keep,
        deadline_s=trainer.wait_deadline_s,
        note=progress.note,
    )
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(mirror.run(), name="mirror")
        yield mirror
        progress.phase(f"copying the last checkpoint to {store.address}")
        await mirror.finish()
        work.cancel()
