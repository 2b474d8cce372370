"""One trajectory: an agent plays one episode with the policy."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from millrace.errors import EpisodeError, LimitReached, MillraceError
from millrace.ports import Agent, Environment, PolicySession
from millrace.rollout.retry import pause
from millrace.rollout.session import NO_LIMITS, Draw, Limits, OnProgress, Session
from millrace.types import Ending, Prompt, SamplingParams, Stop, Trajectory
from millrace.waits.registry import acting, doing

__all__ = ["Draw", "EnvironmentAgent", "SingleTurn", "request_seed", "run_episode"]

T = TypeVar("T")

_DONE = Ending()
_CUT = Ending("context")


def request_seed(run_seed: int, sample_index: int, trajectory: int) -> int:
    """Return the seed of one trajectory: 63 bits that depend only on these three numbers."""
    digest = hashlib.blake2b(
        f"{run_seed}/{sample_index}/{trajectory}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") >> 1


class SingleTurn:
    """The agent of one prompt and one response, for problems with a checkable answer."""

    async def play(self, session: PolicySession) -> Ending:
        await session.draw(session.prompt.tokens)
        return _DONE

    async def close(self) -> None:
        return None


class EnvironmentAgent:
    """The agent of environments that speak tokens: `make` returns one for each episode.

    A turn that is cut by a limit gets no reply. An error of an environment is an EpisodeError.
    """

    def __init__(self, make: Callable[[Prompt], Environment]) -> None:
        self.make = make

    async def play(self, session: PolicySession) -> Ending:
        environment = self.make(session.prompt)
        try:
            ending = await self._talk(session, environment)
            score = await _answer("score", environment.score())
        finally:
            await _answer("close", environment.close())
        return Ending(ending.reason, score)

    async def _talk(self, session: PolicySession, environment: Environment) -> Ending:
        context, after = await _answer("open", environment.open(session.prompt)), None
        while True:
            try:
                turn = await session.draw(context, after=after)
            except LimitReached as error:
                return Ending(error.limit)
            if turn.stop is Stop.LENGTH:
                return _CUT
            reply = await _answer("reply", environment.reply(turn.segments))
            if reply is None:
                return _DONE
            context, after = reply.tokens, turn.number

    async def close(self) -> None:
        return None


async def _answer(call: str, answer: Awaitable[T]) -> T:
    """Return an environment's answer. Its own errors become an EpisodeError."""
    try:
        with doing(f"the answer to {call}", by="the environment"):
            return await answer
    except MillraceError:
        raise
    except Exception as error:
        text = f"{call} raised {type(error).__name__}: {error}"
        raise EpisodeError("environment", text) from error


async def run_episode(
    draw: Draw,
    agent: Agent,
    prompt: Prompt,
    params: SamplingParams,
    name: str,
    *,
    limits: Limits = NO_LIMITS,
    so_far: Trajectory | None = None,
    on_progress: OnProgress | None = None,
    retries: int = 0,
) -> Trajectory:
    """Return the finished trajectory of `prompt`, which `agent` plays.

    `params.max_tokens` bounds the whole thread after the prompt, including turns of others. After a
    restart, `so_far` has the turns of the attempt before. `on_progress` gets each trajectory that
    an interruption leaves unfinished.

    A failed episode begins again, up to `retries` times, after a growing pause. The tokens of a failed try are dead tokens
    of the trajectory. Raises EpisodeError if the last try fails too.
    """
    lost = 0

    def progress(trajectory: Trajectory) -> None:
        if on_progress is not None:
            on_progress(_with_lost(trajectory, lost))

    for failed in range(retries + 1):
        try:
            with acting(f"session {name}"):
                session = Session(
                    draw,
                    prompt,
                    params,
                    name,
                    limits,
                    so_far=so_far,
                    on_progress=progress if failed else on_progress,
                    plain=isinstance(agent, SingleTurn),
                )
                ending = await agent.play(session)
        except LimitReached as error:
            ending = Ending(error.limit)
        except EpisodeError:
            if failed == retries:
                raise
            drawn = session.trajectory(Ending())
            lost += drawn.num_policy_tokens + drawn.dead_tokens
            so_far = None
            progress(Trajectory())
            await pause(f"session {name}", failed)
            continue
        return _with_lost(session.trajectory(ending), lost, failed)
    raise AssertionError("the last try returns or raises")


def _with_lost(trajectory: Trajectory, tokens: int, failed: int = 0) -> Trajectory:
    """Return the trajectory with the tokens and the number of its failed tries."""
    if not tokens and not failed:
        return trajectory
    counts = trajectory.counts | ({"retries": float(failed)} if failed else {})
    return replace(trajectory, dead_tokens=trajectory.dead_tokens + tokens, counts=counts)
