"""From drawn text to a message: thinking, content and tool calls. A broken call stays text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.agents.request import ToolSchema
from millrace.errors import bad_value


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool, as the policy wrote it."""

    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The tool calls, text and errors that a format found."""

    content: str
    calls: tuple[Call, ...] = ()
    broken: int = 0
    """Calls that are not valid. Their text is in `content`."""


class ToolFormat(Protocol):
    """How the policy writes tool calls. A format only reads: drawn tokens stay what they are."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the special tokens that the format reads. Others are not in the text."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed: ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """A format with a pattern for each call. `read` raises ValueError if a call is broken."""

    pattern: re.Pattern[str]
    read: Callable[[str, Sequence[ToolSchema]], list[Call]]
    opening: str
    """What begins a call. Where it is left after all blocks are read, a call has no end."""
    marks: tuple[str, ...] = ()
    bare: re.Pattern[str] | None = None
    """The pattern of calls in a text where `pattern` finds nothing."""
    closing: str = ""
    """What ends each call. No call is after the last one, so nobody looks for it there again."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        calls: list[Call] = []
        kept: list[str] = []
        broken = end = 0
        last = text.rfind(self.closing) + len(self.closing)
        blocks = [*self.pattern.finditer(text, 0, last)]
        if not blocks and self.bare is not None:
            blocks = [*self.bare.finditer(text)]
        for block in blocks:
            kept.append(text[end : block.start()])
            end = block.end()
            try:
                calls += self.read(block[1], tools)
            except (ValueError, RecursionError):
                kept.append(block[0])
                broken += 1
        broken += self.opening in text[end:]
        content = "".join([*kept, text[end:]])
        return Parsed(content.strip() if calls else content, tuple(calls), broken)


@dataclass(frozen=True, slots=True)
class Json:
    """The whole text is one call or a list of calls, after an optional mark."""

    marks: tuple[str, ...] = ("[TOOL_CALLS]", "<|python_tag|>")

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        found = next((m for m in self.marks if m in text), None)
        before, _, body = text.partition(found) if found else ("", "", text)
        begins = body.lstrip()[:1] in ("{", "[")
        try:
            if begins:
                return Parsed(before.strip(), tuple(_json_calls(body, tools)))
        except (ValueError, RecursionError):
            pass
        meant = found is not None or (begins and '"name"' in body)
        return Parsed(text, broken=int(meant))


def _json_calls(text: str, tools: Sequence[ToolSchema] = ()) -> list[Call]:
    """Return the calls in a JSON text: one object, a list, or objects separated by `;`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = [json.loads(piece) for piece in re.split(r"(?<=\})\s*;\s*(?=\{)", text)]
    return [_call(v) for v in (value if isinstance(value, list) and value else [value])]


def _call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call is an object with a name")
    if not value.keys() & {"arguments", "parameters"} and value.keys() - {"name", "id", "type"}:
        raise ValueError("the arguments have another name")  # without them, the call is another one
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return _made(value["name"], arguments)


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _made(name: str, arguments: dict[str, Any]) -> Call:
    """Return a call. Raises ValueError for infinity, NaN, broken Unicode and what JSON lacks."""
    try:
        text = _JSON.encode(arguments)
    except TypeError as error:
        raise ValueError(str(error)) from error
    (name + text).encode()
    return Call(name, text)


_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)
"""A value ends at its closing tag. Without one, it ends at the next value, or at the function's end.

vLLM and verl read calls without closing tags, several in a block, and calls without a block.
"""


def _qwen_calls(text: str, tools: Sequence[ToolSchema]) -> list[Call]:
    """Return the calls of a block in Qwen3-Coder's XML form."""
    calls = []
    for function, body in _FUNCTION.findall(text):
        name = _bare_name(function)
        types = _parameters(name, tools)
        pairs = ((_bare_name(key), value) for key, value in _PARAMETER.findall(body))
        # The form puts a line break before and after each value.
        values = {key: value.removeprefix("\n").removesuffix("\n") for key, value in pairs}
        calls.append(_made(name, {key: _typed(v, types.get(key)) for key, v in values.items()}))
    if not calls:
        raise ValueError("no function")
    return calls


def _bare_name(text: str) -> str:
    """Return a name without the space and the quotes around it."""
    return text.strip().strip("\"'")


