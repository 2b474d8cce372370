"""Keys of verl that only have a meaning together with other keys, in one layer or in several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from millrace.config.explain import default_of
from millrace.config.layers import Setting
from millrace.errors import ConfigError, bad_value

Given = dict[str, Any]
"""The last value of each key, over all layers, without verl's prefix. Later settings come last."""
Joined = tuple[int, list[Setting], str]
"""The layer, the settings that a key of verl's becomes there, and a note."""
Parts = dict[str, tuple[list[Setting], str]]
"""The settings and the note of each key."""

_FUNCTION = ("custom_reward_function", "reward.custom_reward_function")
_DECAY = ("actor.optim.lr_decay_steps", "actor.optim.total_training_steps")
_CRITIC_DECAY = ("critic.optim.lr_decay_steps", "critic.optim.total_training_steps")
_FLOORS = ("actor.optim.min_lr", "critic.optim.min_lr")
_LENGTHS = (
    ("rollout.max_prompt_length", "data.max_prompt_length", "rollout.prompt_length"),
    ("rollout.max_response_length", "data.max_response_length", "rollout.response_length"),
)
_ROOMS = ("rollout.max_model_len", "rollout.engine_kwargs.vllm.max_model_len")
_COMPILED = ("actor.use_torch_compile", "actor.fsdp_config.use_torch_compile")
_SWITCHES = ("algorithm.rollout_correction.bypass_mode", "trainer.resume_mode")
_WEIGHTS = "it starts from the policy's weights"
_ULYSSES = (
    "actor.ulysses_sequence_parallel_size",
    "actor.fsdp_config.ulysses_sequence_parallel_size",
)
_ACTOR = "the critic uses the policy's setting"
EQUAL: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "critic.loss_agg_mode": (("actor.loss_agg_mode",), "token-mean", _ACTOR),
    "critic.loss_scale_factor": (("actor.loss_scale_factor",), None, _ACTOR),
    "critic.model.lora_alpha": (("model.lora_alpha",), 16, _ACTOR),
    "critic.model.lora_rank": (("model.lora_rank",), 0, _ACTOR),
    "critic.model.path": (("model.path",), "", f"the critic: {_WEIGHTS}"),
    "critic.model.target_modules": (("model.target_modules",), "all-linear", _ACTOR),
    "critic.ppo_epochs": (("actor.ppo_epochs",), 1, _ACTOR),
    "critic.ppo_mini_batch_size": (("actor.ppo_mini_batch_size",), 32, _ACTOR),
    "critic.ulysses_sequence_parallel_size": (_ULYSSES, 1, _ACTOR),
    "ref.ulysses_sequence_parallel_size": (
        _ULYSSES,
        1,
        "the reference policy uses the policy's setting",
    ),
    "ref.model.path": (("model.path",), "", f"the reference policy: {_WEIGHTS}"),
    "reward.reward_kwargs.max_resp_len": (_LENGTHS[1], 512, "it is the limit of a response"),
    "reward_model.reward_kwargs.max_resp_len": (_LENGTHS[1], 512, "it is the limit of a response"),
}
"""Keys that must equal another key: its names, its default, and the reason."""
_SCHEDULE = "the schedule ends at the run's last optimizer step"

_CONFIG = "actor.megatron.override_transformer_config"
_BALANCE = (f"{_CONFIG}.moe_aux_loss_coeff", f"{_CONFIG}.moe_router_load_balancing_type")
_ROUTER_MODES = ("actor.router_replay.mode", "actor.megatron.router_replay.mode")
_TURNS = "rollout.multi_turn.enable"
_TOOLS = {
    f"{section}.{theirs}": f"agents.{ours}"
    for section in ("data", "rollout.multi_turn")
    for theirs, ours in (("function_tool_path", "tools"), ("tool_config_path",) * 2)
}


