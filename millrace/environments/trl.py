"""TRL's environments and tools: a class with reset, methods as tools, and get_reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from millrace.data.user_code import failure
from millrace.environments.chat import OneAnswer, Start
from millrace.environments.prompts import messages_of
from millrace.environments.task_tools import selected
from millrace.environments.threads import in_thread
from millrace.environments.tools import FunctionTool, schema_of
from millrace.errors import EpisodeError, bad_value
from millrace.types import Prompt, Score

_OWN = ("reset", "get_reward")


class TrlEnvironment(OneAnswer):
    """An instance of `environment_factory=Class` for one episode. Its first answer ends it."""

    def __init__(self, instance: Any, tools: Sequence[FunctionTool]) -> None:
        self._instance = instance
        self._tools = tools

    async def reset(self, task: Prompt) -> Start:
        messages = list(messages_of(task))
        said = await _called(self._instance.reset, **_row(task))
        if said is not None:
            if not isinstance(said, str):
                detail = f"reset returned a {type(said).__name__}; return a string or None"
                raise EpisodeError("environment", detail)
            messages[-1] = messages[-1] | {"content": messages[-1]["content"] + said}
        return Start(tuple(messages), selected(task, self._tools))

    async def score(self) -> Score | None:
        if not hasattr(self._instance, "get_reward"):
            return None
        value = await _called(self._instance.get_reward)
        return None if value is None else Score(float(value))

    async def close(self) -> None:
        if callable(close := getattr(self._instance, "_close", None)):
            await _called(close)


class TrlFactory:
    """Makes an environment for each episode. The tools' schemas are read once."""

    def __init__(
        self, kind: Callable[[], Any], functions: Sequence[Callable[..., Any]] = ()
    ) -> None:
        """`functions` are further tools, as TRL's `tools=`. Raises ConfigError."""
        self._kind = kind
        self._functions = [FunctionTool(f) for f in functions]
        name = getattr(kind, "__name__", repr(kind))
        try:
            probe = kind()
        except Exception as error:  # the user's own constructor
            rule = f"it cannot be made: {failure(error)}"
            fix = "a constructor without arguments: reset(self, **row) gets the row"
            raise bad_value("agents.environment", name, rule, fix) from error
        if not callable(getattr(probe, "reset", None)):
            raise bad_value("agents.environment", name, "has no method reset", "reset(self, **row)")
        members = inspect.getmembers(type(probe), predicate=inspect.isfunction)
        names = [n for n, _ in members if n not in _OWN and not n.startswith("_")]
        self._schemas = {n: schema_of(getattr(probe, n)) for n in names}

    def __call__(self, prompt: Prompt) -> TrlEnvironment:
        instance = self._kind()
        methods = [FunctionTool(getattr(instance, n), s) for n, s in self._schemas.items()]
        return TrlEnvironment(instance, [*self._functions, *methods])


def _row(task: Prompt) -> dict[str, Any]:
    """Return the row's columns for `reset`, as TRL gives them."""
    known = {"data_source": task.data_source, "ground_truth": task.ground_truth}
    row = known | {"extra_info": task.extra_info} | task.extra_info | task.columns
    return row | {"prompt": list(messages_of(task))}


async def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await in_thread(function, **arguments)
