"""What a user reads about settings that millrace lacks."""

from __future__ import annotations

import pytest

from millrace.config.recipe import load
from millrace.errors import ConfigError


@pytest.mark.parametrize(
    ("logger", "said"),
    [("swanlab", "no swanlab. "), ("[console,swanlab,clearml]", "no clearml, swanlab. ")],
)
def test_a_run_says_which_loggers_it_lacks(logger: str, said: str) -> None:
    notes = load("quickstart", [f"trainer.logger={logger}"]).notes
    assert any(f"trainer.logger: millrace has {said}" in note for note in notes)


@pytest.mark.parametrize("logger", ["console", "[tensorboard]", "[]"])
def test_a_run_without_these_loggers_says_nothing(logger: str) -> None:
    assert not any(
        "has no" in note for note in load("quickstart", [f"trainer.logger={logger}"]).notes
    )


@pytest.mark.parametrize(
    ("key", "near"),
    [("wieght", "weight"), ("functoin", "function"), ("judge.max_token", "judge.max_tokens")],
)
def test_a_misspelled_key_of_a_part_names_the_nearest_one(key: str, near: str) -> None:
    mix = ["reward.mix.a.function=exact", f"reward.mix.a.{key}=2"]
    with pytest.raises(ConfigError, match=rf"no such key\. Fix: reward\.mix\.a\.{near};"):
        load("quickstart", mix)


def test_the_fix_for_a_list_that_is_null_names_no_none() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger = None: .*logger=\[\.\.\.\]'"):
        load("quickstart", ["trainer.logger=null"])
