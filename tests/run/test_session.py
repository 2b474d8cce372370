"""The end of a resumed run, against its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace import codec
from millrace.config import recipe
from millrace.errors import ConfigError
from millrace.run.session import check_end
from millrace.schedule.ledger import LedgerSnapshot

LIMITS = ("rollout.total_rollout_steps", "trainer.total_epochs", "trainer.total_training_steps")
SIZE = ["actor.ppo_mini_batch_size=4", "async_training.trigger_parameter_sync_step=2"]
MORE = [
    "rollout.total_rollout_steps=96",
    "trainer.total_epochs=6",
    "trainer.total_training_steps=12",
]


@pytest.mark.parametrize("key", LIMITS)
def test_the_key_that_ends_a_run_before_its_checkpoint_is_named(tmp_path: Path, key: str) -> None:
    """The checkpoint has trained 64 samples: 4 passes over 16 rows, or 8 windows of 8 samples."""
    snapshot = LedgerSnapshot(8, 8, 64, 64, {}, [])
    (tmp_path / "ledger.json").write_bytes(codec.to_json(snapshot))

    def check(value: int) -> None:
        config = recipe.load("quickstart", ["mode=colocate_sync", *SIZE, *MORE, f"{key}={value}"])
        assert config.schedule.window == 8
        check_end(config, 16, tmp_path)

    exact = {"rollout.total_rollout_steps": 64, "trainer.total_epochs": 4}.get(key, 8)
    check(exact)
    message = rf"{key} = {exact - 1}: the run would end after \d+ samples, .* has trained 64\."
    with pytest.raises(ConfigError, match=message):
        check(exact - 1)
