"""The environment of one prompt and one response, for problems with a checkable answer."""

from __future__ import annotations

from millrace.ports import Reply
from millrace.types import Prompt, Segment, Tokens


class SingleTurn:
    """An environment that sends the prompt and no reply."""

    async def open(self, prompt: Prompt) -> Tokens:
        return prompt.tokens

    async def reply(self, segments: tuple[Segment, ...]) -> Reply | None:
        return None

    async def close(self) -> None:
        return None
