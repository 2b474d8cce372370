"""A judge with its scores on disk, so that the same response is judged once."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from millrace.config import JudgeConfig
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


class ScoreCache:
    """Scores by key, in memory and in a file with one JSON object on each line.

    A new score is appended at once, so a killed run keeps it. The file is rewritten with the newest
    scores once this process has seen twice as many lines as the cache has room. Runs may share a
    file: each locks it to write. A line that is no valid score is ignored.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._scores: dict[str, float] = {}
        self._lines = 0
        self._file: int | None = None
        """The descriptor of the file, while it is open."""

    def open(self) -> None:
        """Read the file, and make it if it is missing. Raise OSError, also if it is a link."""
        with self._locked() as file:
            if not self._read():
                _write(file, b"\n")  # a process was killed in the middle of the last line
            self._rewrite_if_long()

    def get(self, key: str) -> float | None:
        return self._scores.get(key)

    def put(self, key: str, score: float) -> None:
        """Keep a score. The oldest one leaves a full cache. Raise OSError if it is not on disk."""
        self._keep(key, score)
        with self._locked() as file:
            _write(file, json.dumps([key, score]).encode() + b"\n")
            self._lines += 1
            self._rewrite_if_long()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Lock the file and yield its descriptor. Another run may have replaced it since."""
        while True:
            if self._file is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                self._file = os.open(self._path, flags, 0o600)
            with suppress(OSError):  # Some file systems have no locks.
                fcntl.flock(self._file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), os.lstat(self._path)):
                    break
            self.close()
        try:
            yield self._file
        finally:
            if self._file is not None:
                with suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> bool:
        """Take the scores of the file. Return whether its last line has an end."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        self._lines = len(lines)
        for line in lines:
            with suppress(ValueError, TypeError, OverflowError, RecursionError):
                key, score = json.loads(line)
                self._keep(str(key), float(score))
        return not lines or lines[-1].endswith(b"\n")

    def _keep(self, key: str, score: float) -> None:
        self._scores.pop(key, None)
        if math.isfinite(score):
            self._scores[key] = score
        if len(self._scores) > self._size:
            del self._scores[next(iter(self._scores))]

    def _rewrite_if_long(self) -> None:
        """Replace a long file by one with the newest scores, those of other runs too."""
        if self._lines <= 2 * self._size:
            return
        self._read()
        new = self._path.with_name(f".{self._path.name}.new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self._scores.items())
        new.replace(self._path)
        self.close()
        self._lines = len(self._scores)


def _write(file: int, line: bytes) -> None:
    """Append a line by one system call, so that no other process writes into it."""
    if os.write(file, line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class CachedJudge:
    """A RewardFunction: the judge's pool behind the cache.

    Only valid scores are kept. A failure is tried again the next time.
    """

    def __init__(self, pool: RewardPool, config: JudgeConfig) -> None:
        self.job = pool.job
        self.figures: Counter[str] = pool.figures
        self._pool = pool
        self._config = config
        self._cache: ScoreCache | None = None
        self._note: Callable[[str], object] | None = None
        """Called once, if a score cannot be written."""
        self._under_way: dict[str, asyncio.Future[list[Score]]] = {}

    @property
    def whole_group(self) -> bool:
        """Whether one call needs all completions of a sample. A judge reads one at a time."""
        return False

    async def start(self) -> None:
        await self._pool.start()

    def open_cache(self, folder: Path, note: Callable[[str], object] = warnings.warn) -> None:
        """Read the cache in a folder that millrace made. Raise ConfigError if this fails.

        `note` gets a message if a score cannot be written later.
        """
        cache = ScoreCache(folder / f"{self.job.name}.jsonl", self._config.cache_size)
        try:
            cache.open()
        except OSError as error:
            key, rule = f"{self.job.key}.cache_dir", f"cannot be used: {error.strerror or error}"
            fix = "a folder that can be written to, and whose files are no links"
            raise bad_value(key, str(folder), rule, fix) from None
        self._cache, self._note = cache, note

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Return one Score for each completion. Only those that are not in the cache are judged."""
        if self._cache is None:
            return await self._pool.score(prompt, completions)
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
        value = cache.get(key)
        if value is not None and self._config.min <= value <= self._config.max:
            self.figures["cache_hits"] += 1
            return Score(value)
        future = self._under_way[key] = asyncio.ensure_future(
            self._pool.score(prompt, [completion])
        )
        try:
            (score,) = await future
        finally:
            del self._under_way[key]
        self._save(cache, key, score.value)
        return score

    def _save(self, cache: ScoreCache, key: str, score: float) -> None:
        """Keep a score. If the disk refuses it, count this. The run continues without it."""
        try:
            cache.put(key, score)
        except OSError as error:
            self.figures["cache_errors"] += 1
            if self._note is not None:
                self._note(
                    f"{self.job.key}.cache: a score cannot be written to the cache "
                    f"({error.strerror or error}), so a later run asks the judge for it again"
                )
                self._note = None

    async def close(self) -> None:
        await self._pool.close()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _key(self, prompt: Prompt, completion: str) -> str:
        """Return a hash of everything that decides the score."""
        call = Call(0, prompt.text, prompt.data_source, prompt.ground_truth, {}, prompt.columns, [])
        decides = self._config.model_dump(mode="json", include=set(_DECIDE))
        text = json.dumps([decides, message_of(self._config, call, completion)], sort_keys=True)
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
