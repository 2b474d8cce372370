"""Ports that report each call to a Watch, and else do what the port behind them does."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.errors import RewardError
from millrace.observe.watch import Watch
from millrace.ports import Replica, RewardFunction, RolloutStats, TransferReport, WeightSync
from millrace.types import Completion, PolicyVersion, Prompt, SamplingParams, Score, Segment, Tokens
from millrace.waits.registry import count, doing


class WatchedReplica:
    """A replica on its own track."""

    def __init__(self, engine: Replica, track: str, watch: Watch) -> None:
        self._engine, self._track, self._watch = engine, track, watch

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        with self._watch.span(self._track, "request", session) as facts:
            segments = await self._engine.generate(tokens, params, session)
            versions = [[s.version, len(s.tokens)] for s in segments]
            facts["tokens"] = sum([count for _, count in versions])
            facts["versions"] = versions
            facts["stop"] = str(segments[-1].stop) if segments else "interrupted"
        return segments

    async def interrupt(self) -> None:
        with self._watch.span(self._track, "interrupt"):
            await self._engine.interrupt()

    async def stats(self) -> RolloutStats:
        stats = await self._engine.stats()
        self._watch.at(self._track, "stats", stats=stats)
        return stats

    async def sleep(self, keep_weights: bool = True) -> None:
        with self._watch.span(self._track, "sleep"):
            await self._engine.sleep(keep_weights)

    async def wake_weights(self) -> None:
        with self._watch.span(self._track, "wake_weights"):
            await self._engine.wake_weights()

    async def wake(self) -> None:
        with self._watch.span(self._track, "wake"):
            await self._engine.wake()

    async def close(self) -> None:
        await self._engine.close()


class WatchedSync:
    """A weight sync on the track `sync`. The key of a span is its version."""

    def __init__(self, sync: WeightSync, watch: Watch) -> None:
        self._sync, self._watch = sync, watch

    async def keep(self, version: PolicyVersion) -> None:
        with self._watch.span("sync", "keep", str(version)):
            await self._sync.keep(version)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        with self._watch.span("sync", "transfer", str(version)) as facts:
            report = await self._sync.transfer(version)
            facts["bytes"] = report.bytes
        return report

    async def activate(self, version: PolicyVersion) -> float:
        with self._watch.span("sync", "activate", str(version)) as facts:
            facts["pause_s"] = pause_s = await self._sync.activate(version)
        return pause_s


class WatchedReward:
    """A reward on the track `rewards`. The key of a span is the prompt's index."""

    def __init__(self, reward: RewardFunction, watch: Watch, prefix: str = "") -> None:
        """`prefix` comes before the index, "val/" for problems of a validation."""
        self._reward, self._watch, self._prefix = reward, watch, prefix

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        key = f"{self._prefix}{prompt.index}"
        with self._watch.span("rewards", "score", key, n=len(completions)) as facts:
            try:
                with doing(f"the score of prompt {prompt.index}", by="the reward"):
                    scores = await self._reward.score(prompt, completions)
                count("scores")
                return scores
            except RewardError as error:
                facts["failed"] = error.reason
                raise

    async def close(self) -> None:
        await self._reward.close()
