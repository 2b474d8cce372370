"""Sockets, tokens and caches are the user's alone, whatever the umask of the user is."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.agents.remote import FILE, RemoteProgram
from millrace.config import TrainerConfig
from millrace.run.stall import watched
from millrace.waits.wait_server import FOLDER
from tests.rewards.test_judge_cache import filled


@pytest.fixture(autouse=True)
def open_to_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("left", [False, True], ids=["a new folder", "the folder of a dead run"])
def test_only_the_user_reaches_the_sockets_of_a_run(tmp_path: Path, left: bool) -> None:
    folder = tmp_path / FOLDER
    if left:
        folder.mkdir(mode=0o777)

    async def work() -> None:
        async with watched(tmp_path, TrainerConfig(), lambda text: None):
            assert mode(folder) == 0o700
            assert {mode(p) for p in folder.iterdir() if p.is_socket()} == {0o600}

    asyncio.run(work())


def test_only_the_user_reads_the_token_for_workers(tmp_path: Path) -> None:
    (tmp_path / f".{FILE}").write_text("left by a dead run")
    path = RemoteProgram(60.0).publish(tmp_path, "http://127.0.0.1:1")
    assert path == tmp_path / FILE and mode(path) == 0o600


def test_only_the_user_reads_the_scores_of_a_judge(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    filled(path, 2, "a").close()
    assert mode(path) == 0o600
