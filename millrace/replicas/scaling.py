"""Another number of replicas for a running run: `millrace scale`, and nodes that come and go.

waits for  a request file in RUN/.waits; free devices; the start and the end of workers
produces   replicas that join or leave; an answer file

The folder belongs to the run's user, and each attempt empties it. So no old request is found.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from millrace.errors import DeadlineError, MillraceError
from millrace.process.files import replace_file
from millrace.replicas.roster import ReplicaState
from millrace.replicas.supervisor import ReplicaSupervisor

REQUEST, ANSWER = ".scale", ".scaled"
"""The ends of the files' names. They begin with the id of the request."""
_POLL_S = 0.25
_LOOK_S, _LONGEST_S = 5.0, 300.0
"""The pauses between two looks for free devices: the usual one, and the longest one."""
_LONGEST = 4096
"""Bytes of a request."""


class Request(msgspec.Struct, frozen=True):
    """The request of `millrace scale`."""

    id: str
    rollout: int
    wait_s: float = 0.0
    """How long the answer may wait until the replicas that joined serve."""


class Reply(msgspec.Struct, frozen=True):
    """The driver's reply."""

    id: str
    before: int
    after: int
    seconds: float
    serving: bool = True
    """Whether every replica serves."""
    error: str = ""


def unread(folder: Path, seen: set[str]) -> list[Path]:
    """Return the requests in a folder, the oldest first. `seen` has the names of earlier ones."""
    found: list[tuple[int, Path]] = []
    for file in folder.glob(f"[!.]*{REQUEST}"):
        if file.name not in seen:
            with suppress(OSError):
                found.append((file.lstat().st_mtime_ns, file))
    seen.update(file.name for _, file in found)
    return [file for _, file in sorted(found)]


def read(file: Path) -> Request:
    """Read a request, and remove it. Raises OSError or DecodeError for anything else."""
    about = file.lstat()
    if not stat.S_ISREG(about.st_mode) or about.st_size > _LONGEST:
        raise OSError(f"not a file of at most {_LONGEST} bytes")
    data = file.read_bytes()
    file.unlink()
    return msgspec.json.decode(data, type=Request)


class Scaler:
    """Lets replicas join and leave. The newest request is the one that counts."""

    def __init__(
        self,
        keeper: ReplicaSupervisor,
        *,
        most: int,
        fixed: str,
        note: Callable[[str], None],
    ) -> None:
        """Replicas join by themselves while there are fewer than `most` and free devices for them.

        With a reason in `fixed`, none joins or leaves.
        """
        self.note, self._keeper, self._roster = note, keeper, keeper.roster
        self._most, self._fixed, self._turn = most, fixed, asyncio.Lock()
        self._newest = 0
        """The number of the newest request."""

    async def serve(self, folder: Path) -> None:
        """Answer the requests in a folder. Each has a task of its own."""
        seen = set[str]()
        while True:
            await asyncio.sleep(_POLL_S)
            for file in unread(folder, seen):
                try:
                    request = read(file)
                except (OSError, msgspec.DecodeError) as error:
                    self.note(f"warning: {file.name} in {folder} is no request: {error}")
                else:
                    self._keeper.begin(self._answer(file, request), "scaling")

    async def follow(self) -> None:
        """Let replicas join as devices become free. After a failure, wait longer and longer."""
        pause_s = _LOOK_S
        while not self._fixed:
            await asyncio.sleep(pause_s)
            try:
                await self._fill()
                pause_s = _LOOK_S
            except (MillraceError, OSError) as error:
                pause_s = min(2 * pause_s, _LONGEST_S)
                self.note(f"no replica joined: {error}; the next try is in {pause_s:g} s")

    async def _fill(self) -> None:
        """Let as many replicas join as there are devices for, up to the most."""
        async with self._turn:
            members, given_up = (
                len(self._roster.members),
                len(self._roster.ids(ReplicaState.RETIRED)),
            )
            if members + given_up >= self._most:
                return
            room = (await self._keeper.starter.limit()).most
            total = self._most if room is None else min(self._most, room)
            if (count := total - given_up) > members:
                self.note(f"free devices: the run grows from {members} to {count} replicas")
                await self._grow(count, self._newest, [ReplicaState.LEFT])

    async def _answer(self, file: Path, request: Request) -> None:
        clock = asyncio.get_running_loop().time
        start, before, error = clock(), len(self._roster.members), ""
        try:
            await self.scale(request.rollout)
            await self._serving(request.wait_s)
        except (MillraceError, OSError) as failure:
            error = str(failure)
            self.note(f"`millrace scale` failed: {error}")
        seconds, after = clock() - start, len(self._roster.members)
        if after != before:
            self.note(f"scaled from {before} to {after} replicas after {seconds:.1f} s")
        serving = len(self._roster.live) == after
        reply = Reply(request.id, before, after, seconds, serving, error)
        try:
            replace_file(file.with_suffix(ANSWER), msgspec.json.encode(reply))
        except OSError as failure:
            self.note(f"warning: `millrace scale` gets no answer: {failure}")

    async def _serving(self, wait_s: float) -> None:
        """Wait until no replica is STALE, at most `wait_s` seconds, whatever happens meanwhile.

        The command itself gives up some time after that.
        """
        with suppress(TimeoutError, DeadlineError):
            ready = lambda: not self._roster.ids(ReplicaState.STALE)  # noqa: E731
            async with asyncio.timeout(wait_s):
                await self._roster.wait("scale", ready, wait_s, "sync|trainer")

    async def scale(self, count: int) -> None:
        """Let replicas join or leave until there are `count`. The highest numbers leave first.

        A replica that joins serves from the next weight sync on. A newer call ends one that is
        under way.
        """
        self._newest += 1
        number = self._newest
        async with self._turn:
            await self._check(count)
            await self._grow(count, number, [ReplicaState.LEFT, ReplicaState.RETIRED])
            for replica in reversed(self._roster.members[count:]):
                await self._keeper.leave(replica)
            self._most = count

    async def _grow(self, count: int, number: int, again: Sequence[ReplicaState]) -> None:
        """Let replicas join until there are `count`, those in the states `again` first."""
        while len(self._roster.members) < count:
            if number != self._newest:
                raise MillraceError("a newer `millrace scale` asks for another number")
            replica = min(self._roster.ids(*again), default=len(self._roster))
            if replica in self._roster.ids(ReplicaState.RETIRED):
                await self._keeper.leave(replica)
            await self._keeper.join(replica)

    async def _check(self, count: int) -> None:
        members = self._roster.members
        if count < 1:
            raise MillraceError(f"rollout={count}: a run needs a replica. Fix: rollout=1")
        if self._fixed:
            raise MillraceError(f"rollout={count}: {self._fixed}")
        if count > len(members):
            most, why, more = await self._keeper.starter.limit()
            if most is not None and count > most:
                fix = f"{more}rollout={max(most, len(members))} or less"
                raise MillraceError(f"rollout={count}: {why}. Fix: {fix}")
        elif count < len(members) and not {*members[:count]} & {*self._roster.live}:
            fix = "wait for a weight sync, and try again"
            raise MillraceError(f"rollout={count}: none of the replicas left serves. Fix: {fix}")
