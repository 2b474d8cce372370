"""The token of a Ray cluster that a run starts: random, asked of every client, never on disk.

The cluster is a real one on this machine. Its home is a folder of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from millrace.runtime import ray_token
from millrace.runtime.ray import RayRuntime
from tests.runtime.test_placement import config
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("ray")

TOKEN = "f" * 63 + "0"
JOIN = """
import os, ray, sys
try:
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
except Exception as error:
    os.write(1, b"refused " + type(error).__name__.encode())
else:
    os.write(1, b"joined")
os._exit(0)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give Ray an empty home, without settings of the user."""
    for name in (ray_token.MODE, ray_token.TOKEN, ray_token.PATH, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    yield home
    with contextlib.suppress(Exception):
        ray.shutdown()


def client(address: str, **variables: str) -> subprocess.Popen[str]:
    """Start a process that joins the cluster with these variables."""
    quick = {
        "RAY_NUM_REDIS_GET_RETRIES": "2"
    }  # Ray asks twenty times for a cluster that refuses it
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, address],
        env=os.environ | quick | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def says(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=HANG_S)[0]


def files_with(text: str, *folders: Path) -> list[Path]:
    """Return the files whose bytes have `text`."""
    found = (p for folder in folders for p in folder.rglob("*") if p.is_file())
    return [p for p in found if text.encode() in p.read_bytes()]


async def test_a_cluster_of_a_run_has_a_token_that_is_nowhere_to_be_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_token.secrets, "token_hex", lambda size: TOKEN[: 2 * size])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a user's setting for other clusters
    before, notes = dict(os.environ), list[str]()
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    sides = config((1, 1), (1, 1), runtime="ray", device="cpu").sides
    runtime = await RayRuntime.open(sides, logs, notes.append)
    try:
        assert {**os.environ} == before
        address = ray.get_runtime_context().gcs_address
        bare = client(address)
        other = client(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
        right = client(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
        peer = await runtime.start("rollout-0", "rollout", 0)
        await peer.call("ping")
        worker = runtime._workers[0].actor
        seen = await worker.__ray_call__.remote(lambda host: dict(os.environ))
        assert TOKEN not in str(seen) and ray_token.TOKEN not in seen
        assert TOKEN not in repr(await asyncio.to_thread(runtime.answers))
        said = await asyncio.gather(*(asyncio.to_thread(says, p) for p in (bare, other, right)))
        assert [one.split()[0] for one in said] == ["refused", "refused", "joined"], said
        node: Any = ray._private.worker._global_node
        session = Path(node.get_session_dir_path())
        assert not files_with(TOKEN, session / "logs", tmp_path)
        running = psutil.process_iter(["cmdline"])  # without those that end now
        assert TOKEN not in str([p.info["cmdline"] for p in running])
    finally:
        await runtime.close()
    assert {**os.environ} == before and not notes
    assert not (home / ".ray").exists() and not ray_token.asks_for_token()


def test_a_start_that_fails_leaves_the_environment_and_rays_mode(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "mine"))
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), ray_token.fresh_token():
        assert len(os.environ["RAY_AUTH_TOKEN"]) == 64 and ray_token.asks_for_token()
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ
        raise ZeroDivisionError
    assert {**os.environ} == before and not ray_token.asks_for_token()


def test_each_cluster_has_another_token(home: Path) -> None:
    tokens = set()
    for _ in range(3):
        with ray_token.fresh_token():
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
        ray_token.forget_token()
    assert len(tokens) == 3
