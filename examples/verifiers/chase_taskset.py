"""A small taskset of verifiers: follow a hidden table with a tool."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ChaseTaskset"]


def table(seed: int) -> list[int]:
    """Return the hidden table of a task."""
    return [random.Random(seed).randrange(10) for _ in range(10)]


class Lookup(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """The tool server of a task."""

    @vf.tool
    async def lookup(self, seed: int, place: int) -> str:
        """Return the entry of the table at a place."""
        return str(table(seed)[place % 10])


class ChaseData(vf.TaskData):
    seed: int
    hops: int


class ChaseTask(vf.Task[ChaseData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Lookup(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        place = 7
        for _ in range(self.data.hops):
            place = table(self.data.seed)[place]
        return float((trace.last_reply or "").strip() == str(place))


class ChaseTaskset(vf.Taskset[ChaseTask]):
    def load(self) -> Iterator[ChaseTask]:
        for seed in range(100):
            hops = 1 + seed % 3
            prompt = f"Look up {hops} times in table {seed}, from place 7. Answer with the digit."
            yield ChaseTask(ChaseData(prompt=prompt, seed=seed, hops=hops), self.config.task)


if __name__ == "__main__":
    Lookup.run()
