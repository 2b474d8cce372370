"""The event recorder of a run: accounts, which are written here, trace and samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EEXIST
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millrace.config import ReportConfig
from millrace.observe.files import drop_unfinished_line
from millrace.persist.accounts import FILE, Device, Line, Work
from millrace.persist.run_reader import RunReader
from millrace.report.accounts.devices import DeviceAccount, FlowAccount
from millrace.report.accounts.pace import LoadAccount
from millrace.report.accounts.tokens import PREFIX, TokenAccount, tokens_of_slot
from millrace.report.trace.writer import TraceWriter
from millrace.schedule.ledger import Ledger, LedgerSnapshot, Slot, State
from millrace.types import Tokens
from millrace.waits.stream import Event, Watcher

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


@dataclass
class Accounts:
    """A watcher that writes RUN/accounts.jsonl. It comes after the accounts that it writes."""

    path: Path
    attempt: int
    version: int
    clock: Callable[[], float]
    begin: float
    """The time at which the attempt and its accounts began."""
    tokens: TokenAccount
    devices: DeviceAccount
    flow: FlowAccount
    note: Callable[[str], None]
    price: float = 0.0
    limit: int | None = None
    loads: LoadAccount = field(default_factory=LoadAccount)
    share_cores: bool = False
    names = frozenset({"published"})
    _broken = False

    def __post_init__(self) -> None:
        self.write("start")

    def __call__(self, event: Event) -> None:
        self.version = event.facts["version"]
        self.write("version")

    def line(self, event: str) -> Line:
        """Return the accounts as they are now."""
        now, flow = self.clock(), self.flow
        return Line(
            event=event,
            attempt=self.attempt,
            version=self.version,
            time=time.time(),
            seconds=now - self.begin,
            generated=self.tokens.generated,
            tokens=self.tokens.totals(),
            prefill=self.tokens.read(),
            devices={
                track: Device(count, dict(seconds))
                for track, (count, seconds) in self.devices.seconds(now).items()
            },
            slots={str(state): flow.slots[state].until(now) for state in State},
            samples={str(state): flow.slots[state].level for state in State},
            retired=flow.retired,
            requests=Work(flow.requests, flow.drawing.until(now), flow.tokens),
            scores=Work(flow.scores, flow.scoring.until(now), busy=flow.any_score.until(now)),
            loads={name: (s, load) for name, (s, load) in self.loads.bins.items()},
            price=self.price,
            limit=self.limit,
            share_cores=self.share_cores,
        )

    def write(self, event: str) -> None:
        """Append a line. After the first failure there are no more lines."""
        if self._broken:
            return
        try:
            if event == "start":
                prepare(self.path)
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(self.line(event)) + b"\n")
        except OSError as error:
            self._broken = True
            why = f"cannot be written: {error.strerror}. The run goes on"
            self.note(f"warning: {self.path} {why}")


def counts_at_stop(
    lines: Sequence[Line], version: int, slots: Iterable[tuple[int, Slot]]
) -> dict[str, float]:
    """Return the counts at the end of the attempt whose last checkpoint has `version` and `slots`.

    The checkpoint itself was written before the attempt threw tokens away. {} if the attempt was
    killed, or if the checkpoint is an older one.
    """
    for line in reversed(lines):
        if line.version < version:
            break
        if line.event == "end":
            tokens = dict(line.tokens)
            held = sum(tokens_of_slot(slot) for _, slot in slots)
            if line.version != version or tokens.pop("held", 0) != held:
                break
            return {f"{PREFIX}{name}": float(count) for name, count in tokens.items()}
    return {}


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
        self._files: list[TraceWriter | SampleStore] = []
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
