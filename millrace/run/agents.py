"""The agent of a run, from its configuration: one response, an environment, or a program."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.config import AgentConfig, RolloutConfig
from millrace.environments.chat import ChatEnvironment
from millrace.errors import bad_value
from millrace.ports import Agent, PolicySession
from millrace.rollout.episode import SingleTurn
from millrace.rollout.session import Limits
from millrace.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from millrace.agents.conversation import Conversation
    from millrace.agents.endpoint import Endpoint
    from millrace.agents.programs import Program
    from millrace.agents.service import Service

MODEL = "policy"
"""The policy's name at the endpoint."""

OWN = ("chase",)
"""Environments of the package, which generated tasks belong to."""

Note = Callable[[str], None]


def limits_of(agents: AgentConfig, rollout: RolloutConfig) -> Limits:
    """Return the limits of an episode. The keys' 0 is no limit."""
    if not agents.player:
        return Limits()
    return Limits(
        max_len=rollout.max_len,
        max_turns=agents.max_turns or None,
        max_tokens_per_turn=agents.max_tokens_per_turn or None,
        max_episode_tokens=agents.max_episode_tokens or None,
    )


@asynccontextmanager
async def open_agent(
    agents: AgentConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    note: Note,
) -> AsyncIterator[Agent]:
    """Make the agent of a run, and close it at exit. `folder` is the run's.

    Raises ConfigError or MissingDependency for what can be known before an episode runs.
    """
    if not agents.player:
        yield SingleTurn()
        return
    from millrace.agents.conversation import Conversation
    from millrace.agents.parse import tool_format
    from millrace.agents.render import Renderer
    from millrace.agents.template import check_template

    report = check_template(tokenizer)
    if agents.tools or agents.tool_config_path or agents.environment in OWN:
        report.require_tools()
    for line in report.refusals:
        note(f"chat template: {line}")
    converse = partial(
        Conversation,
        renderer=Renderer(tokenizer),
        tool_format=tool_format(agents.tool_format),
        history=agents.history,
        main_models=agents.train_models,
    )
    opened = _serve if agents.served else _play
    async with opened(agents, rollout, tokenizer, converse, folder, note) as agent:
        yield agent


@asynccontextmanager
async def _play(
    agents: AgentConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    converse: Callable[[PolicySession], Conversation],
    folder: Path,
    note: Note,
) -> AsyncIterator[Agent]:
    """Yield the agent of an environment or of tools."""
    from millrace.agents.chat_agent import ChatAgent, ChatOptions
    from millrace.environments.tools import CallLimits, Cut

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    options = ChatOptions(
        CallLimits(agents.tool_deadline_s, agents.max_parallel_calls),
        Cut(encode, decode, agents.max_tool_tokens),
        agents.tool_deadline_s,
    )
    make, close = _environments(agents)
    try:
        yield ChatAgent(make, converse, options)
    finally:
        await close()


async def _nothing() -> None:
    return None


def _environments(
    agents: AgentConfig,
) -> tuple[Callable[[Prompt], ChatEnvironment], Callable[[], Any]]:
    """Return the maker of an episode's environment, and what closes all of them."""
    from millrace.environments.chase import Chase
    from millrace.environments.named import KINDS, named_environments
    from millrace.environments.task_tools import TaskWithTools
    from millrace.environments.verl_tools import load_function_tools, load_tool_config

    key = "agents.environment"
    if agents.tool_config_path or agents.tools:
        of_row = load_tool_config(agents.tool_config_path) if agents.tool_config_path else None
        shared = load_function_tools(agents.tools, "agents.tools") if agents.tools else []
        return lambda _: TaskWithTools(
            lambda p: [*(of_row(p) if of_row else ()), *shared]
        ), _nothing
    name = agents.environment
    if name == "chase":
        return lambda _: Chase(), _nothing
    if name.partition(":")[0] in KINDS:
        named = named_environments(
            name, deadline_s=agents.tool_deadline_s, tool_deadline_s=agents.tool_deadline_s
        )
        return lambda _: named.make(), named.close
    if ":" not in name:
        raise bad_value(
            key,
            name,
            "is not the name of an environment",
            f"chase, path.py:Class, {', '.join(KINDS)}",
        )
    return _of_class(key, name), _nothing


def _of_class(key: str, name: str) -> Callable[[Prompt], ChatEnvironment]:
    """Return the maker of the user's own environments, in millrace's or TRL's form."""
    from millrace.data.user_code import load
    from millrace.environments.trl import TrlFactory

    kind = load(key, name, kind="class")
    if callable(getattr(kind, "step", None)) and callable(getattr(kind, "reset", None)):
        return lambda _: kind()  # type: ignore[no-any-return]
    return TrlFactory(kind)


@asynccontextmanager
async def _serve(
    agents: AgentConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    converse: Callable[[PolicySession], Conversation],
    folder: Path,
    note: Note,
) -> AsyncIterator[Agent]:
    """Yield the agent of a program, and serve it for as long."""
    from millrace.agents.endpoint import Endpoint
    from millrace.agents.programs import ProgramAgent
    from millrace.agents.remote import RemoteProgram
    from millrace.agents.service import Service, ServiceOptions
    from millrace.agents.wire import Sampling

    service = Service(
        ServiceOptions(
            model=MODEL,
            max_model_len=rollout.max_len,
            sampling=Sampling(rollout.temperature),
            strict=agents.strict,
            turn_deadline_s=agents.turn_deadline_s,
            retry_grace_s=agents.retry_grace_s,
        )
    )
    endpoint = Endpoint(service, agents.host, agents.port)
    program = _program(agents, service, endpoint, note)
    try:
        if not agents.program:
            await endpoint.start()
            note(f"endpoint: {endpoint.url}/v1")
        if isinstance(program, RemoteProgram):
            path = program.publish(folder, endpoint.url)
            note(f"workers find the address and the token in {path}")
        await program.start()
        yield ProgramAgent(program, service, converse, agents.deadline_s)
    finally:
        await program.close()
        await endpoint.close()


def _program(agents: AgentConfig, service: Service, endpoint: Endpoint, note: Note) -> Program:
    from millrace.agents.command import CommandProgram
    from millrace.agents.function import FunctionProgram
    from millrace.agents.remote import RemoteProgram

    if agents.program:
        return FunctionProgram(agents.program, service, note)
    if agents.command:
        concurrent = agents.max_concurrent or 2 * (os.cpu_count() or 1)
        return CommandProgram(
            agents.command, lambda: endpoint.url, concurrent=concurrent, env=agents.env
        )
    program = RemoteProgram(agents.lease_s)
    service.claims = program
    return program
