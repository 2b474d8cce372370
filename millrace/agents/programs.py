"""The agent of programs: any agent program plays an episode through the endpoint.

The program sees an OpenAI server, and nothing of syncs and interruptions. What it raises, or does
not answer in time, is an EpisodeError, unless a limit of the episode had ended its requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.agents.conversation import Conversation
from millrace.agents.live import LiveEpisode
from millrace.agents.service import Service
from millrace.environments.prompts import messages_of
from millrace.errors import EpisodeError, SampleError
from millrace.ports import PolicySession
from millrace.types import Ending, Prompt, Score


@dataclass(frozen=True, slots=True)
class Task:
    """One episode for a program."""

    name: str
    """The name of the episode, such as "17/3"."""
    key: str
    """The episode's API key."""
    data: dict[str, Any]
    """What the program reads: the row, with the names of the episode and of the model."""


class Program(Protocol):
    """Runs episodes of one kind of program."""

    async def start(self) -> None:
        """Start what all episodes share. Called before the first episode."""
        ...

    async def run(self, task: Task) -> Any:
        """Run one episode, and return its reward: a number, a dict with "reward", or None.

        Raises EpisodeError if the program fails. Any other exception is the program's own.
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
            model = self._service.options.model
            task = Task(session.name, episode.key, data_of(session.prompt, session.name, model))
            async with asyncio.timeout(self._deadline_s):
                value = await self._program.run(task)
        except TimeoutError:
            failure = EpisodeError(
                "agent_deadline",
                f"episode {session.name} took over {self._deadline_s:g} s. Fix: raise "
                "agents.deadline_s, or lower agents.max_turns",
            )
        except EpisodeError as error:
            failure = error
        finally:
            await self._service.end(episode)
        conversation.settle()
        return _ending(episode, conversation, value, failure)

    async def close(self) -> None:
        await self._program.close()


def _ending(
    episode: LiveEpisode, conversation: Conversation, value: Any, failure: EpisodeError | None
) -> Ending:
    """Return how an episode ended. Raises EpisodeError if something but the policy failed."""
    if isinstance(episode.error, SampleError):
        raise episode.error
    if episode.error is not None:  # A fault of millrace, such as a dead engine.
        raise episode.error
    if failure is not None and episode.limit is None:
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


def score_of(value: Any) -> Score | None:
    """Return the score that a program returned, or None. Raises EpisodeError for anything else."""
    extra: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise EpisodeError(
                "bad_reward", f'the program returned a dict without "reward": {value}'
            )
        extra = {
            str(name): float(one)
            for name, one in value.items()
            if name != "reward" and isinstance(one, int | float)
        }
        value = value["reward"]
    if value is None:
        return None
    if not isinstance(value, int | float):
        try:
            value = float(value)  # NumPy's and torch's numbers
        except (TypeError, ValueError):
            kind = type(value).__name__
            text = f"the program returned a {kind}; a reward is a number, a dict or None"
            raise EpisodeError("bad_reward", text) from None
    if not math.isfinite(value):
        raise EpisodeError("bad_reward", f"the program returned {value}: a reward is finite")
    return Score(float(value), extra)


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
