"""The durable journal: the life of every sample since the last checkpoint.

    consumes   the ledger's moves; finished samples; the progress of running ones
    waits for  the disk, in a thread; nobody waits for the journal
    produces   RUN/journal; after a restart, the samples that need not be drawn again

The event loop only notes references to frozen samples. A task packs them, writes them and syncs
them in groups. A new file begins with each version that gets a checkpoint, so the older files go
with the older checkpoints. A disk that refuses a write ends the journal until the next file. As
soon as the disk takes files again, the journal asks for a checkpoint.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from millrace.errors import CheckpointError
from millrace.persist.ownership import disk_errors
from millrace.pipeline import journal_file, replay
from millrace.pipeline.journal_file import (
    Batch,
    Finished,
    Header,
    Progress,
    Sealed,
    Step,
    checksum,
)
from millrace.pipeline.replay import JournalState, RecoveredSample
from millrace.ports import TrainBatch
from millrace.process.files import sync
from millrace.schedule.ledger import Ledger, Move, Slot, State
from millrace.types import PolicyVersion, Prompt, Sample, Trajectory
from millrace.waits.registry import acting, doing

GROUP_S = 0.2
"""Seconds of facts that one write and one sync cover."""
RECORD = 32
"""The most finished samples of one record. It stays in the caches of a core."""
PROGRESS_S = 2.0
"""The least seconds between two records of running samples."""
PROGRESS_RATE = 8_000_000
"""The most bytes of running samples for each second, on average."""
PROBE_S = 5.0
"""The least seconds between two looks at a disk that refused the journal."""
_SILENT = frozenset({State.RUNNING, State.READY, State.TAKEN, State.TRAINED})
"""Moves that need no fact. A finished sample and a step have their own."""


class Journal:
    """The journal of one attempt."""

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        header: Header,
        past: JournalState,
        *,
        save_freq: int,
        note: Callable[[str], None] = lambda text: None,
        synced: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        """`note` gets alarms. `synced` sees each batch that is durable."""
        self.past = past
        self.working = True
        """Whether the disk takes what is written."""
        self.written = 0
        """Bytes that are durable."""
        self._folder, self._ledger, self._header = folder, ledger, header
        self._save_freq, self._note, self._synced = save_freq, note, synced
        self._batch = Batch()
        self._running: dict[int, tuple[Prompt, tuple[Trajectory, ...]]] = {}
        """Running samples with progress that is not written."""
        self._last: dict[int, tuple[Trajectory, ...]] = {}
        """The progress of running samples that is written."""
        self._next_progress = 0.0
        self._some = asyncio.Event()
        """Whether there is something to write."""
        self._queue: deque[tuple[Header, Batch]] = deque()
        """Batches on their way to the disk, with the headers of their files."""
        self._broken: Header | None = None
        """The header of the file that the disk refused."""
        self._looks, self._next_look = False, 0.0
        """Whether, and when, to look if the disk takes files again."""
        self._again = False
        """Whether it does."""
        self._extra: PolicyVersion | None = None
        """A version with a checkpoint that is due because the journal begins again."""
        self._others = False
        """Whether a sample had known tokens that this attempt cannot use."""
        self._lock = threading.Lock()
        self._done: list[Batch] = []

    # -- facts, on the event loop

    def moved(self, moves: Sequence[Move]) -> None:
        """Note moves of the ledger."""
        if not moves or (moves[0].to in _SILENT and moves[-1].to in _SILENT):
            return
        ledger, batch = self._ledger, self._batch
        sealed, live = list[int](), False
        for sample_id, to, reason in moves:
            if to == State.WAITING:
                batch.admitted.append((sample_id, ledger.version))
            elif to == State.SEALED:
                sealed.append(sample_id)
            elif to == "retired":
                live = True
            elif to == "dropped":
                batch.dropped.append((sample_id, reason))
                self.past.forget(sample_id)
                self._end(sample_id)
        if sealed:
            version = ledger.version + 1
            if not self.past.compare(version, sealed):
                ledger.follow(())
                self._note(
                    f"version {version} has other samples than before the restart: "
                    f"{self.past.lost} tokens of later versions are drawn again"
                )
            batch.sealed.append(Sealed(version, ledger.local_steps, sealed))
        if live and (ledger.version % self._save_freq == 0 or ledger.version == self._extra):
            self._close_file(ledger.version)
        self._some.set()

    def stepped(self, batch: TrainBatch) -> None:
        """Note the last local step of the ledger."""
        number, prompts = self._ledger.local_steps, [s.prompt for s in batch.samples]
        other = {p.index: p for p in prompts if p.position is not None}
        step = Step(number, [p.index for p in prompts], batch.lr_scale, other)
        self._batch.steps.append(step)
        self.past.steps.pop(number, None)
        self._some.set()

    def checkpoint_due(self, version: PolicyVersion) -> bool:
        """Whether the journal needs a checkpoint of a version, to begin again."""
        if self._again:
            self._again, self._extra = False, version
        return version == self._extra

    def progressed(
        self, sample_id: int, prompt: Prompt, trajectories: tuple[Trajectory, ...]
    ) -> None:
        """Note the trajectories of a running sample."""
        self._running[sample_id] = prompt, trajectories
        if self.past.progress:
            self.past.progress.pop(sample_id, None)
        self._some.set()

    def finished(self, sample_id: int, sample: Sample) -> None:
        """Note a finished sample, before anybody decides whether it is trained."""
        self._end(sample_id)
        if not self.past.forget(sample_id):  # Else it is in this file already.
            crc = checksum(sample.prompt.tokens)
            one = Finished(sample_id, crc, sample.trajectories, sample.greedy)
            self._batch.finished.append(one)
            if len(self._batch.finished) >= RECORD:
                self._enqueue()
            self._some.set()

    def recall(self, sample_id: int, slot: Slot) -> RecoveredSample | None:
        """Return what an earlier attempt left of a sample. The first one that it cannot use is noted."""
        lost = self.past.lost
        known = self.past.recall(sample_id, slot, self._ledger.version)
        if self.past.lost > lost and not self._others:
            self._others = True
            self._note(
                f"sample {sample_id} has another prompt or version than before the restart: "
                f"{self.past.lost - lost:,} known tokens, its own and those of later versions, are drawn "
                "again, and those of each such sample"
            )
        return known

    def _end(self, sample_id: int) -> None:
        self._running.pop(sample_id, None)
        self._last.pop(sample_id, None)

    def _close_file(self, version: int) -> None:
        """Begin a new file, with what the run has not used of the attempt before."""
        self._looks = self._again = False
        self._take_progress()
        self._enqueue()
        self._header = msgspec.structs.replace(self._header, version=version)
        if self.past:
            self._queue += [(self._header, batch) for batch in self.past.batches()]

    def _enqueue(self) -> None:
        if self._batch != Batch():
            self._queue.append((self._header, self._batch))
            self._batch = Batch()

    def _take_progress(self) -> int:
        """Move the progress of running samples into the batch. Return its tokens."""
        tokens = 0
        for sample_id, (prompt, now) in self._running.items():
            before = self._last.get(sample_id, ())
            changed = {
                k: t
                for k, t in enumerate(now)
                if t.threads and not (k < len(before) and t is before[k])
            }
            if changed:
                one = Progress(sample_id, checksum(prompt.tokens), changed)
                self._batch.progress.append(one)
                tokens += sum(t.num_tokens for t in changed.values())
            self._last[sample_id] = now
        self._running.clear()
        return tokens

    # -- writing

    def refuse(self, trouble: str) -> None:
        """Write nothing more to the first file, because the disk refuses it."""
        self._broken, self._looks = self._header, True
        self._report(trouble)

    async def run(self) -> None:
        """Write in groups until the run cancels this task."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await self._some.wait()
                await asyncio.sleep(GROUP_S)
                self._some.clear()
                if self._running and clock() >= self._next_progress:
                    rest = 8 * self._take_progress() / PROGRESS_RATE
                    self._next_progress = clock() + max(PROGRESS_S, rest)
                elif self._running:
                    asyncio.get_running_loop().call_at(self._next_progress, self._some.set)
                self._enqueue()
                self._report(await asyncio.to_thread(self._write))
                if self._looks and clock() >= self._next_look:
                    self._next_look = clock() + PROBE_S
                    takes = await asyncio.to_thread(journal_file.takes, self._folder)
                    self._again = takes and self._looks
        finally:
            self._take_progress()
            self._enqueue()
            self._report(self._write())

    async def since(self, ledger: Ledger) -> JournalState:
        """Return the facts of this attempt since the checkpoint that has `ledger`."""
        self._enqueue()
        self._report(await asyncio.to_thread(self._write))
        return await asyncio.to_thread(
            partial(replay.read, self._folder, ledger, self._header, this_attempt=True)
        )

    def _report(self, trouble: str) -> None:
        done, self._done = self._done, []
        for batch in done:
            self._synced(batch)
        if trouble and self.working:
            self.working = False
            self._note(
                f"alarm: the journal ends: {trouble}. The run goes on, and a crash now costs the "
                "tokens since then. The journal begins again with the next checkpoint"
            )
        elif not trouble and done and not self.working:
            self.working = True
            self._note("alarm over: the disk takes the journal again")

    def _write(self) -> str:
        """Write and sync what is queued. Return what the disk refused, if anything."""
        with acting("journal"), doing("a write of the journal", by="the disk"), self._lock:
            while self._queue:
                header, same = self._queue[0][0], []
                while self._queue and self._queue[0][0] == header:
                    same.append(self._queue.popleft()[1])
                if header == self._broken:
                    continue
                path = journal_file.path_of(self._folder, header.attempt, header.version)
                try:
                    self.written += write(path, header, same)
                    self._done += same
                except OSError as error:
                    self._broken, self._looks = header, header == self._header
                    return f"{error.filename or path}: {error.strerror or error}"
                except TypeError as error:  # such as an object in a message of an agent
                    self._broken, self._looks = header, False
                    return f"{path}: a sample cannot be packed: {error}"
        return ""


