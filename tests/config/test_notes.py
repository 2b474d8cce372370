"""Notes of a run on settings that mean something else here."""

from __future__ import annotations

import pytest

from millrace.config.recipe import load


@pytest.mark.parametrize(
    ("logger", "said"), [("wandb", "no wandb. "), ("[console,mlflow,wandb]", "no mlflow, wandb. ")]
)
def test_a_run_says_which_loggers_it_lacks(logger: str, said: str) -> None:
    notes = load("quickstart", [f"trainer.logger={logger}"]).notes
    assert any(f"trainer.logger: millrace has {said}" in note for note in notes)


@pytest.mark.parametrize("logger", ["console", "[tensorboard]", "[]"])
def test_a_run_without_these_loggers_says_nothing(logger: str) -> None:
    assert not any(
        "has no" in note for note in load("quickstart", [f"trainer.logger={logger}"]).notes
    )
