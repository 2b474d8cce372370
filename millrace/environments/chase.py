"""The environment of the task `chase`: a table that the policy can read through a tool only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.environments.chat import OneAnswer, Start, ToolError
from millrace.environments.prompts import messages_of
from millrace.errors import bad_row
from millrace.types import Prompt, Score


class Lookup:
    """Reads one entry of the table."""

    name = "lookup"
    schema: dict[str, Any] = {  # noqa: RUF012 - nobody changes it
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Return the entry of the hidden table at a position.",
            "parameters": {
                "type": "object",
                "properties": {"position": {"type": "integer", "description": "from 0 to 9"}},
                "required": ["position"],
            },
        },
    }

    def __init__(self, table: str) -> None:
        self._table = table

    async def call(self, arguments: Mapping[str, Any]) -> str:
        position = arguments.get("position")
        if not isinstance(position, int) or not 0 <= position < len(self._table):
            raise ToolError("the position must be a number from 0 to 9")
        return self._table[position]


class Chase(OneAnswer):
    """One problem. The first message without a call is the answer, such as `=3`."""

    _truth: str | None = None

    async def reset(self, task: Prompt) -> Start:
        table = task.extra_info.get("table")
        if not isinstance(table, str) or len(table) != 10 or not table.isdecimal():
            rule = "the environment chase needs a table of ten digits"
            where = f"row of prompt {task.index}, extra_info.table"
            raise bad_row(where, table, rule, 'data.train_files=["task:chase"]')
        self._truth = str(task.ground_truth)
        return Start(messages_of(task), (Lookup(table),))

    async def score(self) -> Score | None:
        """Return 1 for the right answer, and 0 for a wrong one or none."""
        right = self.answer == f"={self._truth}"
        return Score(float(right), answer=(self.answer or "").removeprefix("="))
