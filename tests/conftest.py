"""Settings and fixtures of all tests."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The machines that run these tests are shared, so the duration of an example shows nothing.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Otherwise, the next engine in this process would use the process group of an earlier test."""
    yield
    if torch := sys.modules.get("torch"):
        assert not torch.distributed.is_initialized(), "an engine of this test was not closed"
