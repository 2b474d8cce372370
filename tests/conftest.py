"""What all tests share."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The machines that run these tests are shared: how long an example takes says nothing of the code.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """The next engine in this process would take it for its own, or for one of several ranks."""
    yield
    if torch := sys.modules.get("torch"):
        assert not torch.distributed.is_initialized(), "an engine of this test was not closed"
