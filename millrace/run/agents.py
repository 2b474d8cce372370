"""The agent of a run, from its configuration: one response, an environment, or a program."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.config import AgentConfig, RolloutConfig, plugins
from millrace.config.agent_keys import TOOLS
from millrace.errors import ConfigError, bad_value
from millrace.ports import Agent, PolicySession
from millrace.rollout.episode import SingleTurn
from millrace.rollout.session import Limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from millrace.agents.conversation import Conversation
    from millrace.agents.endpoint import Endpoint
    from millrace.agents.programs import Program
    from millrace.agents.service import Service
    from millrace.environments.named import Maker
    from millrace.environments.task_tools import Row
    from millrace.environments.tools import FunctionTool

MODEL = "policy"
"""The policy's name at the endpoint."""

Note = Callable[[str], None]


def check_player(agents: AgentConfig) -> None:
    """Raise ConfigError if what plays cannot exist. This imports no code of the user's."""
    from millrace.data.user_code import check_file, check_name

    if agents.program:
        check_name("agents.program", agents.program)
    for key, suffixes, other in (
        ("tools", (".py",), "tool_config_path"),
        ("tool_config_path", (".yaml", ".yml"), "tools"),
    ):
        if (path := getattr(agents, key)) and not path.endswith(suffixes):
            rule = f"must be a file {' or '.join(suffixes)}"
            raise bad_value(f"agents.{key}", path, rule, f"agents.{other} for the other form")
    if agents.tools:
        check_file("agents.tools", agents.tools, agents.tools)
    if agents.tool_config_path:
        _forms().entries_of(agents.tool_config_path)
    if agents.command:
        from millrace.agents.process import argv_of

        argv_of(agents.command, agents.env)
    if agents.environment:
        from millrace.environments.named import check_environment

        check_environment(agents.environment)


def row_check(agents: AgentConfig) -> Callable[[Row, str], None] | None:
    """Return the check of the columns by which a row chooses its tools, or None without tools.

    The check raises DataError. It loads the tools at the first row that has such a column.
    """
    if agents.agent_kind not in TOOLS:
        return None
    from millrace.environments.task_tools import COLUMNS, column, selection

    tools = cache(partial(_tools, agents))

    def check(row: Row, where: str) -> None:
        if all(column(row, name) is None for name in COLUMNS):
            return
        own, shared = tools()
        selection(row, where, [*(own.names if own else ()), *(tool.name for tool in shared)])
        if own is not None:
            own.options(row, where)

    return check


def _forms() -> Any:
    """Return the module that reads tools in verl's form."""
    return plugins.load("the form of agents.tools", "verl", "tools")


def _tools(agents: AgentConfig) -> tuple[Any, list[FunctionTool]]:
    """Load the tools of agents.tool_config_path and agents.tools. Raises ConfigError."""
    own = _forms().ToolConfig(agents.tool_config_path) if agents.tool_config_path else None
    return own, _forms().load_function_tools(agents.tools) if agents.tools else []


def limits_of(agents: AgentConfig, rollout: RolloutConfig) -> Limits:
    """Return the limits of an episode. The keys' 0 is no limit."""
    if not agents.agent_kind:
        return Limits()
    return Limits(
        max_len=rollout.max_len,
        max_turns=agents.max_turns or None,
        max_tokens_per_turn=agents.max_tokens_per_turn or None,
        max_episode_tokens=agents.max_episode_tokens or None,
    )


