"""What the driver makes of several workers' answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.errors import SyncError, WorkerError
from millrace.ports import TransferReport
from millrace.runtime.remote import RemoteWeightSync


class Answers:
    """A peer that answers by method; an exception is raised."""

    def __init__(self, name: str, lost: str = "", **answers: Any) -> None:
        self.name, self.lost, self.answers, self.asked = name, lost, answers, []

    async def call(self, method: str, args: tuple[object, ...] = (), result: object = None) -> Any:
        self.asked.append(method)
        answer = self.answers[method.partition(".")[2]]
        if isinstance(answer, Exception):
            raise answer
        return answer


BROKEN = SyncError("rollout-0: a weight transfer broke off")


@pytest.mark.parametrize(
    "trainer, cause",
    [
        (Answers("trainer-0", keep=None, sent=SyncError("trainer-0: out of memory")), "trainer-0: out of memory"),
        (Answers("trainer-0", "trainer-0 was killed", keep=None, sent=WorkerError("gone")), "trainer-0 was killed"),
        (Answers("trainer-0", keep=None, sent=None), "rollout-0: a weight transfer broke off"),
    ],
)
def test_if_a_version_that_is_on_its_way_does_not_arrive_the_side_that_failed_is_the_error(trainer: Answers, cause: str) -> None:
    async def main() -> None:
        sync = RemoteWeightSync([trainer], [Answers("rollout-0", transfer=BROKEN)])  # type: ignore[list-item]
        await sync.keep(3)
        with pytest.raises((SyncError, WorkerError), match=cause):
            await sync.transfer(3)

    asyncio.run(main())


def test_what_was_begun_is_begun_once() -> None:
    """The same version again, of another run on the same engines, is sent by the trainer's ranks as any other."""
    trainer = Answers("trainer-0", keep=None, transfer=TransferReport(8, 0.1))
    replica = Answers("rollout-0", transfer=TransferReport(8, 0.2))

    async def main() -> None:
        sync = RemoteWeightSync([trainer], [replica])  # type: ignore[list-item]
        await sync.keep(3)
        await sync.transfer(3)
        assert trainer.asked == ["sender.keep"]
        await sync.transfer(3)
        assert trainer.asked == ["sender.keep", "sender.transfer"] and replica.asked == ["receiver.transfer"] * 2

    asyncio.run(main())
