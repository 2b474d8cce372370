"""The policy's side of one episode: it draws turns, counts limits, and makes threads of them.

A turn continues another turn, or it opens a thread, so the turns form a tree. A draw lasts through
interruptions: the turn continues from its tokens so far, in the same random stream.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from millrace.errors import EpisodeError, LimitReached
from millrace.rollout.tree import extended_by, recorded_turns, superseded, threads_of
from millrace.types import (
    DEAD_REWARDS,
    Ending,
    Prompt,
    SamplingParams,
    Segment,
    Stop,
    Thread,
    Tokens,
    Trajectory,
    Turn,
    joined,
)
from millrace.waits.registry import count, current, within

Draw = Callable[[Tokens, SamplingParams, str], Awaitable[tuple[Segment, ...]]]
"""A call that draws tokens from the pool of rollout engines. It waits while rollouts are paused."""

OnProgress = Callable[[Trajectory], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an episode. None sets no limit."""

    max_len: int | None = None
    """Tokens of a thread, with its opening. A thread after the prompt also has max_tokens."""
    max_turns: int | None = None
    """Turns that are drawn, dead ones included."""
    max_tokens_per_turn: int | None = None
    max_episode_tokens: int | None = None
    """Tokens of all turns and of their contexts. Turns that run at once may pass it together."""


NO_LIMITS = Limits()


