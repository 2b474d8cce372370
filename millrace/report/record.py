"""The event recorder of a run: accounts, which are written here, trace and samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from errno import EEXIST
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millrace.config import ReportConfig
from millrace.observe.files import drop_unfinished_line
from millrace.persist.accounts import FILE, Device, Line, Work
from millrace.persist.run_reader import RunReader
from millrace.report.accounts import (
    PREFIX,
    DeviceAccount,
    FlowAccount,
    LoadAccount,
    TokenAccount,
    tokens_of_slot,
)
from millrace.report.trace.writer import TraceWriter
from millrace.schedule.ledger import Ledger, LedgerSnapshot, Slot, State
from millrace.types import Tokens
from millrace.waits.registry import Event, Watcher

if TYPE_CHECKING:
    from millrace.report.samples.store import SampleStore


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


def counts_at_stop(
    lines: Sequence[Line], version: int, slots: Iterable[tuple[int, Slot]]
) -> dict[str, float]:
    """Return the counts at the end of the attempt whose last checkpoint has `version` and `slots`.

    The checkpoint itself was written before the attempt threw tokens away. {} if the attempt was
    killed, or if the checkpoint is an older one.
    """
    last = next((x for x in reversed(lines) if x.event == "end" or x.version < version), None)
    held = sum(tokens_of_slot(slot) for _, slot in slots)
    if last is None or last.version != version or last.tokens.get("held", 0) != held:
        return {}
    tokens = last.tokens.items()
    return {f"{PREFIX}{name}": float(count) for name, count in tokens if name != "held"}


def prepare(path: Path) -> None:
    """Prepare a file for another attempt. A link in its place is replaced and not followed.

    A last line that a crash left unfinished is removed. Raise OSError if it is no regular file.
    """
    if path.is_symlink():
        path.unlink()
    elif path.is_file():
        drop_unfinished_line(path)
    elif path.exists():  # a write to a pipe would wait for its reader
        raise FileExistsError(EEXIST, "it is not a file")


class EventRecorder:
    """Everything that watches one attempt at a run. It writes RUN/accounts.jsonl itself."""

    names = frozenset({"published"})

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
        self._path, self._note, self._broken = run_dir / FILE, note, False
        self._attempt, self._version, self._limit = attempt, ledger.version, ledger.limit
        self._price, self._share_cores = options.price, devices.share_cores
        self._clock, self._begin = clock, (now := clock())
        self._saved: LedgerSnapshot | None = None
        self._tokens, self._loads = TokenAccount(counts, slots, generated), LoadAccount()
        self._flow = FlowAccount(now)
        self._devices = DeviceAccount(
            now,
            ledger.schedule,
            self._flow,
            trainers=devices.trainers,
            replicas=devices.replicas,
            limit=ledger.limit,
            retired=ledger.retired,
            tools=devices.tools,
        )
        self._write("start")
        self._files: list[TraceWriter | SampleStore] = []
        if options.trace:
            limit, load, states = options.trace_mb, options.trace_load, self._devices.states
            trace = TraceWriter(
                run_dir, attempt, clock, note, limit_mb=limit, load=load, states=states
            )
            self._devices.tell(clock(), trace.put)
            self._files.append(trace)
        if options.samples or (run_dir / "samples").exists():  # old samples may be superseded
            from millrace.report.samples.store import SampleStore  # imports pyarrow

            share, limit, start = options.samples, options.samples_mb, ledger.version
            store = SampleStore(run_dir, attempt, start, decode, note, share=share, max_mb=limit)
            self._files.append(store)
        accounts: list[Watcher] = [self._tokens, self._flow, self._loads, self._devices]
        self.watchers: list[Watcher] = [*accounts, self, *self._files]

    def __call__(self, event: Event) -> None:
        self._version = event.facts["version"]
        self._write("version")

    def counts(self, snapshot: LedgerSnapshot) -> dict[str, float]:
        """Return the counts for the checkpoint of `snapshot`."""
        self._saved = snapshot
        return self._tokens.counts(snapshot)

    def end(self, snapshot: LedgerSnapshot) -> None:
        """End the accounts of an attempt that ended in order, at `snapshot`.

        Rollouts may have continued after the last checkpoint. They are thrown away.
        """
        saved = self._saved
        at_end = saved is not None and saved.version == snapshot.version
        self._tokens.end(saved if saved is not None and at_end else snapshot)
        self._write("end")

    def close(self) -> None:
        """Write what is not written yet. Each file has a limited time for it, at the same time."""
        threads = [threading.Thread(target=file.close, daemon=True) for file in self._files]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _write(self, event: str) -> None:
        """Append the accounts as they are now. After the first failure there are no more lines."""
        if self._broken:
            return
        try:
            if event == "start":
                prepare(self._path)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(self._line(event)) + b"\n")
        except OSError as error:
            self._broken = True
            why = f"cannot be written: {error.strerror}. The run goes on"
            self._note(f"warning: {self._path} {why}")

    def _line(self, event: str) -> Line:
        now, flow = self._clock(), self._flow
        return Line(
            event=event,
            attempt=self._attempt,
            version=self._version,
            time=time.time(),
            seconds=now - self._begin,
            generated=self._tokens.generated,
            tokens=self._tokens.totals(),
            prefill=self._tokens.read(),
            devices={
                track: Device(count, dict(seconds))
                for track, (count, seconds) in self._devices.seconds(now).items()
            },
            slots={str(state): flow.slots[state].until(now) for state in State},
            samples={str(state): flow.slots[state].level for state in State},
            retired=flow.retired,
            requests=Work(flow.requests, flow.drawing.until(now), flow.tokens),
            scores=Work(flow.scores, flow.scoring.until(now), busy=flow.any_score.until(now)),
            loads={name: (s, load) for name, (s, load) in self._loads.bins.items()},
            price=self._price,
            limit=self._limit,
            share_cores=self._share_cores,
        )
