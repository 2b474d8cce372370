"""The token of a Ray cluster: a cluster that a run starts always has one, in memory alone.

Ray's own way is to write a token to ~/.ray/auth_token, which other users may read. A token in the
environment comes first, and Ray then writes nothing. This process keeps its copy inside Ray.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

import ray._raylet

_ray: Any = ray._raylet  # Ray has no public functions for its mode and its token.

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
NO_TOKEN = (
    "the Ray cluster asks for no token: everyone who reaches its ports can run code on it. "
    "Fix: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN for `ray start` on every node"
)


@contextlib.contextmanager
def fresh_token() -> Iterator[None]:
    """Give a new token to this process, and to the processes that Ray starts in the block.

    The block restores the environment, so no other child of this process has the token.
    """
    before = dict(os.environ)
    os.environ |= {MODE: "token", TOKEN: secrets.token_hex(32)}
    os.environ.pop(PATH, None)
    _read_environment()
    try:
        yield
    except BaseException:
        _restore(before)
        _read_environment()
        raise
    _restore(before)


def forget_token() -> None:
    """Apply the user's own settings again. Call this after the end of the cluster."""
    _read_environment()


def hide_token() -> None:
    """Remove the token from the environment of this worker. Ray has read it already."""
    os.environ.pop(TOKEN, None)


def asks_for_token() -> bool:
    """Return whether the node of this process runs with a token."""
    return bool(_ray.get_authentication_mode() == _ray.AuthenticationMode.TOKEN)


def _read_environment() -> None:
    """Make Ray read its settings anew. The mode comes first: a thread of Ray may still run."""
    _ray.Config.initialize("")
    _ray.AuthenticationTokenLoader.instance().reset_cache()


def _restore(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ |= before
