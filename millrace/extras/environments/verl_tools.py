"""verl's tools: the YAML of classes with create, execute and release, and decorated functions.

The user's files import verl. Where verl is not installed, stand-ins of its few words take its
place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from millrace.data.spec import nearest
from millrace.data.user_code import check_file, failure, load, load_module, stand_in
from millrace.environments.chat import Tool
from millrace.environments.task_tools import Row, column
from millrace.environments.threads import RAISED
from millrace.environments.tools import FunctionTool, text_of
from millrace.errors import EpisodeError, bad_row, bad_value
from millrace.types import Prompt

_KEY, _CONFIG_KEY = "agents.tools", "agents.tool_config_path"
_ENTRY = ("class_name", "config", "tool_schema")
_PARTS = ("create_kwargs", "execute_kwargs", "release_kwargs", "calc_reward_kwargs")


class Schema(SimpleNamespace):
    """A tool's schema as verl's classes read it: by attributes, or as a dict by model_dump."""

    def model_dump(self, **options: Any) -> Any:
        return json.loads(json.dumps(self, default=vars))

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        return json.loads(json.dumps(value), object_hook=lambda fields: cls(**fields))


class ToolResponse:
    """verl's result of a tool: text, and images and videos, which are refused."""

    def __init__(self, text: str | None = None, image: Any = None, video: Any = None) -> None:
        self.text, self.image, self.video = text, image, video


