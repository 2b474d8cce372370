"""The keys that a resume may change. Every key is applied, refused, or without effect.

The samples in flight are in the checkpoint. Keys that shaped them cannot change. All other keys
may.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from millrace.config import Config, RewardConfig
from millrace.config.agent_keys import LOCAL, SERVED
from millrace.config.recipe import parse
from millrace.errors import bad_value
from millrace.pipeline.checkpoint import ROWS, read_ledger


def _longer_prompts(now: Config, before: Config) -> bool:
    longer = now.rollout.max_prompt_length > before.rollout.max_prompt_length
    return longer and not now.data.filter_overlong_prompts


@dataclass(frozen=True, slots=True)
class Rule:
    """Keys that a resume cannot change, and the reason."""

    keys: tuple[str, ...]
    why: str
    unless: Callable[[Config, Config], bool] = lambda now, before: False
    """Whether the change is harmless, from the configurations (now, before)."""


def _same_server_elsewhere(*values: str) -> bool:
    """Whether only the address of an environment's server differs."""
    kinds = {value.partition(":http")[0] for value in values}
    return all(":http" in value for value in values) and len(kinds) == 1


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
_STREAM = ("prompt_key", "shuffle", "filter_overlong_prompts")
_POSITION = "it identifies each prompt by its position in the data"

RULES = (
    Rule(
        ("trainer.seed", *(f"data.{key}" for key in _STREAM)),
        _POSITION,
    ),
    Rule(
        ("data.chat",),
        "its prompts in flight were read with it",
        lambda now, before: (
            not now.model.path and "always" not in (now.data.chat, before.data.chat)
        ),
    ),
    Rule(("rollout.n",), "its samples in flight have that many trajectories"),
    Rule(("rollout.temperature",), "its tokens in flight have log-probs at that temperature"),
    Rule(
        ("rollout.stop", "rollout.ignore_eos"),
        "its responses in flight may already contain what would end them now",
    ),
    Rule(
        ("rollout.max_response_length",),
        "its responses in flight may be longer",
        lambda now, before: now.rollout.max_response_length > before.rollout.max_response_length,
    ),
    Rule(
        ("rollout.max_prompt_length",),
        "its prompts in flight may be longer, or the data is filtered by this length",
        _longer_prompts,
    ),
    Rule(("rollout.drawn_lengths.enable",), "its responses in flight may be longer"),
    Rule(
        ("rollout.drawn_lengths.median", "rollout.drawn_lengths.sigma"),
        "its responses in flight may be longer",
        lambda now, before: not now.rollout.drawn_lengths.enable,
    ),
    Rule(
        tuple(f"agents.{player}" for player in LOCAL),
        "its episodes in flight were played with it",
        lambda now, before: _same_server_elsewhere(
            now.agents.environment, before.agents.environment
        ),
    ),
    Rule(
        tuple(f"agents.{player}" for player in SERVED),
        "its episodes in flight have no program",
        lambda now, before: now.agents.served and before.agents.served,
    ),
    Rule(
        ("agents.tool_format", "agents.history", "agents.train_models"),
        "its turns in flight were drawn and kept by it",
    ),
    Rule(_SHAPE, "the model was built with it", lambda now, before: bool(now.model.path)),
    Rule(
        ("model.tokenizer_vocab_size",),
        "the tokenizer was built with it",
        lambda now, before: bool(now.model.path) or now.model.tokenizer == "chars",
    ),
    Rule(("model.override_config",), "the model was trained with it"),
    Rule(("model.lora_rank",), "the trained weights have that rank"),
    Rule(
        ("model.lora_alpha", "model.target_modules", "model.dtype"),
        "the adapters were trained with it",
        lambda now, before: not now.model.lora_rank,
    ),
    Rule(
        ("model.router_replay",),
        "its samples in flight have experts with R3 alone",
        lambda now, before: "R3" not in (now.model.router_replay, before.model.router_replay),
    ),
)
"""Keys that are refused if the value differs."""

