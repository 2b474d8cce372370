"""Names of environments, and the beginning of a conversation."""

from __future__ import annotations

import pytest

from millrace.config import plugins
from millrace.environments.named import Environments, check_environment
from millrace.environments.prompts import messages_of, opening, seed_of
from millrace.errors import ConfigError
from millrace.extras.environments.mcp import McpServers
from millrace.extras.environments.openenv import OpenEnvServer
from millrace.types import Message, Prompt, tokens_of
from tests.environments.servers import prompt


def named_environments(value: str, deadline_s: float = 60.0) -> Environments:
    check_environment(value)
    made = plugins.load("agents.environment", value.partition(":")[0], "environments")
    opened: Environments = made.open_environments(value, deadline_s)
    return opened


def test_names_become_options() -> None:
    server = named_environments("openenv:http://h:80/x?action=a&observation=b", deadline_s=3)
    assert isinstance(server, OpenEnvServer)
    assert server.options.url == "http://h:80/x"
    assert (server.options.action, server.options.observation) == ("a", "b")
    assert server.options.deadline_s == 3
    plain = named_environments("openenv:http://[::1]:8000")
    assert isinstance(plain, OpenEnvServer) and plain.options.action is None
    tools = named_environments("mcp:ls 'my server.py' --fast", deadline_s=4)
    assert isinstance(tools, McpServers)
    assert tools.options.command == ("ls", "my server.py", "--fast")
    assert not tools.options.shared and tools.options.deadline_s == 4
    remote = named_environments("mcp-shared:https://h/mcp")
    assert isinstance(remote, McpServers)
    assert remote.options.url == "https://h/mcp" and remote.options.shared


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("", "openenv:http://HOST:PORT"),
        ("openenv", "openenv:http://HOST:PORT"),
        ("openenv:", "openenv:http://HOST:PORT"),
        ("opnenv:http://h:1", "openenv:http://HOST:PORT"),
        ("textarea:Game-v0", "textarena:GuessTheNumber-v0"),
        ("openenv:h:80", "http://127.0.0.1:8000"),
        ("openenv:ftp://h:80", "http://127.0.0.1:8000"),
        ("openenv:http://", "http://127.0.0.1:8000"),
        ("openenv:http://h:port", "http://127.0.0.1:8000"),
        ("openenv:http://h:1?acton=x", "action=FIELD"),
        ("mcp:http://h:99999/mcp", "http://127.0.0.1:8000"),
        ("mcp:python 'x.py", "close the quote"),
        ("mcp:   ", "mcp:COMMAND"),
        ("mcp:no-such-program x.py", "mcp:python my_server.py"),
    ],
)
def test_a_name_that_is_wrong_is_refused_with_a_fix(value: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(value)
    text = str(caught.value)
    assert (
        text.startswith(f"agents.environment = {value!r}: ") and fix in text.partition("Fix: ")[2]
    )


def test_the_beginning_of_a_conversation() -> None:
    system: Message = {"role": "system", "content": "Be short."}
    user: Message = {"role": "user", "content": "Play."}

    def row(*messages: Message) -> Prompt:
        return Prompt(0, tokens_of(), "rendered", "x", columns={"prompt": list(messages)})

    assert messages_of(prompt("text")) == ({"role": "user", "content": "text"},)
    assert messages_of(prompt("")) == ()
    assert messages_of(row(system, user)) == (system, user)
    assert opening(row(system, user), "Go.") == (
        system,
        {"role": "user", "content": "Play.\n\nGo."},
    )
    assert opening(row(system), "Go.") == (system, {"role": "user", "content": "Go."})
    assert opening(row(system, user), "") == (system, user)
    changed = row(user)
    opening(changed, "Go.")
    assert messages_of(changed) == (user,)


def test_siblings_share_a_seed_and_a_row_can_name_it() -> None:
    assert seed_of(prompt(index=3)) == 3
    assert seed_of(prompt(index=3, seed=8)) == 8
    assert seed_of(prompt(index=3, seed="8")) == seed_of(prompt(index=3, seed=-1)) == 3