def write(path: Path, header: Header, batches: Iterable[Batch]) -> int:
    """Append batches to a file, which begins with the header. Return the number of bytes."""
    new = not path.is_file()
    if not path.parent.is_dir():
        path.parent.mkdir()
        sync(path.parent.parent)
    head: list[Header | Batch] = [header] if new else []
    return journal_file.append(path, [*head, *batches])


def resume(
    folder: Path,
    ledger: Ledger,
    header: Header,
    *,
    save_freq: int,
    note: Callable[[str], None],
    synced: Callable[[Batch], None] = lambda batch: None,
) -> Journal:
    """Return the journal of a new attempt, which uses what earlier ones left.

    `ledger` is that of the checkpoint. It gets the order in which the earlier attempt trained. What
    is usable moves to a file of this attempt before the older files go.
    """
    with disk_errors(folder):
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder} is a link, and millrace follows none. "
                "Fix: a folder in its place, or trainer.journal=false"
            )
        past = replay.read(folder, ledger, header, note)
    if past or past.damage or past.lost:
        note(_resumed(past, ledger))
    journal = Journal(folder, ledger, header, past, save_freq=save_freq, note=note, synced=synced)
    ledger.follow(past.plan)
    path = journal_file.path_of(folder, header.attempt, header.version)
    try:
        if past:
            temporary = path.with_name(f".{path.name}")
            temporary.unlink(missing_ok=True)
            write(temporary, header, past.batches())
            temporary.rename(path)
            sync(folder)
        journal_file.remove(folder, header.version, before=header.attempt)
    except OSError as error:
        journal.refuse(f"{error.filename or path}: {error.strerror or error}")
    return journal


def _resumed(past: JournalState, ledger: Ledger) -> str:
    """Say what a resumed run takes from the journal."""
    known = {*past.finished, *past.progress, *past.dropped}
    waiting = {*ledger.ids(State.WAITING)}
    waiting |= {i for i in past.started if i >= ledger.admitted}
    unknown = sum(1 for i in waiting if i not in known)
    return (
        f"resumed at version {ledger.version} + journal: {len(past.finished)} finished samples used "
        f"again, {len(past.progress)} continued at {past.running_tokens:,} tokens, "
        f"{past.lost:,} known tokens are drawn again"
        + (f", and all tokens of {unknown} samples" if unknown else "")
        + ("" if past.same else ". Settings changed, so versions after the checkpoint are not used")
        + (f". {past.damage[0].upper()}{past.damage[1:]}" if past.damage else "")
    )
