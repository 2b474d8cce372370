"""The check that no key of the configuration has a secret: config.yaml and trackers get them all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from millrace.errors import ConfigError, bad_value, forms_of, secrets_of_user

_NAME = re.compile(
    r"(?:api|access|auth|bearer|hf|private|secret)[_-]?(?:key|token)$"
    r"|^(?:authorization|credentials?|passwd|password|secret)$",
    re.IGNORECASE,
)
"""The names of a mapping with free keys, such as reward.judge.extra_body."""
_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_PARAMETER = re.compile(
    r"(?:[?&]|--)[\w-]*(?:api[_-]?key|(?:access|api|auth)[_-]?token|passwd|password|secret|signature)"
    r"[= ]\S",
    re.IGNORECASE,
)


def check_secrets(tree: dict[str, Any]) -> None:
    """Raise ConfigError if a key has a secret. The error does not show it."""
    known = secrets_of_user()
    for key, value in _leaves("", tree):
        names = [n for n, secret in known.items() if any(f in value for f in forms_of(secret))]
        if names:
            raise _refusal(key, f"has the value of {names[0]}")
        if _NAME.search(key.rpartition(".")[2]) and value:
            raise _refusal(key, "has the name of a secret")
        if _PASSWORD.search(value):
            raise _refusal(key, "is an address with a password")
        if _PARAMETER.search(value):
            raise _refusal(key, "has a parameter with the name of a secret")


def _refusal(key: str, found: str) -> ConfigError:
    rule = f"it {found}, and config.yaml, logs and trackers show every key"
    fix = "the secret in the environment, where its library reads it, and none in the configuration"
    if key.endswith("judge.base_url"):
        variable = key.removesuffix("base_url") + "api_key_env"
        fix = f"an address alone, with the key in the variable of {variable}"
    return bad_value(key, "***", rule, fix)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each text and number of a tree with its dotted key. A name is a text of its parent."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield key, str(name)
            yield from _leaves(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(key, inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield key, str(value)
