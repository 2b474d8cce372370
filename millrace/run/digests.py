"""Digests of the settings behind samples and weights, by which a journal knows its run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from millrace.config.explain import facts
from millrace.config.facts import Fixed, NoEffectOnWeights
from millrace.config.teacher_keys import CLIENT_KEYS
from millrace.observe.files import flat


def digests(values: dict[str, Any], rows: str = "") -> tuple[str, str]:
    """Return digests of the settings that shape samples, and of those that shape weights too.

    `values` is a configuration as plain data, and `rows` names the rows of the training data. The
    journal has both digests.
    """
    keys = dict(flat(values))
    teachers = values.get("teachers") or {}
    free = tuple(f"{key}." for key, _ in facts(NoEffectOnWeights))
    free += tuple(f"teachers.{name}.{key}." for name in teachers for key in CLIENT_KEYS)
    samples = {key: keys.get(key) for key, _ in facts(Fixed)} | {"rows": rows}
    outside = {
        name: (one["model"] if one["base_url"] else one["path"], one["data_sources"])
        for name, one in teachers.items()
        if one["base_url"] or one["place"] == "own"
    }
    if outside:  # a finished sample has their log-probs
        samples["teachers"] = outside
    training = {key: value for key, value in keys.items() if not f"{key}.".startswith(free)}
    first, second = (
        hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:16]
        for part in (samples, training)
    )
    return first, second
