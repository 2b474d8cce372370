"""A reward, a sampler and metrics that are closures, on rows of a list. The script has no guard, so it runs once."""

import json
import sys

import millrace

sys.path.insert(0, sys.argv[1])
from small import ROWS, SMALL


def reward_with(weight: float):
    def reward(completions, answer, place, **columns):
        assert all(1000 <= one < 1040 for one in place)
        return [weight * len(c) for c in completions]

    return reward


seen = []


def count(samples, decode):
    seen.extend(sample.prompt.text for sample in samples)
    return {"prompts": len(samples)}


run = millrace.train(
    "quickstart",
    reward=reward_with(0.5),
    train=ROWS,
    val=ROWS[:4],
    **SMALL,
    **{"data.sampler": lambda index, rows, outcomes: index % 3, "observe.metrics": count},
)
lengths = [len(row["response"]) * 0.5 == row["reward"] for row in run.samples()]
print(json.dumps({
    "complete": run.complete,
    "versions": [row["version"] for row in run.metrics],
    "scores": all(lengths) and len(lengths),
    "checkpoint": str(run.checkpoint),
    "after": run.after,
    "prompts": sorted(set(seen)),
    "counted": sum(row["user/prompts"] for row in run.metrics),
}))  # fmt: skip
