"""Messages and tools to tokens through the chat template, and the bridge between two requests.

The bridge extends drawn tokens by what the template writes after them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from millrace.agents.memo import Memo
from millrace.agents.request import RequestError, ToolSchema
from millrace.data import template
from millrace.types import Message, Tokens, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoder:
    """A tokenizer. `source` is the text of its chat template.

    Marks replace the text of control tokens in messages. They become plain tokens again, so the
    template's own control tokens are the only ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {i: t.content for i, t in added.items() if t.special}
        self._id: dict[str, int] = {t.content: i for i, t in added.items()}
        written = {t.content for t in added.values() if len(t.content) > 1 and t.content in source}
        self._controls = sorted({*self.special.values(), *written, "\ue000"}, key=len)[::-1]
        self._number = {text: n for n, text in enumerate(self._controls)}
        self.any = _either(self._controls)
        """Finds the text of each control token."""
        self._specials = _either(["\ue000", *self.special.values()])
        self._encoded = Memo(self._encode)
        self._decoded = Memo(self._decode)

    def protect(self, value: Any, ours: bool = False) -> Any:
        """Return a value in which marks replace the text of control tokens.

        In `ours`, what the policy wrote, these are the special tokens alone.
        """
        if isinstance(value, str):
            safe = value
            if not value.isascii():
                safe = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            pattern = self._specials if ours else self.any
            return pattern.sub(lambda m: f"\ue000{self._number[m[0]]}\ue001", safe)
        if isinstance(value, Mapping):
            return {self.protect(k, ours): self.protect(v, ours) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(v, ours) for v in value]
        return value

    def tokens(self, text: str, after: str | None = None) -> Tokens:
        """Return the tokens of a text with marks, as they are behind the control token `after`."""
        return self._encoded(text, after)[:]

    def decode(self, tokens: Tokens, marks: Sequence[str] = ()) -> str:
        """Return the text of drawn tokens. Of the special ones, only `marks` are in it."""
        return self._decoded(tuple(tokens), tuple(marks))

    def _decode(self, tokens: Sequence[int], marks: Sequence[str]) -> str:
        kept = [t for t in tokens if t not in self.special or self.special[t] in marks]
        return str(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False))

    def _encode(self, text: str, after: str | None) -> Tokens:
        tokens = tokens_of()
        for n, piece in enumerate(re.split("\ue000(\\d+)\ue001", text)):
            if n % 2 == 0:
                tokens.extend(self._behind(after, piece))
                after = self._tokenizer.eos_token
                continue
            control = self._controls[int(piece)]
            for part in (control[:1], control[1:]):
                tokens.extend(self._behind(after, part, split_special_tokens=True))
        return tokens

    def _behind(self, mark: str | None, text: str, **options: Any) -> list[int]:
        """Return the tokens of `text` behind a mark, without those of the mark.

        Some tokenizers write a blank at the start of a text. A mark before the text avoids it.
        """
        if not text:
            return []
        encode = self._tokenizer.encode
        if mark in self._id and not options:
            ids = encode(f"{mark}{text}", add_special_tokens=False)
            if ids[:1] == [self._id[str(mark)]]:
                return list(ids[1:])
        return list(encode(text, add_special_tokens=False, **options))


def _either(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len)[::-1]))


Messages = Sequence[Message]

U, A, V = "\ue002u", "\ue002a", "\ue002v"
"""Contents of probes. No template and no message has them."""
USER: Message = {"role": "user", "content": U}
ANSWER: Message = {"role": "assistant", "content": A}
CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "probe", "arguments": f'{{"key": "{A}"}}'},
}
_CHANGES = re.compile(r"\b(?:strftime_now|random|lipsum)\b")
"""What a template may write that differs from call to call."""


@dataclass(frozen=True, slots=True)
class Extension:
    """The tokens between a drawn answer and the next one."""

    tokens: Tokens
    exact: bool
    """False: the template rewrites history, so a short history stood in for the true one."""