class Session:
    """The turns of one episode. It satisfies ports.PolicySession.

    `so_far` has the turns of an earlier attempt. A draw whose context is that of such a turn
    returns the turn, or continues it. `on_progress` gets the unfinished trajectory after each
    interruption and each turn. A `plain` session has one turn: its end is no progress of its own,
    and nothing is counted.
    """

    def __init__(
        self,
        draw: Draw,
        prompt: Prompt,
        params: SamplingParams,
        name: str,
        limits: Limits = NO_LIMITS,
        *,
        so_far: Trajectory | None = None,
        on_progress: OnProgress | None = None,
        plain: bool = False,
    ) -> None:
        self.name = name
        self.prompt = prompt
        self._draw = draw
        self._params = params
        self._limits = limits
        self._record = recorded_turns(prompt, so_far) if so_far and so_far.threads else {}
        self._on_progress = on_progress
        self._plain = plain
        self._turns: dict[int, Turn] = {}
        """All turns by number. One that runs or was cancelled has no stop."""
        self._dead: set[int] = set()
        self._rewards: dict[int, float] = {}
        self._times: dict[bytes, int] = {}
        """How often each context was drawn."""
        self._asked = 0
        self._spent = 0
        """Tokens of finished turns, and of all contexts."""
        self._counts: dict[str, float] = {}
        self._over = False
        self._actor = current()
        """Who draws, in the graph of waits. A program's requests come from tasks of a server."""

    @property
    def turns(self) -> Sequence[Turn]:
        return [t for _, t in sorted(self._turns.items()) if not t.unfinished]

    async def draw(
        self,
        context: Tokens,
        *,
        after: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        whole = context if after is None else self.tokens(after) + context
        room = self._room(whole, context, after, max_tokens)
        number, self._asked = self._asked, self._asked + 1
        self._spent += len(context)
        seed, segments = self._begin(whole)
        params = self._params
        if stop or seed != params.seed:
            params = replace(params, seed=seed, stop=(*params.stop, *stop))
        turn = self._turns[number] = Turn(number, after, context, segments)
        unfinished = turn.unfinished
        try:
            while unfinished:
                so_far = whole + turn.tokens if segments else whole
                drawn = len(so_far) - len(whole)
                left = room - drawn
                if left < 1:  # Before a restart, other turns had left it more room.
                    segments = (*segments[:-1], replace(segments[-1], stop=Stop.LENGTH))
                else:
                    offset = self._params.offset + drawn
                    if left != params.max_tokens or offset != params.offset:
                        params = replace(params, max_tokens=left, offset=offset)
                    if params.experts_from is not None:
                        known = len(so_far) if drawn else len(whole) - len(context)
                        params = replace(params, experts_from=max(known - 1, 0))
                    with within(self._actor):
                        segments += await self._draw(so_far, params, self.name)
                    count("draws")
                turn = self._turns[number] = Turn(number, after, context, segments)
                unfinished = turn.unfinished
                if unfinished:
                    self._progress()
        finally:
            if unfinished:  # Cancelled, or the engine failed: nobody receives this turn.
                self._dead.add(number)
        if not self._plain:
            self._spent += len(turn.tokens)
            self._progress()
        return turn

    def tokens(self, turn: int) -> Tokens:
        parts: list[Tokens] = []
        number: int | None = turn
        while number is not None:
            one = self._finished(number)
            parts += (one.tokens, one.context)
            number = one.after
        return joined(reversed(parts))

    def kill(self, turn: int) -> None:
        self._finished(turn)
        self._dead.add(turn)

    def reward(self, value: float, turn: int | None = None) -> None:
        if not math.isfinite(value):
            raise EpisodeError("reward_not_finite", f"the reward of a turn is {value}")
        if turn is None:
            turn = max((t.number for t in self.turns), default=-1)
        self._rewards[self._finished(turn).number] = self._rewards.get(turn, 0.0) + float(value)

    def count(self, name: str, value: float = 1.0) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + value

    def trajectory(self, ending: Ending | None = None) -> Trajectory:
        """Return the threads so far, or the finished trajectory if there is an `ending`."""
        over = ending is not None
        self._over |= over
        if self._plain and ending is not None and len(self._turns) == 1 and not self._dead:
            (turn,) = self._turns.values()  # One prompt and one response need no tree.
            return Trajectory((Thread(turn.segments),), ending.score, ending.reason)
        turns = {n: t for n, t in self._turns.items() if (not t.unfinished if over else t.segments)}
        extended = extended_by(turns, self._dead)
        replaced = superseded(turns, self._dead, extended) if over else set[int]()
        gone = {n for n in self._turns if n not in turns or n in replaced}
        gone |= {n for n in self._dead & self._turns.keys() if n not in extended}
        leaves = [n for n in sorted(turns) if n not in extended and n not in gone]
        threads = threads_of(self.prompt, turns, leaves, self._rewards)
        dead = sum(len(self._turns[n].tokens) for n in gone)
        return self._ended(Trajectory(threads, dead_tokens=dead), ending, sorted(gone))

    def _ended(
        self, trajectory: Trajectory, ending: Ending | None, gone: Sequence[int]
    ) -> Trajectory:
        if ending is None:
            return trajectory
        counts: dict[str, float] = {}
        if not self._plain:
            own = len(self._turns) - len(gone)
            context = sum(len(t.context) for n, t in self._turns.items() if n not in gone)
            counts = {
                "turns": float(own),
                "threads": float(len(trajectory.threads)),
                "context_tokens": float(context),
                "dead_turns": float(len(gone)),
                f"ended/{ending.reason}": 1.0,
                **self._counts,
            }
            if lost := sum(n in self._rewards for n in gone):
                counts[DEAD_REWARDS] = float(lost)
        return replace(
            trajectory,
            score=ending.score,
            ended=ending.reason,
            messages=ending.messages,
            counts=counts,
        )

    def _progress(self) -> None:
        if self._on_progress is not None and not self._over:
            self._on_progress(self.trajectory())

    def _finished(self, turn: int) -> Turn:
        if turn not in self._turns or self._turns[turn].unfinished:
            known = ", ".join(str(t.number) for t in self.turns) or "none"
            raise ValueError(f"turn {turn}: a finished turn is needed. Finished are: {known}.")
        return self._turns[turn]

    def _room(
        self, whole: Tokens, context: Tokens, after: int | None, max_tokens: int | None
    ) -> int:
        """Return how many tokens the turn may have. Raises LimitReached if there is no room."""
        limits = self._limits
        if self._over:
            raise EpisodeError("episode_over", "a turn is asked for after the end of its episode")
        if not whole:
            raise EpisodeError("empty_context", "a turn is asked for after no token at all")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: at least one token is drawn")
        if limits.max_turns is not None and self._asked >= limits.max_turns:
            raise LimitReached("turns", f"the episode has its {limits.max_turns} turns")
        if after is None and context is self.prompt.tokens and limits.max_len is None:
            room = self._params.max_tokens
        else:
            room = self._length(context, after) - len(whole)
        if room < 1:
            raise LimitReached("context", f"{len(whole)} tokens leave no room for another one")
        if limits.max_episode_tokens is not None:
            left = limits.max_episode_tokens - self._spent - len(context)
            if left < 1:
                raise LimitReached(
                    "tokens", f"the episode has its {limits.max_episode_tokens} tokens"
                )
            room = min(room, left)
        if limits.max_tokens_per_turn is not None:
            room = min(room, limits.max_tokens_per_turn)
        return room if max_tokens is None else min(room, max_tokens)

    def _length(self, context: Tokens, after: int | None) -> int:
        """Return the limit on the tokens of the thread, its opening included."""
        while after is not None:
            context, after = self._turns[after].context, self._turns[after].after
        limit = self._limits.max_len
        if limit is None or context is self.prompt.tokens or context == self.prompt.tokens:
            own = len(context) + self._params.max_tokens
            limit = own if limit is None else min(limit, own)
        return limit

    def _begin(self, whole: Tokens) -> tuple[int, tuple[Segment, ...]]:
        """Return the seed of the next draw of this context, and its tokens of an earlier attempt.

        It does not depend on the order in which turns of different contexts are asked for.
        """
        first = whole is self.prompt.tokens or whole == self.prompt.tokens
        key = b"" if first else whole.tobytes()
        times = self._times.get(key, 0)
        self._times[key] = times + 1
        segments: tuple[Segment, ...] = ()
        if self._record:
            earlier = self._record.get(key, ())
            segments = earlier[times] if times < len(earlier) else ()
        if first and not times:
            return self._params.seed, segments
        digest = blake2b(f"{self._params.seed}/{times}/".encode() + whole.tobytes(), digest_size=8)
        return int.from_bytes(digest.digest(), "big") >> 1, segments
