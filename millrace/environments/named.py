"""Environments by name: every value of agents.environment is read here."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.config import plugins
from millrace.data.user_code import check_name, load
from millrace.environments.chase import Chase
from millrace.environments.chat import ChatEnvironment, Tool
from millrace.environments.code_tests import CodeTests, Runner
from millrace.environments.trl import TrlFactory
from millrace.errors import EpisodeError, bad_value
from millrace.types import Prompt

KINDS = {
    "openenv": "openenv:http://HOST:PORT",
    "mcp": "mcp:COMMAND or mcp:http://HOST:PORT/mcp, with a server for each episode",
    "mcp-shared": "the same, with one server for all episodes",
    "textarena": "textarena:GuessTheNumber-v0",
    "gymnasium": "gymnasium:MODULE:NAME-v0",
}
"""The package's kinds of names, each with its form."""
KEY = "agents.environment"


@dataclass(frozen=True, slots=True)
class Own:
    """An environment of the package."""

    make: Callable[[Runner, Callable[[], Tool]], ChatEnvironment]
    """Make it, given a sandbox and what makes a tool on it."""
    tools: bool
    """Whether it has tools, which the chat template must show to the policy."""
    sandboxed: bool
    """Whether it runs what the policy wrote."""


OWN = {
    "chase": Own(lambda *_: Chase(), tools=True, sandboxed=False),
    "fill_in": Own(lambda sandbox, _: CodeTests(sandbox), tools=False, sandboxed=True),
    "code_tests": Own(
        lambda sandbox, tool: CodeTests(sandbox, [tool()]), tools=True, sandboxed=True
    ),
}
"""A hidden table with a tool that reads it, an expression for hidden tests, and code with tests."""


class Environments(Protocol):
    """The environments of a run. It makes one for each episode."""

    def make(self) -> ChatEnvironment: ...

    async def reach(self) -> None:
        """Reach the server once. Raises EpisodeError if no episode could."""
        return

    async def close(self) -> None:
        return None


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes the environment of each episode."""

    make: Callable[[Prompt], ChatEnvironment]
    close: Callable[[], Awaitable[None]] = _nothing
    reach: Callable[[], Awaitable[None]] = _nothing


async def check_server(maker: Maker, value: str) -> None:
    """Raise ConfigError if the server that `value` names cannot be reached or started."""
    try:
        await maker.reach()
    except EpisodeError as error:
        rule = f"no episode can begin: {str(error).rstrip('.')}"
        raise bad_value(KEY, value, rule, "start or correct the server") from None


def check_environment(value: str) -> None:
    """Raise ConfigError if `value` names no environment. This imports no code of the user's files."""
    kind, colon, rest = value.partition(":")
    names = plugins.names("environments")
    forms = {name: name for name in (*OWN, *names)} | KINDS
    given = value in OWN or kind in {*names, *plugins.OWN["environments"]}
    if given or plugins.elsewhere(kind):
        plugins.find(KEY, kind, plugins.Named("environments", tuple(OWN)), f"{KEY}={{}}")
        if kind in KINDS and not rest.strip():
            raise bad_value(KEY, value, "is not the name of an environment", KINDS[kind])
        part = None if value in OWN else _part(kind)
        if colon and isinstance(part, type):
            raise bad_value(KEY, value, f"{kind} is a class, and takes no value", f"{KEY}={kind}")
        if check := getattr(part, "check", None):
            check(value)
    elif not colon or not (value.rpartition(":")[0].endswith(".py") or "." in value):
        near = difflib.get_close_matches(kind, forms, 1)
        fix = forms[near[0]] if near else "; ".join([*forms.values(), "path.py:Class"])
        raise bad_value(KEY, value, "is not the name of an environment", fix)
    else:
        check_name(KEY, value)


def environment_maker(
    value: str, *, deadline_s: float, sandbox: Runner, tool: Callable[[], Tool]
) -> Maker:
    """Return the maker of the environments that `value` names. Raise ConfigError if it names none.

    `deadline_s` bounds each step and each call. `tool` makes a tool on the sandbox.
    """
    check_environment(value)
    if value in OWN:
        return Maker(lambda _: OWN[value].make(sandbox, tool))
    kind = value.partition(":")[0]
    given = kind in plugins.names("environments")
    made = _part(kind) if given else load(KEY, value, kind="class")
    if not isinstance(made, type) and hasattr(made, "open_environments"):
        opened: Environments = made.open_environments(value, deadline_s)
        return Maker(lambda _: opened.make(), opened.close, opened.reach)
    if callable(getattr(made, "step", None)) and callable(getattr(made, "reset", None)):
        return Maker(lambda _: made())
    return Maker(TrlFactory(made))


def _part(kind: str) -> Any:
    return plugins.load(KEY, kind, "environments")
