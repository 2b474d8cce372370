"""The task `chase` as a program outside of millrace, with nothing but an OpenAI client.

    millrace train agents_quickstart agents.environment= \\
        agents.program=millrace.environments.chase_program:play
    millrace train agents_quickstart agents.environment= \\
        agents.command="python -m millrace.environments.chase_program" \\
        agents.workers=1 agents.max_concurrent=128

Without `agents.workers`, the command plays one episode in each process.
It is the first program to read for someone who writes one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from millrace.environments.chase import Lookup
from millrace.environments.chat import ToolError


async def play(client: Any, task: dict[str, Any]) -> float:
    """Play one episode, and return 1 for the right answer and 0 for a wrong one."""
    import openai

    lookup = Lookup(task["extra_info"]["table"])
    messages: list[dict[str, Any]] = list(task["messages"])
    while True:
        try:
            answer = await client.chat.completions.create(
                model=task["model"], messages=messages, tools=[lookup.schema]
            )
        except openai.BadRequestError:  # A limit of the episode: the policy asks for too much.
            return 0.0
        choice = answer.choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason == "length":
            return 0.0
        if not choice.message.tool_calls:
            return float(choice.message.content == f"={task['ground_truth']}")
        for call in choice.message.tool_calls:
            try:
                result = await lookup.call(json.loads(call.function.arguments))
            except ToolError as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def once(path: str) -> None:
    """Play the episode of a file. The last line of output has the reward."""
    import openai

    task = json.loads(Path(path).read_text())
    async with openai.AsyncOpenAI() as client:  # it reads OPENAI_BASE_URL and OPENAI_API_KEY
        reward = await play(client, task)
    print(json.dumps({"reward": reward}))  # noqa: T201 - this line is the result


async def work() -> None:
    """Play an episode for each line of input, many at once. Each ends with a line of output."""
    import openai

    async def one(task: dict[str, Any]) -> None:
        key = task["api_key"]
        answer: dict[str, Any] = {"api_key": key}
        try:
            answer["reward"] = await play(shared.with_options(api_key=key), task)
        except openai.OpenAIError as error:
            answer["error"] = str(error)
        print(json.dumps(answer), flush=True)  # noqa: T201 - this line is the result

    http = openai.DefaultAioHttpClient()  # openai's own client for many requests at once
    async with (
        openai.AsyncOpenAI(api_key="-", http_client=http) as shared,
        asyncio.TaskGroup() as episodes,
    ):
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(one(json.loads(line)))


if __name__ == "__main__":
    given = os.environ.get("MILLRACE_TASK")
    asyncio.run(once(given) if given else work())
