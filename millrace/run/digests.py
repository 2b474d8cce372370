"""Digests of the settings behind samples and weights, by which a journal knows its run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from millrace.persist.config_file import flat
from millrace.run.resume_checks import RULES

_PLACES_OF_TRAINING = (
    *("nnodes", "n_gpus_per_node", "gpus_in_node", "runtime", "ray_address", "device", "threads"),
    *("offload", "offload_policy", "wait_deadline_s", "stop_grace_s"),
    *("stall_s", "on_stall", "max_restarts", "max_skipped_steps"),
)
_PLACES_OF_ROLLOUTS = (
    *("nnodes", "n_gpus_per_node", "max_replicas"),
    *("heartbeat_s", "stall_s", "max_restarts"),
)
_RECORDS = (
    *("save_freq", "async_save", "save_last", "max_ckpt_to_keep", "journal", "resume", "run_dir"),
    "mirror",
    *("logger", "project_name", "prometheus_port", "test_freq", "val_before_train"),
)
WITHOUT_EFFECT_ON_WEIGHTS = (
    *("report", "guard", "sync"),
    *(f"trainer.{key}" for key in (*_PLACES_OF_TRAINING, *_RECORDS)),
    *(f"rollout.{key}" for key in (*_PLACES_OF_ROLLOUTS, "test_freq", "val_kwargs")),
    *("data.val_files", "data.val_max_samples", "data.appended_rows"),
    *("data.train_files", "data.train_max_samples"),  # their rows have a digest of their own
)
"""Keys that may change while a resumed run trains the steps of the journal again."""
_FREE = tuple(f"{key}." for key in WITHOUT_EFFECT_ON_WEIGHTS)


def digests(values: dict[str, Any], rows: str = "") -> tuple[str, str]:
    """Return digests of the settings that shape samples, and of those that shape weights too.

    `values` is a configuration as plain data, and `rows` names the rows of the training data. The
    journal has both digests.
    """
    keys = dict(flat(values))
    samples = {key: keys.get(key) for rule in RULES for key in rule.keys} | {"rows": rows}
    training = {key: value for key, value in keys.items() if not f"{key}.".startswith(_FREE)}
    first, second = (
        hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:16]
        for part in (samples, training)
    )
    return first, second
