"""The conversation of one task: its messages, tools, and one answer. Also verl's columns for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from millrace.environments.chat import OneAnswer, Start, Tool
from millrace.environments.prompts import messages_of
from millrace.errors import bad_row
from millrace.types import Prompt

_AGENTS = {"tool_agent": True, "single_turn_agent": False}
"""verl's agents, and whether they have tools."""
COLUMNS = ("agent_name", "tool_selection", "tools_kwargs")
"""The columns by which a row chooses its tools."""


class Row(Protocol):
    """A row of the data, before or after its prompt is rendered."""

    @property
    def extra_info(self) -> dict[str, Any]: ...

    @property
    def columns(self) -> dict[str, Any]: ...


def column(row: Row, name: str) -> Any:
    """Return a value of extra_info, or of a column of its own. None if there is none."""
    found = row.extra_info.get(name)
    return row.columns.get(name) if found is None else found


def selection(row: Row, where: str, known: Sequence[str]) -> Sequence[str]:
    """Return the tools that the row's columns `agent_name` and `tool_selection` allow.

    `known` has the names of all tools. Raises DataError for a name that does not exist.
    """
    agent = column(row, "agent_name")
    if agent is not None and agent not in _AGENTS:
        rule = f"the agents of rows are {', '.join(_AGENTS)}"
        raise bad_row(f"{where}, agent_name", agent, rule, "one of them, or no such column")
    if agent is not None and not _AGENTS[agent]:
        return ()
    names = column(row, "tool_selection")
    if names is None:
        return known
    if not isinstance(names, list) or any(name not in known for name in names):
        rule = f"must be a list of names of tools; these are {', '.join(known) or 'none'}"
        raise bad_row(f"{where}, tool_selection", names, rule, "correct the column")
    return names


def selected(prompt: Prompt, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools of an episode. Raises DataError as `selection` does."""
    known = {tool.name: tool for tool in tools}
    names = selection(prompt, f"row of prompt {prompt.index}", list(known))
    return tuple(known[name] for name in names)


class TaskWithTools(OneAnswer):
    """The environment of a task that the policy solves with tools. Its first answer ends it."""

    def __init__(self, tools: Callable[[Prompt], Sequence[Tool]]) -> None:
        self._tools = tools
        self._open: tuple[Tool, ...] = ()

    async def reset(self, task: Prompt) -> Start:
        self._open = selected(task, self._tools(task))
        return Start(messages_of(task), self._open)

    @property
    def counts(self) -> Mapping[str, float]:
        """Return what the tools counted, for the metrics."""
        totals: dict[str, float] = {}
        for tool in self._open:
            for name, value in getattr(tool, "counts", {}).items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    async def close(self) -> None:
        """Close the tools that have a state."""
        for tool in self._open:
            if (close := getattr(tool, "close", None)) is not None:
                await close()