def _parameters(name: str, tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """Return the properties of a tool's parameters."""
    functions = (t.get("function", {}) for t in tools)
    schema: dict[str, Any] = next((f for f in functions if f.get("name") == name), {})
    return dict((schema.get("parameters") or {}).get("properties") or {})


def _typed(value: str, schema: Any) -> Any:
    """Return text as a value of one of the schema's types. Raises ValueError if it is none.

    Values in Python's spelling are read too, and null is a value of every type, as in vLLM.
    """
    kinds = _kinds(schema)
    if (word := value.strip().lower()) in ("null", "none"):
        return None if word == "null" or kinds != {"string"} else value
    for kind in sorted(kinds, key=_ORDER.index):
        with suppress(ValueError):
            return _as(kind, value)
    raise ValueError(f"no {' or '.join(sorted(kinds))}")


_PYTHON = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
}
"""Types with Python's names, which tools of users have, and which vLLM and verl read too."""
_ORDER = ("boolean", "integer", "number", "array", "object", "any", "string")


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema allows, without null. Without a type, it is a text."""
    if not isinstance(schema, dict):
        return {"string"}
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else named or ()
    kinds = {_PYTHON.get(kind, kind) for kind in listed if isinstance(kind, str)}
    for word in ("anyOf", "oneOf"):
        for option in schema.get(word) or ():
            kinds |= _kinds(option)
    if not kinds and any(not isinstance(value, str) for value in schema.get("enum") or ()):
        return {"any"}
    return {k if k in _ORDER else "any" for k in kinds - {"null"}} or {"string"}


def _as(kind: str, value: str) -> Any:
    """Return text as a value of a type. Raises ValueError."""
    if kind == "string":
        return value
    if kind == "boolean":
        if (word := value.strip().lower()) not in ("true", "false"):
            raise ValueError("no boolean")
        return word == "true"
    if kind in ("integer", "number"):
        number = float(value)
        if kind == "integer" and not number.is_integer():
            raise ValueError("a fraction")
        whole = re.fullmatch(r"\s*[-+]?\d+\s*", value)
        return int(value) if whole else int(number) if kind == "integer" else number
    try:
        return json.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value.strip())
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(f"no {kind}") from error


def _line_calls(text: str, tools: Sequence[ToolSchema]) -> list[Call]:
    """Return the call of `?7.` or `?name 7.`. Values go to the parameters in their order.

    Without a name, the call is of the only tool.
    """
    names = [str(t.get("function", {}).get("name")) for t in tools]
    words = text.split(" ") if text else []
    if words and words[0] in names:
        name, words = words[0], words[1:]
    elif len(names) == 1:
        name = names[0]
    else:
        raise ValueError("no tool is named")
    types = _parameters(name, tools)
    if len(words) != len(types) or "" in words:
        raise ValueError(f"{name} has {len(types)} parameters")
    return [_made(name, {k: _typed(w, types[k]) for k, w in zip(types, words, strict=True)})]


FORMATS: dict[str, ToolFormat] = {
    "hermes": Blocks(re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL), _json_calls,
                     "<tool_call>", ("<tool_call>", "</tool_call>"), closing="</tool_call>"),
    "json": Json(),
    "qwen": Blocks(re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL), _qwen_calls,
                   "<tool_call>", ("<tool_call>", "</tool_call>"),
                   re.compile(r"(<function=.*?(?:</function>|\Z))(?:\s*</tool_call>)?", re.DOTALL)),
    "line": Blocks(re.compile(r"\?([^?.]*)\."), _line_calls, "?"),
}  # fmt: skip
"""The formats by name, for agents.tool_format."""


def tool_format(name: str) -> ToolFormat:
    """Return a format by name. Raises ConfigError if there is none of this name."""
    if name not in FORMATS:
        rule = f"the formats are {', '.join(FORMATS)}"
        raise bad_value("agents.tool_format", name, rule, "the one that the model was trained on")
    return FORMATS[name]


def split_thinking(text: str, *, opened: bool) -> tuple[str, str]:
    """Return (thinking, the rest). `opened`: the prompt ends inside of <think>.

    Thinking without an end is all of the text.
    """
    head = text.lstrip()
    if not opened and not head.startswith("<think>"):
        return "", text
    thinking, found, rest = head.removeprefix("<think>").partition("</think>")
    return thinking.strip("\n"), rest.lstrip("\n") if found else ""
