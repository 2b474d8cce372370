"""The numbers of arrows. A cause and its effects have the same one."""

from __future__ import annotations

SAMPLE, STEP, VERSION = range(3)


def arrow(kind: int, number: int) -> int:
    """Return the number of an arrow. Perfetto wants whole numbers."""
    return 4 * number + kind


def number_of(key: str) -> int | None:
    """Return the number with which a key begins: 17 for `17/3`, None for `val/3`."""
    head = key.partition("/")[0]
    return int(head) if head.isdecimal() and len(head) < 16 else None