def join(given: Given, last: Mapping[str, int], errors: list[ConfigError]) -> dict[str, Joined]:
    """Return what the keys of JOINED in `given` become.

    `last` has the last layer that sets each key. Keys that make one setting make it in the last
    layer that has one of them. `errors` gets the contradictions.
    """
    result: dict[str, Joined] = {}
    for keys, part in _PARTS.items():
        if not any(key in given for key in keys):
            continue
        layer = max(last[key] for key in keys if key in given)
        try:
            parts = part(given) if keys not in _LAYERED else part(given, last)
        except ConfigError as error:
            errors.append(error)
            continue
        result |= {key: (layer, *settings) for key, settings in parts.items() if key in given}
    return result


def _clip(given: Given, last: Mapping[str, int]) -> Parts:
    """A side in the same layer wins over clip_ratio. A side in an earlier layer does not."""
    key = "actor.clip_ratio"
    sides = [f"{key}_low", f"{key}_high"]
    chosen = [(side, given[key]) for side in sides if last.get(side) != last[key]]
    return {key: (chosen, "both clip_ratio_low and clip_ratio_high, where they are not set")}


def _agents(given: Given, last: Mapping[str, int]) -> Parts:
    """Multiply both counts of one layer: n_agent copies of a prompt with n responses each."""
    key, other = "rollout.n_agent", "rollout.n"
    copies, n = given[key], given[other] if last.get(other) == last[key] else 1
    count = copies * n if isinstance(copies, int) and isinstance(n, int) else copies
    note = "rollout.n times it is the number of responses to a prompt"
    return _won(last, key, (other, count), note, f"{key} times it is rollout.n here")


def _memory(given: Given, last: Mapping[str, int]) -> Parts:
    """Take the share of replicas on devices of their own, in place of that of shared ones."""
    key, other = "rollout.standalone_gpu_memory_utilization", "rollout.gpu_memory_utilization"
    note = "rollout.gpu_memory_utilization, of rollouts on devices of their own"
    if not given[key]:
        return {key: ([], note)}
    return _won(
        last, key, (other, given[key]), note, f"{key} is that of rollouts on devices of their own"
    )


def _proximal(given: Given, last: Mapping[str, int]) -> Parts:
    """Take the rollout's log-probs, unless the proximal policy's are computed anew."""
    key, other = "async_training.compute_prox_log_prob", "async_training.use_rollout_log_probs"
    old = given.get(other, True) is True and given[key] is not True
    note = "true recomputes the log-probs, as async_training.use_rollout_log_probs=false"
    return _won(last, key, (other, old), note, f"{key} decides it")


def _won(last: Mapping[str, int], key: str, becomes: Setting, note: str, why: str) -> Parts:
    """Return what a key becomes, which replaces another key of the same layer."""
    parts: Parts = {key: ([becomes], note)}
    if last.get(becomes[0]) == last[key]:
        parts[becomes[0]] = ([], why)
    return parts


def _equal(given: Given, *, key: str) -> Parts:
    names, default, why = EQUAL[key]
    value, other = given[key], _value(given, names, default)
    if value is not None and value != other:
        raise bad_value(key, value, f"must be {names[0]} = {other!r}: {why}", "leave the key out")
    return {key: ([], why)}


def _value(given: Given, names: tuple[str, ...], default: Any) -> Any:
    """Return the last value of a key with several names."""
    return next((value for key, value in reversed(given.items()) if key in names), default)


def _function(given: Given, *, section: str) -> Parts:
    path, name = given.get(f"{section}.path"), given.get(f"{section}.name")
    function = [("reward.function", f"{path}:{name or 'compute_score'}")] if path else []
    named = "it names the function in" if path else "it names nothing without"
    return {
        f"{section}.path": (function, "" if path else "without a path there is no function"),
        f"{section}.name": ([], f"{named} {section}.path"),
    }


def _greedy(given: Given) -> Parts:
    key = "rollout.val_kwargs.do_sample"
    off = given[key] is False
    return {key: ([("rollout.val_kwargs.temperature", 0)] if off else [], "validation samples")}


