"""Games in text: textarena's, and gymnasium environments whose spaces are text."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from millrace.data.user_code import message_of
from millrace.environments.chat import Start, Step
from millrace.environments.prompts import opening, seed_of
from millrace.environments.threads import RAISED
from millrace.errors import INSTALL, EpisodeError, MissingDependency, bad_value
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

    def close(self) -> None: ...


class TextGames:
    """The games of a run. They share one thread, because some use Python's global random state."""

    def __init__(self, name: str, make: Callable[[], Game], deadline_s: float = 60.0) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self._make = make
        self._thread: _Thread | None = None

    def make(self) -> TextGame:
        return TextGame(self, self._make)

    async def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a call of a game in the thread. Raise EpisodeError if it fails or never ends."""
        if self._thread is None:
            self._thread = _Thread()
        thread = self._thread
        try:
            async with asyncio.timeout(self.deadline_s):
                return await thread.run(lambda: call(*arguments))
        except TimeoutError:
            if thread is self._thread:  # the thread cannot be stopped: the next games get another
                await self.close()
            detail = f"{self.name}: a step took over {self.deadline_s:g} s"
            raise EpisodeError("environment_deadline", detail) from None

    async def close(self) -> None:
        if self._thread is not None:
            self._thread.calls.put(None)
            self._thread = None

    def check(self) -> str:
        """Begin one game, and return its first observation. Raise what it raises."""
        game = self._make()
        with _own_random(random.Random(0)):
            text = game.reset(0)
            game.close()
        return text


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


class _Thread:
    """A thread that runs calls in order. A call that never ends does not keep the process alive."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="text-games", daemon=True).start()

    async def run(self, call: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Result] = loop.create_future()

        def work() -> None:
            if ended.cancelled():
                return
            try:
                result = call()
            except (EpisodeError, MissingDependency) as error:
                settle = functools.partial(_fail, ended, error)
            else:
                settle = functools.partial(_succeed, ended, result)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle)

        self.calls.put(work)
        return await ended

    def _serve(self) -> None:
        while (work := self.calls.get()) is not None:
            work()


def _succeed(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


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


class TextArena:
    """A game of textarena for one player, without the wrappers that repeat the whole game."""

    def __init__(self, name: str) -> None:
        try:
            import textarena
        except ImportError as error:
            rule = "games of textarena need the package textarena, which is missing"
            raise MissingDependency(f"{rule}. Fix: {INSTALL['textarena']}") from error
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

    def close(self) -> None:
        return None

    def _said(self) -> str:
        """Return what the game said since the last turn. The policy's own words are left out."""
        player, messages = self._core.get_observation()
        return "\n".join(text for author, text, *_ in messages if author != player)


class GymnasiumText:
    """A gymnasium environment whose actions and observations are text. Rewards are summed."""

    def __init__(self, name: str) -> None:
        try:
            import gymnasium
        except ImportError as error:
            rule = "environments of gymnasium need the package gymnasium, which is missing"
            raise MissingDependency(f"{rule}. Fix: {INSTALL['gymnasium']}") from error
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


def text_games(kind: str, name: str, deadline_s: float) -> TextGames:
    """Return the games of a kind ("textarena" or "gymnasium"). Raise ConfigError if none begins."""
    makers: dict[str, Callable[[str], Game]] = {
        "textarena": TextArena,
        "gymnasium": GymnasiumText,
    }
    maker = makers[kind]
    games = TextGames(f"{kind}:{name}", lambda: maker(name), deadline_s)
    try:
        games.check()
    except MissingDependency:
        raise
    except Exception as error:
        rule = f"the game does not begin: {type(error).__name__}: {error}"
        fix = f"the name of a game of {kind} for one player, with text in and text out"
        raise bad_value("agents.environment", f"{kind}:{name}", rule, fix) from error
    return games