class Renderer:
    """A tokenizer and its chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._options = dict(options or {})  # such as enable_thinking, for the template
        source = tokenizer.chat_template
        if not isinstance(source, str):
            source = tokenizer.get_chat_template()
        self._source = source
        self._encoder = Encoder(tokenizer, source)
        self.special = self._encoder.special
        self.decode = self._encoder.decode
        self._tail = re.compile(rf"(?:{self._encoder.any.pattern})?\s*\Z")
        self._safe = Memo(self._encoder.protect)
        self._made = Memo(self._message)
        self._written = self._write if _CHANGES.search(source) else Memo(self._write)
        self._ended: dict[str, re.Pattern[str]] = {}

    def opening(self, messages: Messages, tools: Sequence[ToolSchema] = ()) -> Tokens:
        """Return the tokens of a whole conversation, with the head of the next answer.

        Raise RequestError if the template refuses the conversation.
        """
        self._check(messages)
        return self._encoder.tokens(self._text(messages, tools, head=True))

    def bridge(
        self,
        known: Messages,
        new: Messages,
        tools: Sequence[ToolSchema] = (),
        *,
        ended: str | None,
        keep: bool = True,
    ) -> Extension | None:
        """Return the tokens that follow the drawn answer, which is the last message of `known`.

        `ended` is the text of the token that ended the answer. None: a limit or a stop string
        ended it, so the template's closing mark is part of the result.

        The result is None if the template rewrites history. With `keep`, the new messages are then
        rendered after a short history in place of the true one, and None means that the template
        refuses that too.
        """
        self._check(new)
        suffix = self._difference(known, new, tools, ended)
        if suffix is not None and not keep and self._forgets(known, tools):
            suffix = None
        exact = suffix is not None
        if suffix is None and keep:
            suffix = self._after_short(known[-1], new, ended)
        return (
            None if suffix is None else Extension(self._encoder.tokens(suffix, after=ended), exact)
        )

    @cached_property
    def twin(self) -> Renderer:
        """A copy for other threads. A tokenizer has settings that each call may change."""
        return Renderer(deepcopy(self.tokenizer), self._options)

    def encode(self, text: str) -> Tokens:
        """Return the tokens of plain text. The text of a control token stays text."""
        return self._encoder.tokens(self._encoder.protect(text))

    def mark(self, token: int) -> str:
        """Return the text of one token, also of a special one."""
        if token in self.special:
            return self.special[token]
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    @cached_property
    def thinks(self) -> bool:
        """Whether the model thinks between <think> and </think>."""
        return "</think>" in self._source

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the head of an answer ends inside of <think>."""
        return self._text([USER], (), head=True).rstrip().endswith("<think>")

    @cached_property
    def refused(self) -> dict[str, str]:
        """The roles that the template refuses or drops silently, each with the reason."""
        call: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        probes: dict[str, list[Message]] = {
            "system": [{"role": "system", "content": V}, USER],
            "user": [USER | {"content": V}],
            "assistant": [USER, {"role": "assistant", "content": V}],
            "tool": [USER, call, {"role": "tool", "content": V, "tool_call_id": CALL["id"]}],
        }
        found: dict[str, str] = {}
        for role, messages in probes.items():
            try:
                if V not in self._text(messages, (), head=False):
                    found[role] = "the chat template drops the text of such messages"
            except RequestError as error:
                found[role] = str(error)
        return found

    def answer(self, message: Message, tools: Sequence[ToolSchema] = ()) -> Tokens:
        """Return the tokens with which the template writes an answer. Raise RequestError."""
        whole = self._text([USER, message], tools, head=False)
        head = self._text([USER], tools, head=True)
        pairs = enumerate(zip(whole, head, strict=False))
        common = next((n for n, (one, other) in pairs if one != other), len(head))
        return self._encoder.tokens(whole[common:])

    def shows(self, messages: Messages, text: str, tools: Sequence[ToolSchema] = ()) -> bool:
        """Whether the template writes `text`, which is in `messages` or `tools`."""
        try:
            return text in self._text(messages, tools, head=False)
        except RequestError:
            return False

    def _check(self, messages: Messages) -> None:
        """Raise RequestError if the template would drop or refuse the text of a role."""
        for message in messages:
            if why := self.refused.get(message["role"]):
                raise RequestError(f"a message of role {message['role']!r}: {why}")

    def _difference(
        self, known: Messages, new: Messages, tools: Sequence[ToolSchema], ended: str | None
    ) -> str | None:
        """Return what the template writes after the last message of `known`, or None."""
        try:
            before = self._text(known, tools, head=False)
            whole = self._text([*known, *new], tools, head=True)
        except RequestError:
            return None
        length = len(before) - len(self._closing(before))
        return self._open(whole[length:], ended) if whole[:length] == before[:length] else None

    def _open(self, rest: str, ended: str | None) -> str:
        """Return a text that begins with a closing mark, without it if the answer has its own."""
        if ended is None:
            return rest
        if ended not in self._ended:
            marks = "|".join(re.escape(m) for m in (ended, *self._ends))
            self._ended[ended] = re.compile(rf"\s*(?:{marks})")
        found = self._ended[ended].match(rest)
        return rest[found.end() :] if found else rest

    def _after_short(self, answer: Message, new: Messages, ended: str | None) -> str | None:
        """Return what the template writes after a short history that ends like the true one."""
        calls = answer.get("tool_calls") or []
        if new and new[0]["role"] == "tool":
            for some in (calls, calls[:1]) if len(calls) > 1 else (calls,):
                short = [USER, {"role": "assistant", "content": "", "tool_calls": list(some)}]
                found = self._difference(short, new, (), ended) if some else None
                if found is not None:
                    return found
        try:
            _, mark, rest = self._text([USER, ANSWER, *new], (), head=True).partition(A)
        except RequestError:
            return None
        return self._open(rest, ended) if mark and U not in rest else None

    def _closing(self, text: str) -> str:
        """Return what the template writes at the end of an answer."""
        if text.endswith(self._close):
            return self._close
        found = self._tail.search(text)
        return found[0] if found else ""

    @cached_property
    def _close(self) -> str:
        return self._text([USER, ANSWER], (), head=False).rpartition(A)[2]

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The mark that ends messages of users and of the policy alike, if there is one."""
        try:
            text = self._text([USER, ANSWER, USER | {"content": V}], (), head=True)
        except RequestError:
            return ()
        mark = re.compile(rf"\s*({self._encoder.any.pattern})")
        found = [mark.match(text.partition(probe)[2]) for probe in (U, A)]
        names = {m[1] if m else None for m in found}
        return tuple(n for n in names if n) if len(names) == 1 else ()

    def _forgets(self, known: Messages, tools: Sequence[ToolSchema]) -> bool:
        """Whether the template leaves out the thinking of the last message."""
        thought = str(known[-1].get("reasoning_content") or "").strip()
        return bool(thought) and thought not in self._text(known, tools, head=False)

    @cached_property
    def arguments_are_text(self) -> bool:
        """Whether the template wants the arguments of a call as a JSON string."""
        call = CALL | {"function": {"name": "probe", "arguments": {U: A}}}
        asked: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self._render([USER, asked], ())
        except RequestError:
            return True
        return f"'{U}'" in text  # Python's own form of a dict

    def _text(self, messages: Messages, tools: Sequence[ToolSchema], *, head: bool) -> str:
        """Return the template's text. Control tokens' text in messages is replaced by marks."""
        return self._written(list(messages), list(tools), head)

    def _write(self, messages: Messages, tools: Sequence[ToolSchema], head: bool) -> str:
        names: dict[str, str] = {}
        ready = [self._ready(m, names) for m in messages]
        return self._render(ready, self._safe(list(tools)) if tools else (), head=head)

    def _render(self, messages: Messages, tools: Sequence[ToolSchema], head: bool = False) -> str:
        try:
            return template.render(
                self.tokenizer, messages, tools, head=head, options=self._options
            )
        except template.Refused as error:
            roles = ", ".join(m["role"] for m in messages[-6:])
            detail = f"the chat template refuses messages that end in {roles}: {error}"
            raise RequestError(detail) from error

    def _ready(self, message: Message, names: dict[str, str]) -> Message:
        """Return a message as templates want it: arguments as objects, results with a name."""
        if calls := message.get("tool_calls"):
            names.update({c["id"]: c["function"]["name"] for c in calls})
        if message["role"] == "tool" and "name" not in message:
            message = message | {"name": names.get(message.get("tool_call_id", ""), "")}
        return self._made(message)

    def _message(self, message: Message) -> Message:
        made: Message = self._encoder.protect(message, message["role"] == "assistant")
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [self._ready_call(c) for c in calls]
        return made

    def _ready_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if not self.arguments_are_text and isinstance(function["arguments"], str):
            try:
                value = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                value = function["arguments"]
            function["arguments"] = value if isinstance(value, dict) else {"arguments": value}
        return dict(self._encoder.protect(call | {"function": function}, ours=True))
