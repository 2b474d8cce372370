"""The check of a chat template before a run: what it supports, and the fix for what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from millrace.agents.parse import FORMATS, Call
from millrace.agents.render import ANSWER, CALL, USER, A, Messages, Renderer, V
from millrace.agents.request import RequestError, ToolSchema
from millrace.errors import bad_value
from millrace.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Bridge = Literal["exact", "short", "none"]
"""How drawn tokens are extended: by the true history, by a short one in its place, or never."""

_NAME, _JSON = "probe_tool", '{"x": "v"}'
_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_KEY = "model.path"


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The abilities of a model's chat template."""

    system: bool
    tools: bool
    """Whether the policy reads the schemas of tools."""
    tool_results: bool
    parallel_calls: bool
    """Whether a history with two calls in one message can be rendered."""
    thinking: Literal["none", "kept", "dropped"]
    """What becomes of earlier thinking at a new message of the user."""
    opens_thinking: bool
    """Whether the head of an answer ends inside of <think>."""
    user_bridge: Bridge
    tool_bridge: Bridge
    formats: tuple[str, ...] | None
    """The tool formats that read the template's own calls. None if it writes no calls."""

    @property
    def refusals(self) -> tuple[str, ...]:
        """Return what the template lacks, each with its fix."""
        found = []
        if not self.system:
            found.append("it refuses system messages. Fix: put them into the first user message")
        if not self.tool_results:
            found.append(
                "it has no place for tool results. Fix: send results as user messages,"
                " or set a chat template with tools in the model folder"
            )
        elif not self.tools:
            found.append(
                "it does not show tools to the policy. Fix: describe them in the first message,"
                " or set a chat template with tools in the model folder"
            )
        elif not self.parallel_calls:
            found.append(
                "it renders one tool call in each message. Fix: agents.max_parallel_calls=1."
                " Drawn calls are kept as tokens, but a rewritten history with two is refused"
            )
        for name, bridge in (("user messages", self.user_bridge), ("results", self.tool_bridge)):
            if bridge == "none" and (name != "results" or self.tool_results):
                found.append(
                    f"it cannot continue drawn tokens at {name}: each opens another thread."
                    " Fix: set a chat template that only appends"
                )
        return tuple(found)

    def require_tools(self) -> None:
        """Raise ConfigError if a policy with this template cannot use tools."""
        if not self.tool_results:
            rule = "agents with tools need a chat template with tool results"
            raise bad_value(_KEY, "its chat template", rule, self.refusals[-1].split("Fix: ")[-1])

    def unread_calls(self, tool_format: str) -> str:
        """Return why a tool format is wrong for this template, with the fix. Empty if it is not."""
        if self.formats is None or tool_format in self.formats:
            return ""
        rule = f"the chat template writes calls in a form that {tool_format} does not read"
        fix = " or ".join(f"agents.tool_format={name}" for name in self.formats)
        own = f"a chat template that writes calls as one of {', '.join(FORMATS)}, in model.path"
        return f"{rule}. Fix: {fix or own}"

    def require_format(self, tool_format: str) -> None:
        """Raise ConfigError if millrace could read no call of a policy with this template."""
        if why := self.unread_calls(tool_format):
            rule, _, fix = why.partition(". Fix: ")
            raise bad_value("agents.tool_format", tool_format, rule, fix)

    def lines(self) -> list[str]:
        """Return the report, one feature a line, for the dry run."""
        yes = {True: "yes", False: "no"}
        rows = [
            ("system messages", yes[self.system]),
            ("tools in the prompt", yes[self.tools]),
            ("tool results", yes[self.tool_results]),
            ("parallel calls", yes[self.parallel_calls]),
            (
                "tool calls",
                "none" if self.formats is None else ", ".join(self.formats) or "unknown",
            ),
            ("thinking", self.thinking),
            ("bridge at user messages", self.user_bridge),
            ("bridge at tool results", self.tool_bridge),
        ]
        return [*(f"{name}: {value}" for name, value in rows), *self.refusals]


def check_template(tokenizer: PreTrainedTokenizerBase) -> TemplateReport:
    """Return what the chat template of `tokenizer` supports.

    Raise ConfigError if there is none, or if it cannot render one message of a user.
    """
    fix = "a model folder with chat_template in tokenizer_config.json, or chat_template.jinja"
    if not tokenizer.chat_template:
        raise bad_value(_KEY, "no chat template", "agents need a chat template", fix)
    renderer = Renderer(tokenizer)
    if why := renderer.refused.get("user") or renderer.refused.get("assistant"):
        raise bad_value(_KEY, "its chat template", why, fix)
    return TemplateReport(
        system="system" not in renderer.refused,
        tools=renderer.shows([USER], _NAME, [_TOOL]),
        tool_results="tool" not in renderer.refused,
        parallel_calls=_parallel(renderer),
        thinking=_thinking(renderer),
        opens_thinking=renderer.opens_thinking,
        user_bridge=_bridge(renderer, [USER, ANSWER], [USER | {"content": V}]),
        tool_bridge=_bridge(renderer, [USER, _calls(1)], _results(1)),
        formats=_formats(renderer),
    )


def _formats(renderer: Renderer) -> tuple[str, ...] | None:
    call = {"id": CALL["id"], "type": "function", "function": {"name": _NAME, "arguments": _JSON}}
    try:
        tokens = renderer.answer(
            {"role": "assistant", "content": "", "tool_calls": [call]}, [_TOOL]
        )
    except RequestError:
        return None
    if _NAME not in renderer.decode(tokens):
        return None
    texts = {name: renderer.decode(tokens, form.marks) for name, form in FORMATS.items()}
    wanted = (Call(_NAME, _JSON),)
    return tuple(n for n, text in texts.items() if FORMATS[n].parse(text, [_TOOL]).calls == wanted)


def _calls(count: int) -> Message:
    calls = [CALL | {"id": f"abcdefgh{n}"} for n in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(count: int) -> list[Message]:
    ids = [f"abcdefgh{n}" for n in range(count)]
    return [{"role": "tool", "content": f"{V}{i}", "tool_call_id": i} for i in ids]


def _parallel(renderer: Renderer) -> bool:
    messages = [USER, _calls(2), *_results(2)]
    texts = [A, *(str(m["content"]) for m in messages[2:])]
    return "tool" not in renderer.refused and all(renderer.shows(messages, t) for t in texts)


def _thinking(renderer: Renderer) -> Literal["none", "kept", "dropped"]:
    if not renderer.thinks:
        return "none"
    answer = ANSWER | {"reasoning_content": V}
    return "kept" if renderer.shows([USER, answer, USER], V) else "dropped"


def _bridge(renderer: Renderer, known: Messages, new: Messages) -> Bridge:
    try:
        found = renderer.bridge(known, new, ended=None)
    except RequestError:
        return "none"
    return "none" if found is None else "exact" if found.exact else "short"
