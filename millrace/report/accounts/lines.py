"""RUN/accounts.jsonl: where every token and every second of every device went.

Each attempt has a line for its start, one for each version and one for its end. Tokens are those
of the surviving history. All other figures are those of the attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from errno import EEXIST
from pathlib import Path
from typing import Annotated

import msgspec

from millrace.observe.files import drop_unfinished_line, lines
from millrace.observe.watch import Event
from millrace.report.accounts.devices import DeviceAccount
from millrace.report.accounts.flow import FlowAccount
from millrace.report.accounts.pace import LoadAccount
from millrace.report.accounts.tokens import PREFIX, TokenAccount, tokens_of_slot
from millrace.schedule.ledger import Slot, State

FILE = "accounts.jsonl"

Count = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""A number of things. A line with a larger one is no line of a run."""


class Device(msgspec.Struct, frozen=True):
    """The devices of one track."""

    count: Count
    seconds: dict[str, float]
    """Seconds of one of the devices, by state. They add up to the line's `seconds`."""


class Work(msgspec.Struct, frozen=True):
    """Calls, their seconds and their tokens."""

    count: Count = 0
    seconds: float = 0.0
    tokens: Count = 0
    busy: float = 0.0
    """Seconds with at least one call. Only the rewards have it."""


class Line(msgspec.Struct, frozen=True):
    """The accounts at one moment."""

    event: str
    """One of start, version and end."""
    attempt: Count
    version: Count
    time: float
    """Unix time."""
    seconds: float
    """Seconds of this attempt so far."""
    generated: Count
    """Tokens drawn. `tokens` adds up to it."""
    tokens: dict[str, Count]
    """Tokens by bucket (report/accounts/tokens.py)."""
    prefill: Count = 0
    """Tokens that this attempt has read into KV caches."""
    devices: dict[str, Device] = {}
    slots: dict[str, float] = {}
    """Sample-seconds by the sample's state."""
    samples: dict[str, Count] = {}
    """Samples that are in each state now."""
    retired: Count = 0
    """Samples that this attempt has trained to a live version."""
    requests: Work = Work()
    scores: Work = Work()
    loads: dict[str, tuple[float, float]] = {}
    """Of each bin: seconds, and the integral of the load (report/accounts/pace.py)."""
    """Seconds of engines by the number of requests that draw (report/accounts/pace.py)."""
    price: float = 0.0
    """Money that one device costs per hour."""
    limit: Count | None = None
    """Samples that the whole run trains."""
    share_cores: bool = False
    """Whether the devices are processes on the cores of one CPU."""


_line = msgspec.json.Decoder(Line)  # made now, for threads: see waits/ask.py


class Accounts:
    """A watcher that writes the accounts. It comes after the accounts that it writes."""

    names = frozenset({"published"})

    def __init__(
        self,
        path: Path,
        attempt: int,
        version: int,
        clock: Callable[[], float],
        begin: float,
        tokens: TokenAccount,
        devices: DeviceAccount,
        flow: FlowAccount,
        note: Callable[[str], None],
        price: float = 0.0,
        limit: int | None = None,
        loads: LoadAccount | None = None,
        share_cores: bool = False,
    ) -> None:
        """`begin` is the time at which the attempt and its accounts began."""
        self.tokens, self.devices, self.flow = tokens, devices, flow
        self.loads = loads or LoadAccount()
        self._path, self._attempt, self._version = path, attempt, version
        self._clock, self._begin, self._note, self._price = clock, begin, note, price
        self._limit, self._share_cores, self._broken = limit, share_cores, False
        self.write("start")

    def __call__(self, event: Event) -> None:
        if event.name == "published":
            self._version = event.facts["version"]
            self.write("version")

    def line(self, event: str) -> Line:
        """Return the accounts as they are now."""
        now, flow = self._clock(), self.flow
        return Line(
            event=event,
            attempt=self._attempt,
            version=self._version,
            time=time.time(),
            seconds=now - self._begin,
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
            price=self._price,
            limit=self._limit,
            share_cores=self._share_cores,
        )

    def write(self, event: str) -> None:
        """Append a line. After the first failure there are no more lines."""
        if self._broken:
            return
        try:
            if event == "start":
                own(self._path)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(self.line(event)) + b"\n")
        except OSError as error:
            self._broken = True
            self._note(
                f"warning: {self._path} cannot be written: {error.strerror}. The run goes on"
            )


def read(run_dir: Path) -> list[Line]:
    """Return the lines of a run, oldest first. A line that is not whole is left out."""
    return read_counted(run_dir)[0]


def read_counted(run_dir: Path) -> tuple[list[Line], int]:
    """Return the lines of a run, oldest first, and the number of damaged ones.

    A last line without its end is one that is being written.
    """
    path, bad = run_dir / FILE, 0
    found: list[Line] = []
    if path.is_file():
        for text in lines(path):
            try:
                if text.endswith(b"\n"):
                    found.append(_line.decode(text))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                bad += bool(text.strip())
    return found, bad


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


def own(path: Path) -> None:
    """Prepare a file for another attempt. A link in its place is replaced and not followed.

    A last line that a crash left unfinished is removed. Raise OSError if it is no regular file.
    """
    if path.is_symlink():
        path.unlink()
    elif path.is_file():
        drop_unfinished_line(path)
    elif path.exists():  # a write to a pipe would wait for its reader
        raise FileExistsError(EEXIST, "it is not a file")
