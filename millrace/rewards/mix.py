"""The reward of a run: one reward, or the weighted sum of several. It counts failures and costs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from millrace.config import RewardConfig
from millrace.errors import RewardError
from millrace.rewards.functions import NOT_FOR_THE_TASK
from millrace.rewards.judge_cache import CachedJudge
from millrace.rewards.pool import RewardPool
from millrace.rewards.start import Launcher
from millrace.types import Completion, Prompt, Score

_JUDGED = ("requests", "retries", "cache_hits", "tokens_in", "tokens_out")
"""The figures that every judge has, even if they are 0."""


class RunReward:
    """A RewardFunction over every part of the configuration.

    One plain reward scores as it is. In a mix, the score is the sum of the parts' scores, each
    times its weight. A part that returns None for a task does not count for it. Each part's own score is a component with the part's name. Its components
    are NAME/COMPONENT.
    """

    def __init__(
        self,
        config: RewardConfig,
        environments: Mapping[str, Sequence[Mapping[str, str]]] | None = None,
        launchers: Mapping[str, Launcher] | None = None,
    ) -> None:
        """Make the pools. `environments` has variables for each worker, by section.

        `launchers` has what starts the workers of a section in a sandbox.
        """
        self._config = config
        self.parts: dict[str, RewardPool] = {}
        self.note: Callable[[str], object] | None = None
        """Called with the first failure of each part and reason, and with `first`."""
        self.first: Callable[[Prompt], str] | None = None
        """Return what to note when the run asks for a score for the first time."""
        self._noted: set[str] = set()
        self._failures: Counter[str] = Counter()
        for section, one in config.parts.items():
            given = (environments or {}).get(section, ()), (launchers or {}).get(section)
            kind = CachedJudge if one.kind == "judge" else RewardPool
            part = kind(one, section, *given)
            self.parts[part.job.name] = part

    async def start(self) -> None:
        """Start every part, and wait until each has loaded. Raise ConfigError or WorkerError."""
        await asyncio.gather(*(part.start() for part in self.parts.values()))

    @property
    def whole_group(self) -> bool:
        """Whether a part asks for all completions of a sample in one call. `start` sets it."""
        return any(part.whole_group for part in self.parts.values())

    def facts(self) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        """Return the columns that each part needs of a row, and lines on it, by its section.

        `start` sets them.
        """
        return {one.job.key: (one.hello.columns, one.hello.notes) for one in self.parts.values()}

    def caches(self) -> dict[CachedJudge, str]:
        """Return the judges with a cache, each with the folder that its user chose, if any."""
        pairs = zip(self.parts.values(), self._config.parts.values(), strict=True)
        return {
            part: one.judge.cache_dir
            for part, one in pairs
            if isinstance(part, CachedJudge) and one.judge.cache
        }

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Return one Score for each completion.

        Raise RewardError if any part fails. Its reason has the part's name in a mix.
        """
        if self.first is not None and self.note is not None:
            self.note(self.first(prompt))
            self.first = None
        if not self._config.mix:  # One part needs no task of its own.
            (only,) = self.parts
            try:
                return await self.parts[only].score(prompt, completions)
            except RewardError as error:
                self._failed(only, error)
                raise
        answers = await asyncio.gather(
            *(part.score(prompt, completions) for part in self.parts.values()),
            return_exceptions=True,
        )
        scores: dict[str, list[Score]] = {}
        failures: list[BaseException] = []
        for name, answer in zip(self.parts, answers, strict=True):
            if isinstance(answer, RewardError) and answer.reason == NOT_FOR_THE_TASK:
                continue
            if isinstance(answer, BaseException):
                failures.append(self._failed(name, answer))
            else:
                scores[name] = answer
        if not scores and not failures:
            detail = "every reward of reward.mix returned None"
            failures = [self._failed(name, RewardError(NOT_FOR_THE_TASK, detail))]
        if failures:  # Any other error, such as a dead worker, comes before a failed reward.
            raise min(failures, key=lambda error: isinstance(error, RewardError))
        return [
            self._sum({name: each[i] for name, each in scores.items()})
            for i in range(len(completions))
        ]

    def take_figures(self) -> dict[str, float]:
        """Return failures by reason, and the work of judges, since the last call of this method.

        The names are reward/NAME/FIGURE. A plain reward's name is function, model or judge.
        """
        figures = {name: float(count) for name, count in self._failures.items()}
        self._failures.clear()
        for (name, part), one in zip(self.parts.items(), self._config.parts.values(), strict=True):
            taken = {f"reward/{name}/{k}": float(v) for k, v in part.figures.items()}
            part.figures.clear()
            if one.kind == "judge":
                taken = {f"reward/{name}/{k}": 0.0 for k in _JUDGED} | taken
                prices = one.judge.price_in, one.judge.price_out
                if any(prices):
                    tokens = (taken[f"reward/{name}/tokens_{way}"] for way in ("in", "out"))
                    cost = sum(n * price for n, price in zip(tokens, prices, strict=True))
                    taken[f"reward/{name}/cost"] = cost / 1e6
            figures |= taken
        return figures

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self.parts.values()))

    def _failed(self, name: str, error: BaseException) -> BaseException:
        """Count a failure. Return the error, with the part's name in a mix."""
        if not isinstance(error, RewardError):
            return error
        total, reason = f"reward/{name}/failures", f"reward/{name}/failures/{error.reason}"
        self._failures.update((total, reason))
        if self.note is not None and reason not in self._noted:
            self._noted.add(reason)
            self.note(f"reward {name} failed, as counted in {total}: {error}")
        if not self._config.mix:
            return error
        detail = str(error).removeprefix(f"{error.reason}: ")
        named = RewardError(f"{name}/{error.reason}", detail, error.trace)
        named.__cause__ = error
        return named

    def _sum(self, scores: dict[str, Score]) -> Score:
        extra: dict[str, float] = {}
        for name, score in scores.items():
            extra[name] = score.value
            extra |= {f"{name}/{component}": v for component, v in score.extra.items()}
        value = sum(self._config.mix[name].weight * score.value for name, score in scores.items())
        answers = (score.answer for score in scores.values() if score.answer is not None)
        return Score(value, extra, answer=next(answers, None))