def template_lines(agents: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what the chat template cannot do. Raises ConfigError if the run needs it."""
    from millrace.agents.template import check_template
    from millrace.environments.named import OWN

    report = check_template(tokenizer)
    own = OWN.get(agents.environment)
    if agents.agent_kind in TOOLS or (own is not None and own.tools):
        report.require_tools()
        report.require_format(agents.tool_format)
    if agents.tool_format == "line":  # demonstrations teach these calls; no template shows them
        report = replace(report, tools=True)
    lines = [*report.refusals, report.unread_calls(agents.tool_format)]
    return [f"chat template: {line}" for line in lines if line]


def described(agents: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Return who plays, the limits of an episode, and what the chat template supports."""
    from millrace.agents.template import check_template

    names = ["max_turns", "max_tokens_per_turn", "max_episode_tokens"]
    seconds = ["deadline_s", "turn_deadline_s"] if agents.served else ["tool_deadline_s"]
    found = [(f"agents.{agents.agent_kind}", str(getattr(agents, agents.agent_kind)))]
    found += [(f"agents.{name}", str(getattr(agents, name) or "no limit")) for name in names]
    found += [(f"agents.{name}", f"{getattr(agents, name):g}") for name in seconds]
    found += [("agents.retries", str(agents.retries))]
    return found + [("chat template", line) for line in check_template(tokenizer).lines()]


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
    if not agents.agent_kind:
        yield SingleTurn()
        return
    from millrace.agents.conversation import Conversation
    from millrace.agents.parse import tool_format
    from millrace.agents.render import Renderer

    for line in template_lines(agents, tokenizer):
        note(line)
    converse = partial(
        Conversation,
        renderer=Renderer(tokenizer),
        tool_format=tool_format(agents.tool_format),
        history=agents.history,
        main_models=agents.train_models,
    )
    playing = _play(agents, tokenizer, converse)
    serving = _serve(agents, rollout, converse, folder, note)
    async with serving if agents.served else playing as agent:
        yield agent


@asynccontextmanager
async def _play(
    agents: AgentConfig,
    tokenizer: PreTrainedTokenizerBase,
    converse: Callable[[PolicySession], Conversation],
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
    maker = await _environments(agents)
    try:
        yield ChatAgent(maker.make, converse, options)
    finally:
        await maker.close()


async def _environments(agents: AgentConfig) -> Maker:
    """Return the maker of an episode's environment."""
    from millrace.environments.named import OWN, Maker, check_server, environment_maker
    from millrace.environments.task_tools import TaskWithTools

    if agents.agent_kind in TOOLS:
        own, shared = _tools(agents)
        return Maker(lambda _: TaskWithTools(lambda p: [*(own(p) if own else ()), *shared]))
    from millrace.tools.python_tool import PythonTool
    from millrace.tools.sandbox import Sandbox, SandboxRefused

    sandbox = Sandbox(agents.sandbox)
    if agents.environment in OWN and OWN[agents.environment].sandboxed:
        try:
            await sandbox.check()
        except SandboxRefused as refused:
            rule = f"the environment {agents.environment} cannot run: {refused}"
            raise ConfigError(f"agents.sandbox = {agents.sandbox!r}: {rule}") from refused
    maker = environment_maker(
        agents.environment,
        deadline_s=agents.tool_deadline_s,
        sandbox=sandbox,
        tool=lambda: PythonTool(sandbox),
    )
    await check_server(maker, agents.environment)
    return maker


@asynccontextmanager
async def _serve(
    agents: AgentConfig,
    rollout: RolloutConfig,
    converse: Callable[[PolicySession], Conversation],
    folder: Path,
    note: Note,
) -> AsyncIterator[Agent]:
    """Yield the agent of a program, and serve it for as long."""
    from millrace.agents.endpoint import Endpoint
    from millrace.agents.live import ServiceOptions
    from millrace.agents.programs import ProgramAgent
    from millrace.agents.remote import RemoteProgram
    from millrace.agents.service import Service

    service = Service(
        ServiceOptions(
            model=MODEL,
            max_model_len=rollout.max_len,
            temperature=rollout.temperature,
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
    from millrace.agents.command import CommandProgram, WorkerProgram
    from millrace.agents.function import FunctionProgram
    from millrace.agents.process import Launcher
    from millrace.agents.remote import RemoteProgram

    if agents.program:
        return FunctionProgram(agents.program, service, note)
    if agents.command:
        launcher = Launcher(agents.command, lambda: endpoint.url, agents.env)
        if agents.workers:
            return WorkerProgram(launcher, agents.workers, agents.max_concurrent or agents.workers)
        return CommandProgram(launcher, agents.max_concurrent or 2 * (os.cpu_count() or 1))
    program = RemoteProgram(agents.lease_s)
    service.claims = program
    return program
