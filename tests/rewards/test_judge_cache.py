"""The cache of a judge: it survives kills, stays bounded, and reads only its own files."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import RewardConfig, recipe
from millrace.errors import ConfigError, RewardError
from millrace.persist import ownership
from millrace.rewards.judge_cache import ScoreCache
from millrace.rewards.mix import RunReward
from millrace.run.rewards import make_reward, open_caches
from millrace.types import Prompt, tokens_of
from tests.rewards.completions import completed
from tests.rewards.endpoint import Endpoint, endpoint
from tests.waiting import HANG_S

PROMPT = Prompt(0, tokens_of([1]), "say nine", "d", "9")


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as state:
        yield state


def filled(path: Path, size: int, *keys: str) -> ScoreCache:
    cache = ScoreCache(path, size)
    for key in keys:
        cache.put(key, float(len(key)))
    return cache


def known(path: Path, keys: Iterable[str]) -> list[str]:
    """Return the keys with a score in the file."""
    cache = ScoreCache(path, 1000)
    try:
        return [key for key in keys if cache.get(key, 0, 10) is not None]
    finally:
        cache.close()


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40), st.integers(1, 6), st.booleans())
def test_a_cache_keeps_the_newest_scores(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], size: int, closed: bool
) -> None:
    path = tmp_path_factory.mktemp("cache") / "judge.sqlite"
    cache = filled(path, size, *keys)
    if closed:  # a killed process closes nothing
        cache.close()
    kept: list[str] = []
    for key in keys:
        if key not in kept:
            kept = [*kept, key][-size:]
    assert known(path, "abcdefgh") == sorted(kept)
    cache.close()


def test_two_processes_lose_no_score_of_each_other(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from millrace.rewards.judge_cache import ScoreCache
cache = ScoreCache(Path(sys.argv[1]), 1000)
print(flush=True)
sys.stdin.readline()
for n in range(300): cache.put(f"{sys.argv[2]}{n}", 1.0)
"""
    path = tmp_path / "judge.sqlite"
    arguments = [sys.executable, "-c", code, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*arguments, name], **pipes) for name in "ab"]
    for process in processes:
        process.stdout.readline()  # Both are ready.
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait(HANG_S) for process in processes] == [0, 0]
    keys = [f"{name}{n}" for name in "ab" for n in range(300)]
    assert known(path, keys) == keys


def config_of(server: Endpoint, **keys: Any) -> RewardConfig:
    judge = {"model": "m", "base_url": server.url, "template": "{prompt} {response}"} | keys
    return RewardConfig.model_validate({"judge": judge | {"max_retries": 0}})


async def judged(config: RewardConfig, folder: Path, *texts: str) -> tuple[list[float], Any]:
    """Return the scores with a cache in `folder`, and the figures."""
    reward = RunReward(config)
    try:
        open_caches(reward, folder)
        scores = await asyncio.gather(*(reward.score(PROMPT, completed([text])) for text in texts))
        return [score.value for (score,) in scores], reward.take_figures()
    finally:
        await reward.close()


def test_a_response_is_judged_once_even_by_a_later_run(server: Endpoint, tmp_path: Path) -> None:
    async def run() -> None:
        config = config_of(server, price_in=2.0, price_out=5.0)
        texts = ["9", "99", "x"]
        first, figures = await judged(config, tmp_path, *texts)
        assert first == [1, 2, 0]
        assert figures == {
            "reward/judge/requests": 3,
            "reward/judge/retries": 0,
            "reward/judge/cache_hits": 0,
            "reward/judge/tokens_in": 30,
            "reward/judge/tokens_out": 9,
            "reward/judge/cost": (30 * 2 + 9 * 5) / 1e6,
        }
        again, figures = await judged(config, tmp_path, *texts, "999")
        assert again == [1, 2, 0, 3]
        assert (figures["reward/judge/cache_hits"], figures["reward/judge/requests"]) == (3, 1)
        other = config_of(server, template="{response} {prompt} 99")
        assert (await judged(other, tmp_path, "9"))[0] == [2]  # another message

    asyncio.run(run())


def test_a_failure_is_not_kept(server: Endpoint, tmp_path: Path) -> None:
    async def run() -> None:
        reward = RunReward(config_of(server))
        try:
            open_caches(reward, tmp_path)
            for _ in range(2):
                with pytest.raises(RewardError, match=r"^no_score"):
                    await reward.score(PROMPT, completed(["9", "silent"]))
            assert await reward.score(PROMPT, completed([])) == []
            figures = reward.take_figures()
            assert figures["reward/judge/failures"] == 2
            assert figures["reward/judge/failures/no_score"] == 2
            assert (figures["reward/judge/requests"], figures["reward/judge/cache_hits"]) == (3, 1)
        finally:
            await reward.close()

    asyncio.run(run())
    with sqlite3.connect(tmp_path / "judge" / "judge.sqlite") as file:
        assert file.execute("SELECT score FROM scores").fetchall() == [(1.0,)]
    file.close()


