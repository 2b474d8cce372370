"""Reward shaping."""

from __future__ import annotations


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float) -> float:
    """What is added to the reward of a long response: DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4).

    0 up to E = max_length - buffer tokens, from there linear down to -factor at max_length, and -factor beyond it:
    max(-factor, min(0, -factor (length - E) / buffer)).

    `length` counts the policy's own tokens, in all its turns: not what an environment or a tool said between them. (verl counts
    both, and lets the penalty grow past -factor.) Raises ValueError unless 0 < buffer <= max_length, factor >= 0 and
    length >= 0.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"buffer must be over 0 and at most max_length, {max_length}: got {buffer}"
        )
    if not factor >= 0:
        raise ValueError(f"factor must be at least 0, got {factor}")
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    excess = min(max(length - (max_length - buffer), 0), buffer)
    return -factor * (excess / buffer) if excess else 0.0