def _loss_type(given: Given) -> Parts:
    key, mode = "algorithm.rollout_correction.loss_type", "algorithm.rollout_correction.bypass_mode"
    if given.get(key) != "reinforce":
        return {key: ([], "actor.policy_loss.loss_mode names the loss")}
    if given.get(mode) is False:
        return {key: ([], f"it acts in bypass mode alone, and {mode} is false")}
    return {key: ([("actor.policy_loss.loss_mode", "reinforce")], "")}


def _resume(given: Given) -> Parts:
    key, mode = "trainer.resume_from_path", given.get("trainer.resume_mode")
    path, named = given.get(key), mode == "resume_path"
    if named and not path:
        rule = "trainer.resume_mode=resume_path needs the folder of a checkpoint"
        raise bad_value(key, path, rule, f"{key}=FOLDER, or trainer.resume_mode=auto")
    why = "" if named else "trainer.resume_mode is not resume_path"
    return {key: ([("trainer.resume", path)] if named else [], why)}


def _reward_model(given: Given, *, section: str, path: str) -> Parts:
    key, on = f"{section}.{path}", given.get(f"{section}.enable") is True
    model = given.get(key) if on else None
    if on and not model and not given.get("reward.model.path"):
        rule = f"{section}.enable=true needs the folder or hub id of a reward model"
        raise bad_value(key, given.get(key), rule, f"{key}=MODEL, or {section}.enable=false")
    return {
        key: (
            [("reward.model.path", model)] if model else [],
            "" if model else f"{section}.enable is not true",
        ),
        f"{section}.enable": ([], f"{key} names the reward model" if on else "no reward model"),
    }


def _tools(given: Given, *, key: str) -> Parts:
    off = given.get(_TURNS) is False
    tools = [(_TOOLS[key], given[key])] if given.get(key) and not off else []
    switch = "false leaves tools out; else an episode has turns once a key of agents says who plays"
    return {_TURNS: ([], switch), key: (tools, f"{_TURNS} is false" if off else "")}


def _alpha(given: Given) -> Parts:
    """Leave out the scale of adapters that there are not."""
    key, rank = "model.lora_alpha", given.get("model.lora_rank")
    unused = not rank and (given[key] == 0 or (rank == 0 and given[key] != default_of(key)))
    return {key: ([], "model.lora_rank is 0")} if unused else {}


def _compiled(given: Given, *, key: str) -> Parts:
    """Leave out torch.compile with Megatron, which has kernels of its own."""
    engines = ("trainer.engine", "model_engine", "actor.strategy")
    megatron = any(given.get(name) == "megatron" for name in engines)
    return {key: ([], "it changes speed alone, and Megatron lacks it")} if megatron else {}


def _routing(given: Given) -> Parts:
    """Accept the switch of the rollout side if it agrees with the policy's mode."""
    key, modes = "rollout.enable_rollout_routing_replay", _ROUTER_MODES
    mode = next((given[name] for name in modes if name in given), "disabled")
    wanted = mode == "R3"
    if bool(given.get(key, wanted)) != wanted:
        rule = f"is for R3 alone, and {modes[0]} is {mode}"
        raise bad_value(
            key, given[key], rule, f"{key}={str(wanted).lower()}, or another {modes[0]}"
        )
    return {key: ([], "model.router_replay=R3 lets the engine return experts")}


def _balance(given: Given) -> Parts:
    """Accept a loss of single sequences. Those of micro-batches depend on how these are cut."""
    key, type_key = _BALANCE
    coef, kind = given.get(key), given.get(type_key, "aux_loss")
    if coef and kind != "seq_aux_loss":
        rule = f"balances whole micro-batches with {type_key}={kind}, and millrace sequences"
        raise bad_value(key, coef, rule, f"{type_key}=seq_aux_loss, or {key}=0")
    if kind == "sinkhorn":
        raise bad_value(type_key, kind, "millrace routes by the top k alone", "seq_aux_loss")
    balances = [("actor.router_aux_loss_coef", coef)] if coef else []
    return {key: (balances, ""), type_key: ([], "" if coef else f"{key} is 0")}


