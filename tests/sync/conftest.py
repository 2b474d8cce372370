"""A fixture that keeps the tests of this folder on loopback."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
