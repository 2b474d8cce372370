"""What a resume may change: every key is applied, refused by name, or past.

Samples under way are in the checkpoint. They bind what made them; everything else may change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from millrace.config import Config
from millrace.config.recipe import parse
from millrace.errors import bad_value


def _never(now: Config, before: Config) -> bool:
    return False


def _longer_responses(now: Config, before: Config) -> bool:
    return now.rollout.max_response_length > before.rollout.max_response_length


def _longer_prompts(now: Config, before: Config) -> bool:
    longer = now.rollout.max_prompt_length > before.rollout.max_prompt_length
    return longer and not now.data.filter_overlong_prompts


def _no_drawn_lengths(now: Config, before: Config) -> bool:
    return not now.rollout.drawn_lengths.enable


def _own_model(now: Config, before: Config) -> bool:
    return bool(now.model.path)


def _no_byte_pairs(now: Config, before: Config) -> bool:
    return bool(now.model.path) or now.model.tokenizer == "chars"


def _no_adapters(now: Config, before: Config) -> bool:
    return not now.model.lora_rank


def _fixed_kl(now: Config, before: Config) -> bool:
    return now.algorithm.kl_ctrl.type == "fixed"


@dataclass(frozen=True, slots=True)
class Rule:
    """Keys that a resume cannot change, and why."""

    keys: tuple[str, ...]
    why: str
    unless: Callable[[Config, Config], bool] = _never
    """Whether the change is harmless, from the configurations (now, before)."""


_SHAPE = (
    "model.shape.hidden_size",
    "model.shape.num_hidden_layers",
    "model.shape.num_attention_heads",
    "model.shape.num_key_value_heads",
    "model.shape.intermediate_size",
    "model.shape.tie_word_embeddings",
    "model.shape.vocab_size",
    "model.tokenizer",
)
_LENGTHS = ("enable", "median", "sigma")
_STREAM = ("train_files", "prompt_key", "shuffle", "filter_overlong_prompts", "train_max_samples")

RULES = (
    Rule(
        ("trainer.seed", *(f"data.{key}" for key in _STREAM)),
        "prompts are known by their place in the stream",
    ),
    Rule(("rollout.n",), "samples under way have as many trajectories"),
    Rule(("rollout.temperature",), "tokens under way have log-probs at that temperature"),
    Rule(
        ("rollout.stop", "rollout.ignore_eos"),
        "responses under way may be past what would end them now",
    ),
    Rule(("rollout.max_response_length",), "responses under way may be longer", _longer_responses),
    Rule(
        ("rollout.max_prompt_length",),
        "prompts under way may be longer, or the data is filtered by it",
        _longer_prompts,
    ),
    Rule(("rollout.drawn_lengths.enable",), "responses under way may be longer"),
    Rule(
        ("rollout.drawn_lengths.median", "rollout.drawn_lengths.sigma"),
        "responses under way may be longer",
        _no_drawn_lengths,
    ),
    Rule(_SHAPE, "the model was made on the spot then", _own_model),
    Rule(("model.tokenizer_vocab_size",), "the tokenizer was made then", _no_byte_pairs),
    Rule(("model.lora_rank",), "the trained weights are those of that rank"),
    Rule(
        ("model.lora_alpha", "model.target_modules", "model.dtype"),
        "the adapters were trained on that",
        _no_adapters,
    ),
)
"""Refused where the value differs."""

PAST = (
    Rule(
        tuple(
            f"sft.{key}"
            for key in ("steps", "batch_size", "lr", "lr_warmup_steps", "messiness", "files")
        ),
        "the checkpoint is past the warm-up, so this changes nothing",
    ),
    Rule(
        ("algorithm.kl_ctrl.kl_coef",),
        "the adaptive coefficient goes on from the checkpoint's",
        _fixed_kl,
    ),
)
"""Without effect from here on: a note says so."""

BY_MODELS = (
    "model.path",
    "algorithm.adv_estimator",
    "actor.use_kl_loss",
    "algorithm.use_kl_in_reward",
)
"""Refused where they ask for other models than the checkpoint has."""

_PLACES = ("nnodes", "n_gpus_per_node", "engine", "tensor_model_parallel_size", "max_num_seqs")
_VLLM = (
    *("gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "engine_kwargs"),
    *("max_num_batched_tokens", "free_cache_engine"),
)
_ROLLOUT = ("total_rollout_steps", "test_freq", "top_p", "top_k", "kv_on_swap", "val_kwargs")
_DATA = ("val_files", "val_max_samples", "train_batch_size", "gen_batch_size")
_MEMORY = ("gradient_checkpointing", "gradient_checkpointing_share", "compile", "trust_remote_code")

APPLIED = (
    *("name", "mode", "trainer", "reward", "actor", "critic", "algorithm", "async_training"),
    *("sync", "guard"),
    *(f"rollout.{key}" for key in (*_PLACES, *_VLLM, *_ROLLOUT)),
    *(f"data.{key}" for key in _DATA),
    *(f"model.{key}" for key in _MEMORY),
)
"""Keys, and sections whose other keys, take effect at once. top_p and top_k have one value."""


def check(config: Config, checkpoint: Path) -> list[str]:
    """Raise ConfigError for what the run cannot honour. Return notes on what has no effect."""
    before = parse(yaml.safe_load((checkpoint / "config.yaml").read_text()))
    for rule, key in _changed(RULES, config, before):
        then = _value(before, key)
        raise bad_value(
            key,
            _value(config, key),
            f"the checkpoint {checkpoint} was made with {then!r}, and {rule.why}",
            f"{key}={_shown(then)}, or a new run",
        )
    _check_architecture(config, before, checkpoint)
    _check_estimator(config, before, checkpoint)
    _check_reference(config, before, checkpoint)
    changed = _changed(PAST, config, before)
    return [f"{key} = {_value(config, key)!r}: {rule.why}" for rule, key in changed]


def _changed(rules: tuple[Rule, ...], now: Config, before: Config) -> list[tuple[Rule, str]]:
    return [
        (rule, key)
        for rule in rules
        for key in rule.keys
        if _value(now, key) != _value(before, key) and not rule.unless(now, before)
    ]


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _shown(value: Any) -> str:
    """The value as an override."""
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


ARCHITECTURE = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("tie_word_embeddings", "rope_theta", "rope_parameters", "rope_scaling"),
)
"""Keys of a config.json that the trained weights depend on."""


def _check_architecture(config: Config, before: Config, checkpoint: Path) -> None:
    """The weights are the checkpoint's. A model folder that moved is welcome, another model not."""
    path, then = config.model.path, before.model.path
    if path == then:
        return
    trained = _read_json(checkpoint / "model" / "config.json")
    found = _read_json(Path(path) / "config.json") if path else trained
    odd = [key for key in ARCHITECTURE if found.get(key) != trained.get(key)]
    if found and trained and not odd and not (config.model.lora_rank and not path):
        return
    was = f"the checkpoint {checkpoint} was made with"
    rule = f"{was} {then!r}, and whether this is the same model cannot be seen"
    if found and trained and odd:
        rule = f"its {odd[0]} is {found.get(odd[0])}, and {was} {trained.get(odd[0])}"
    raise bad_value("model.path", path, rule, f"model.path={_shown(then)}, or a new run")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_estimator(config: Config, before: Config, checkpoint: Path) -> None:
    """Critics and greedy responses are in the checkpoint, or they are not."""
    estimator, before_it = config.algorithm.adv_estimator, before.algorithm.adv_estimator
    if estimator != before_it and {estimator, before_it} & {"remax", "gae"}:
        lacks = "critic" if "gae" in (estimator, before_it) else "greedy response to each prompt"
        has = "a" if before_it in ("gae", "remax") else "no"
        rule = f"the checkpoint {checkpoint} was made with {before_it}: it has {has} {lacks}"
        raise bad_value(
            "algorithm.adv_estimator",
            estimator,
            rule,
            f"algorithm.adv_estimator={before_it}, or a new run",
        )


def _check_reference(config: Config, before: Config, checkpoint: Path) -> None:
    """So is the reference policy."""
    if config.needs_reference != before.needs_reference:
        rule = f"the checkpoint {checkpoint} was made {'with' if before.needs_reference else 'without'} a reference policy"
        in_loss = config.actor.use_kl_loss != before.actor.use_kl_loss
        key = "actor.use_kl_loss" if in_loss else "algorithm.use_kl_in_reward"
        raise bad_value(
            key, config.needs_reference, rule, "the KL settings of that run, or a new run"
        )
