"""Notes on a run's prompts: how they become tokens, and scorers that do not fit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millrace.config.reward_keys import OneReward
from millrace.data.chat import Chat, Reading
from millrace.data.prompts import PromptStream
from millrace.data.rows import problem
from millrace.data.tokenizer import TEMPLATES
from millrace.rewards.sources import advice_for_chat

_ADVISED = 64
"""Prompts whose scorers are looked at."""
_FOR_AGENTS = ("tools", "agent_name", "tools_kwargs", "tool_selection", "interaction_kwargs")
"""Columns of TRL and verl that only agents read."""
_SHOWN = 1500
"""Characters of a prompt that a dry run shows."""


def first_prompts(chat: Chat, stream: PromptStream) -> Iterator[str]:
    """Yield the first row of each source as the policy reads it, with special tokens in « »."""
    rows = stream.rows
    for at in (0, *rows.ends[:-1]):
        where = rows.describe(at)
        _, tokens = chat.render(problem(rows, at, prompt_key=stream.prompt_key), where)
        text = chat.marked(tokens)
        if (left := len(text) - _SHOWN) > 0:
            half = _SHOWN // 2
            text = f"{text[:half]} ... ({left:,} characters) ... {text[-half:]}"
        yield f"{where} as the policy reads it, {len(tokens)} tokens, special ones in « »: {text}"


def prompt_notes(
    chat: Chat,
    train: PromptStream,
    *,
    chosen: str,
    player: str,
    new_model: bool,
    parts: Mapping[str, OneReward],
) -> Iterator[str]:
    """Yield how prompts are read, and a warning for each scorer that does not fit a chat model.

    The number of prompts that are left out comes first.

    `chosen` is data.chat, and `parts` are the rewards by section.
    """
    if train.filtered:
        yield f"left out {train.filtered} prompts that are longer than rollout.max_prompt_length"
    if player:
        if chosen != "auto":
            yield f"data.chat={chosen} is not read: agents make the messages"
        return
    if (not new_model or chosen != "auto") and (line := chat.described(train.readings)):
        yield line
    prompts = [train[i] for i in range(min(len(train), _ADVISED))]
    for name in _FOR_AGENTS:
        values = ((p.columns | p.extra_info).get(name) for p in prompts)
        if value := next((v for v in values if v and v != "single_turn_agent"), None):
            yield f"the column {name} = {value!r:.80} is not read: no key of agents says who plays"
    if chat.template in (None, *TEMPLATES) or not set(train.readings) - {Reading.PLAIN}:
        return
    end = chat.tokenizer.eos_token
    if end and any(prompt.text.rstrip().endswith(end) for prompt in prompts):
        rule = "prompts end with the end of a message, so the policy writes the head of its answer"
        fix = "a chat template that reads add_generation_prompt, or strings that were made with it"
        yield f"warning: data.train_files: {rule}. Fix: {fix}."
    warned: set[tuple[str, str]] = set()
    for prompt in prompts:
        row = prompt.data_source, prompt.extra_info, prompt.ground_truth
        for section, part in parts.items():
            key = section, prompt.data_source
            if part.kind != "function" or key in warned:
                continue
            if line := advice_for_chat(section, part.function, *row):
                warned.add(key)
                yield line
