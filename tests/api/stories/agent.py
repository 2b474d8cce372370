"""An agent of a few lines, which asks twice. It is a closure over a list of the script."""

import json
import sys

import millrace

sys.path.insert(0, sys.argv[1])
from small import SMALL

played = []


def main():
    async def play(client, task):
        messages = list(task["messages"])
        for _ in range(2):
            answer = await client.chat.completions.create(
                model=task["model"], messages=messages, max_tokens=4
            )
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content or ""},
                {"role": "user", "content": "7"},
            ]
        played.append(task["ground_truth"])
        return float(len(messages))

    rows = [
        {"prompt": [{"role": "user", "content": str(k)}], "answer": f"={k}"} for k in range(10, 42)
    ]
    run = millrace.train(
        "agents_quickstart", agent=play, train=rows, val=[], **SMALL | {"agents.environment": "",
        "sft": {"steps": 0}, "rollout.n": 2}
    )  # fmt: skip
    print(json.dumps({
        "complete": run.complete,
        "played": len(played) >= 64,
        "rewards": sorted({row["reward"] for row in run.samples()}),
        "turns": run.metrics[0]["agents/turns/mean"],
    }))  # fmt: skip


main()