class BaseTool:
    """verl's base class of tools."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


class VerlTool:
    """One of verl's tools in one episode. It is created at the first call, and released once."""

    def __init__(self, tool: Any, options: Mapping[str, Any]) -> None:
        self._tool = tool
        self._options = {part: dict(options.get(part) or {}) for part in _PARTS}
        self._instance: str | None = None
        schema = tool.get_openai_tool_schema()
        if not isinstance(schema, Mapping):
            schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        self.schema: dict[str, Any] = dict(schema)
        self.name = self.schema["function"]["name"]
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"the name of a tool is a text, and not {self.name!r}")
        self.counts: dict[str, float] = {}
        """The rewards and metrics that calls returned. verl logs them too, and trains neither."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if self._instance is None:
            given = self._options["create_kwargs"]
            made = await self._tool.create(create_kwargs=given, **given)
            self._instance = made[0] if isinstance(made, tuple) else made
        answer = await self._tool.execute(
            self._instance, dict(arguments), **self._options["execute_kwargs"]
        )
        response, reward, metrics = answer
        self._add("reward", reward)
        for name, value in (metrics or {}).items():
            self._add(name, value)
        if isinstance(response, str):
            return response
        if getattr(response, "image", None) or getattr(response, "video", None):
            raise EpisodeError(
                "tool", f"{self.name} returned images or a video, and not text alone"
            )
        return text_of(response.text or "")

    async def close(self) -> None:
        if self._instance is not None:
            instance, self._instance = self._instance, None
            await self._tool.release(instance, **self._options["release_kwargs"])

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, int | float):
            key = f"tools/{self.name}/{name}"
            self.counts[key] = self.counts.get(key, 0.0) + float(value)


def entries_of(path: str, key: str = _CONFIG_KEY) -> list[dict[str, Any]]:
    """Return the tools of verl's tool YAML as they are written. Raises ConfigError."""
    import yaml

    fix, file = "the tool YAML of verl", Path(path).expanduser()
    if not file.is_file():
        raise bad_value(key, path, f"no such file (from {Path.cwd()})", fix)
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8
        raise bad_value(key, path, f"cannot be read: {' '.join(str(error).split())}", fix) from None
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        rule = "must have a list `tools` of {class_name, config, tool_schema}"
        raise bad_value(key, path, rule, fix)
    for n, entry in enumerate(entries):
        name = entry.get("class_name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name.partition(".")[2]:
            raise bad_value(key, path, f"tools[{n}] has no class_name", "class_name: module.Class")
        if unknown := sorted(map(str, entry.keys() - set(_ENTRY))):
            rule = f"tools[{n}] has the key {unknown[0]}; the keys are {', '.join(_ENTRY)}"
            raise bad_value(key, path, rule, nearest(unknown[0], _ENTRY))
        if not isinstance(entry.get("config") or {}, dict):
            raise bad_value(key, path, f"tools[{n}].config must be a mapping", fix)
    return entries


class ToolConfig:
    """The tools of verl's tool YAML. A call returns those of an episode, made anew."""

    def __init__(self, path: str) -> None:
        """Load the classes. Raises ConfigError."""
        self._path = path
        self._made = [_tool(path, n, entry) for n, entry in enumerate(entries_of(path))]
        self.names = [VerlTool(tool, {}).name for tool in self._made]
        if len(set(self.names)) < len(self.names):
            rule = f"has two tools of one name: {', '.join(self.names)}"
            raise bad_value(_CONFIG_KEY, path, rule, "other names")

    def __call__(self, prompt: Prompt) -> list[Tool]:
        given = self.options(prompt, f"row of prompt {prompt.index}")
        pairs = zip(self._made, self.names, strict=True)
        return [VerlTool(tool, given.get(name) or {}) for tool, name in pairs]

    def options(self, row: Row, where: str) -> Mapping[str, Any]:
        """Return the row's tools_kwargs: options by tool and by part. Raises DataError."""
        where = f"{where}, tools_kwargs"
        given = column(row, "tools_kwargs") or {}
        if not isinstance(given, Mapping):
            rule = "must be a dict by the names of tools"
            raise bad_row(where, given, rule, 'such as {"search": {"create_kwargs": {"top": 3}}}')
        for name, options in given.items():
            if options is None:  # Parquet gives each row the names of all rows.
                continue
            if name not in self.names:
                rule = f"names tools that {self._path} lacks; it has {', '.join(self.names)}"
                raise bad_row(where, name, rule, "correct the column or the file")
            if not isinstance(options, Mapping) or any(
                part not in _PARTS or not isinstance(value, Mapping | None)
                for part, value in options.items()
            ):
                rule = f"{name} must be a dict of dicts, and its parts are {', '.join(_PARTS)}"
                raise bad_row(where, options, rule, "correct the column")
        return given


def _tool(path: str, n: int, entry: dict[str, Any]) -> Any:
    name, config = entry["class_name"], dict(entry.get("config") or {})
    kind = config.get("type", "native")
    if kind != "native":
        rule = f"tools[{n}] is of type {kind}, and only native tools are read"
        raise bad_value(_CONFIG_KEY, path, rule, "type: native, or an MCP tool of millrace")
    module, _, attribute = name.rpartition(".")
    stand_in(_MODULES)
    kind_of = load(_CONFIG_KEY, f"{module}:{attribute}", kind="class")
    schema = entry.get("tool_schema")
    try:
        made = kind_of(config=config, tool_schema=Schema.model_validate(schema) if schema else None)
        VerlTool(made, {})
    except RAISED as error:
        rule = f"tools[{n}], {name}, cannot be made: {failure(error)}"
        fix = "a subclass of BaseTool, its config, and tool_schema in OpenAI's form"
        raise bad_value(_CONFIG_KEY, path, rule, fix) from error
    return made


def load_function_tools(path: str) -> list[FunctionTool]:
    """Return the functions of a file that verl's @function_tool marks. Raises ConfigError."""
    check_file(_KEY, path, path)
    stand_in(_MODULES)
    module = load_module(_KEY, path, path)
    tools = [v for v in vars(module).values() if isinstance(v, FunctionTool)]
    if not tools:
        raise bad_value(
            _KEY, path, "no function of it has @function_tool", "decorate the functions"
        )
    return tools


def function_tool(function: Any = None, *, schema: Any = None, **options: Any) -> Any:
    """Mark a function as a tool, as verl does."""
    if function is None:
        return lambda f: function_tool(f, schema=schema)
    return FunctionTool(function, schema)


def _traced(function: Any = None, **options: Any) -> Any:
    return function if callable(function) else lambda f: f


_SCHEMAS = dict.fromkeys(("OpenAIFunctionToolSchema", "OpenAIFunctionSchema"), Schema)
_MODULES: dict[str, dict[str, Any]] = {
    "verl.tools.base_tool": {"BaseTool": BaseTool},
    "verl.tools.schemas": {"ToolResponse": ToolResponse, **_SCHEMAS},
    "verl.tools.function_tool": {"function_tool": function_tool},
    "verl.utils.rollout_trace": {"rollout_trace_op": _traced},
}
"""The modules of verl that tools import, with their names."""
