"""Games of textarena and gymnasium: whole games, seeds, failures."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("textarena", reason="the extra games is not installed")
import gymnasium

from millrace.environments.chat import Step
from millrace.errors import ConfigError, EpisodeError
from millrace.extras.environments.text_games import TextGames, open_environments
from millrace.types import Prompt, Score
from tests.environments.servers import prompt, run
from tests.waiting import HANG_S


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def guess(games: Any, row: Prompt) -> tuple[list[str], Score | None]:
    """Play by bisection. Return what the game said, and the score."""
    game = games.make()
    (first,) = (await game.reset(row)).messages
    low, high, heard = 1, 20, [first["content"]]
    step = Step()
    while not step.done:
        middle = (low + high) // 2
        step = await game.step(said(f"I say [{middle}]."))
        if not step.done:
            (hint,) = step.messages
            heard.append(hint["content"])
            low, high = (middle + 1, high) if "higher" in heard[-1] else (low, middle - 1)
    score = await game.score()
    await game.close()
    return heard, score


def test_a_game_of_textarena_is_won() -> None:
    async def work() -> None:
        games = open_environments("textarena:GuessTheNumber-v0", 60.0)
        before = random.getstate()
        played = await asyncio.gather(*(guess(games, prompt("", index=i % 5)) for i in range(10)))
        assert random.getstate() == before
        for heard, score in played:
            assert "Guess The Number" in heard[0] and len(heard) <= 5
            assert score == Score(1.0)
            # The policy's own words are not said again.
            assert set(heard[1:]) <= {f"The target number is {w}." for w in ("higher", "lower")}
        assert [heard for heard, _ in played[:5]] == [heard for heard, _ in played[5:]]
        assert len({tuple(heard) for heard, _ in played}) > 1
        await games.close()

    run(work)


def test_a_game_that_a_limit_ends_scores_nothing() -> None:
    async def work() -> None:
        games = open_environments("textarena:GuessTheNumber-v0", 60.0)
        game = games.make()
        assert await game.score() is None
        await game.reset(prompt())
        assert await game.score() == Score(0.0)
        await game.close()
        await games.close()

    run(work)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("textarena:NoSuchGame-v0", "not found in registry"),
        ("textarena:TicTacToe-v0", "number of players"),
        ("gymnasium:NoSuchGame-v0", "doesn't exist"),
        ("gymnasium:CartPole-v1", "its observation_space is Box.* must be text"),
        ("gymnasium:no_such_module:Game-v0", "No module named"),
    ],
)
def test_a_game_that_cannot_begin_is_refused(name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        open_environments(name, 60.0)
    assert f"agents.environment = '{name}'" in str(caught.value)
    assert "Fix: " in str(caught.value)


class Echo(gymnasium.Env[str, str]):
    """Answers with the words of the policy. "stop" ends the game, and three words cut it off."""

    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self) -> None:
        self.words = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"Say a word. Your number is {self.np_random.integers(1000)}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.words += 1
        if action == "raise":
            raise ZeroDivisionError("a bug of the game")
        if action == "hang":
            GO.wait()
        reward = float("nan") if action == "nan" else 0.5
        return f"You said {action}.", reward, action == "stop", self.words == 3, {}


GO = threading.Event()
"""Ends the step that hangs."""
gymnasium.register("Echo-v0", Echo)  # type: ignore[arg-type]


def test_an_environment_of_gymnasium() -> None:
    async def work() -> None:
        games = open_environments("gymnasium:Echo-v0", 60.0)
        first, second, other = games.make(), games.make(), games.make()
        starts = [await g.reset(prompt(index=i)) for g, i in ((first, 1), (second, 1), (other, 2))]
        assert starts[0] == starts[1] != starts[2]
        assert "Your number is" in starts[0].messages[0]["content"]
        step = await first.step(said("hello"))
        assert step.messages == ({"role": "user", "content": "You said hello."},)
        assert (await first.step(said("stop"))).done
        assert await first.score() == Score(1.0)
        done = [(await second.step(said(str(i)))).done for i in range(3)]
        assert done == [False, False, True]
        assert await second.score() == Score(1.5)
        for game in (first, second, other):
            await game.close()
        await games.close()

    run(work)


@pytest.mark.parametrize("word", ["raise", "nan", "hang"])
def test_a_failure_of_a_game_fails_its_episode_alone(word: str) -> None:
    async def work() -> None:
        games = open_environments("gymnasium:Echo-v0", HANG_S)
        assert isinstance(games, TextGames)
        game, other = games.make(), games.make()
        await game.reset(prompt())
        await other.reset(prompt())
        games.deadline_s = 0.5 if word == "hang" else HANG_S
        with pytest.raises(EpisodeError) as caught:
            await game.step(said(word))
        games.deadline_s = HANG_S
        reason = "environment_deadline" if word == "hang" else "environment_error"
        assert caught.value.reason == reason
        assert not (await other.step(said("hello"))).done
        await game.close()
        await other.close()
        await games.close()

    GO.clear()
    try:
        run(work)
    finally:
        GO.set()


def test_an_endless_game_does_not_keep_the_process_alive() -> None:
    code = """
import asyncio
from millrace.extras.environments.text_games import TextGames

def endless():
    while True:
        pass

async def work():
    try:
        await TextGames("endless", endless, deadline_s=0.1).run(endless)
    finally:
        print("late")

asyncio.run(work())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout.strip() == "late" and "environment_deadline" in done.stderr
