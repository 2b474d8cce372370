"""What reward workers print: whole lines, without secrets, also if a secret comes in pieces."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

from millrace.rewards.output import Budget, Output

SECRET = "sk-canary-1234"


@pytest.mark.parametrize("end", [b"\n", b"\r", b""], ids=["line", "bar", "no end"])
@pytest.mark.parametrize("cut", [0, 5, len(SECRET)])
@pytest.mark.parametrize("before", [0, 9000, 20_000])
def test_a_secret_is_not_shown_also_if_it_comes_in_two_pieces(
    before: int,
    cut: int,
    end: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)

    async def work() -> None:
        reading, writing = os.pipe()
        output = Output(reading, Budget("reward", Counter()))
        for piece in (
            b"x" * before + b"\xff key " + SECRET[:cut].encode(),
            SECRET[cut:].encode() + b" end" + end,
        ):
            os.write(writing, piece)
            await asyncio.sleep(0.05)
        os.close(writing)
        output.close()

    asyncio.run(work())
    assert capfd.readouterr().err == f"{'x' * before}\ufffd key *** end{end.decode() or chr(10)}"
