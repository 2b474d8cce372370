"""A journal on a disk that refuses, and facts that cannot be written."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from millrace.extras.faults.disk import Disk, SimPath, View, simulated_disk
from millrace.extras.faults.world import WorldLoop
from millrace.pipeline import journal_file
from millrace.pipeline.journal import PROBE_S, Journal
from millrace.pipeline.replay import JournalState
from millrace.schedule.ledger import Ledger
from millrace.types import Sample, Trajectory
from tests.pipeline.journals import HEADER, PROMPT, Said, drawn, ledger_at


def place() -> tuple[Disk, Said, Any]:
    """Return a simulated disk, what the journal says, and the journal's folder."""
    disk = Disk(random.Random(0))
    folder: Any = SimPath(View(disk), "/run/journal")
    folder.mkdir(parents=True)
    return disk, Said(), folder


def publish(ledger: Ledger, kept: Journal) -> None:
    """Train the samples that are ready, and make the version live."""
    for change in (ledger.take, ledger.trained, ledger.seal, ledger.published):
        change()
        kept.moved(ledger.moves)
        ledger.moves.clear()


def test_a_full_disk_ends_the_journal_until_the_next_checkpoint() -> None:
    disk, said, folder = place()

    async def main() -> None:
        ledger = ledger_at(4, 0)
        kept = Journal(folder, ledger, HEADER, JournalState(), save_freq=1, note=said)
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(kept.run())
            for i in range(2):
                disk.full = i == 1
                finish(ledger, kept, i)
                await asyncio.sleep(1.0)
            assert not kept.working and "No space left" in said[0] and "run goes on" in said[0]
            disk.full = False
            publish(ledger, kept)
            finish(ledger, kept, 2)
            await asyncio.sleep(1.0)
            writer.cancel()
        assert said[1:] == ["alarm over: the disk takes the journal again"]

    with simulated_disk(), asyncio.Runner(loop_factory=WorldLoop) as runner:
        runner.run(main())
        first, second = map(journal_file.read, journal_file.files(folder))
    assert [f.sample_id for b in first.batches for f in b.finished] == [0]
    assert [f.sample_id for b in second.batches for f in b.finished] == [2]


def test_a_journal_asks_for_a_checkpoint_as_soon_as_the_disk_takes_files_again() -> None:
    """Else a trainer that is lost before the next regular one could not be restored."""
    disk, said, folder = place()

    async def main() -> None:
        ledger = ledger_at(5, 0)
        kept = Journal(folder, ledger, HEADER, JournalState(), save_freq=1000, note=said)
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(kept.run())
            finish(ledger, kept, 0)
            await asyncio.sleep(1.0)
            assert not kept.checkpoint_due(1), "the disk is fine"
            disk.full = True
            finish(ledger, kept, 1)
            await asyncio.sleep(1.0)
            assert not kept.working and not kept.checkpoint_due(1), "the disk is full"
            disk.full = False
            finish(ledger, kept, 2)
            await asyncio.sleep(PROBE_S + 1.0)
            finish(ledger, kept, 3)  # A run has facts all the time.
            await asyncio.sleep(1.0)
            assert kept.checkpoint_due(1) and kept.checkpoint_due(1) and not kept.working
            publish(ledger, kept)
            finish(ledger, kept, 4)
            await asyncio.sleep(PROBE_S + 1.0)
            assert not kept.checkpoint_due(2), "one checkpoint is enough"
            writer.cancel()
        assert said[1:] == ["alarm over: the disk takes the journal again"]

    with simulated_disk(), asyncio.Runner(loop_factory=WorldLoop) as runner:
        runner.run(main())
        assert [p.name for p in journal_file.files(folder)] == [
            "000001-000000.log", "000001-000001.log"
        ]  # fmt: skip


async def test_a_sample_that_cannot_be_packed_ends_the_journal_and_not_the_run(
    tmp_path: Path,
) -> None:
    said, ledger = Said(), ledger_at(1, 0)
    kept = Journal(tmp_path, ledger, HEADER, JournalState(), save_freq=1, note=said)
    odd = Trajectory(ended="done", messages=({"content": object()},))
    kept.finished(0, Sample(PROMPT, (odd,)))
    task = asyncio.create_task(kept.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert "cannot be packed: cannot encode object" in said[0] and not kept.working


def finish(ledger: Ledger, kept: Journal, i: int) -> None:
    ledger.start(i)
    sample = Sample(PROMPT, (drawn(0),))
    kept.finished(i, sample)
    ledger.finish(i, sample)
