"""Data that crosses a process or a checkpoint comes back exactly.

This includes any JSON data and integers of any size.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace import codec
from millrace.data.rows import plain, problem
from millrace.data.sources import Part, Rows, load_source
from millrace.errors import DataError
from millrace.process.channel import Frames
from millrace.rewards.wire import Call, calls_decoder, frame
from millrace.schedule.ledger import Ledger, LedgerSnapshot
from millrace.schedule.schedule import Schedule
from millrace.types import Prompt, Sample, Score, Trajectory, tokens_of

EDGES = [sign * (2**bits + d) for sign in (1, -1) for bits in (31, 63, 64, 128) for d in (-1, 0, 1)]
INTEGERS = st.sampled_from(EDGES) | st.integers() | st.integers(-(2**4000), 2**4000)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=4)


def same(a: Any, b: Any) -> bool:
    """Return whether both are equal, with equal types throughout: 1, 1.0 and True differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def prompt_of(truth: Any, extra: dict[str, Any], columns: dict[str, Any]) -> Prompt:
    return Prompt(0, tokens_of([1, -2]), "text", "source", truth, extra, columns)


def same_prompt(a: Prompt, b: Prompt) -> bool:
    fields = ("ground_truth", "extra_info", "columns")
    return a == b and all(same(getattr(a, name), getattr(b, name)) for name in fields)


@given(JSON)
def test_plain_data_is_the_same_as_msgpack_and_as_json(value: Any) -> None:
    assert same(codec.decoder(Any).decode(codec.pack(value)), value)
    assert same(codec.from_json(codec.to_json(value), Any), value)
    assert same(plain(value), value)


@given(JSON, OBJECTS, OBJECTS)
def test_a_sample_is_the_same_in_another_process_and_in_a_checkpoint(
    truth: Any, extra: Any, columns: Any
) -> None:
    sample = Sample(prompt_of(truth, extra, columns), (Trajectory(score=Score(0.5)),))
    there = codec.decoder(Sample).decode(codec.pack(sample))
    assert there == sample and same_prompt(there.prompt, sample.prompt)
    ledger = Ledger(Schedule(ppo_mini_batch_size=1))
    ledger.admit(sample.prompt)
    snapshot = codec.from_json(codec.to_json(ledger.snapshot()), LedgerSnapshot)
    assert same_prompt(snapshot.slots[0][1].prompt, sample.prompt)


@given(JSON, OBJECTS, OBJECTS)
def test_a_call_of_a_reward_is_the_same_in_the_worker(truth: Any, extra: Any, columns: Any) -> None:
    call = Call(1, "text", "source", truth, extra, columns, ["a response"])
    (payload,) = Frames().feed(frame([call]))
    (there,) = calls_decoder.decode(payload)
    assert there == call
    for name in ("ground_truth", "extra_info", "columns"):
        assert same(getattr(there, name), getattr(call, name))


def test_other_extensions_are_refused() -> None:
    with pytest.raises(ValueError, match="extension of type 7"):
        codec.decoder(Any).decode(b"\xd4\x07\x00")


def test_a_row_of_reasoning_gym_with_a_large_integer_crosses_every_wire() -> None:
    shown = problem(load_source("reasoning_gym:codeio?size=150&seed=1", seed=0), 83)
    prompt = prompt_of(shown.ground_truth, shown.extra_info, shown.columns)
    assert any(n < -(2**63) for n in integers_in([prompt.extra_info, prompt.columns]))
    assert same_prompt(codec.decoder(Prompt).decode(codec.pack(prompt)), prompt)
    assert same_prompt(codec.from_json(codec.to_json(prompt), Prompt), prompt)


def integers_in(value: Any) -> list[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [n for part in value for n in integers_in(part)]
    return [value] if type(value) is int else []


@pytest.mark.parametrize("column", ["answer", "extra"])
def test_an_integer_that_json_cannot_hold_is_a_bad_row(column: str) -> None:
    row = {"prompt": "a", column: 10**5000}
    rows = Rows((Part("source", "source", 1, lambda i: row, generated=True),), (1,))
    with pytest.raises(DataError, match="4300 digits"):
        problem(rows, 0)
