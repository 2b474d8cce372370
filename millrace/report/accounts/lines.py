"""The writer of RUN/accounts.jsonl, as a watcher of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from errno import EEXIST
from pathlib import Path

import msgspec

from millrace.observe.files import drop_unfinished_line
from millrace.persist.accounts import Device, Line, Work
from millrace.report.accounts.devices import DeviceAccount
from millrace.report.accounts.flow import FlowAccount
from millrace.report.accounts.pace import LoadAccount
from millrace.report.accounts.tokens import PREFIX, TokenAccount, tokens_of_slot
from millrace.schedule.ledger import Slot, State
from millrace.waits.stream import Event


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
