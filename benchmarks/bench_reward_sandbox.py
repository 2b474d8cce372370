"""Measure the CPU time of a score: plain workers, sandboxed ones, and one sandbox for each score.

python -m benchmarks.bench_reward_sandbox --scores 1000
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import tempfile
from pathlib import Path

from millrace.config import recipe
from millrace.run.rewards import make_reward
from millrace.types import Completion, Prompt, tokens_of

FUNCTION = """
def score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))
"""


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(u.ru_utime + u.ru_stime for u in used)


async def spent(function: str, sandbox: bool, scores: int) -> float:
    """Return the CPU seconds of a reward from its start to its end."""
    keys = [f"reward.sandbox={str(sandbox).lower()}", f"reward.function={function}:score"]
    before, prompt = cpu_s(), Prompt(0, tokens_of([1]), "p", "d", "4")
    config = recipe.load("quickstart", keys)
    reward = make_reward(config.reward, config.agents, config.sides)
    await reward.start()
    calls = (reward.score(prompt, [Completion("x")]) for _ in range(scores))
    await asyncio.gather(*calls)
    await reward.close()
    return cpu_s() - before


async def main(scores: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "function.py"
        path.write_text(FUNCTION)
        print("| round | plain, ms a score | sandbox, ms a score | start of a sandbox, ms |")
        print("|---|--:|--:|--:|")
        for number in range(rounds):
            plain = [await spent(str(path), False, n) for n in (1, scores + 1)]
            sandbox = [await spent(str(path), True, n) for n in (1, scores + 1)]
            each = [1000 * (many - one) / scores for one, many in (plain, sandbox)]
            print(f"| {number + 1} | {each[0]:.3f} | {each[1]:.2f} | {1000 * sandbox[0]:.0f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--scores", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    asyncio.run(main(given.scores, given.rounds))
