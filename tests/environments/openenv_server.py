"""A real OpenEnv server for tests. Run it with openenv-core: PYTHON openenv_server.py PORT KIND."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str
    guesses: int = 0


class Guessing(Environment):
    """Guess the seed. The answer to a word that is no number is an error of the environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret = self.guesses = 0

    def reset(self, seed: int | None = None, **kwargs: Any) -> Hint:
        self.secret, self.guesses = (seed or 0) % 10, 0
        return Hint(hint="Guess a digit.")

    def step(self, action: Guess, **kwargs: Any) -> Hint:
        self.guesses += 1
        right = int(action.text) == self.secret
        more = "higher" if int(action.text) < self.secret else "lower"
        return Hint(
            hint="right" if right else more,
            guesses=self.guesses,
            done=right,
            reward=1.0 if right else -0.25,
        )

    @property
    def state(self) -> State:
        return State(step_count=self.guesses, secret=self.secret)


class Calculator(MCPEnvironment):
    """An environment whose actions are calls of tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("calculator")

        @server.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed: int | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={})

    def _step_impl(self, action: Action, **kwargs: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    kinds = {
        "guess": (Guessing, Guess, Hint),
        "tools": (Calculator, CallToolAction, CallToolObservation),
    }
    app = create_app(*kinds[sys.argv[2]], env_name=sys.argv[2], max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
