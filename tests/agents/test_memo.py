"""Results that are kept: never those of other arguments, and never too many."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from millrace.agents.memo import LONGEST, Memo


def counted() -> tuple[list[Any], Callable[..., str]]:
    """Return a function that shows its arguments, and the list of its calls."""
    calls: list[Any] = []

    def show(*values: Any) -> str:
        calls.append(values)
        return repr(values)

    return calls, show


def test_equal_arguments_are_computed_once() -> None:
    seen, show = counted()
    memo = Memo(show)
    for _ in range(3):
        assert memo([{"a": "x"}], None) == "([{'a': 'x'}], None)"
    assert len(seen) == 1


def test_alike_arguments_are_told_apart() -> None:
    memo = Memo(repr)
    alike: list[Any] = [1, 1.0, True, "1", (1,), [1], {"1": 1}, {1: 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1},
                        "\ud800", "\ue000", b"1", None, "", (), {}]  # fmt: skip
    for _ in range(2):
        assert [memo(value) for value in alike] == [repr(value) for value in alike]


def test_a_value_of_an_own_type_is_computed_each_time() -> None:
    class Text(str):
        """A string of the user's own class."""

    calls, show = counted()
    memo = Memo(show)
    assert memo(Text("ab")) == memo(Text("ab")) == "('ab',)" and len(calls) == 2


def test_what_was_shown_first_is_forgotten_first() -> None:
    calls, show = counted()
    memo = Memo(show, most_bytes=4000)
    texts = [f"{n:0100}" for n in range(100)]
    assert [memo(t) for t in texts] == [repr((t,)) for t in texts]
    assert memo(texts[-1]) == repr((texts[-1],)) and len(calls) == 100
    assert memo(texts[0]) == repr((texts[0],)) and len(calls) == 101
    assert memo("a" * LONGEST) == memo("a" * LONGEST) and len(calls) == 103


def test_random_arguments_give_the_function() -> None:
    random = Random(0)
    memo = Memo(lambda *a: repr(a), most_bytes=2000)

    def value(depth: int = 0) -> Any:
        kind = random.randrange(3 if depth > 2 else 5)
        if kind < 3:
            return random.choice([1, 1.0, True, None, "a", "é"])
        if kind == 3:
            return [value(depth + 1) for _ in range(random.randrange(3))]
        return {random.choice("abc"): value(depth + 1) for _ in range(random.randrange(3))}

    for _ in range(2000):
        a, b = value(), value()
        assert memo(a, b) == repr((a, b))
