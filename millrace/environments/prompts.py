"""The messages of a prompt, and the beginning of a conversation with them."""

from __future__ import annotations

from millrace.types import Message, Prompt


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return the messages of the row. A prompt that is a string is one message of the user."""
    messages = prompt.columns.get("prompt")
    if isinstance(messages, list):
        return tuple(dict(m) for m in messages)
    return ({"role": "user", "content": prompt.text},) if prompt.text else ()


def opening(prompt: Prompt, observation: str) -> tuple[Message, ...]:
    """Return the row's messages with the environment's first observation at their end.

    Many templates refuse two messages of the user in a row. So the observation extends the row's
    last message if that is the user's.
    """
    messages = messages_of(prompt)
    if not observation:
        return messages
    if messages and messages[-1]["role"] == "user":
        *head, last = messages
        return (*head, {**last, "content": f"{last['content']}\n\n{observation}"})
    return (*messages, {"role": "user", "content": observation})


def seed_of(prompt: Prompt) -> int:
    """Return the seed of the environment. All siblings of a prompt meet the same problem.

    It is the row's extra_info.seed, or else the position of the prompt in the run.
    """
    seed = prompt.extra_info.get("seed")
    return seed if isinstance(seed, int) and seed >= 0 else prompt.index
