"""Environments by name: the values of agents.environment."""

from __future__ import annotations

import difflib
import shlex
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from millrace.environments.chat import ChatEnvironment
from millrace.environments.mcp_tools import McpOptions, McpServers
from millrace.environments.openenv import OpenEnvOptions, OpenEnvServer
from millrace.environments.text_games import text_games
from millrace.errors import ConfigError, bad_value

KINDS = {
    "openenv": "openenv:http://HOST:PORT",
    "mcp": "mcp:COMMAND or mcp:http://HOST:PORT/mcp, with a server for each episode",
    "mcp-shared": "the same, with one server for all episodes",
    "textarena": "textarena:GuessTheNumber-v0",
    "gymnasium": "gymnasium:MODULE:NAME-v0",
}
"""The kinds of names, each with its form."""


class Environments(Protocol):
    """The environments of a run. It makes one for each episode."""

    def make(self) -> ChatEnvironment: ...

    async def close(self) -> None: ...


def named_environments(
    value: str, *, deadline_s: float = 60.0, tool_deadline_s: float = 60.0
) -> Environments:
    """Return the environments that `value` names. Raise ConfigError if it names none.

    `deadline_s` bounds each step of an environment, and `tool_deadline_s` each call of an MCP tool.
    """
    kind, colon, rest = value.partition(":")
    if kind not in KINDS or not colon or not rest.strip():
        near = difflib.get_close_matches(kind, KINDS, 1)
        forms = KINDS[near[0]] if near else "; ".join(KINDS.values())
        raise _bad(value, "is not the name of an environment", forms)
    if kind == "openenv":
        return OpenEnvServer(_openenv(value, rest, deadline_s))
    if kind in ("mcp", "mcp-shared"):
        return McpServers(_mcp(value, rest, kind == "mcp-shared", tool_deadline_s))
    return text_games(kind, rest, deadline_s)


def _openenv(value: str, rest: str, deadline_s: float) -> OpenEnvOptions:
    _check_url(value, rest)
    url, _, query = rest.partition("?")
    options = parse_qs(query, keep_blank_values=True)
    unknown = sorted(options.keys() - {"action", "observation"})
    if unknown:
        rule = f"{unknown[0]!r} is not an option of openenv"
        raise _bad(value, rule, "action=FIELD or observation=FIELD, the fields with the text")
    action, observation = (options.get(k, [None])[-1] for k in ("action", "observation"))
    return OpenEnvOptions(url, action or None, observation or None, deadline_s=deadline_s)


def _mcp(value: str, rest: str, shared: bool, deadline_s: float) -> McpOptions:
    if rest.startswith(("http://", "https://")):
        _check_url(value, rest)
        return McpOptions(url=rest, shared=shared, deadline_s=deadline_s)
    try:
        command = tuple(shlex.split(rest))
    except ValueError as error:
        raise _bad(value, f"the command cannot be split: {error}", "close the quote") from None
    return McpOptions(command=command, shared=shared, deadline_s=deadline_s)


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
