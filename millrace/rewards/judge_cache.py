"""A judge with its scores on disk, so that the same response is judged once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace.config import OneReward
from millrace.errors import bad_value
from millrace.rewards.judge import message_of
from millrace.rewards.pool import RewardPool
from millrace.rewards.wire import Call
from millrace.types import Completion, Prompt, Score

_DECIDE = (
    *("model", "base_url", "pattern", "json_field", "min", "max", "temperature", "max_tokens"),
    "extra_body",
)
"""The keys of a judge that decide a score. The template is in the message."""


_TABLE = "scores (id INTEGER PRIMARY KEY, key TEXT UNIQUE, score REAL)"


class ScoreCache:
    """Scores by key in a SQLite file with at most `size` of them. Several runs may share it."""

    def __init__(self, path: Path, size: int) -> None:
        """Open the file, and make it if it is missing.

        Raise OSError or sqlite3.Error, also if it is a link, damaged or no file of this class.
        """
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        self._size = size
        self._unwritten: dict[str, float] = {}
        """The scores that the disk refused."""
        self._db = sqlite3.connect(path)
        try:
            self._set_up()
        except sqlite3.Error:
            self._db.close()
            raise

    def _set_up(self) -> None:
        schema = self._db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        if schema not in ([], [(f"CREATE TABLE {_TABLE}",)]):
            raise sqlite3.DatabaseError(f"its tables are {schema}")
        # WAL is unsafe on NFS. Without `synchronous` a kill loses nothing, only a power failure may.
        self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.execute("PRAGMA synchronous = OFF")
        ((state,),) = self._db.execute("PRAGMA quick_check(1)")
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        self._db.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")

    def get(self, key: str, least: float, most: float) -> float | None:
        """Return the score if it is between the bounds."""
        if key in self._unwritten:
            return self._unwritten[key]
        query = "SELECT score FROM scores WHERE key = ? AND score BETWEEN ? AND ?"
        row = self._db.execute(query, (key, least, most)).fetchone()
        return row[0] if row else None

    def put(self, key: str, score: float) -> None:
        """Keep a score. The oldest one leaves a full cache. Raise sqlite3.Error without a disk."""
        newest = "ON CONFLICT (key) DO UPDATE SET score = excluded.score"
        oldest = "id <= (SELECT max(id) FROM scores) - ?"
        try:
            with self._db:
                self._db.execute(
                    f"INSERT INTO scores (key, score) VALUES (?, ?) {newest}", (key, score)
                )
                self._db.execute(f"DELETE FROM scores WHERE {oldest}", (self._size,))
        except sqlite3.Error:
            self._unwritten[key] = score
            if len(self._unwritten) > self._size:
                del self._unwritten[next(iter(self._unwritten))]
            raise

    def wait_no_more(self) -> None:
        """Let a locked file fail at once. A wait of SQLite stops the whole driver for seconds."""
        self._db.execute("PRAGMA busy_timeout = 0")

    def close(self) -> None:
        self._db.close()


class CachedJudge(RewardPool):
    """The pool of a judge behind the cache.

    Only valid scores are kept. A failure is tried again the next time.
    """

    def __init__(self, config: OneReward, section: str = "reward", *options: Any) -> None:
        super().__init__(config, section, *options)
        self._config = config.judge
        self._cache: ScoreCache | None = None
        self._note: Callable[[str], object] | None = None
        """Called once, if the disk fails."""
        self._under_way: dict[str, asyncio.Future[list[Score]]] = {}

    def open_cache(self, folder: Path, note: Callable[[str], object] = warnings.warn) -> None:
        """Open the cache in a folder that millrace made. Raise ConfigError if this fails.

        `note` gets a message if the disk fails later, and if there is a file of the former format.
        """
        path = folder / f"{self.job.name}.sqlite"
        if (former := path.with_suffix(".jsonl")).exists():
            note(
                f"{self.job.key}.cache: {former} is ignored, because {path.name} replaces its format"
            )
        try:
            cache = ScoreCache(path, self._config.cache_size)
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            key, rule = f"{self.job.key}.cache_dir", f"cannot be used: {path.name}: {reason}"
            fix = (
                "a folder that can be written to, and whose files can be locked and are no links. "
                "A damaged cache may be deleted"
            )
            raise bad_value(key, str(folder), rule, fix) from None
        self._cache, self._note = cache, note

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Return one Score for each completion. Only those that are not in the cache are judged."""
        if self._cache is None:
            return await super().score(prompt, completions)
        answers = await asyncio.gather(
            *(self._one(self._cache, prompt, one) for one in completions), return_exceptions=True
        )
        if failures := [a for a in answers if isinstance(a, BaseException)]:
            raise failures[0]
        return [a for a in answers if isinstance(a, Score)]

    async def _one(self, cache: ScoreCache, prompt: Prompt, completion: Completion) -> Score:
        """Return the score in the cache, or that of an equal request under way, or a new one.

        The request under way has the pool's deadline. Its failure is the failure of all that wait.
        """
        key = self._key(prompt, completion.text)
        while (under_way := self._under_way.get(key)) is not None:
            await asyncio.wait([under_way])
            if not under_way.cancelled():
                (score,) = under_way.result()
                self.figures["cache_hits"] += 1
                return score
        value = None
        with self._disk_errors():
            value = cache.get(key, self._config.min, self._config.max)
        if value is not None:
            self.figures["cache_hits"] += 1
            return Score(value)
        judged = super().score(prompt, [completion])
        future = self._under_way[key] = asyncio.ensure_future(judged)
        try:
            (score,) = await future
        finally:
            del self._under_way[key]
        with self._disk_errors():
            cache.put(key, score.value)
        return score

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Count an error of the cache, and note the first. The run continues without the cache."""
        try:
            yield
        except sqlite3.Error as error:
            self.figures["cache_errors"] += 1
            if self._cache is not None:
                self._cache.wait_no_more()
            if self._note is not None:
                self._note(
                    f"{self.job.key}.cache: a score cannot be written or read ({error}), "
                    "so a later run asks the judge for it again"
                )
                self._note = None

    async def close(self) -> None:
        await super().close()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _key(self, prompt: Prompt, completion: str) -> str:
        """Return a hash of everything that decides the score."""
        call = Call(0, prompt.text, prompt.data_source, prompt.ground_truth, {}, prompt.columns, [])
        decides = self._config.model_dump(mode="json", include=set(_DECIDE))
        text = json.dumps([decides, message_of(self._config, call, completion)], sort_keys=True)
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
