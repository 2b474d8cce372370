"""Keys of verl that only have a meaning together with other keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millrace.errors import bad_value

Setting = tuple[str, Any]
Given = Mapping[str, Any]
"""All settings of one layer, without verl's prefix. Of equal keys, the last value counts."""
Joined = dict[str, tuple[list[Setting], str]]
"""For each key of verl's: the settings that it becomes, and a note."""

_FUNCTION = ("custom_reward_function", "reward.custom_reward_function")

JOINED: dict[str, str] = {
    "actor.clip_ratio": "both clip_ratio_low and clip_ratio_high, where they are not set",
    "critic.model.path": "the critic starts from the policy's weights",
    **{
        f"{section}.{part}": "reward.function" for section in _FUNCTION for part in ("path", "name")
    },
    "reward.reward_model.model_path": "reward.model.path, with reward.reward_model.enable=true",
    "reward_model.model.path": "reward.model.path, with reward_model.enable=true",
    "rollout.val_kwargs.do_sample": "false sets rollout.val_kwargs.temperature=0",
    "trainer.experiment_name": "name",
    "trainer.project_name": "the first part of name, if there is no experiment_name",
    "trainer.resume_from_path": "trainer.resume, with trainer.resume_mode=resume_path",
}
"""These keys, and what they become."""


def join(given: Given) -> Joined:
    """Return what the keys of JOINED in `given` become. Raises ConfigError."""
    result: Joined = {}
    for part in (_clip, _critic, _function, _greedy, _name, _resume, _reward_model):
        result |= part(given)
    return result


def _clip(given: Given) -> Joined:
    key = "actor.clip_ratio"
    if key not in given:
        return {}
    sides = [side for side in (f"{key}_low", f"{key}_high") if side not in given]
    return {key: ([(side, given[key]) for side in sides], JOINED[key])}


def _critic(given: Given) -> Joined:
    key = "critic.model.path"
    if key not in given:
        return {}
    path, policy = given[key], given.get("model.path")
    if path is not None and policy is not None and path != policy:
        raise bad_value(key, path, JOINED[key], f"critic.model.path={policy}, or leave the key out")
    return {key: ([], JOINED[key])}


def _function(given: Given) -> Joined:
    result: Joined = {}
    for section in _FUNCTION:
        path, name = given.get(f"{section}.path"), given.get(f"{section}.name")
        if f"{section}.path" in given:
            function = f"{path}:{name or 'compute_score'}"
            result[f"{section}.path"] = ([("reward.function", function)] if path else [], "")
        if f"{section}.name" in given:
            result[f"{section}.name"] = ([], f"it names the function in {section}.path")
    return result


def _greedy(given: Given) -> Joined:
    key = "rollout.val_kwargs.do_sample"
    if key not in given:
        return {}
    off = given[key] is False
    return {key: ([("rollout.val_kwargs.temperature", 0)] if off else [], "validation samples")}


def _name(given: Given) -> Joined:
    project, experiment = "trainer.project_name", "trainer.experiment_name"
    result: Joined = {}
    if project in given:
        result[project] = ([], "the name of a run is that of the experiment")
    if given.get(experiment):
        result[experiment] = ([("name", _as_name(given[experiment]))], "")
    elif given.get(project):
        result[project] = ([("name", _as_name(given[project]))], "")
    return result


def _as_name(text: object) -> str:
    return re.sub(r"[^\w.-]+", "-", str(text)).lstrip(".-") or "run"


def _resume(given: Given) -> Joined:
    key, mode = "trainer.resume_from_path", given.get("trainer.resume_mode")
    path = given.get(key)
    if mode == "resume_path" and not path:
        rule = "trainer.resume_mode=resume_path needs the folder of a checkpoint"
        raise bad_value(key, path, rule, f"{key}=FOLDER, or trainer.resume_mode=auto")
    if key not in given:
        return {}
    named = mode == "resume_path"
    why = "" if named else "trainer.resume_mode is not resume_path"
    return {key: ([("trainer.resume", path)] if named else [], why)}


def _reward_model(given: Given) -> Joined:
    result: Joined = {}
    for section, name in (("reward.reward_model", "model_path"), ("reward_model", "model.path")):
        key, on = f"{section}.{name}", given.get(f"{section}.enable") is True
        if key in given:
            use = on and given[key] is not None
            why = "" if use else f"{section}.enable is not true"
            result[key] = ([("reward.model.path", given[key])] if use else [], why)
    return result