_LR_WARM_UP = (
    "no effect, because the warm-up keeps its length in steps from the first start of the run"
)

PAST = (
    Rule(
        tuple(
            f"sft.{key}"
            for key in (
                "steps",
                "batch_size",
                "demonstrations",
                "lr",
                "lr_warmup_steps",
                "messiness",
                "files",
            )
        ),
        "no effect, because the warm-up of the checkpoint is complete",
    ),
    Rule(
        ("algorithm.kl_ctrl.kl_coef",),
        "no effect, because the adaptive coefficient continues from the checkpoint",
        lambda now, before: now.algorithm.kl_ctrl.type == "fixed",
    ),
    Rule(
        ("actor.optim.lr_warmup_steps_ratio",),
        _LR_WARM_UP,
        lambda now, _: not now.actor.optim.lr_warmup_steps_ratio,
    ),
    Rule(
        ("critic.optim.lr_warmup_steps_ratio",),
        _LR_WARM_UP,
        lambda now, _: not now.critic.optim.lr_warmup_steps_ratio,
    ),
)
"""Keys that have no effect after a resume. A note says so."""

BY_ROWS = Rule(("data.train_files", "data.train_max_samples"), _POSITION)
"""Keys that are refused if the rows differ, see `rows`.

A checkpoint without digests of rows needs the same values.
"""

BY_MODELS = (
    "model.path",
    "algorithm.adv_estimator",
    "actor.use_kl_loss",
    "algorithm.use_kl_in_reward",
)
"""Keys that are refused if they need other models than the checkpoint has."""

