"""What several modules of engine tests begin with."""

import pytest
import torch

from tests.train import cases as train_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two small models, tied and untied; this process computes on one thread."""
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("models"))
    train_cases.write_models(path)
    return path