def _room(given: Given, *, key: str) -> Parts:
    """Accept a limit of vLLM's that cuts nothing."""
    lengths = [_value(given, names, 512) for names in _LENGTHS]
    limit, known = given[key], all(isinstance(n, int) for n in (given[key], *lengths))
    if known and limit < (room := sum(lengths)):
        rule = (
            f"is less than prompt and response, {room} tokens, and millrace cuts no response here"
        )
        raise bad_value(key, limit, rule, f"{key}={room}, or a smaller {_LENGTHS[1][0]}")
    return {key: ([], "it is rollout.max_prompt_length + rollout.max_response_length")}


def _decay(given: Given, *, keys: tuple[str, ...]) -> Parts:
    """Accept another length of a schedule if its learning rate is constant."""
    shapes = _shapes(given, keys[0].rpartition(".")[0])
    for key in keys:
        steps = given.get(key)
        if isinstance(steps, int) and steps > 0 and any(shape != "constant" for shape in shapes):
            rule = f"a {shapes[-1]} schedule always ends at the run's last optimizer step"
            raise bad_value(key, steps, rule, "leave the key out")
    return {key: ([], _SCHEDULE) for key in keys}


def _shapes(given: Given, optim: str) -> list[Any]:
    names = ("lr_scheduler_type", "lr_decay_style", "warmup_style")
    return [shape for name in names if (shape := given.get(f"{optim}.{name}")) is not None]


def _floor(given: Given, *, key: str) -> Parts:
    """Turn the least learning rate into a share of the largest one."""
    optim = key.rpartition(".")[0]
    floor, lr = given[key], given.get(f"{optim}.lr")
    if not floor or all(shape == "constant" for shape in _shapes(given, optim)):
        return {key: ([], "a constant learning rate has no floor")}
    if not isinstance(lr, int | float) or not isinstance(floor, int | float) or not lr:
        raise bad_value(key, floor, f"is a share of {optim}.lr here", f"{optim}.lr as well")
    return {key: ([(f"{optim}.min_lr_ratio", floor / lr)], "")}


_LAYERED: dict[tuple[str, ...], Callable[..., Parts]] = {
    ("actor.clip_ratio",): _clip,
    ("rollout.n_agent",): _agents,
    ("async_training.compute_prox_log_prob",): _proximal,
    ("rollout.standalone_gpu_memory_utilization",): _memory,
}
"""Those whose readers also see the layers."""
_PARTS: dict[tuple[str, ...], Callable[..., Parts]] = {
    **{(key,): partial(_equal, key=key) for key in EQUAL},
    **{(f"{s}.path", f"{s}.name"): partial(_function, section=s) for s in _FUNCTION},
    ("rollout.val_kwargs.do_sample",): _greedy,
    ("algorithm.rollout_correction.loss_type", _SWITCHES[0]): _loss_type,
    ("trainer.resume_from_path", _SWITCHES[1]): _resume,
    **{
        (f"{s}.{path}", f"{s}.enable"): partial(_reward_model, section=s, path=path)
        for s, path in (("reward.reward_model", "model_path"), ("reward_model", "model.path"))
    },
    **{(key, _TURNS): partial(_tools, key=key) for key in _TOOLS},
    ("rollout.enable_rollout_routing_replay",): _routing,
    _BALANCE: _balance,
    **{(key,): partial(_room, key=key) for key in _ROOMS},
    ("model.lora_alpha",): _alpha,
    **{(key,): partial(_compiled, key=key) for key in _COMPILED},
    _DECAY: partial(_decay, keys=_DECAY),
    _CRITIC_DECAY: partial(_decay, keys=_CRITIC_DECAY),
    **{(key,): partial(_floor, key=key) for key in _FLOORS},
    **_LAYERED,
}
"""The keys that are read together, and the function that reads them."""

_SHARED = {*_COMPILED, *_SWITCHES, "model.lora_alpha"}
JOINED = dict.fromkeys(
    {key for keys in _PARTS for key in keys} - _SHARED, "it has a meaning with other keys"
)
"""The keys that nothing but their readers translates."""