_PLACES = ("nnodes", "n_gpus_per_node", "engine", "tensor_model_parallel_size", "max_num_seqs")
_VLLM = (
    *("gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "engine_kwargs"),
    *("max_num_batched_tokens", "free_cache_engine"),
)
_ROLLOUT = ("total_rollout_steps", "test_freq", "top_p", "top_k", "val_kwargs")
_AGENTS = (
    *("max_turns", "max_tokens_per_turn", "max_episode_tokens", "max_tool_tokens", "strict"),
    *("max_parallel_calls", "max_concurrent", "workers", "host", "port", "retries", "env"),
    *("deadline_s", "turn_deadline_s", "tool_deadline_s", "retry_grace_s", "lease_s"),
    "sandbox",
)
_KV = ("kv_on_swap", "session_kv_slots")
_LOSSES = ("heartbeat_s", "stall_s", "max_restarts", "max_replicas")
_DATA = ("val_files", "val_max_samples", "train_batch_size", "gen_batch_size", "appended_rows")
_MEMORY = ("gradient_checkpointing", "gradient_checkpointing_share", "compile", "trust_remote_code")

APPLIED = (
    *("name", "mode", "trainer", "reward", "actor", "critic", "algorithm", "async_training"),
    *("sync", "guard", "report"),
    *(f"rollout.{key}" for key in (*_PLACES, *_VLLM, *_ROLLOUT, *_KV, *_LOSSES)),
    *(f"data.{key}" for key in _DATA),
    *(f"agents.{key}" for key in _AGENTS),
    *(f"model.{key}" for key in _MEMORY),
)
"""Keys that take effect at once. A section stands for all its keys that have no rule above.

top_p and top_k have only one valid value.
"""


def check(config: Config, checkpoint: Path) -> list[str]:
    """Return notes on the changes that have no effect after a resume.

    Raises ConfigError for a change that a resume cannot make.
    """
    before = parse(yaml.safe_load((checkpoint / "config.yaml").read_text()))
    rules = RULES if (checkpoint / ROWS).is_file() else (*RULES, BY_ROWS)
    for rule, key in _changed(rules, config, before):
        then = before.value_of(key)
        raise bad_value(
            key,
            config.value_of(key),
            f"the checkpoint {checkpoint} was made with {then!r}, and {rule.why}",
            f"{key}={_shown(then)}, or a new run",
        )
    _check_architecture(config, before, checkpoint)
    _check_estimator(config, before, checkpoint)
    _check_reference(config, before, checkpoint)
    _check_components(config, before, checkpoint)
    changed = _changed(PAST, config, before)
    return [f"{key} = {config.value_of(key)!r}: {rule.why}" for rule, key in changed]


def _changed(rules: tuple[Rule, ...], now: Config, before: Config) -> list[tuple[Rule, str]]:
    """Return the rules and keys that the configurations (now, before) differ in."""
    return [
        (rule, key)
        for rule in rules
        for key in rule.keys
        if now.value_of(key) != before.value_of(key) and not rule.unless(now, before)
    ]


def _shown(value: Any) -> str:
    """Return the value as it is written in an override."""
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


ARCHITECTURE = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("tie_word_embeddings", "rope_theta", "rope_parameters", "rope_scaling"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"),
    "moe_intermediate_size",
)
"""Keys of config.json that the trained weights depend on."""


def _check_architecture(config: Config, before: Config, checkpoint: Path) -> None:
    """Raise ConfigError if model.path is another model than the checkpoint's.

    The same model in another folder is valid.
    """
    path, then = config.model.path, before.model.path
    if path == then:
        return
    trained = _read_json(checkpoint / "model" / "config.json")
    given = _read_json(Path(path) / "config.json") if path else trained
    given |= config.model.override_config if given else {}
    different = [key for key in ARCHITECTURE if given.get(key) != trained.get(key)]
    if given and trained and not different and not (config.model.lora_rank and not path):
        return
    origin = f"the checkpoint {checkpoint} was made with"
    rule = f"{origin} {then!r}, and millrace cannot check that this is the same model"
    if given and trained and different:
        key = different[0]
        rule = f"its {key} is {given.get(key)}, and {origin} {trained.get(key)}"
    raise bad_value("model.path", path, rule, f"model.path={_shown(then)}, or a new run")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _check_estimator(config: Config, before: Config, checkpoint: Path) -> None:
    """Raise ConfigError if only one of the run and the checkpoint has a critic.

    The same applies to greedy responses.
    """
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
    """Raise ConfigError if only one of the run and the checkpoint has a reference policy."""
    if config.needs_reference != before.needs_reference:
        with_ = "with" if before.needs_reference else "without"
        rule = f"the checkpoint {checkpoint} was made {with_} a reference policy"
        in_loss = config.actor.use_kl_loss != before.actor.use_kl_loss
        key = "actor.use_kl_loss" if in_loss else "algorithm.use_kl_in_reward"
        raise bad_value(
            key, config.needs_reference, rule, "the KL settings of that run, or a new run"
        )


def _check_components(config: Config, before: Config, checkpoint: Path) -> None:
    """Raise ConfigError if gdpo would train samples in flight by the components of another reward.

    The finished samples of the checkpoint have the scores of the reward before.
    """
    if config.algorithm.adv_estimator != "gdpo":
        return
    samples = [slot.sample for _, slot in read_ledger(checkpoint).slots if slot.sample is not None]
    scores = [t.score for sample in samples for t in sample.trajectories if t.score is not None]
    keys = config.algorithm.gdpo_reward_keys
    missing = sorted({key for key in keys for score in scores if key not in score.extra})
    if not scores or not (
        missing if keys else _components(config.reward) != _components(before.reward)
    ):
        return
    names = ", ".join(sorted({name for score in scores for name in score.extra})) or "none"
    rule = f"finished samples of the checkpoint {checkpoint} have the components {names}, " + (
        f"without {', '.join(missing)}" if missing else "of another reward"
    )
    fix = "components that both rewards have, the reward of the checkpoint, or a new run"
    raise bad_value("algorithm.gdpo_reward_keys", list(keys), rule, fix)


def _components(reward: RewardConfig) -> Any:
    """Return the keys that decide which components a score has."""
    parts = {
        section: (part.function, part.model.path, part.judge.model)
        for section, part in reward.parts.items()
    }
    return parts, reward.overlong_buffer.enable
