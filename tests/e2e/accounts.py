"""Checks of the accounts of a real run, against figures that other code counted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from millrace.persist.accounts import Line
from millrace.persist.run_reader import RunReader
from tests.e2e import runs


def check_accounts(folder: Path, n: int = 4) -> list[Line]:
    """Check every line. Return the lines of a complete run, whose samples have `n` trajectories."""
    lines = RunReader(folder).read().accounts
    assert lines[0].event == "start" and lines[-1].event == "end"
    for line in lines:
        assert sum(line.tokens.values()) == line.generated
        assert all(count > 0 for count in line.tokens.values()), "a bucket without tokens is absent"
        for track, device in line.devices.items():
            assert sum(device.seconds.values()) == pytest.approx(line.seconds, rel=1e-6), track
    for before, after in pairwise(lines):
        assert before.generated <= after.generated, "no token is ever forgotten"
    last = lines[-1]
    lengths = [row["response_length/mean"] * row["train/samples"] * n for row in runs.rows(folder)]
    assert last.tokens["trained"] == round(sum(lengths))
    assert "held" not in last.tokens
    return lines
