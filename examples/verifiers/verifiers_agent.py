"""Play tasks of verifiers 0.4 with the policy that millrace trains.

verifiers needs openai 2, and millrace has openai 3. So this program has an environment of its own:

    python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers==0.4.0
    .venv-verifiers/bin/python verifiers_agent.py rows TASKSET 1000 > rows.jsonl
    millrace train RECIPE data.train_files=[rows.jsonl] \
        agents.command=".venv-verifiers/bin/python verifiers_agent.py play"

TASKSET is the name of an installed taskset, or of a module next to this file. The taskset's own
rewards score the episode. A failure of a task, a toolset or the harness exits with status 1, so the
episode is counted as an error and never as a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["InProcess"]

LIMITS = ("context_length_exceeded", "max_turns_reached", "max_episode_tokens_reached")
"""The codes of the endpoint for the limits of an episode."""


_NUMBERS = itertools.count()


class InProcessConfig(vf.HarnessConfig):
    id: str = "verifiers_agent"


class InProcess(vf.Harness[InProcessConfig]):
    """A chat loop in this process. The harnesses of the package install programs with uv."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **kwargs: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [m.model_dump(exclude_none=True) for m in prompt or ()]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        # No retries here: they are between verifiers and millrace.
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
        async with client, contextlib.AsyncExitStack() as stack:
            tools, names, connections = await connect_mcp(servers, stack)
            while True:
                chat = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or openai.omit
                )
                message = chat.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in message.tool_calls:
                    text = await _call(connections, names, call)
                    result = {"role": "tool", "tool_call_id": call.id, "content": text}
                    messages.append(result)


async def _call(connections: Any, names: Any, call: Any) -> Any:
    """Return the result of a tool. The policy reads about a call that is wrong."""
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if call.function.name not in names or not isinstance(arguments, dict):
        return f"error: no tool {call.function.name}, or its arguments are no object"
    return await call_mcp(connections, names, call.function.name, arguments)


def tasks(taskset: str) -> Iterator[Any]:
    """Yield the tasks of a taskset by name, in order."""
    yield from vf.load_taskset(vf.taskset_config_type(taskset)(id=taskset))


def rows(taskset: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows for millrace's data. A row names its task, and shows the task's prompt."""
    for index, task in enumerate(itertools.islice(tasks(taskset), count)):
        extra = {"verifiers": {"taskset": taskset, "index": index}}
        text = task.data.prompt_text or f"{taskset} {index}"
        yield {"prompt": text, "data_source": taskset, "extra_info": extra}


async def play(task: Any, base_url: str, key: str, model: str) -> float:
    """Play one task, and return its reward. Raise RuntimeError if something else failed."""
    variable = f"MILLRACE_KEY_{next(_NUMBERS)}"  # verifiers reads the key from a variable
    os.environ[variable] = key
    config = vf.AgentConfig(
        harness=InProcessConfig(),
        runtime=vf.SubprocessConfig(),
        model=model,
        client=vf.EvalClientConfig(base_url=base_url, api_key_var=variable),
    )
    try:
        async with vf.make_agent(config) as agent:
            trace = await agent.run(task)
    finally:
        del os.environ[variable]
    if trace.has_error:
        if not all(any(limit in e.message for limit in LIMITS) for e in trace.errors):
            raise RuntimeError("; ".join(f"{e.type}: {e.message}" for e in trace.errors))
        # The policy reached a limit of the run. That is no failure: what it did so far is scored.
        if any("runtime" in inspect.signature(f).parameters for f in task.hooks("reward")):
            raise RuntimeError("a limit ended the episode, and a reward needs its runtime")
        await task.score(trace)
    if not math.isfinite(trace.reward):
        raise RuntimeError(f"the reward is {trace.reward}")
    return float(trace.reward)


def find(row: dict[str, Any]) -> Any:
    """Return the task that a row names."""
    wanted = row["extra_info"]["verifiers"]
    return next(itertools.islice(tasks(wanted["taskset"]), wanted["index"], None))


def prepare() -> None:
    """Make the modules next to this file known, here and to the servers of toolsets."""
    logging.disable(logging.WARNING)
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


def main() -> None:
    prepare()
    if sys.argv[1] == "rows":
        for row in rows(sys.argv[2], int(sys.argv[3])):
            print(json.dumps(row))
        return
    task = find(json.loads(Path(os.environ["MILLRACE_TASK"]).read_text()))
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    with openai.OpenAI() as client:
        model = client.models.list().data[0].id
    print(json.dumps({"reward": asyncio.run(play(task, url, key, model))}))


if __name__ == "__main__":
    main()
