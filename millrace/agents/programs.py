"""The agent of programs: any agent program plays an episode through the endpoint.

The program sees an OpenAI server, and nothing of syncs and interruptions. Its error is an
EpisodeError, unless a limit of the episode had ended its requests. A program that is late is always
one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from millrace.agents.conversation import Conversation
from millrace.agents.live import LiveEpisode
from millrace.agents.service import Service
from millrace.environments.prompts import messages_of
from millrace.errors import EpisodeError
from millrace.ports import PolicySession
from millrace.types import Ending, Prompt, Score
from millrace.waits.registry import doing


@dataclass(frozen=True, slots=True)
class Task:
    """One episode for a program."""

    name: str
    """The name of the episode, such as "17/3"."""
    key: str
    """The episode's API key."""
    data: dict[str, Any]
    """What the program reads: the row, with the names of the episode and of the model."""
    begin: Callable[[], None]
    """Starts the deadline. The time in which an episode waits for a free place is not in it."""
    quiet_s: Callable[[], float]
    """Return the seconds since the program's last request. 0 while the policy draws for it."""


class Program(Protocol):
    """Runs episodes of one kind of program."""

    async def start(self) -> None:
        """Start what all episodes share. Called before the first episode."""
        return

    async def run(self, task: Task) -> Any:
        """Run one episode, and return its reward: a number, a dict with "reward", or None.

        Call `task.begin` once the program starts. A cancelled call must end the program. Raises
        EpisodeError if the program fails.
        """
        ...

    async def close(self) -> None: ...


class ProgramAgent:
    """Plays each episode with a program. `deadline_s` bounds an episode."""

    def __init__(
        self,
        program: Program,
        service: Service,
        converse: Callable[[PolicySession], Conversation],
        deadline_s: float,
    ) -> None:
        self._program = program
        self._service = service
        self._converse = converse
        self._deadline_s = deadline_s

    async def play(self, session: PolicySession) -> Ending:
        conversation = self._converse(session)
        episode = self._service.open(conversation, session)
        failure: EpisodeError | None = None
        value: Any = None
        try:
            value = await self._run(episode, session)
        except EpisodeError as error:
            failure = error
        finally:
            await self._service.end(episode)
        conversation.end_dead_turns()
        return _ending(episode, conversation, value, failure)

    async def _run(self, episode: LiveEpisode, session: PolicySession) -> Any:
        """Run the program up to its deadline, or up to an error of the episode itself."""
        loop = asyncio.get_running_loop()
        model = self._service.options.model

        def end_in(seconds: float) -> None:
            if not timer.expired():
                timer.reschedule(loop.time() + seconds)

        try:
            async with asyncio.timeout(None) as timer:
                task = Task(
                    session.name,
                    episode.key,
                    data_of(session.prompt, session.name, model),
                    begin=partial(end_in, self._deadline_s),
                    quiet_s=episode.quiet_s,
                )
                # Such as a dead engine: the program might go on for ever.
                episode.on_error = partial(end_in, 0.0)
                try:
                    with doing("an episode", by="the agent's program"):
                        return await self._program.run(task)
                finally:
                    episode.on_error = None
        except TimeoutError:
            raise EpisodeError(
                "agent_deadline",
                f"episode {session.name} took over {self._deadline_s:g} s. Fix: raise "
                "agents.deadline_s, or lower agents.max_turns",
            ) from None

    async def close(self) -> None:
        await self._program.close()


def _ending(
    episode: LiveEpisode, conversation: Conversation, value: Any, failure: EpisodeError | None
) -> Ending:
    """Return how an episode ended. Raises EpisodeError if something but the policy failed."""
    if episode.error is not None:  # A failed turn, or a fault of millrace such as a dead engine.
        raise episode.error
    if failure is not None and (episode.limit is None or failure.reason == "agent_deadline"):
        raise failure
    if not episode.session.turns:
        raise EpisodeError(
            "no_turns",
            f"the program of episode {episode.session.name} ended without a request. "
            "Fix: let it use the base URL and the key that it gets",
        )
    score = score_of(value) if failure is None else None
    if episode.reward is not None and score is None:
        score = Score(episode.reward)
    reason = "done" if failure is None or episode.limit is None else episode.limit.limit
    return Ending(reason, score, conversation.messages)


def reward_in(answer: Mapping[str, Any], name: str) -> Any:
    """Return what a worker's answer says about an episode. Raises EpisodeError for an error."""
    if "error" in answer:
        raise EpisodeError("agent_raised", f"{name}: {answer['error']}"[:2000])
    return answer if "reward" in answer else None


def score_of(value: Any) -> Score | None:
    """Return the score that a program returned, or None. Raises EpisodeError for anything else.

    The other numbers of a dict become components of the score.
    """
    given = value if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in given:
        shown = repr(dict(given))[:200]
        text = f'the program returned {shown}, a dict without "reward". Fix: {{"reward": 1.0}}'
        raise EpisodeError("bad_reward", text)
    others = {name: one for name, one in given.items() if isinstance(one, int | float)}
    extra = {str(name): _finite(one) for name, one in others.items() if name != "reward"}
    return None if given["reward"] is None else Score(_finite(given["reward"]), extra)


def _finite(value: Any) -> float:
    """Return a number of Python, NumPy or torch as a float. Raises EpisodeError."""
    is_text = isinstance(value, str | bytes)
    try:
        found = math.nan if is_text else float(value)
    except OverflowError:
        found = math.inf
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        found = math.nan
    if math.isfinite(found):
        return found
    shown = f": {value[:80]!r}" if is_text else f": {value}" if isinstance(value, float) else ""
    raise EpisodeError(
        "bad_reward",
        f"the program returned a {type(value).__name__}{shown}. "
        'Fix: return a number, a dict with "reward", or None. A reward is finite',
    )


def data_of(prompt: Prompt, name: str, model: str) -> dict[str, Any]:
    """Return the task as plain data. Columns of the row come first, and none replaces our keys."""
    return {
        **prompt.columns,
        "episode": name,
        "model": model,
        "prompt": prompt.columns.get("prompt", prompt.text),
        "messages": list(messages_of(prompt)),
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }
