"""Real agent clients, each as a program that plays one episode at the endpoint."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LANGSMITH_TRACING"] = "false"
os.environ["ANONYMIZED_TELEMETRY"] = "false"

QUESTION = "What is 12 + 7?"
SYSTEM = "You add numbers."
STEPS = 4
"""The turns of a client without a loop of its own."""

Program = Callable[[str, str, bool], Awaitable[None]]
"""Plays an episode, given the endpoint's address, a key, and whether to stream."""

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS},
}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


def result_of(arguments: str) -> str:
    given = json.loads(arguments)
    return str(add(given["a"], given["b"]))


async def openai_sdk(url: str, key: str, stream: bool) -> None:
    """Speak with openai's own client, as its documents show."""
    import openai

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=key) as client:
        await chat_with(client, stream)


async def chat_with(client: Any, stream: bool) -> None:
    """Play an episode with an openai client."""
    import openai

    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    for _ in range(STEPS):
        asked: Any = {"model": "policy", "messages": messages, "tools": [TOOL]}
        if stream:
            async with client.chat.completions.stream(
                **asked, stream_options={"include_usage": True}
            ) as events:
                async for _event in events:
                    pass
                with suppress(openai.LengthFinishReasonError):  # The helper refuses cut answers.
                    await events.get_final_completion()
                answer = events.current_completion_snapshot
        else:
            answer = await client.chat.completions.create(**asked)
        message = answer.choices[0].message
        assert answer.usage is not None and answer.usage.completion_tokens > 0
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in messages[-1].get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
            text = result_of(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "go on"})


async def anthropic_sdk(url: str, key: str, stream: bool) -> None:
    """Speak with anthropic's own client."""
    import anthropic

    tool: Any = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
        for _ in range(STEPS):
            asked: Any = {
                "model": "policy",
                "max_tokens": 64,
                "system": SYSTEM,
                "messages": messages,
                "tools": [tool],
            }
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": answer.content})
            said = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": result_of(json.dumps(block.input)),
                }
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": said or "go on"})


async def openai_agents(url: str, key: str, stream: bool, responses: bool = False) -> None:
    """Run an agent of openai-agents, over chat completions or Responses."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=key) as client:
        make = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
        agent = agents.Agent(
            name="adder",
            instructions=SYSTEM,
            model=make("policy", client),
            tools=[agents.function_tool(add)],
        )
        if not stream:
            await agents.Runner.run(agent, QUESTION, max_turns=6)
            return
        run = agents.Runner.run_streamed(agent, QUESTION, max_turns=6)
        async for _event in run.stream_events():
            pass


async def openai_agents_responses(url: str, key: str, stream: bool) -> None:
    """Run an agent of openai-agents over Responses."""
    await openai_agents(url, key, stream, responses=True)


async def langgraph(url: str, key: str, stream: bool) -> None:
    """Run an agent of langchain, which is a graph of langgraph."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    model = ChatOpenAI(
        model="policy", base_url=url + "/v1", api_key=SecretStr(key), disable_streaming=not stream
    )
    agent: Any = create_agent(model, tools=[add], system_prompt=SYSTEM)
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    settings = {"recursion_limit": 12}
    if not stream:
        await agent.ainvoke(asked, settings)
        return
    async for _event in agent.astream(asked, settings, stream_mode="messages"):
        pass


async def pydantic_ai(url: str, key: str, stream: bool) -> None:
    """Run an agent of pydantic-ai."""
    import openai
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=key) as client:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        agent: Any = Agent(model, system_prompt=SYSTEM, tools=[add])
        if not stream:
            await agent.run(QUESTION)
            return
        async with agent.run_stream(QUESTION) as run:
            async for _text in run.stream_text():
                pass


async def smolagents(url: str, key: str, stream: bool) -> None:
    """Run an agent of smolagents, which writes calls and results as text."""
    from rich.console import Console
    from smolagents import AgentLogger, LogLevel, OpenAIModel, ToolCallingAgent, tool

    def play() -> None:
        silent = AgentLogger(LogLevel.OFF, Console(file=io.StringIO()))
        model = OpenAIModel("policy", api_base=url + "/v1", api_key=key)
        agent = ToolCallingAgent(
            tools=[tool(add)],
            model=model,
            stream_outputs=stream,
            max_steps=3,
            logger=silent,
        )
        agent.run(QUESTION)
        model.client.close()

    await asyncio.to_thread(play)


CLIENTS: dict[str, Program] = {
    "openai": openai_sdk,
    "anthropic": anthropic_sdk,
    "openai-agents": openai_agents,
    "openai-agents-responses": openai_agents_responses,
    "langgraph": langgraph,
    "pydantic-ai": pydantic_ai,
    "smolagents": smolagents,
}
