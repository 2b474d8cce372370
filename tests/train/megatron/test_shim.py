"""Every name that the shim patches exists in the pinned version."""

from __future__ import annotations

import importlib

import pytest

from tests.train.megatron import shim

megatron = pytest.importorskip("megatron.core")


def test_the_version_is_the_pinned_one() -> None:
    assert megatron.__version__ == shim.VERSION


@pytest.mark.parametrize("module", shim.PATCHES)
def test_every_patched_name_exists(module: str) -> None:
    for name in shim.PATCHES[module]:
        assert hasattr(importlib.import_module(module), name)
