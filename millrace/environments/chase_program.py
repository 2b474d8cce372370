"""The task `chase` as a program outside of millrace, with nothing but an OpenAI client.

    millrace train agents_quickstart agents.environment= \\
        agents.program=millrace.environments.chase_program:play
    millrace train agents_quickstart agents.environment= \\
        agents.command="python -m millrace.environments.chase_program"

It is the first program to read for someone who writes one.
"""

from __future__ import annotations

import asyncio
import json
import os
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


async def main() -> None:
    """Play the episode of MILLRACE_TASK. The last line of output has the reward."""
    import openai

    task = json.loads(Path(os.environ["MILLRACE_TASK"]).read_text())
    async with openai.AsyncOpenAI() as client:  # it reads OPENAI_BASE_URL and OPENAI_API_KEY
        reward = await play(client, task)
    print(json.dumps({"reward": reward}))  # noqa: T201 - this line is the result


if __name__ == "__main__":
    asyncio.run(main())
