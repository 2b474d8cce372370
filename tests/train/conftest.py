"""Fixtures that several modules of engine tests share."""

import pytest
import torch

from tests.train import cases as train_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with two small models, tied and untied. This process then uses one thread."""
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("models"))
    train_cases.write_models(path)
    return path
