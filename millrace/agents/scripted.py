"""Demonstrations with several turns: an agent plays them with a script in place of the policy.

The tokens are therefore those of a rollout, whatever the agent, its tools and the template do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from millrace.errors import DataError, LimitReached, bad_row
from millrace.ports import Agent
from millrace.types import Prompt, Segment, Stop, Tokens, Turn, floats_of, joined, tokens_of


class ScriptedSession:
    """A session whose turns are given texts, each with an end-of-sequence token."""

    def __init__(
        self,
        prompt: Prompt,
        script: Sequence[str],
        encode: Callable[[str], Sequence[int]],
        eos: Tokens,
    ) -> None:
        self.prompt = prompt
        self.name = f"demonstration {prompt.index}"
        self._script = script
        self._encode = encode
        self._eos = eos
        self.turns: list[Turn] = []
        self.told = asyncio.Event()
        """The script is at its end. What follows, such as a score, is no part of an example."""

    async def draw(
        self,
        context: Tokens,
        *,
        after: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        number = len(self.turns)
        if number >= len(self._script):
            raise LimitReached("turns", "the demonstration has no further turn")
        if after != (number - 1 if number else None):
            raise self._refused("its agent opens a second thread", "an agent of one thread")
        tokens = tokens_of(self._encode(self._script[number])) + self._eos
        drawn = Segment(tokens, version=0, log_probs=floats_of([0.0] * len(tokens)), stop=Stop.EOS)
        turn = Turn(number, after, context, (drawn,))
        self.turns.append(turn)
        if len(self.turns) == len(self._script):
            self.told.set()
            await asyncio.Event().wait()  # until the demonstration cancels its agent
        return turn

    def tokens(self, turn: int) -> Tokens:
        return joined(part for t in self.turns[: turn + 1] for part in (t.context, t.tokens))

    def kill(self, turn: int) -> None:
        raise self._refused("its agent drops a turn", "an agent that uses every turn")

    def reward(self, value: float, turn: int | None = None) -> None:
        return None

    def count(self, name: str, value: float = 1.0) -> None:
        return None

    def example(self) -> tuple[Tokens, ...]:
        """Return (prompt, response, context, response, ...). Raises DataError."""
        if len(self.turns) < len(self._script):
            rule = f"the episode ended after {len(self.turns)} of its {len(self._script)} turns"
            raise self._refused(rule, "turns that the environment answers")
        return tuple(part for turn in self.turns for part in (turn.context, turn.tokens))

    def _refused(self, rule: str, fix: str) -> DataError:
        return bad_row(self.name, list(self._script), rule, fix)


async def demonstration(
    agent: Agent,
    prompt: Prompt,
    script: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    eos: Tokens,
) -> tuple[Tokens, ...]:
    """Return a demonstration's tokens for `sft_step`. `script` has the policy's turns as text.

    Raises DataError if the agent does not use every turn of the script.
    """
    session = ScriptedSession(prompt, script, encode, eos)
    play = asyncio.ensure_future(agent.play(session))
    told = asyncio.ensure_future(session.told.wait())
    try:
        await asyncio.wait({play, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not play.done():
            play.cancel()
        told.cancel()
        await asyncio.wait({play, told})
    if not play.cancelled() and (error := play.exception()) is not None:
        raise error
    return session.example()
