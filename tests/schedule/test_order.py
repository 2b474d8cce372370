"""The order of training, compared with a plain reference that checks every sample at each pick."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.schedule.order import TrainingOrder


def reference(pending: dict[int, bool], count: int, lookahead: int) -> list[int]:
    """Return the next `count` finished samples, or [] if there are fewer.

    Each pick is the first finished sample within the look ahead. `pending` has all samples that are
    admitted and not taken, in order of admission, and whether each is finished.
    """
    left, chosen = dict(pending), []  # type: ignore[var-annotated]
    while len(chosen) < count and left:
        horizon = min(left) + lookahead
        pick = next((i for i, finished in left.items() if finished and i < horizon), None)
        if pick is None:
            return []
        del left[pick]
        chosen.append(pick)
    return chosen if len(chosen) == count else []


@settings(max_examples=300, deadline=None)
@given(lookahead=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_any_walk_takes_what_the_reference_takes(lookahead: int, seed: int) -> None:
    rng, order = random.Random(seed), TrainingOrder(lookahead)
    pending: dict[int, bool] = {}
    admitted = 0
    for _ in range(300):
        unfinished = [i for i, finished in pending.items() if not finished]
        move = rng.random()
        if move < 0.35 and len(pending) < 20:
            order.admit(admitted)
            pending[admitted] = False
            admitted += 1
        elif move < 0.7 and unfinished:
            # The oldest sample is a straggler most of the time.
            i = rng.choice(unfinished[1:] if rng.random() < 0.7 and unfinished[1:] else unfinished)
            order.finish(i)
            pending[i] = True
        elif move < 0.8 and pending:
            i = rng.choice(list(pending))
            order.drop(i)
            del pending[i]
        else:
            count = rng.randint(1, 6)
            expected = reference(pending, count, lookahead)
            assert (len(order) >= count) == bool(expected)
            if expected:
                assert order.first(count) == expected == order.take(count)
                for i in expected:
                    del pending[i]


@pytest.mark.parametrize("lookahead", [1, 4])
def test_a_straggler_lets_through_what_the_lookahead_allows(lookahead: int) -> None:
    order = TrainingOrder(lookahead)
    for i in range(10):
        order.admit(i)
    for i in range(1, 10):
        order.finish(i)
    assert order.first(10) == list(range(1, lookahead))
    order.finish(0)
    assert order.take(10) == list(range(10))
