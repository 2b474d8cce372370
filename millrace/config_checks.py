"""Cross-checks of a configuration: settings that are each right and wrong together. Each names key, value, rule and fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.config_correction import check_correction, check_trust
from millrace.config_vllm import check_vllm
from millrace.errors import bad_value
from millrace.schedule.schedule import OnSync, Placement

if TYPE_CHECKING:
    from millrace.config import Config

GROUP_RELATIVE = frozenset(
    {
        "grpo",
        "grpo_passk",
        "rloo",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "gdpo",
        "optimal_token_baseline",
    }
)
"""Estimators for which a group of one has no advantage."""


def check(config: Config) -> None:
    """Raises ConfigError at the first that fails."""
    for one in (
        _check_sampling,
        _check_lengths,
        _check_batches,
        _check_determinism,
        check_vllm,
        _check_placement,
        _check_model,
        _check_lora,
        _check_estimator,
        check_correction,
        check_trust,
        _check_kl,
        _check_guard,
    ):
        one(config)


def _check_sampling(c: Config) -> None:
    if c.rollout.top_p < 1:
        raise bad_value(
            "rollout.top_p",
            c.rollout.top_p,
            "training needs log-probs of the full distribution, and a nucleus renormalises them",
            "rollout.top_p=1 (rollout.val_kwargs.top_p may be less)",
        )
    if c.rollout.top_k > 0:
        raise bad_value(
            "rollout.top_k",
            c.rollout.top_k,
            "training needs log-probs of the full distribution, and a top-k cut renormalises them",
            "rollout.top_k=0",
        )


def _check_lengths(c: Config) -> None:
    longest = c.rollout.max_prompt_length + c.rollout.max_response_length
    if c.actor.ppo_max_token_len_per_gpu < longest:
        raise bad_value(
            "actor.ppo_max_token_len_per_gpu",
            c.actor.ppo_max_token_len_per_gpu,
            f"one trajectory may have rollout.max_prompt_length + rollout.max_response_length = {longest} tokens and must fit",
            f"actor.ppo_max_token_len_per_gpu={longest} or more, or shorter lengths",
        )

    drawn = c.rollout.drawn_lengths
    if drawn.enable and not 1 <= drawn.median <= c.rollout.max_response_length:
        raise bad_value(
            "rollout.drawn_lengths.median",
            drawn.median,
            f"half of the responses are longer, and none may be over rollout.max_response_length = {c.rollout.max_response_length}",
            f"rollout.drawn_lengths.median={max(1, c.rollout.max_response_length // 8)}",
        )


def _check_batches(c: Config) -> None:
    a, batch = c.async_training, c.data.train_batch_size
    windowed = c.mode in ("colocate_sync", "one_step_off")
    if batch and not windowed:
        raise bad_value(
            "data.train_batch_size",
            batch,
            "a streaming mode has no train batch",
            "data.train_batch_size=0; actor.ppo_mini_batch_size x async_training.require_batches x "
            "async_training.trigger_parameter_sync_step is the window",
        )
    step = c.actor.ppo_mini_batch_size * a.require_batches
    if batch and batch != step * a.trigger_parameter_sync_step:
        raise bad_value(
            "data.train_batch_size",
            batch,
            f"the window is ppo_mini_batch_size x require_batches x trigger_parameter_sync_step = "
            f"{c.actor.ppo_mini_batch_size} x {a.require_batches} x {a.trigger_parameter_sync_step}",
            f"a multiple of {step}, with async_training.trigger_parameter_sync_step left out",
        )
    if c.data.gen_batch_size != 1:
        raise bad_value(
            "data.gen_batch_size",
            c.data.gen_batch_size,
            "samples are admitted one by one",
            "data.gen_batch_size=1",
        )
    if a.partial_rollout and a.on_sync is not OnSync.INTERRUPT:
        raise bad_value(
            "async_training.on_sync",
            a.on_sync.value,
            "partial_rollout=true means on_sync=interrupt",
            "leave one of the two keys out",
        )
    if c.trainer.test_freq and c.rollout.test_freq and c.trainer.test_freq != c.rollout.test_freq:
        raise bad_value(
            "rollout.test_freq",
            c.rollout.test_freq,
            f"trainer.test_freq is {c.trainer.test_freq}, and both say the same thing",
            "set one of them",
        )


def _check_determinism(c: Config) -> None:
    if c.trainer.deterministic and c.async_training.on_sync is not OnSync.DRAIN:
        raise bad_value(
            "trainer.deterministic",
            True,
            f"with on_sync={c.async_training.on_sync.value} timing decides which version draws which token",
            "async_training.on_sync=drain, or trainer.deterministic=false",
        )
    if c.trainer.deterministic and c.schedule.lookahead > 1:
        raise bad_value(
            "async_training.lookahead",
            c.schedule.lookahead,
            "with a look-ahead, timing decides the order of training",
            "async_training.lookahead=1, or trainer.deterministic=false",
        )


def _check_placement(c: Config) -> None:
    t, r = c.trainer, c.rollout
    if "://" in t.ray_address:
        rule = "the driver is a part of the cluster: neither Ray Client nor the job server can carry it"
        fix = "trainer.ray_address=auto on a node of the cluster, or its HOST:PORT of `ray start --head`"
        raise bad_value("trainer.ray_address", t.ray_address, rule, fix)
    if t.ray_address and t.runtime != "ray":
        rule = "the local runtime joins no cluster"
        raise bad_value(
            "trainer.ray_address",
            t.ray_address,
            rule,
            "trainer.runtime=ray, or trainer.ray_address=''",
        )
    if c.trainer_ranks % c.shard_size:
        raise bad_value(
            "trainer.fsdp_size",
            t.fsdp_size,
            f"each copy of the model takes as many ranks, and trainer.nnodes x n_gpus_per_node = {c.trainer_ranks} are not a multiple",
            f"a divisor of {c.trainer_ranks}, or trainer.fsdp_size=0 for one copy",
        )
    limit = t.gpus_in_node
    for key, value in (
        ("trainer.n_gpus_per_node", t.n_gpus_per_node),
        ("rollout.n_gpus_per_node", r.n_gpus_per_node),
    ):
        if limit and value > limit:
            raise bad_value(
                key,
                value,
                f"a node has trainer.gpus_in_node = {limit} devices",
                f"{key}={limit} or less",
            )
    if r.tensor_model_parallel_size > 1 and r.engine == "torch":
        raise bad_value(
            "rollout.tensor_model_parallel_size",
            r.tensor_model_parallel_size,
            "engine=torch holds a replica on one device",
            "rollout.engine=vllm, or rollout.tensor_model_parallel_size=1",
        )
    if r.n_gpus_per_node % r.tensor_model_parallel_size:
        raise bad_value(
            "rollout.tensor_model_parallel_size",
            r.tensor_model_parallel_size,
            f"a replica's devices are on one node, and a node has rollout.n_gpus_per_node = {r.n_gpus_per_node}",
            f"a divisor of {r.n_gpus_per_node}",
        )
    sides = [(side.nnodes, side.n_gpus_per_node) for side in (t, r)]
    if c.async_training.placement is Placement.COLOCATED and sides[0] != sides[1]:
        raise bad_value(
            "async_training.placement",
            "colocated",
            f"both sides share the same devices of the same nodes, but trainer.nnodes x n_gpus_per_node = {t.nnodes} x "
            f"{t.n_gpus_per_node} and rollout.nnodes x n_gpus_per_node = {r.nnodes} x {r.n_gpus_per_node}",
            f"rollout.nnodes={t.nnodes} rollout.n_gpus_per_node={t.n_gpus_per_node}",
        )
    if c.async_training.overlap_sync and (
        c.async_training.placement is Placement.COLOCATED
        or not c.async_training.staleness_threshold
    ):
        raise bad_value(
            "async_training.overlap_sync",
            True,
            "the trainer goes on with other samples, on other devices, while a version is on its way to the rollouts",
            "async_training.placement=separate and async_training.staleness_threshold=0.5, say",
        )


def _check_model(c: Config) -> None:
    shape = c.model.shape
    if shape.hidden_size % shape.num_attention_heads:
        raise bad_value(
            "model.shape.num_attention_heads",
            shape.num_attention_heads,
            f"must divide model.shape.hidden_size = {shape.hidden_size}",
            "a divisor of the width",
        )
    if (shape.hidden_size // shape.num_attention_heads) % 2:
        raise bad_value(
            "model.shape.hidden_size",
            shape.hidden_size,
            f"the head size hidden_size / num_attention_heads = {shape.hidden_size // shape.num_attention_heads} must be even",
            "a multiple of 2 x num_attention_heads",
        )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise bad_value(
            "model.shape.num_key_value_heads",
            shape.num_key_value_heads,
            f"must divide model.shape.num_attention_heads = {shape.num_attention_heads}",
            "a divisor of the heads",
        )


def _check_lora(c: Config) -> None:
    names = c.model.target_modules
    if not names or "all-linear" in names[1:] or (names[0] == "all-linear" and len(names) > 1):
        rule = (
            "all-linear stands alone: it is every linear module"
            if names
            else "adapters without a module train nothing"
        )
        raise bad_value(
            "model.target_modules",
            list(names),
            rule,
            "model.target_modules=all-linear, or [q_proj,v_proj]",
        )
    widest = min(c.model.shape.hidden_size, c.model.shape.intermediate_size)
    if not c.model.path and c.model.lora_rank > widest:
        rule = f"an adapter of more than min(hidden_size, intermediate_size) = {widest} is larger than what it stands for"
        raise bad_value(
            "model.lora_rank", c.model.lora_rank, rule, f"model.lora_rank={max(1, widest // 4)}"
        )


def _check_estimator(c: Config) -> None:
    name = c.algorithm.adv_estimator
    if c.rollout.n == 1 and name in GROUP_RELATIVE and c.algorithm.norm_adv_by_std_in_grpo:
        raise bad_value(
            "rollout.n",
            1,
            f"{name} compares the responses to a prompt with each other: for a group of one all advantages are 0",
            "rollout.n=8 (to measure speed alone, algorithm.norm_adv_by_std_in_grpo=false)",
        )
    if c.rollout.n == 1 and c.algorithm.filter_groups.enable:
        raise bad_value(
            "algorithm.filter_groups.enable",
            True,
            "a group of one always has equal outcomes: all are dropped",
            "rollout.n=8",
        )
    if (
        c.algorithm.filter_groups.enable
        and c.trainer.deterministic
        and c.async_training.staleness_threshold > 0
    ):
        raise bad_value(
            "algorithm.filter_groups.enable",
            True,
            "with staleness, timing decides which version draws the sample that takes a dropped one's place",
            "async_training.staleness_threshold=0, or trainer.deterministic=false",
        )
    keys, weights = c.algorithm.gdpo_reward_keys, c.algorithm.gdpo_reward_weights
    if weights and len(weights) != len(keys):
        raise bad_value(
            "algorithm.gdpo_reward_weights",
            list(weights),
            f"needs one weight for each of algorithm.gdpo_reward_keys = {list(keys)}",
            "as many weights as keys, or none",
        )
    if not c.needs_critic:
        for key, value in (
            ("trainer.critic_warmup", c.trainer.critic_warmup),
            ("algorithm.bootstrap_truncated", c.algorithm.bootstrap_truncated),
        ):
            if value:
                raise bad_value(
                    key,
                    value,
                    f"{name} has no critic",
                    "algorithm.adv_estimator=gae, or leave the key out",
                )
    if name == "gdpo" and c.algorithm.use_kl_in_reward:
        raise bad_value(
            "algorithm.use_kl_in_reward",
            True,
            "gdpo normalises each component of the reward by itself: a KL penalty has no place among them",
            "actor.use_kl_loss=true in its place",
        )
    buffer = c.reward.overlong_buffer
    if buffer.enable and not 0 < buffer.len <= c.rollout.max_response_length:
        raise bad_value(
            "reward.overlong_buffer.len",
            buffer.len,
            f"must be from 1 to rollout.max_response_length = {c.rollout.max_response_length}",
            f"reward.overlong_buffer.len={max(1, c.rollout.max_response_length // 5)}",
        )


def _check_kl(c: Config) -> None:
    ctrl, batch = c.algorithm.kl_ctrl, c.schedule.step_size * c.rollout.n
    if c.algorithm.use_kl_in_reward and ctrl.type == "adaptive" and 5 * ctrl.horizon <= batch * 2:
        raise bad_value(
            "algorithm.kl_ctrl.horizon",
            ctrl.horizon,
            f"a local step has {batch} trajectories, which could turn the coefficient to 0: must be over 0.4 x {batch} = {batch * 2 / 5:g}",
            f"algorithm.kl_ctrl.horizon={10 * batch}",
        )


def _check_guard(c: Config) -> None:
    if c.guard.min_grad_rows > c.guard.grad_rows:
        raise bad_value(
            "guard.min_grad_rows",
            c.guard.min_grad_rows,
            f"the median is of guard.grad_rows = {c.guard.grad_rows} rows at most",
            f"guard.min_grad_rows={c.guard.grad_rows} or less",
        )
