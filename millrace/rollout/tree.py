"""The tree of turns of an episode, as threads and back. These functions are pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from millrace.types import (
    UNFINISHED,
    Author,
    Prompt,
    Segment,
    Thread,
    Trajectory,
    Turn,
    joined,
    joined_experts,
    tokens_of,
)


def extended_by(turns: Mapping[int, Turn], dead: Collection[int]) -> set[int]:
    """Return the turns that a live turn continues. They are live too, also if they were killed."""
    extended: set[int] = set()
    for number in sorted(turns, reverse=True):
        after = turns[number].after
        if after is not None and (number in extended or number not in dead):
            extended.add(after)
    return extended


def superseded(
    turns: Mapping[int, Turn], dead: Collection[int], extended: Collection[int]
) -> set[int]:
    """Return the turns that another draw of the same context replaces.

    Of siblings with equal contexts, only those that a later turn continues are trained. If there is
    none, the last one is.
    """
    kept: dict[tuple[int | None, bytes], int] = {}
    replaced: set[int] = set()
    for number in sorted((n for n in turns if n not in dead or n in extended), reverse=True):
        key = turns[number].after, turns[number].context.tobytes()
        before = kept.setdefault(key, number)
        if before == number:
            continue
        if number not in extended:
            replaced.add(number)
        elif before not in extended:
            replaced.add(before)
            kept[key] = number
    return replaced


def threads_of(
    prompt: Prompt, turns: Mapping[int, Turn], leaves: Sequence[int], rewards: Mapping[int, float]
) -> tuple[Thread, ...]:
    """Return the path to each leaf as a thread.

    A turn of several paths is trained in the first one. It is context in the others.
    """
    trained: set[int] = set()
    threads = []
    for leaf in leaves:
        path: list[Turn] = []
        number: int | None = leaf
        while number is not None:
            path.append(turns[number])
            number = turns[number].after
        path.reverse()
        opening = path[0].context
        segments: list[Segment] = []
        for turn in path:
            if turn.context and turn is not path[0]:
                segments.append(Segment(turn.context, Author.ENVIRONMENT))
            if turn.number in trained:
                routed = joined_experts(s.experts for s in turn.segments)
                segments.append(Segment(turn.tokens, Author.ENVIRONMENT, experts=routed))
            else:
                segments += _rewarded(turn.segments, rewards.get(turn.number))
            trained.add(turn.number)
        own = None if opening == prompt.tokens else opening
        threads.append(Thread(tuple(segments), own))
    return tuple(threads)


def _rewarded(segments: tuple[Segment, ...], reward: float | None) -> tuple[Segment, ...]:
    if reward is None or not segments:
        return segments
    return (*segments[:-1], replace(segments[-1], reward=reward))


def recorded_turns(
    prompt: Prompt, trajectory: Trajectory
) -> dict[bytes, list[tuple[Segment, ...]]]:
    """Return the turns of an unfinished trajectory by the bytes of their whole context.

    The key of the prompt's tokens is empty. The turns of one context are in the order of threads.
    """
    record: dict[bytes, list[tuple[Segment, ...]]] = {}
    for thread in trajectory.threads:
        whole = tokens_of(prompt.tokens if thread.opening is None else thread.opening)
        turn: list[Segment] = []
        for i, segment in enumerate(thread.segments):
            if segment.author is Author.POLICY:
                plain = segment.reward is None
                turn.append(segment if plain else replace(segment, reward=None))
            last = i + 1 == len(thread.segments)
            ends = turn and (last or segment.stop not in UNFINISHED or _others(thread, i + 1))
            if ends:
                key = b"" if whole == prompt.tokens else whole.tobytes()
                record.setdefault(key, []).append(tuple(turn))
                whole = joined([whole, *(s.tokens for s in turn)])
                turn = []
            elif segment.author is not Author.POLICY:
                whole = joined([whole, segment.tokens])
    return record


def _others(thread: Thread, i: int) -> bool:
    return thread.segments[i].author is not Author.POLICY
