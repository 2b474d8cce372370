"""The event recorder of a run: accounts, trace and samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.config import ReportConfig
from millrace.persist.accounts import FILE
from millrace.persist.run_reader import RunReader
from millrace.report.accounts.devices import DeviceAccount
from millrace.report.accounts.flow import FlowAccount
from millrace.report.accounts.lines import Accounts, counts_at_stop
from millrace.report.accounts.pace import LoadAccount
from millrace.report.accounts.tokens import TokenAccount
from millrace.report.trace.writer import TraceWriter
from millrace.schedule.ledger import Ledger, LedgerSnapshot
from millrace.types import Tokens
from millrace.waits.stream import Event, Watcher


class File(Protocol):
    """A watcher that writes files in a thread."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a run."""

    trainers: int
    """Train ranks."""
    replicas: dict[str, int]
    """Devices of each replica, by its track."""
    share_cores: bool = False
    """Whether they are processes on the cores of one CPU."""
    tools: bool = False
    """Whether sessions wait for tools and environments."""


class EventRecorder:
    """Everything that watches one attempt at a run."""

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        ledger: Ledger,
        counts: Mapping[str, float],
        devices: Devices,
        options: ReportConfig,
        clock: Callable[[], float],
        note: Callable[[str], None],
        decode: Callable[[Tokens], str],
    ) -> None:
        """`counts` are those of the checkpoint from which `ledger` was restored.

        `decode` is called in a thread. `note` gets one line for each problem of a watcher.
        """
        slots, lines = ledger.snapshot().slots, RunReader(run_dir).read().accounts
        generated = lines[-1].generated if lines else 0
        counts = counts_at_stop(lines, ledger.version, slots) or counts
        tokens = TokenAccount(counts, slots, generated)
        self._saved: LedgerSnapshot | None = None
        now = clock()
        flow, loads = FlowAccount(now), LoadAccount()
        account = DeviceAccount(
            now,
            ledger.schedule,
            flow,
            trainers=devices.trainers,
            replicas=devices.replicas,
            limit=ledger.limit,
            retired=ledger.retired,
            tools=devices.tools,
        )
        self.accounts = Accounts(
            *(run_dir / FILE, attempt, ledger.version, clock, now, tokens, account, flow, note),
            *(options.price, ledger.limit, loads, devices.share_cores),
        )
        self._files: list[File] = []
        if options.trace:
            limit, load, states = options.trace_mb, options.trace_load, account.states
            trace = TraceWriter(
                run_dir, attempt, clock, note, limit_mb=limit, load=load, states=states
            )
            account.tell(clock(), trace.put)
            self._files.append(trace)
        if options.samples or (run_dir / "samples").exists():  # old samples may be superseded
            from millrace.report.samples.store import SampleStore  # imports pyarrow

            share, limit, start = options.samples, options.samples_mb, ledger.version
            store = SampleStore(run_dir, attempt, start, decode, note, share=share, max_mb=limit)
            self._files.append(store)
        self.watchers: list[Watcher] = [tokens, flow, loads, account, self.accounts, *self._files]

    def counts(self, snapshot: LedgerSnapshot) -> dict[str, float]:
        """Return the counts for the checkpoint of `snapshot`."""
        self._saved = snapshot
        return self.accounts.tokens.counts(snapshot)

    def end(self, snapshot: LedgerSnapshot) -> None:
        """End the accounts of an attempt that ended in order, at `snapshot`.

        Rollouts may have continued after the last checkpoint. They are thrown away.
        """
        saved = self._saved
        at_end = saved is not None and saved.version == snapshot.version
        self.accounts.tokens.end(saved if saved is not None and at_end else snapshot)
        self.accounts.write("end")

    def close(self) -> None:
        """Write what is not written yet. Each file has a limited time for it, at the same time."""
        threads = [threading.Thread(target=file.close, daemon=True) for file in self._files]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
