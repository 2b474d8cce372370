"""How many samples a trace draws follows from the load of its thread."""

from __future__ import annotations

from millrace.report.trace.writer import TraceSampler


class Load:
    """A thread with a load, and what its pace says."""

    def __init__(self, most: float) -> None:
        self.pace, self.now, self.used, self.calls = TraceSampler(most), 0.0, 0.0, 0
        assert self(0.5) is None, "the first look begins a window"

    def __call__(self, load: float, seconds: float = 2.5, calls: int = 1) -> int | None:
        self.now, self.used = self.now + seconds, self.used + load * seconds
        self.calls += calls
        return self.pace.choose(self.now, self.used, self.calls)


def test_a_pace_follows_the_load() -> None:
    after = Load(0.01)
    assert [after(0.5), after(0.5), after(0.009), after(0.5, 1.0)] == [2, 4, None, None]
    assert after(0.5) == 8
    assert [after(0.002) for _ in range(11)] == [None] * 4 + [4] + [None] * 4 + [2] + [None]
    assert [after(1.0) for _ in range(7)] == [4, 8, 16, 32, 64, None, None]


def test_a_time_without_calls_says_nothing() -> None:
    """On shared devices the trainer has turns, in which nothing is drawn."""
    after, numbers = Load(0.015), []
    for _ in range(50):
        numbers += [after(0.05), after(0.05), after(0.0, calls=0), after(0.0, 30, calls=0)]
    assert [n for n in numbers if n] == [2, 4, 8, 16, 32, 64]


def test_a_thread_that_never_rests_is_thinned_to_the_end() -> None:
    """Events come faster than they are drawn. So it looks at its pace after each batch."""
    after, numbers = Load(0.015), []
    for _ in range(2000):
        numbers.append(after(1.0, 0.01))
    assert [n for n in numbers if n] == [2, 4, 8, 16, 32, 64]


def test_a_pace_of_a_whole_core_never_thins() -> None:
    after = Load(1.0)
    assert not any(after(1.0001) for _ in range(50))
