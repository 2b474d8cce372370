"""Games in text: textarena's, and gymnasium environments whose spaces are text."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

from millrace.data.user_code import message_of
from millrace.environments.chat import Start, Step
from millrace.environments.named import Environments
from millrace.environments.prompts import opening, seed_of
from millrace.environments.threads import RAISED, in_thread
from millrace.errors import EpisodeError, MissingDependency, bad_value, needed
from millrace.types import Message, Prompt, Score

Result = TypeVar("Result")


class Game(Protocol):
    """A game for one player. Its calls block."""

    def reset(self, seed: int) -> str:
        """Return the first observation."""
        ...

    def step(self, text: str) -> tuple[str, bool]:
        """Return the next observation, and whether the game is over."""
        ...

    def reward(self) -> float | None:
        """Return the reward of the whole game."""
        ...

    def close(self) -> None:
        return None


class TextGames(Environments):
    """The games of a run. One moves at a time: some use Python's global random state."""

    def __init__(self, name: str, make: Callable[[], Game], deadline_s: float = 60.0) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self._make = make
        self._turn = asyncio.Lock()

    def make(self) -> TextGame:
        return TextGame(self, self._make)

    async def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a call of a game. Raise EpisodeError if it fails or never ends."""
        running = asyncio.ensure_future(self._alone(call, *arguments))
        try:
            async with asyncio.timeout(self.deadline_s):
                return await asyncio.shield(running)  # a cancelled episode leaves its call alone
        except TimeoutError:
            running.cancel()
            self._turn = asyncio.Lock()  # nothing can stop the call: the next games do not wait
            detail = f"{self.name}: a step took over {self.deadline_s:g} s"
            raise EpisodeError("environment_deadline", detail) from None

    async def _alone(self, call: Callable[..., Result], *arguments: Any) -> Result:
        async with self._turn:
            return await in_thread(call, *arguments)


class TextGame:
    """One game as a conversation. The score is the game's reward."""

    def __init__(self, games: TextGames, make: Callable[[], Game]) -> None:
        self._games = games
        self._make = make
        self._game: Game | None = None
        self._random = random.Random()
        self._reward: float | None = None

    async def reset(self, task: Prompt) -> Start:
        self._random.seed(seed_of(task))
        text = await self._games.run(self._played, self._begin, seed_of(task))
        return Start(opening(task, text))

    async def step(self, message: Message) -> Step:
        assert self._game is not None, "step comes after reset"
        said = message.get("content") or ""
        text, done = await self._games.run(self._played, self._game.step, said)
        return Step(({"role": "user", "content": text},) if text and not done else (), done=done)

    async def score(self) -> Score | None:
        if self._game is None:
            return None
        reward = await self._games.run(self._played, self._game.reward)
        return None if reward is None else Score(reward)

    async def close(self) -> None:
        if self._game is not None:
            game, self._game = self._game, None
            with contextlib.suppress(EpisodeError):  # the game has its score
                await self._games.run(self._played, game.close)

    def _begin(self, seed: int) -> str:
        self._game = self._make()
        return self._game.reset(seed)

    def _played(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Make a call with this game's own random state. The game's bugs are EpisodeErrors."""
        with _own_random(self._random):
            try:
                return call(*arguments)
            except (EpisodeError, MissingDependency):
                raise
            except RAISED as error:
                detail = f"{self._games.name}: {message_of(error)}"
                raise EpisodeError("environment_error", detail) from error


@contextlib.contextmanager
def _own_random(state: random.Random) -> Iterator[None]:
    """Give the block `state` as the global random state, and restore the global one after it."""
    before = random.getstate()
    random.setstate(state.getstate())
    try:
        yield
    finally:
        state.setstate(random.getstate())
        random.setstate(before)


class TextArena(Game):
    """A game of textarena for one player, without the wrappers that repeat the whole game."""

    def __init__(self, name: str) -> None:
        textarena = needed("textarena", "a game of textarena")
        self._game: Any = textarena.make(name)
        self._core = self._game
        while isinstance(self._core, textarena.Wrapper):
            self._core = self._core.env

    def reset(self, seed: int) -> str:
        self._game.reset(num_players=1, seed=seed)
        return self._said()

    def step(self, text: str) -> tuple[str, bool]:
        done, _ = self._game.step(text)
        return "" if done else self._said(), bool(done)

    def reward(self) -> float | None:
        rewards, _ = self._game.close()
        return 0.0 if rewards is None else _number(rewards[0])  # a limit ended the game

    def _said(self) -> str:
        """Return what the game said since the last turn. The policy's own words are left out."""
        player, messages = self._core.get_observation()
        return "\n".join(text for author, text, *_ in messages if author != player)


class GymnasiumText(Game):
    """A gymnasium environment whose actions and observations are text. Rewards are summed."""

    def __init__(self, name: str) -> None:
        gymnasium = needed("gymnasium", "an environment of gymnasium")
        self._game: Any = gymnasium.make(name, disable_env_checker=True)
        self._sum = 0.0
        for what in ("observation_space", "action_space"):
            space = getattr(self._game, what)
            if not isinstance(space, gymnasium.spaces.Text):
                raise TypeError(f"its {what} is {space}, and must be text")

    def reset(self, seed: int) -> str:
        observation, _ = self._game.reset(seed=seed)
        return str(observation)

    def step(self, text: str) -> tuple[str, bool]:
        observation, reward, terminated, truncated, _ = self._game.step(text)
        self._sum += _number(reward)
        return str(observation), bool(terminated or truncated)

    def reward(self) -> float | None:
        return self._sum

    def close(self) -> None:
        self._game.close()


def _number(reward: Any) -> float:
    """Return a reward as a finite number."""
    if not math.isfinite(value := float(reward)):
        raise ValueError(f"the reward is {reward!r}")
    return value


KINDS: dict[str, Callable[[str], Game]] = {"textarena": TextArena, "gymnasium": GymnasiumText}


def open_environments(value: str, deadline_s: float) -> TextGames:
    """Return the games of one of KINDS. Raise ConfigError if none begins."""
    kind, _, name = value.partition(":")
    make = partial(KINDS[kind], name)
    try:
        with _own_random(random.Random(0)):
            game = make()
            game.reset(0)
            game.close()
    except MissingDependency:
        raise
    except Exception as error:
        rule = f"the game does not begin: {type(error).__name__}: {error}"
        fix = f"the name of a game of {kind} for one player, with text in and text out"
        raise bad_value("agents.environment", value, rule, fix) from error
    return TextGames(value, make, deadline_s)
