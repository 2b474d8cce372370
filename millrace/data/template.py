"""Chat templates, rendered in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace.errors import bad_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Refused(Exception):
    """A template raised: it does not support these messages."""


def source(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template's text. It is None if there is none, and "" if it is code."""
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return ""
    try:
        return str(tokenizer.get_chat_template(None, None))
    except ValueError:
        return None


def begins_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message is words of the assistant, which the policy continues."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last.get("content", "").strip())


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    head: bool,
    continues: bool = False,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the chat template's text. With `head`, it ends with the head of the next answer.

    If it `continues`, it ends with the last message's own words instead.
    Raise Refused if the template raises, and ConfigError if it recurses without end, or if
    Python finds no memory for it.
    """
    return render_all(
        tokenizer, [messages], tools, head=head, continues=continues, options=options
    )[0]


def render_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    head: bool,
    continues: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the texts of several conversations, which takes a third of the time. See `render`."""
    from jinja2 import TemplateError

    try:
        texts: Any = tokenizer.apply_chat_template(
            [list(messages) for messages in conversations],  # type: ignore[arg-type]  # a mapping is what it reads
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=head and not continues,
            continue_final_message=continues,
            **(options or {}),
        )
    except (MemoryError, RecursionError) as error:
        rule = f"stopped: {str(error) or type(error).__name__}"
        fix = "a chat template that you trust, in the model folder"
        raise bad_value("chat_template", tokenizer.name_or_path, rule, fix) from None
    except (
        *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError),
        *(SyntaxError, TemplateError, TypeError, ValueError),
    ) as error:
        raise Refused(f"{error}" or type(error).__name__) from error
    return [str(text) for text in texts]
