"""Refusals and notes of a resume. The fact on a key's field says what a change of it means.

The samples in flight are in the checkpoint. Keys that shaped them cannot change. Keys without such
a fact are applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from millrace.config import AlgorithmConfig, Config, ModelConfig, RewardConfig, TeacherConfig
from millrace.config.algorithm_keys import without_own_algorithm
from millrace.config.explain import all_keys, facts, ignored, section_of, shown
from millrace.config.recipe import parse
from millrace.config.section import Fixed, FixedRows, Past, Section
from millrace.config.teacher_keys import weights_of
from millrace.errors import ConfigError, bad_value
from millrace.pipeline.checkpoint import ROWS, read_ledger

_Fact = TypeVar("_Fact", FixedRows, Fixed, Past)
_OF_AN_ATTEMPT = ("trainer.resume", "trainer.run_dir")
"""Keys that say where to resume, and nothing about the run."""


def check(config: Config, checkpoint: Path) -> list[str]:
    """Return notes on the keys that have changed: without effect, or used from here on.

    Raises ConfigError for a change that a resume cannot make.
    """
    tree = yaml.safe_load((checkpoint / "config.yaml").read_text())
    now = config.algorithm.adv_estimator
    then = (tree.get("algorithm") or {}).get("adv_estimator", "")
    moved = now.rpartition(":")[2] == then.rpartition(":")[2]  # the same function in another file
    before = parse(without_own_algorithm(tree, now if moved else then))

    def differing(kind: type[_Fact]) -> list[tuple[str, _Fact]]:
        """Return the keys with such a fact whose values differ, with the fact."""
        return [
            (key, fact)
            for key, fact in facts(kind)
            if config.value_of(key) != before.value_of(key) and not fact.unless(config, before, key)
        ]

    fixed: list[tuple[str, FixedRows | Fixed]] = [*differing(Fixed)]
    if not (checkpoint / ROWS).is_file():
        fixed += differing(FixedRows)
    refused = [
        bad_value(
            key,
            config.value_of(key),
            f"the checkpoint {checkpoint} was made with {before.value_of(key)!r}, and {fact.why}",
            f"{key}={shown(before.value_of(key))}, or a new run",
        )
        for key, fact in fixed
    ]
    if refused:
        raise ConfigError("\n".join(map(str, refused)))
    _check_architecture(config.model, before.model.path, checkpoint)
    _check_estimator(config.algorithm, before.algorithm, checkpoint)
    if config.needs_reference != before.needs_reference:
        with_ = "with" if before.needs_reference else "without"
        rule = f"the checkpoint {checkpoint} was made {with_} a reference policy"
        in_loss = config.actor.use_kl_loss != before.actor.use_kl_loss
        key = "actor.use_kl_loss" if in_loss else "algorithm.use_kl_in_reward"
        fix = "the KL settings of that run, or a new run"
        raise bad_value(key, config.needs_reference, rule, fix)
    _check_components(config.algorithm, config.reward, before.reward, checkpoint)
    _check_teachers(config.teachers, before.teachers, checkpoint)
    past = dict(differing(Past))
    unused = {*past, *_OF_AN_ATTEMPT, *(key for key, _ in ignored(config.value_of))}
    lines = [
        f"{key} = {config.value_of(key)!r}: no effect, because {fact.why}"
        for key, fact in past.items()
    ]
    changed = [
        f"{key} = {_text(config.value_of(key))} (was {_text(before.value_of(key))})"
        for key, field in all_keys()
        if not section_of(field.annotation) and key not in unused
        if config.value_of(key) != before.value_of(key)
    ]
    if changed:
        lines.append(f"changed since the checkpoint, and used from here on: {', '.join(changed)}")
    path, kept = config.model.path, _template(checkpoint / "model")
    if path and _template(Path(path)) not in (kept, ""):
        why = "prompts are read as at the checkpoint, whose template is another one"
        lines.append(f"model.path = {path!r}: its chat template has no effect, because {why}")
    return lines


def _text(value: Any) -> str:
    """Return a value as a recipe has it. Parts of a mapping have the keys that are set."""
    if isinstance(value, dict):
        parts = (
            v if not isinstance(v, Section) else v.model_dump(mode="json", exclude_defaults=True)
            for v in value.values()
        )
        value = dict(zip(value, parts, strict=True))
    return shown(value)


def _template(model: Path) -> str:
    """Return the chat template of a folder. It is empty if there is none, or a list of them."""
    file = model / "chat_template.jinja"
    if file.is_file():
        return file.read_text(errors="replace")
    found = _read_json(model / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else ""


ARCHITECTURE = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("tie_word_embeddings", "rope_theta", "rope_parameters", "rope_scaling"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"),
    "moe_intermediate_size",
)
"""Keys of config.json that the trained weights depend on."""


def _check_architecture(model: ModelConfig, then: str, checkpoint: Path) -> None:
    """Raise ConfigError if model.path is another model than `then`, the checkpoint's.

    The same model in another folder is valid.
    """
    if (path := model.path) == then:
        return
    trained = _read_json(checkpoint / "model" / "config.json")
    given = _read_json(Path(path) / "config.json") if path else trained
    given |= model.override_config if given else {}
    different = [key for key in ARCHITECTURE if given.get(key) != trained.get(key)]
    if given and trained and not different and not (model.lora_rank and not path):
        return
    origin = f"the checkpoint {checkpoint} was made with"
    rule = f"{origin} {then!r}, and millrace cannot check that this is the same model"
    if given and trained and different:
        key = different[0]
        rule = f"its {key} is {given.get(key)}, and {origin} {trained.get(key)}"
    raise bad_value("model.path", path, rule, f"model.path={shown(then)}, or a new run")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _check_estimator(now: AlgorithmConfig, then: AlgorithmConfig, checkpoint: Path) -> None:
    """Raise ConfigError if only one of the run and the checkpoint has a critic.

    The same applies to greedy responses.
    """
    estimator, before_it = now.adv_estimator, then.adv_estimator
    if estimator == before_it:
        return
    critic, greedy = now.needs_critic != then.needs_critic, now.needs_greedy != then.needs_greedy
    if critic or greedy:
        lacks = "critic" if critic else "greedy response to each prompt"
        has = "a" if then.needs_critic or then.needs_greedy else "no"
        rule = f"the checkpoint {checkpoint} was made with {before_it}: it has {has} {lacks}"
        raise bad_value(
            "algorithm.adv_estimator",
            estimator,
            rule,
            f"algorithm.adv_estimator={before_it}, or a new run",
        )


def _check_components(
    algorithm: AlgorithmConfig, reward: RewardConfig, before: RewardConfig, checkpoint: Path
) -> None:
    """Raise ConfigError if gdpo would train samples in flight by the components of another reward.

    The finished samples of the checkpoint have the scores of the reward `before`.
    """
    if not algorithm.needs_components:
        return
    samples = [slot.sample for _, slot in read_ledger(checkpoint).slots if slot.sample is not None]
    scores = [t.score for sample in samples for t in sample.trajectories if t.score is not None]
    keys = algorithm.gdpo_reward_keys
    missing = sorted({key for key in keys for score in scores if key not in score.extra})
    if not scores or not (missing if keys else _components(reward) != _components(before)):
        return
    names = ", ".join(sorted({name for score in scores for name in score.extra})) or "none"
    rule = f"finished samples of the checkpoint {checkpoint} have the components {names}, " + (
        f"without {', '.join(missing)}" if missing else "of another reward"
    )
    fix = "components that both rewards have, the reward of the checkpoint, or a new run"
    raise bad_value("algorithm.gdpo_reward_keys", list(keys), rule, fix)


def _check_teachers(
    now: Mapping[str, TeacherConfig], before: Mapping[str, TeacherConfig], checkpoint: Path
) -> None:
    """Raise ConfigError if finished samples lack log-probs of a teacher outside of the trainer.

    Another address of the same teacher is valid.
    """
    outside = {name: one for name, one in now.items() if one.outside}
    if not outside:
        return
    samples = [slot.sample for _, slot in read_ledger(checkpoint).slots if slot.sample is not None]
    for sample in samples:
        row = sample.prompt
        for name in weights_of(now, row.data_source, row.extra_info).keys() & outside:
            then, fix = before.get(name), "the teachers of the checkpoint, or a new run"
            if any(name not in t.teachers for t in sample.trajectories):
                rule = (
                    f"finished samples of the checkpoint {checkpoint} have no log-probs of {name}"
                )
                raise bad_value(f"teachers.{name}", outside[name].identity, rule, fix)
            given, own = outside[name], then.identity if then is not None else ""
            if own and own != given.identity:
                rule = f"finished samples of the checkpoint {checkpoint} have those of {own!r}"
                key = f"teachers.{name}.{'model' if given.base_url else 'path'}"
                raise bad_value(key, given.identity, rule, fix)


def _components(reward: RewardConfig) -> Any:
    """Return the keys that decide which components a score has."""
    parts = {
        section: (part.function, part.model.path, part.judge.model)
        for section, part in reward.parts.items()
    }
    return parts, reward.overlong_buffer.enable
