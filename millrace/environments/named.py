"""Environments by name: every value of agents.environment is read here."""

from __future__ import annotations

import difflib
import shlex
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from millrace.data.user_code import check_name, load
from millrace.environments.chase import Chase
from millrace.environments.chat import ChatEnvironment, Tool
from millrace.environments.code_tests import CodeTests, Runner
from millrace.environments.mcp import McpOptions, McpServers
from millrace.environments.openenv import OpenEnvServer
from millrace.environments.openenv_socket import OpenEnvOptions
from millrace.environments.text_games import text_games
from millrace.environments.trl import TrlFactory
from millrace.errors import ConfigError, EpisodeError, bad_value
from millrace.types import Prompt

KINDS = {
    "openenv": "openenv:http://HOST:PORT",
    "mcp": "mcp:COMMAND or mcp:http://HOST:PORT/mcp, with a server for each episode",
    "mcp-shared": "the same, with one server for all episodes",
    "textarena": "textarena:GuessTheNumber-v0",
    "gymnasium": "gymnasium:MODULE:NAME-v0",
}
"""The kinds of names, each with its form."""


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
        ...

    async def close(self) -> None: ...


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
        raise _bad(value, rule, "start or correct the server") from None


def check_environment(value: str) -> None:
    """Raise ConfigError if `value` names no environment. This imports nothing."""
    kind, colon, _ = value.partition(":")
    if value in OWN:
        return
    if not colon and kind not in KINDS:
        near = difflib.get_close_matches(value, [*OWN, *KINDS], 1)
        forms = near[0] if near else ", ".join([*OWN, "path.py:Class", *KINDS.values()])
        raise _bad(value, "is not the name of an environment", forms)
    is_code = value.rpartition(":")[0].endswith(".py") or "." in value
    if kind in KINDS or not is_code:  # such as opnenv:...
        _options(value)
    else:
        check_name("agents.environment", value)


def environment_maker(
    value: str, *, deadline_s: float, sandbox: Runner, tool: Callable[[], Tool]
) -> Maker:
    """Return the maker of the environments that `value` names. Raise ConfigError if it names none.

    `deadline_s` bounds each step and each call. `tool` makes a tool on the sandbox.
    """
    check_environment(value)
    if value in OWN:
        return Maker(lambda _: OWN[value].make(sandbox, tool))
    if value.partition(":")[0] in KINDS:
        named = named_environments(value, deadline_s=deadline_s, tool_deadline_s=deadline_s)
        return Maker(lambda _: named.make(), named.close, named.reach)
    kind = load("agents.environment", value, kind="class")
    if callable(getattr(kind, "step", None)) and callable(getattr(kind, "reset", None)):
        return Maker(lambda _: kind())
    return Maker(TrlFactory(kind))


def named_environments(
    value: str, *, deadline_s: float = 60.0, tool_deadline_s: float = 60.0
) -> Environments:
    """Return the environments that `value` names. Raise ConfigError if it names none.

    `deadline_s` bounds each step of an environment, and `tool_deadline_s` each call of an MCP tool.
    """
    kind, _, rest = value.partition(":")
    options = _options(value)
    if isinstance(options, OpenEnvOptions):
        return OpenEnvServer(replace(options, deadline_s=deadline_s))
    if isinstance(options, McpOptions):
        return McpServers(replace(options, deadline_s=tool_deadline_s))
    return text_games(kind, rest, deadline_s)


def _options(value: str) -> OpenEnvOptions | McpOptions | None:
    """Return what `value` says about a server. Raise ConfigError if it is none of KINDS."""
    kind, _, rest = value.partition(":")
    if kind not in KINDS or not rest.strip():
        near = difflib.get_close_matches(kind, KINDS, 1)
        forms = KINDS[near[0]] if near else "; ".join(["path.py:Class", *KINDS.values()])
        raise _bad(value, "is not the name of an environment", forms)
    if kind == "openenv":
        return _openenv(value, rest)
    return _mcp(value, rest, kind == "mcp-shared") if kind.startswith("mcp") else None


def _openenv(value: str, rest: str) -> OpenEnvOptions:
    _check_url(value, rest)
    url, _, query = rest.partition("?")
    options = parse_qs(query, keep_blank_values=True)
    unknown = sorted(options.keys() - {"action", "observation"})
    if unknown:
        rule = f"{unknown[0]!r} is not an option of openenv"
        raise _bad(value, rule, "action=FIELD or observation=FIELD, the fields with the text")
    action, observation = (options.get(k, [None])[-1] for k in ("action", "observation"))
    return OpenEnvOptions(url, action or None, observation or None)


def _mcp(value: str, rest: str, shared: bool) -> McpOptions:
    if rest.startswith(("http://", "https://")):
        _check_url(value, rest)
        return McpOptions(url=rest, shared=shared)
    try:
        command = tuple(shlex.split(rest))
    except ValueError as error:
        raise _bad(value, f"the command cannot be split: {error}", "close the quote") from None
    if not command or shutil.which(command[0]) is None:
        rule = f"there is no program {command[0] if command else ''!r} on PATH"
        raise _bad(value, rule, "such as mcp:python my_server.py")
    return McpOptions(command=command, shared=shared)


def _check_url(value: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        good = False
    if not good:
        raise _bad(value, "has no address of a server", "an address such as http://127.0.0.1:8000")


def _bad(value: str, rule: str, fix: str) -> ConfigError:
    return bad_value("agents.environment", value, rule, fix)
