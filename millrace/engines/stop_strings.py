"""When a response has said one of its stop strings: engines draw tokens, and strings are in their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace.types import Tokens


def stop_window(stop: Sequence[str]) -> int:
    """How many of the last tokens can have to do with a stop string: it has at most as many tokens as bytes."""
    return max(len(s.encode()) for s in stop) + 4


def completes_stop(tail: Tokens, stop: Sequence[str], decode: Callable[[Tokens], str]) -> bool:
    """Whether the last token of `tail`, the response's last `stop_window` tokens, completes a stop string."""
    text = decode(tail)
    found = [s for s in stop if s in text]
    if not found:
        return False
    before = decode(tail[:-1])
    return any(text.count(s) > before.count(s) for s in found)
