"""The keys of agents: who plays an episode with the policy, its limits, and its endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.section import Fixed, Rule, Section

SERVED = ("program", "command", "remote")
"""The players that are programs: the endpoint serves them."""
TOOLS = ("tools", "tool_config_path")
"""The player with tools of these keys. One or both may be set."""
LOCAL = ("environment", *TOOLS)
"""The players in the driver."""
PLAYERS = (*SERVED, *LOCAL)
"""The keys that name who plays. Without one, an episode is one prompt and one response."""

READ = (
    # keys, and the players that read them
    ("max_tool_tokens max_parallel_calls tool_deadline_s", LOCAL),
    ("env max_concurrent workers", ("command",)),
    ("host port", ("command", "remote")),
    ("lease_s", ("remote",)),
    ("deadline_s turn_deadline_s retry_grace_s strict train_models", SERVED),
    ("sandbox", ("environment",)),
)
"""Any other key is read by all of them."""


def _same_server_elsewhere(now: Any, before: Any, key: str) -> bool:
    """Return whether only the address of an environment's server differs."""
    values = now.agents.environment, before.agents.environment
    kinds = {value.partition(":http")[0] for value in values}
    return all(":http" in value for value in values) and len(kinds) == 1


_KEPT = Fixed("its turns in flight were drawn and kept by it")
_PLAYED = "its episodes in flight were played with it"
_NO_PROGRAM = Fixed(
    "its episodes in flight have no program",
    lambda now, before, key: now.agents.served and before.agents.served,
    "a change between a program and none",
)


class AgentConfig(Section):
    program: Annotated[str, _NO_PROGRAM] = ""
    """An agent program: `path.py:function` with `async def function(client, task) -> float`.

    It runs in the driver. `client` is an `openai.AsyncOpenAI`, and `task` a dict.
    """
    command: Annotated[str, _NO_PROGRAM] = ""
    """An agent program with a process of its own for each episode, such as `python my_agent.py`.

    It gets OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and
    MILLRACE_TASK, the path of a JSON file. Its last line of output is `{"reward": 1.0}`.
    """
    remote: Annotated[bool, _NO_PROGRAM] = False
    """Let workers elsewhere claim episodes at the endpoint, as docs/programs.md says."""
    environment: Annotated[
        str, Fixed(_PLAYED, _same_server_elsewhere, "another one, but not another address")
    ] = ""
    """An environment by name, such as `chase`, `openenv:http://HOST:PORT` or `path.py:Class`.

    A class is a chat environment of millrace, or one in TRL's form.
    """
    sandbox: Literal["namespaces", "process"] = "namespaces"
    """How the environment `fill_in` isolates the programs that the policy writes.

    `process` sets limits alone. It guards against accidents, and is no boundary.
    """
    tools: Annotated[str, Fixed(_PLAYED)] = ""
    """Function tools for the policy: a Python file, as verl's function_tool_path."""
    tool_config_path: Annotated[str, Fixed(_PLAYED)] = ""
    """Tools in verl's form: a YAML file."""
    tool_format: Annotated[
        Literal["hermes", "json", "qwen", "line"],
        _KEPT,
    ] = "hermes"
    """How the model writes tool calls."""
    history: Annotated[Literal["keep", "template"], _KEPT] = "keep"
    """What happens where the chat template rewrites history, for example drops earlier thinking.

    `keep` extends the drawn tokens as they are. `template` opens a new thread, as a server that
    renders each request would.
    """
    max_turns: int = Field(0, ge=0)
    """The policy's turns in an episode. 0 sets no limit."""
    max_tokens_per_turn: int = Field(0, ge=0)
    """Tokens of a turn. 0 sets no limit of its own."""
    max_episode_tokens: int = Field(0, ge=0)
    """Tokens that an episode draws and reads, over all threads. 0 sets no limit."""
    deadline_s: float = Field(3600.0, gt=0)
    """Seconds of an episode of a program."""
    turn_deadline_s: float = Field(580.0, gt=0)
    """Seconds of a turn at the endpoint, syncs included. Clients wait for 600 s by default."""
    tool_deadline_s: float = Field(60.0, gt=0)
    """Seconds of a call of a tool, and of a step of an environment."""
    max_tool_tokens: int = Field(1024, ge=1)
    """Tokens of a tool's result. A longer one is cut, with a mark."""
    max_parallel_calls: int = Field(8, ge=1)
    """Calls of one turn that run. Each further one gets the result "too many calls"."""
    max_concurrent: int = Field(0, ge=0)
    """Episodes of agents.command at once. 0 means twice the cores, or one for each worker."""
    workers: int = Field(0, ge=0)
    """Processes of agents.command that play many episodes, as docs/programs.md says.

    0 starts a process for each episode.
    """
    host: str = "127.0.0.1"
    """Where the endpoint listens. Another address than loopback sends prompts as plain HTTP."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the endpoint. 0 takes a free port."""
    strict: bool = False
    """Refuse requests with settings that training cannot honour, such as response_format.

    Otherwise such a setting is ignored and counted.
    """
    retries: int = Field(1, ge=0)
    """How often a failed episode begins again before its sample is dropped."""
    retry_grace_s: float = Field(30.0, ge=0)
    """Seconds that a turn is kept for a client that lost its connection."""
    lease_s: float = Field(60.0, gt=0)
    """Seconds after the last sign of life in which a remote worker loses its episode."""
    env: tuple[str, ...] = ()
    """Names of the user's environment variables that agents.command gets too."""
    train_models: Annotated[tuple[str, ...], _KEPT] = ()
    """Model names whose turns are trained. Empty trains all. Other turns are served and counted."""

    @property
    def agent_kind(self) -> str:
        """The key that names who plays. Empty if an episode is one prompt and one response."""
        return next((key for key in PLAYERS if getattr(self, key)), "")

    @property
    def served(self) -> bool:
        """Whether the endpoint serves programs."""
        return self.agent_kind in SERVED

    @property
    def tries(self) -> int:
        """How often a failed episode begins again: never without an agent."""
        return self.retries if self.agent_kind else 0

    def unread(self) -> dict[str, tuple[str, ...]]:
        """Return each key that is set and that the player ignores, with the players to read it."""
        found: dict[str, tuple[str, ...]] = {}
        readers = {key: players for keys, players in READ for key in keys.split()}
        for key, field in type(self).model_fields.items():
            players = readers.get(key, PLAYERS)
            read = key in PLAYERS or self.agent_kind in players
            if not read and getattr(self, key) != field.default:
                found[key] = players
        return found

    def rules(self, here: str) -> Iterator[Rule]:
        first, *others = [key for key in PLAYERS if getattr(self, key)] or [""]
        for key in others:
            yield (
                not {first, key} <= set(TOOLS),
                key,
                f"agents.{first} names who plays already",
                f"only one of {', '.join(f'agents.{key}' for key in PLAYERS)}",
            )