def test_equal_responses_under_way_share_one_request(server: Endpoint, tmp_path: Path) -> None:
    server.wait_s = 0.2

    async def run() -> None:
        scores, figures = await judged(config_of(server), tmp_path, *["9"] * 5)
        assert scores == [1] * 5
        assert (figures["reward/judge/requests"], figures["reward/judge/cache_hits"]) == (1, 4)
        reward = RunReward(config_of(server))
        try:
            await reward.start()
            open_caches(reward, tmp_path)
            calls = [
                asyncio.ensure_future(reward.score(PROMPT, completed(["99"]))) for _ in range(3)
            ]
            await asyncio.sleep(0.1)
            calls[0].cancel()  # the one that asked: another one asks again
            ((second,), (third,)) = await asyncio.gather(*calls[1:])
            assert (second.value, third.value) == (2, 2)
            failing = [reward.score(PROMPT, completed(["silent"])) for _ in range(3)]
            outcomes = await asyncio.gather(*failing, return_exceptions=True)
            assert all(isinstance(o, RewardError) and o.reason == "no_score" for o in outcomes)
            assert len([r for r in server.requests if "silent" in str(r)]) == 1
        finally:
            await reward.close()

    asyncio.run(run())


def test_a_full_disk_costs_a_note_and_no_score(server: Endpoint, tmp_path: Path) -> None:
    notes: list[str] = []
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def run() -> None:
        reward = RunReward(config_of(server))
        try:
            open_caches(reward, tmp_path, notes.append)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, limit[1]))
            for text in ("9", "99", "9"):  # The memory still has the first one.
                assert (await reward.score(PROMPT, completed([text])))[0].value == len(text)
            figures = reward.take_figures()
            assert (figures["reward/judge/cache_errors"], figures["reward/judge/requests"]) == (
                2,
                2,
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            await reward.close()

    asyncio.run(run())
    assert len(notes) == 1 and notes[0].startswith("reward.judge.cache: ")


FILES: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text('["a", 10.0]\n' * 100),
    "cut off": lambda path: os.truncate(path, 5000),
    "overwritten": lambda path: path.write_bytes(path.read_bytes()[:4096] + b"x" * 8192),
    "of another program": lambda path: sqlite3.connect(path).executescript(
        "DROP TABLE scores; CREATE TABLE scores (name TEXT)"
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_cache_is_refused_and_kept(
    server: Endpoint, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "judge" / "judge.sqlite"
    path.parent.mkdir()
    filled(path, 1000, *(f"{n}" * 40 for n in range(100))).close()
    FILES[kind](path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"reward\.judge\.cache_dir = .*judge\.sqlite.* Fix: "):
        open_caches(RunReward(config_of(server)), tmp_path)
    assert path.read_bytes() == before


def test_a_file_of_the_former_format_is_named_and_kept(server: Endpoint, tmp_path: Path) -> None:
    notes: list[str] = []
    former = tmp_path / "judge" / "judge.jsonl"
    former.parent.mkdir()
    former.write_text('["a", 10.0]\n')

    async def run() -> None:
        reward = RunReward(config_of(server))
        open_caches(reward, tmp_path, notes.append)
        await reward.close()

    asyncio.run(run())
    assert len(notes) == 1 and str(former) in notes[0] and former.is_file()


def test_a_disk_that_cannot_be_written_is_refused_at_the_start(
    server: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    match = r"reward\.judge\.cache_dir = .*Read-only file system\. Fix: a folder"
    for module, name in ((Path, "mkdir"), (os, "open")):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=match):
            patch.setattr(module, name, refuse)
            open_caches(RunReward(config_of(server)), tmp_path)
        (tmp_path / "judge").mkdir(exist_ok=True)


def reward_of(keys: list[str]) -> RunReward:
    config = recipe.load("quickstart", keys)
    return make_reward(config.reward, config.agents, config.sides)


def test_a_foreign_folder_or_a_link_is_refused(server: Endpoint, tmp_path: Path) -> None:
    foreign, mine = tmp_path / "foreign", tmp_path / "mine"
    foreign.mkdir()
    (foreign / "judge.sqlite").write_text('["a", 10.0]\n')
    keys = [f"reward.judge.base_url={server.url}", "reward.judge.model=m"]
    with pytest.raises(ConfigError, match=r"reward\.judge\.cache_dir = .*no run of millrace made"):
        reward_of([*keys, f"reward.judge.cache_dir={foreign}"])
    reward = reward_of([*keys, f"reward.judge.cache_dir={mine}"])
    open_caches(reward, tmp_path)
    assert (mine / ownership.MARKER).is_file() and (mine / "judge.sqlite").is_file()
    (mine / "judge.sqlite").unlink()
    (mine / "judge.sqlite").symlink_to(foreign / "judge.sqlite")
    with pytest.raises(ConfigError, match=r"reward\.judge\.cache_dir = .*links"):
        open_caches(reward, tmp_path)
    (tmp_path / "judge").symlink_to(foreign)
    open_caches(reward_of(keys), tmp_path)
    assert not (tmp_path / "judge").is_symlink() and len(list(foreign.iterdir())) == 1


def test_a_score_outside_of_the_bounds_in_the_file_is_judged_again(
    server: Endpoint, tmp_path: Path
) -> None:
    async def run() -> None:
        await judged(config_of(server), tmp_path, "99")
        with sqlite3.connect(tmp_path / "judge" / "judge.sqlite") as file:
            assert file.execute("UPDATE scores SET score = 1000 WHERE score = 2").rowcount == 1
        file.close()
        assert (await judged(config_of(server), tmp_path, "99"))[0] == [2]

    asyncio.run(run())


def test_a_locked_file_is_waited_for_once(tmp_path: Path) -> None:
    """A wait of SQLite stops the loop that all replicas answer to."""
    cache = filled(tmp_path / "judge.sqlite", 10, "a")
    other = sqlite3.connect(tmp_path / "judge.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    cache.wait_no_more()
    assert cache._db.execute("PRAGMA busy_timeout").fetchone() == (0,)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        cache.put("bb", 2.0)
    assert cache.get("bb", 0, 10) == 2.0, "a score in memory needs no file"
    other.close()
    cache.close()
