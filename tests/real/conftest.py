"""Tests on real weights: SmolLM2-135M-Instruct, in float32 on the CPU (`make test-real`).

Without the weights they are skipped. With MILLRACE_SMOLLM2 set, nothing is skipped: a missing
folder and a missing package are failures then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from millrace.types import Sample
from tests.real.model import KEY, Reference, weights
from tests.real.step import Update, exact_model, first_update, samples_of
from tests.serving.engine import ENGINE

if not ENGINE:
    collect_ignore = ["test_serving.py"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Turn a skip into a failure where the user has named the weights."""
    report = yield
    if report.skipped and KEY in os.environ:  # type: ignore[attr-defined]
        report.outcome = "failed"  # type: ignore[attr-defined]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests but the smoke, which `make test` runs."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem != "test_smoke":
            item.add_marker("real")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the weights."""
    folder, command = weights()
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"{folder} has no model.safetensors. Fix: {command}")
    return folder


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="session")
def samples(reference: Reference) -> tuple[Sample, ...]:
    return samples_of(reference)


@pytest.fixture(scope="session")
def updates(reference: Reference, samples: tuple[Sample, ...]) -> Callable[[str], Update]:
    """A function from a path of the policy's loss to its first update in float64."""

    @cache
    def update(path: str) -> Update:
        model = exact_model(reference)
        return first_update(model, samples, path, dict(model.named_parameters()))

    return update
