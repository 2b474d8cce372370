"""Each loss and each estimator has an independent reference in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.algorithms.estimators import ESTIMATORS
from millrace.algorithms.losses import POLICY_LOSSES
from tests.algorithms.loss_cases import TOKEN_RULES
from tests.algorithms.test_estimators import Reference
from tests.algorithms.test_sequence_losses import REFERENCES

KNOWN = {*vars(Reference), *TOKEN_RULES, *(mode for mode, _ in REFERENCES)}


@pytest.mark.parametrize("name", [*ESTIMATORS, *POLICY_LOSSES])
def test_each_algorithm_has_a_reference_here_or_a_test_of_its_own(name: str) -> None:
    assert name in KNOWN or (Path(__file__).parent / f"test_{name}.py").is_file()
