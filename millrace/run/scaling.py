"""Another number of replicas for a running run: the requests of `millrace scale`.

waits for  a request file in RUN/.waits; the start and the end of workers
produces   replicas that join or leave; an answer file

The folder belongs to the run's user, and each attempt empties it. So no old request is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from millrace.config import Sides
from millrace.errors import DeadlineError, MillraceError
from millrace.rollout.patience import wait_for_replicas
from millrace.rollout.roster import Standing
from millrace.run.keeper import Keeper
from millrace.runtime.local import visible_gpus
from millrace.runtime.replica import RemoteRolloutEngine
from millrace.runtime.rpc import Peer

REQUEST, ANSWER = ".scale", ".scaled"
"""The ends of the files' names. They begin with the id of the request."""
_POLL_S = 0.25


class Request(msgspec.Struct, frozen=True):
    """What the command asks for."""

    id: str
    rollout: int
    wait_s: float = 0.0
    """How long the answer may wait until the replicas that joined serve."""


class Reply(msgspec.Struct, frozen=True):
    """What the driver answers."""

    id: str
    before: int
    after: int
    seconds: float
    serving: bool = True
    """Whether every replica serves."""
    error: str = ""


class Limit(msgspec.Struct, frozen=True):
    """The most replicas of a run, and the reason."""

    most: int | None
    why: str


def limit_of(sides: Sides) -> Limit:
    """Return how many replicas a run may have."""
    trainer, rollout = sides.trainer, sides.rollout
    if sides.colocated:
        return Limit(0, "in this mode the replicas share the trainer's devices")
    if trainer.runtime == "ray":
        most = rollout.devices // rollout.tensor_model_parallel_size
        return Limit(most, "with Ray, a run has reserved the devices of its start")
    gpus = visible_gpus() if trainer.device != "cpu" else []
    if not gpus:
        return Limit(None, "")
    each = rollout.tensor_model_parallel_size
    uses = f"the trainer uses {trainer.ranks}, and a replica {each}"
    why = f"this machine has {len(gpus)} GPUs, {uses}"
    return Limit((len(gpus) - trainer.ranks) // each, why)


def write(path: Path, content: Request | Reply) -> None:
    """Write a file as a whole."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(msgspec.json.encode(content))
    new.replace(path)


class Scaler:
    """Lets replicas join and leave. It serves one request at a time."""

    def __init__(self, keeper: Keeper, engines: list[RemoteRolloutEngine], limit: Limit) -> None:
        """`engines` gets the engine of each replica that joins."""
        self.note: Callable[[str], None] = lambda text: None
        self._keeper, self._roster, self._engines = keeper, keeper.roster, engines
        self._limit, self._turn = limit, asyncio.Lock()
        self._told: list[Callable[[int, RemoteRolloutEngine], None]] = []

    def tell(self, take: Callable[[int, RemoteRolloutEngine], None]) -> None:
        """Let `take` have the number and the engine of each further replica."""
        self._told.append(take)

    async def serve(self, folder: Path) -> None:
        """Answer the requests in a folder."""
        while True:
            await asyncio.sleep(_POLL_S)
            for file in sorted(folder.glob(f"[!.]*{REQUEST}")):
                try:
                    data = file.read_bytes()
                    file.unlink()
                    request = msgspec.json.decode(data, type=Request)
                    write(file.with_suffix(ANSWER), await self._answer(request))
                except (OSError, msgspec.DecodeError) as error:
                    self.note(f"warning: a request of `millrace scale` failed: {error}")

    async def _answer(self, request: Request) -> Reply:
        clock = asyncio.get_running_loop().time
        start, before, error = clock(), len(self.members), ""
        try:
            await self.scale(request.rollout)
            await self._serving(request.wait_s)
        except (MillraceError, OSError) as failure:
            error = str(failure)
            self.note(f"`millrace scale` failed: {error}")
        seconds, after = clock() - start, len(self.members)
        if after != before:
            self.note(f"scaled from {before} to {after} replicas after {seconds:.1f} s")
        serving = len(self._roster.live) == after
        return Reply(request.id, before, after, seconds, serving, error)

    async def _serving(self, wait_s: float) -> None:
        """Wait until no replica is STALE, at most `wait_s` seconds."""
        with suppress(DeadlineError):
            stale = self._roster.ids
            ready = lambda: not stale(Standing.STALE)  # noqa: E731
            await wait_for_replicas(self._roster, "scale", ready, wait_s, whom="sync|trainer")

    @property
    def members(self) -> list[int]:
        """The replicas that serve, start or start again."""
        return self._roster.ids(Standing.LIVE, Standing.STALE, Standing.LOST)

    async def scale(self, count: int) -> None:
        """Let replicas join or leave until there are `count`. The highest numbers leave first.

        A replica that joins serves from the next weight sync on.
        """
        async with self._turn:
            await self._scale(count)

    async def _scale(self, count: int) -> None:
        self._check(count)
        while len(self.members) < count:
            gone = self._roster.ids(Standing.LEFT, Standing.RETIRED)
            replica = min(gone, default=len(self._roster))
            if replica in self._roster.ids(Standing.RETIRED):
                await self._keeper.leave(replica)
            await self._keeper.join(replica, partial(self._take, replica))
        for replica in reversed(self.members[count:]):
            await self._keeper.leave(replica)

    def _check(self, count: int) -> None:
        most, why = self._limit.most, self._limit.why
        if count < 1:
            raise MillraceError(f"rollout={count}: a run needs a replica. Fix: rollout=1")
        if most == 0:
            raise MillraceError(f"rollout={count}: {why}. Fix: a mode with separate devices")
        if most is not None and count > most:
            raise MillraceError(f"rollout={count}: {why}. Fix: rollout={most} or less")
        if not {*self.members[:count]} & {*self._roster.live}:
            fix = "wait for a weight sync, and try again"
            raise MillraceError(f"rollout={count}: none of the replicas left serves. Fix: {fix}")

    def _take(self, replica: int, peer: Peer) -> None:
        if replica < len(self._engines):
            self._engines[replica].renew(peer)
            return
        engine = RemoteRolloutEngine(peer, stall_s=self._engines[0].stall_s)
        self._engines.append(engine)
        for take in self._told:
            take(replica, engine)
