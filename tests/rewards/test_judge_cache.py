"""The cache of a judge: it survives kills, stays bounded, and reads only its own files."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
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
    cache.open()
    for key in keys:
        cache.put(key, float(len(key)))
    return cache


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40), st.integers(1, 6), st.booleans())
def test_a_cache_keeps_the_newest_scores_and_a_bounded_file(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], size: int, closed: bool
) -> None:
    path = tmp_path_factory.mktemp("cache") / "judge.jsonl"
    cache = filled(path, size, *keys)
    if closed:  # a killed process closes nothing
        cache.close()
    newest = list(dict.fromkeys(reversed(keys)))[:size]
    again = filled(path, size)
    assert {key for key in "abcdefgh" if again.get(key) is not None} == set(newest)
    assert len(path.read_text().splitlines()) <= 2 * size
    again.close()
    cache.close()


def test_a_torn_line_or_a_wrong_value_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "judge.jsonl"
    path.write_bytes(
        b'["a", 1.0]\n["b", NaN]\n{"c": 2}\n7\n\xff\xfe\n["d", null]\n["e", 3.0]\n'
        + b'["d", 1%s]\n%s\n["f", ' % (b"0" * 400, b"[" * 100_000)
    )
    cache = filled(path, 10)
    assert [cache.get(key) for key in "abcdef"] == [1.0, None, None, None, 3.0, None]
    cache.put("g", 4.0)
    cache.close()
    assert filled(path, 10).get("g") == 4.0  # on a line of its own


def test_caches_that_share_a_file_lose_no_score_of_each_other(tmp_path: Path) -> None:
    """The third score of either cache rewrites the file, and the other one goes on in the new."""
    path = tmp_path / "judge.jsonl"
    one, two = ScoreCache(path, 6), ScoreCache(path, 6)
    one.open()
    two.open()
    for n in range(40):
        (one, two)[n % 3 == 0].put(str(n), float(n))
    again = filled(path, 6)
    assert [n for n in range(40) if again.get(str(n)) == n] == list(range(34, 40))
    assert len(path.read_text().splitlines()) <= 3 * 6
    path.unlink()
    one.put("new", 1.0)
    assert filled(path, 6).get("new") == 1.0


def test_two_processes_lose_no_score_of_each_other(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from millrace.rewards.judge_cache import ScoreCache
cache = ScoreCache(Path(sys.argv[1]), 1000)
cache.open()
print(flush=True)
sys.stdin.readline()
for n in range(300): cache.put(f"{sys.argv[2]}{n}" * 20, 1.0)
"""
    path = tmp_path / "judge.jsonl"
    arguments = [sys.executable, "-c", code, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*arguments, name], **pipes) for name in "ab"]
    for process in processes:
        process.stdout.readline()  # Both are ready.
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait(HANG_S) for process in processes] == [0, 0]
    keys = [json.loads(line)[0] for line in path.read_text().splitlines()]
    assert sorted(keys) == sorted(f"{name}{n}" * 20 for name in "ab" for n in range(300))


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
    assert len((tmp_path / "judge" / "judge.jsonl").read_text().splitlines()) == 1


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


def test_a_full_disk_costs_a_note_and_no_score(
    server: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    write = os.write
    full = lambda fd, data: 1 if data.startswith(b'["') else write(fd, data)  # noqa: E731

    async def run() -> None:
        reward = RunReward(config_of(server))
        try:
            open_caches(reward, tmp_path, notes.append)
            monkeypatch.setattr(os, "write", full)
            for text in ("9", "99", "9"):  # The memory still has the first one.
                assert (await reward.score(PROMPT, completed([text])))[0].value == len(text)
            figures = reward.take_figures()
            assert (figures["reward/judge/cache_errors"], figures["reward/judge/requests"]) == (
                2,
                2,
            )
        finally:
            await reward.close()

    asyncio.run(run())
    assert notes == [
        "reward.judge.cache: a score cannot be written to the cache (No space left on device), "
        "so a later run asks the judge for it again"
    ]


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


def test_a_foreign_folder_or_a_link_is_refused(server: Endpoint, tmp_path: Path) -> None:
    foreign, mine = tmp_path / "foreign", tmp_path / "mine"
    foreign.mkdir()
    (foreign / "judge.jsonl").write_text('["a", 10.0]\n')
    said = [f"reward.judge.base_url={server.url}", "reward.judge.model=m"]
    with pytest.raises(ConfigError, match=r"reward\.judge\.cache_dir = .*no run of millrace made"):
        make_reward(recipe.load("quickstart", [*said, f"reward.judge.cache_dir={foreign}"]))
    reward = make_reward(recipe.load("quickstart", [*said, f"reward.judge.cache_dir={mine}"]))
    open_caches(reward, tmp_path)
    assert (mine / ownership.MARKER).is_file() and (mine / "judge.jsonl").is_file()
    (mine / "judge.jsonl").unlink()
    (mine / "judge.jsonl").symlink_to(foreign / "judge.jsonl")
    with pytest.raises(ConfigError, match=r"reward\.judge\.cache_dir = .*links"):
        open_caches(reward, tmp_path)
    (tmp_path / "judge").symlink_to(foreign)
    open_caches(make_reward(recipe.load("quickstart", said)), tmp_path)
    assert not (tmp_path / "judge").is_symlink() and len(list(foreign.iterdir())) == 1


def test_a_score_outside_of_the_bounds_in_the_file_is_judged_again(
    server: Endpoint, tmp_path: Path
) -> None:
    async def run() -> None:
        await judged(config_of(server), tmp_path, "99")
        path = tmp_path / "judge" / "judge.jsonl"
        ((key, score),) = map(json.loads, path.read_text().splitlines())
        assert score == 2
        path.write_text(json.dumps([key, 1000.0]) + "\n")
        assert (await judged(config_of(server), tmp_path, "99"))[0] == [2]

    asyncio.run(run())
