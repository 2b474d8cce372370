"""Retries with exponential back-off, and a reward and a teacher that retry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b

from millrace.errors import DeadlineError, RewardError, TeacherError
from millrace.ports import RewardFunction, Teacher
from millrace.types import Completion, Floats, Prompt, Score, Trajectory
from millrace.waits.registry import count, span, waiting

_FIRST_S = 0.25
_MOST_S = 30.0


def pause_s(name: str, failed: int) -> float:
    """Return the seconds to wait after the try `failed`, from 0.

    They double with each try. Jitter by `name`, 0.5 to 1.5, keeps callers that failed together from
    retrying together.
    """
    share = blake2b(f"{name}/{failed}".encode(), digest_size=4).digest()
    jitter = 0.5 + int.from_bytes(share, "big") / 2**32
    return jitter * min(_MOST_S, _FIRST_S * 2.0 ** min(failed, 20))


async def pause(name: str, failed: int) -> None:
    """Wait before the next try."""
    with waiting("the clock", f"try {failed + 2} of {name}"):
        await asyncio.sleep(pause_s(name, failed))


class RetryingReward:
    """A reward that scores again, up to `retries` times, if scores failed.

    Each try is a span on the track `rewards`. Its key is the prompt's index after `prefix`, which
    is "val/" for problems of a validation.
    """

    def __init__(self, reward: RewardFunction, retries: int, prefix: str = "") -> None:
        self._reward, self._retries, self._prefix = reward, retries, prefix

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        for failed in range(self._retries):
            try:
                return await self._score(prompt, completions)
            except RewardError:
                await pause(f"the score of prompt {prompt.index}", failed)
        return await self._score(prompt, completions)

    async def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        key, what = f"{self._prefix}{prompt.index}", f"the score of prompt {prompt.index}"
        with span("rewards", "score", key, by="the reward", what=what, n=len(completions)) as call:
            try:
                scores = await self._reward.score(prompt, completions)
            except RewardError as error:
                call.facts["failed"] = error.reason
                raise
        count("scores")
        return scores

    async def close(self) -> None:
        await self._reward.close()


class RetryingTeacher:
    """A teacher that is asked again until it answers, for at most `deadline_s` seconds of failures.

    Then the run ends. If `drops`, the first failure is final, and the sample is replaced. Each try is
    a span on the track `teachers`. Its key is the prompt's index.
    """

    def __init__(
        self,
        name: str,
        teacher: Teacher,
        *,
        address: str,
        fix: str,
        deadline_s: float,
        drops: bool,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`address` says where it is, and `fix` what helps a dead one.

        `note` gets the first failure of each reason.
        """
        self._name, self._teacher, self._address, self._fix = name, teacher, address, fix
        self._deadline_s, self._drops, self._note = deadline_s, drops, note
        self._noted: set[str] = set()

    async def log_probs(self, prompt: Prompt, trajectory: Trajectory) -> Floats:
        """Raises TeacherError with the reason teacher_NAME, or DeadlineError."""
        clock, name, failed = asyncio.get_running_loop().time, self._name, 0
        who, what = f"teacher {name}", f"log-probs of prompt {prompt.index}"
        end = None
        while True:
            try:
                key = str(prompt.index)
                with span("teachers", "log_probs", key, by=who, what=what, teacher=name) as call:
                    try:
                        found = await self._teacher.log_probs(prompt, trajectory)
                    except TeacherError as error:
                        call.facts["failed"] = error.reason
                        raise
                count("log_probs")
                return found
            except TeacherError as error:
                if error.reason not in self._noted:
                    self._noted.add(error.reason)
                    self._note(
                        f"teacher {name} at {self._address} failed, as counted in "
                        f"teacher/{name}/failures: {error}"
                    )
                if self._drops:
                    detail = f"{self._address}: {error}"
                    raise TeacherError(f"teacher_{name}", detail) from error
                end = clock() + self._deadline_s if end is None else end
                if clock() + pause_s(f"{what} of {who}", failed) > end:
                    raise DeadlineError(
                        f"the teacher {name} at {self._address} gave no {what} in "
                        f"teachers.{name}.wait_deadline_s = {self._deadline_s:g}. The last failure: "
                        f"{error}. Fix: {self._fix} and resume the run, or "
                        f"teachers.{name}.on_failure=drop"
                    ) from error
            await pause(f"{what} of {who}", failed)
            failed += 1
