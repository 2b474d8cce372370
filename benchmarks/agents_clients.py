"""Count the tokens of many episodes of real agent clients, over an engine that draws what hurts.

    python benchmarks/agents_clients.py --episodes 1000 --clients openai anthropic

Each client runs in a process of its own. The result is a table: one row for each client and way of
answering. The last column counts the differences between the engine's log and what is trained:
tokens, log-probs, versions, contexts, tokens that are trained twice or in no count.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from concurrent.futures import ProcessPoolExecutor

from tests.agents.clients import CLIENTS
from tests.agents.episodes import Tally, endpoint, tally

HEAD = (
    "| client | answers | episodes | turns | tokens trained | dead | threads an episode | forks "
    "| programs that raised | seconds | differences |\n"
    "|---|---|--:|--:|--:|--:|---|---|---|--:|--:|"
)


def count(name: str, stream: bool, episodes: int, seed: int) -> tuple[Tally, float]:
    """Play the episodes of one client."""

    async def main() -> Tally:
        async with endpoint() as served:
            return await tally(served, CLIENTS[name], stream, episodes, seed)

    start = time.perf_counter()
    return asyncio.run(main()), time.perf_counter() - start


def row(name: str, stream: bool, found: Tally, seconds: float) -> str:
    threads = ", ".join(f"{k}: {n}" for k, n in sorted(found.threads.items()))
    forks = ", ".join(f"{k.removeprefix('forks/')} {n}" for k, n in sorted(found.forks.items()))
    raised = ", ".join(f"{k} {n}" for k, n in sorted(found.raised.items()))
    wrong = len(found.differences) + len(found.failed)
    cells = [
        name, "stream" if stream else "plain", found.episodes, found.turns, found.tokens,
        found.dead_tokens, threads, forks or "none", raised or "none", f"{seconds:.0f}", wrong,
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    print(HEAD, flush=True)
    with ProcessPoolExecutor(given.processes, max_tasks_per_child=1) as pool:
        jobs = [
            (name, stream, pool.submit(count, name, stream, given.episodes, given.seed))
            for name in given.clients
            for stream in (False, True)
        ]
        for name, stream, job in jobs:
            print(row(name, stream, *job.result()), flush=True)


if __name__ == "__main__":
    main()
