"""A program that plays many episodes: `agents.command="python many_episodes.py" agents.workers=2`.

It reads a task from each line of its input, and writes a line with the reward of each.
`agent.py` beside it has `play`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import openai
from agent import play


async def one(shared, task):
    client = shared.with_options(api_key=task["api_key"])
    answer = {"api_key": task["api_key"], "reward": await play(client, task)}
    print(json.dumps(answer), flush=True)


async def main():
    http = openai.DefaultAioHttpClient()
    async with (
        openai.AsyncOpenAI(api_key="-", http_client=http) as shared,
        asyncio.TaskGroup() as episodes,
    ):
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(one(shared, json.loads(line)))


asyncio.run(main())
