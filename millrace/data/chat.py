"""Problems as tokens through the chat template. A user's text never becomes a control token."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from millrace.data import template
from millrace.data.rows import Messages, Problem
from millrace.data.tokenizer import TEMPLATES
from millrace.errors import DataError, bad_row
from millrace.types import Tokens, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_METHODS = (
    *("encode", "_encode_plus", "_batch_encode_plus", "set_truncation_and_padding"),
    *("_convert_encoding", "decode", "_decode", "backend_tokenizer"),
)
"""The methods of a tokenizer that turn text into tokens and back."""
_MARK = "\ue000"
_MARKUP = re.compile(
    r"<\|(?:im_start|start_header_id|user|assistant|system|turn|start|end_of_turn)\|?>"
    r"|<start_of_turn>|\[/?INST\]|<｜(?:User|Assistant)｜>"
)
"""Heads of turns in the families of chat templates."""
_FOREIGN = re.compile(r"<\|[A-Za-z_]+\|>")
"""The form of most special tokens. Those that the tokenizer has not are of another model."""
_QUOTE = r"""\\?["']"""
_MESSAGES = re.compile(
    rf"""\W*(?:array\(\[)?\{{(?=[^{{}}]*{_QUOTE}(?:content|value){_QUOTE}\s*:)[^{{}}]*"""
    rf"""{_QUOTE}(?:role|from){_QUOTE}\s*:\s*"""
    rf"""{_QUOTE}(?:system|developer|user|human|assistant|gpt|tool){_QUOTE}"""
)
"""The start of messages that were saved as text."""
_SWITCH = re.compile(r"/(?:no_think|think|system_override)\b")
"""Words that some templates take out of a message, because they mean the template."""
_ESCAPES = {i: repr(chr(i))[1:-1] for i in (*range(32), 127)}


def _lost(messages: Messages, text: str) -> dict[str, Any] | None:
    """Return the first message whose words a template leaves out. It may edit those of answers."""
    for message in messages:
        parts = _SWITCH.split(message["content"])
        edited = message["role"] in ("assistant", "tool")
        if not edited and any(part.strip() not in text for part in parts):
            return message
    return None


class Reading(StrEnum):
    """How a prompt becomes tokens."""

    MESSAGES = "messages through the chat template"
    CONTINUED = "messages that end with the assistant's words, which the policy continues"
    WRAPPED = "strings through the chat template, each as one message of the user"
    RENDERED = "strings with the template's markup already, read as they are"
    PLAIN = "strings as plain text"


@dataclass(frozen=True)
class Chat:
    """The pipeline's view of a tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    generation_prompt: bool = True
    """End with the head of the next message of the model. A reward model reads whole messages."""
    strings: Literal["auto", "always", "never"] = "never"
    """When a string is a message of the user. auto: if the template is not one of millrace."""

    def reading(self, problem: Problem) -> Reading:
        """Return how `render` reads the prompt."""
        if not isinstance(problem.prompt, str):
            begun = self.generation_prompt and template.begins_answer(problem.prompt)
            return Reading.CONTINUED if begun else Reading.MESSAGES
        if self._rendered(problem.prompt):
            return Reading.RENDERED
        own = self.template in TEMPLATES
        wraps = self.strings == "always" or (self.strings == "auto" and not own)
        return Reading.WRAPPED if wraps and self.template is not None else Reading.PLAIN

    def as_chat(self, problem: Problem) -> Problem:
        """Return the problem with its string prompt as messages, where strings are chat."""
        if self.reading(problem) is not Reading.WRAPPED:
            return problem
        messages = [{"role": "user", "content": problem.prompt}]
        return replace(problem, prompt=messages, columns=problem.columns | {"prompt": messages})

    def described(self, readings: Mapping[Reading, int]) -> str:
        """Return one line on how prompts are read. It is empty if all of them are messages."""
        if not set(readings) - {Reading.MESSAGES}:
            return ""
        parts = [f"{count} {reading}" for reading, count in readings.items()]
        why = ""
        if Reading.PLAIN in readings and self.strings != "never":
            why = f" ({'no' if self.template is None else 'a plain'} chat template)"
        return f"data.chat={self.strings}: of the prompts checked, {', '.join(parts)}{why}"

    def render(self, problem: Problem, where: str = "prompt") -> tuple[str, Tokens]:
        """Return the prompt's text and its tokens. `where` names the row in errors.

        Messages go through the chat template, and so do strings where `reading` says so. Other
        strings are tokenised without a template, after the begin token if the tokenizer has one for
        plain text. Only a string that the template has rendered already may have special tokens.
        Raise DataError if the template refuses the messages or drops tool calls, and for a string
        with markup of a chat that is read as characters. Raise it too if a message contains a
        special token's text and the template changes messages: the text and the token are then
        indistinguishable.
        """
        self._check_markup(problem, where)
        problem = self.as_chat(problem)
        if isinstance(problem.prompt, str):
            split = self._split or not self._rendered(problem.prompt)
            tokens = self._encode(problem.prompt, split)
            begin = self._begin if tokens[:1] != self._begin else []
            return problem.prompt, tokens_of(begin + tokens)
        text = self._template(problem.prompt, where)
        without = [{k: v for k, v in m.items() if k != "tool_calls"} for m in problem.prompt]
        called = any(m.get("tool_calls") for m in problem.prompt)
        try:
            dropped = called and self._template(without, where) == text
        except DataError:  # the template needs the calls, so it reads them
            dropped = False
        if dropped:
            rule = "are not in the text that the chat template makes"
            fix = "calls as the words of their message, or a chat template with tools"
            raise bad_row(f"{where}, tool_calls", problem.prompt, rule, fix)
        if self._special is not None:
            self._check_beside(problem.prompt, self._special, where)
            if any(self._special.search(m["content"]) for m in problem.prompt):
                return text, self._render_apart(problem.prompt, where)
        if (lost := _lost(problem.prompt, text)) is not None:
            rule = f"is not in the text that the chat template makes: {text!r:.200}"
            fix = "other messages, or another chat template in the model folder"
            raise bad_row(f"{where}, the words of {lost['role']}", lost["content"], rule, fix)
        return text, tokens_of(self._encode(text, self._split))

    def lengths(self, entries: Sequence[tuple[Problem, str]], limit: int) -> list[int]:
        """Return the number of tokens of each prompt, from the problems and the words for them.

        This takes a fraction of the time of `render`. A text that cannot have more than `limit`
        tokens counts as many as it has letters. 0 stands for a prompt that only `render` can judge.
        """
        texts: list[tuple[str, bool] | None] = [None] * len(entries)
        lengths = [0] * len(entries)
        whole: dict[int, Messages] = {}
        for n, (entry, where) in enumerate(entries):
            self._check_markup(entry, where)
            prompt = self.as_chat(entry).prompt
            if isinstance(prompt, str):
                texts[n] = prompt, self._split or not self._rendered(prompt)
            elif not self._apart(prompt):
                whole[n] = prompt
        try:
            made = template.render_all(
                self.tokenizer, [*whole.values()], head=self.generation_prompt
            )
        except template.Refused:  # the template refuses one of them
            made = [""] * len(whole)
        for n, text in zip(whole, made, strict=True):
            texts[n] = (text, self._split) if text and not _lost(whole[n], text) else None
        exact: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for n, one in enumerate(texts):
            if one is not None and self._by_bytes and one[0].isascii() and len(one[0]) < limit:
                lengths[n] = len(one[0]) + 1
            elif one is not None and self._core is not None:
                exact[one[1]].append((n, one[0]))
        for split, group in exact.items():
            if not group:
                continue
            self._encode("", split)  # sets the core, which encodes on all cores
            given = [text for _, text in group]
            encoded = self._core.encode_batch_fast(given, add_special_tokens=False)
            for (n, _), found in zip(group, encoded, strict=True):
                ids = found.ids
                whole_text = self._begin + ids if n not in whole and ids[:1] != self._begin else ids
                lengths[n] = 0 if self.unk_id in ids else len(whole_text)
        return lengths

    def _apart(self, messages: Messages) -> bool:
        """Whether `render` must encode the messages by themselves, or continue the last one."""
        if self.template is None or (self.generation_prompt and template.begins_answer(messages)):
            return True
        special = self._special
        return special is not None and any(
            special.search(m["content"]) or m.keys() - {"role", "content"} for m in messages
        )

    @cached_property
    def _by_bytes(self) -> bool:
        """Whether each token stands for a byte of the text at least, and no byte is unknown."""
        from tokenizers import models, pre_tokenizers

        core = self._core
        if core is None or not isinstance(core.model, models.BPE):
            return False
        steps = [
            "" if step is None else step.__getstate__().decode()
            for step in (core.normalizer, core.pre_tokenizer)
        ]
        normal = set(re.findall(r'"type":"(\w+)"', steps[0])) <= {"NFC", "Sequence"}
        other = '"add_prefix_space":true', '"Removed"'  # steps that add or drop letters
        level = '"ByteLevel"' in steps[1] and not any(word in steps[1] for word in other)
        known = all(core.token_to_id(c) is not None for c in pre_tokenizers.ByteLevel.alphabet())
        return normal and level and known

    @cached_property
    def digest(self) -> str:
        """The digest of all that makes tokens of a prompt. It is empty if code makes them."""
        if self._core is None or self.template == "":
            return ""
        names = self.tokenizer.special_tokens_map, self.strings, self._split
        state = f"{self._core.to_str()} {self.template!r} {sorted(names[0].items())} {names[1:]}"
        return hashlib.sha256(state.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of plain text. The text of a special token stays text."""
        return self._encode(text, True)

    def decode(self, tokens: Tokens) -> str:
        """Return the text of `tokens`, without special tokens."""
        return self._decode(list(tokens))

    def marked(self, tokens: Tokens) -> str:
        """Return the text of `tokens` on one line, with each special token in « »."""
        special = {
            i: t.content for i, t in self.tokenizer.added_tokens_decoder.items() if t.special
        }
        groups = groupby(tokens, key=lambda i: special.get(i, ""))
        whole = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return "".join(
            f"«{name}»" * sum(1 for _ in ids) if name else self.tokenizer.decode([*ids], **whole)
            for name, ids in groups
        ).translate(_ESCAPES)

    @cached_property
    def _begin(self) -> list[int]:
        """The token that begins every plain text, as Llama 3, Mistral and Gemma have. Else none."""
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and self.tokenizer.encode("")[:1] == [bos] else []

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        eos = self.tokenizer.eos_token_id
        return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)

    @cached_property
    def _core(self) -> Any:
        """The core, which the tokenizer's methods call. None if its class overrides one of them.

        Through these methods, `encode` takes twice as long, and `decode` three times.
        """
        from transformers import PreTrainedTokenizerFast as Fast

        own = type(self.tokenizer)
        same = all(getattr(own, name, None) is getattr(Fast, name, None) for name in _METHODS)
        return self.tokenizer.backend_tokenizer if same else None

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        if (core := self._core) is not None:
            return partial(core.decode, skip_special_tokens=True)
        clean = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return lambda ids: str(self.tokenizer.decode(ids, **clean))

    @cached_property
    def _encode(self) -> Callable[[str, bool], list[int]]:
        """A function of a text and `split`. With `split`, the text of a special token stays text."""
        core, tokenizer = self._core, self.tokenizer
        if core is None:
            plain = {"add_special_tokens": False}
            return lambda text, split: list(
                tokenizer.encode(text, **plain, split_special_tokens=split)
            )

        def encode(text: str, split: bool) -> list[int]:
            if core.truncation is not None:
                core.no_truncation()
            if core.padding is not None:
                core.no_padding()
            if core.encode_special_tokens is not split:
                core.encode_special_tokens = split
            return list(core.encode(text, add_special_tokens=False).ids)

        return encode

    @cached_property
    def unk_id(self) -> int | None:
        """The token for unknown characters."""
        unk = self.tokenizer.unk_token_id
        return None if unk is None else int(unk)

    @property
    def _split(self) -> bool:
        """Whether the text of a special token stays text, also where the template has written it."""
        return bool(self.tokenizer.split_special_tokens)

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        special = [t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special]
        return re.compile("|".join(re.escape(t) for t in special)) if special else None

    @cached_property
    def _added(self) -> set[str]:
        return {token.content for token in self.tokenizer.added_tokens_decoder.values()}

    @cached_property
    def template(self) -> str | None:
        """The chat template, or None if there is none."""
        return template.source(self.tokenizer)

    @cached_property
    def _scaffold(self) -> str:
        """Return the template's text around a message of the user, with a mark in its place."""
        try:
            user = [{"role": "user", "content": _MARK}]
            return template.render(self.tokenizer, user, head=True)
        except template.Refused:
            return ""

    def _rendered(self, text: str) -> bool:
        """Whether a string begins as the template's text does."""
        start = text.lstrip()
        if self.template is None or self._special is None:
            return False
        if (found := self._special.match(start)) is not None:
            return found[0] in self._scaffold.replace(_MARK, "")
        if self.strings == "never":  # the text of special tokens aside, nothing depends on it
            return False
        head = self._special.sub("", self._scaffold.partition(_MARK)[0]).strip()
        # A bare role, such as "user", may be the first word of any problem.
        return re.search(r"[^\w\s]", head) is not None and start.startswith(head)

    def _check_markup(self, problem: Problem, where: str) -> None:
        """Raise DataError for a string with markup of a chat that is not read as such.

        It is markup of another model, or does not begin the string. Messages as text are markup too.
        """
        if self.strings != "auto" or self.reading(problem) not in (Reading.WRAPPED, Reading.PLAIN):
            return
        text = str(problem.prompt)
        foreign = next((m for m in _FOREIGN.finditer(text) if m[0] not in self._added), None)
        if (found := _MARKUP.search(text) or _MESSAGES.match(text) or foreign) is not None:
            rule = "is markup of a chat, which the policy would read as characters"
            fix = "messages [{role, content}] in place of the string, or data.chat=never"
            if self.template is not None:
                fix += ", which reads the text alone, or always, which makes it words of the user"
            raise bad_row(where, found[0], rule, fix)

    def _template(self, messages: Messages, where: str) -> str:
        if self.template is None:
            rule = "the model's folder has no chat template, which messages need"
            fix = "chat_template.jinja in model.path, an instruct model, or a string prompt"
            raise bad_row(where, messages, rule, fix)
        try:
            begun = self.generation_prompt and template.begins_answer(messages)
            return template.render(
                self.tokenizer, messages, head=self.generation_prompt, continues=begun
            )
        except template.Refused as error:
            rule = f"the chat template refuses the messages: {error}"
            fix = "other messages, a string prompt with data.chat=never, or another chat template"
            raise bad_row(where, messages, rule, f"{fix} in the model folder") from error

    def _check_beside(self, messages: Messages, special: re.Pattern[str], where: str) -> None:
        """Raise DataError if a text beside a message's content would become a special token.

        Such a text is an argument of a tool call, or the reasoning.
        """
        beside = [{k: v for k, v in m.items() if k not in ("role", "content")} for m in messages]
        if not any(beside):
            return
        text = json.dumps(beside, ensure_ascii=False)
        if (token := special.search(text)) is None:
            return
        marked = json.loads(special.sub(_MARK, text))
        both = [m | other for m, other in zip(messages, marked, strict=True)]
        if _MARK in self._template(both, where):
            rule = "is the text of a special token, in a message beside its content"
            raise bad_row(where, token[0], rule, "delete it from the message")

    def _render_apart(self, messages: Messages, where: str) -> Tokens:
        """Encode the template's text and the messages' text separately.

        Only the template's text may contain special tokens.
        """
        marks = [f"\ue000{n}\ue001" for n in range(len(messages))]
        text = self._template(
            [m | {"content": mark} for m, mark in zip(messages, marks, strict=True)], where
        )
        pieces = re.split("(\ue000\\d+\ue001)", text)
        if pieces[1::2] != marks:
            token = next(
                s[0]
                for m in messages
                if self._special and (s := self._special.search(m["content"]))
            )
            rule = (
                "is the text of a special token, and the chat template does not keep messages whole"
            )
            raise bad_row(where, token, rule, "delete it from the message, or use a string prompt")
        tokens = tokens_of()
        for n, piece in enumerate(pieces):
            if n % 2:
                tokens.extend(self.encode(messages[n // 2]["content"]))
            else:
                tokens.extend(self._encode(piece, self._split))
        return tokens
