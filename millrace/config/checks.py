"""Checks of keys in different sections that contradict each other.

Each error names the key, its value, the rule and the fix. A section checks its own keys itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.config.algorithm_keys import ActorConfig, AlgorithmConfig, PolicyLossConfig
from millrace.config.data_keys import RewardConfig
from millrace.config.endpoint_keys import PlaceConfig
from millrace.config.keys import Config
from millrace.config.model_keys import ModelConfig, SftConfig
from millrace.config.optim_keys import OptimConfig
from millrace.config.plugins import Named, find, load_if_given
from millrace.config.rollout_keys import RolloutConfig
from millrace.config.schedule_keys import AsyncConfig
from millrace.config.serving_checks import check_serving
from millrace.config.sides import Sides
from millrace.config.teacher_keys import DistillationConfig, TeacherConfig, check_names
from millrace.config.trainer_keys import LOGGERS, TrainerConfig, too_many_devices
from millrace.errors import ConfigError, bad_value
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import OnSync, Schedule

_NO_TEACHERS: Mapping[str, TeacherConfig] = {}


def check(config: Config) -> None:
    """Raise ConfigError at the first check that fails."""
    c, trainer, rollout, algorithm = config, config.trainer, config.rollout, config.algorithm
    _check_parts(rollout, trainer)
    _check_lengths(rollout, c.actor, c.context_size)
    _check_sequence(c.actor, trainer)
    _check_optimizers({"actor": c.actor.optim, "critic": c.critic.optim}, trainer)
    mini = c.actor.ppo_mini_batch_size
    _check_batches(c.data.train_batch_size, c.mode, mini, c.async_training)
    c.end(1)  # The data has a row at least. Its number decides only which key ends the run.
    _check_test_freq(trainer, rollout)
    _check_determinism(trainer, c.schedule)
    check_serving(rollout, trainer)
    if checks := load_if_given("trainer.engine", trainer.engine, "train_checks"):
        checks.check_keys(trainer, c.model, c.actor, algorithm)
    _check_placement(c.sides)
    _check_teachers(c)
    player = c.agents.agent_kind
    owners = {"data.sampler": c.data.sampler, "teachers": ", ".join(c.teachers)}
    owners |= {f"agents.{player}": player and str(getattr(c.agents, player))}
    # This comes before those checks that ask for a group, which windows refuse.
    _check_windows(algorithm, rollout, owners)
    _check_groups(algorithm, rollout, rewarded=c.learns_from_rewards)
    _check_filter(algorithm, trainer, c.async_training)
    _check_critic(algorithm, trainer)
    _check_overlong(c.reward, rollout)
    _check_devices(placed(c.reward, c.teachers), c.sides)
    _check_components(c.reward, algorithm)
    _check_correction(algorithm, c.actor, c.async_training)
    _check_replay(c.model.router_replay, rollout, algorithm, c.async_training)
    _check_trust(algorithm, c.actor.policy_loss, c.async_training, c.schedule.lag_bound)
    _check_quantised(c.model, rollout, algorithm, c.actor.policy_loss, c.async_training)
    _check_kl(algorithm, c.schedule.step_size * rollout.n)


def _check_parts(rollout: RolloutConfig, trainer: TrainerConfig) -> None:
    """Raise ConfigError for a name that no installed package gives."""
    find("rollout.engine", rollout.engine, Named("rollout_engines"), "rollout.engine={}")
    find("trainer.engine", trainer.engine, Named("train_engines"), "trainer.engine={}")
    for name in trainer.logger:
        find("trainer.logger", name, LOGGERS, "trainer.logger=[{}]")


def _check_lengths(rollout: RolloutConfig, actor: ActorConfig, ranks: int) -> None:
    """Raise ConfigError if a trajectory may not fit in the micro-batch of `ranks` ranks."""
    if actor.ppo_max_token_len_per_gpu * ranks < rollout.max_len:
        share = f", on {ranks} ranks together" if ranks > 1 else ""
        least = -(-rollout.max_len // ranks)
        raise bad_value(
            "actor.ppo_max_token_len_per_gpu",
            actor.ppo_max_token_len_per_gpu,
            "must fit the longest trajectory, which has rollout.max_prompt_length + "
            f"rollout.max_response_length = {rollout.max_len} tokens{share}",
            f"actor.ppo_max_token_len_per_gpu={least} or more, or shorter lengths",
        )


def _check_sequence(actor: ActorConfig, trainer: TrainerConfig) -> None:
    size = actor.ulysses_sequence_parallel_size
    if trainer.engine == "fsdp" and trainer.ranks % size:
        raise bad_value(
            "actor.ulysses_sequence_parallel_size",
            size,
            f"must divide the number of ranks, trainer.nnodes x n_gpus_per_node = {trainer.ranks}",
            f"trainer.n_gpus_per_node={size}, or a divisor of {trainer.ranks}",
        )


def _check_optimizers(optims: Mapping[str, OptimConfig], trainer: TrainerConfig) -> None:
    for name, optim in optims.items():
        if optim.optimizer == "muon" and trainer.offload_policy:
            rule = "with trainer.offload_policy no rank has a whole matrix on its device"
            key = f"{name}.optim.optimizer"
            raise bad_value(key, "muon", rule, f"{key}=adamw, or trainer.offload_policy=false")


def _check_batches(batch: int, mode: str | None, mini: int, a: AsyncConfig) -> None:
    if batch and not (mode and MODES[mode].batch_is_window):
        raise bad_value(
            "data.train_batch_size",
            batch,
            "a streaming mode has no train batch",
            "data.train_batch_size=0: the window is actor.ppo_mini_batch_size x "
            "async_training.require_batches x async_training.trigger_parameter_sync_step",
        )
    step = mini * a.require_batches
    if batch and batch != step * a.trigger_parameter_sync_step:
        raise bad_value(
            "data.train_batch_size",
            batch,
            "the window is ppo_mini_batch_size x require_batches x trigger_parameter_sync_step = "
            f"{mini} x {a.require_batches} x {a.trigger_parameter_sync_step}",
            f"a multiple of {step}, without async_training.trigger_parameter_sync_step",
        )


def _check_test_freq(trainer: TrainerConfig, rollout: RolloutConfig) -> None:
    if trainer.test_freq and rollout.test_freq and trainer.test_freq != rollout.test_freq:
        raise bad_value(
            "rollout.test_freq",
            rollout.test_freq,
            f"trainer.test_freq is {trainer.test_freq}, and both keys set the same interval",
            "rollout.test_freq=0, or trainer.test_freq=0",
        )


def _check_determinism(trainer: TrainerConfig, schedule: Schedule) -> None:
    if trainer.deterministic and schedule.on_sync is not OnSync.DRAIN:
        raise bad_value(
            "trainer.deterministic",
            True,
            f"with on_sync={schedule.on_sync.value}, timing decides which version draws a token",
            "async_training.on_sync=drain, or trainer.deterministic=false",
        )
    if trainer.deterministic and schedule.lookahead > 1:
        raise bad_value(
            "async_training.lookahead",
            schedule.lookahead,
            "with a look-ahead over 1, timing decides the order of training",
            "async_training.lookahead=1, or trainer.deterministic=false",
        )


def _check_placement(sides: Sides) -> None:
    t, r = sides.trainer, sides.rollout
    if t.gpus_in_node and r.n_gpus_per_node > t.gpus_in_node:
        raise too_many_devices("rollout", r.n_gpus_per_node, t.gpus_in_node)
    if sides.colocated and (t.nnodes, t.n_gpus_per_node) != (r.nnodes, r.n_gpus_per_node):
        raise bad_value(
            "async_training.placement",
            "colocated",
            "both sides share the same devices of the same nodes, but trainer.nnodes x "
            f"n_gpus_per_node = {t.nnodes} x {t.n_gpus_per_node} and rollout.nnodes x "
            f"n_gpus_per_node = {r.nnodes} x {r.n_gpus_per_node}",
            f"rollout.nnodes={t.nnodes} rollout.n_gpus_per_node={t.n_gpus_per_node}",
        )
    most, key = r.max_replicas, "rollout.max_replicas"
    if most and t.runtime != "ray":
        rule = "trainer.runtime=local has no nodes that join"
        raise bad_value(key, most, rule, "trainer.runtime=ray, or `millrace scale RUN rollout=N`")
    if most and sides.colocated:
        rule = "in a colocated mode the number of replicas is fixed"
        raise bad_value(key, most, rule, f"a mode with separate devices, or {key}=0")
    if 0 < most < r.replicas:
        raise bad_value(key, most, f"the run starts with {r.replicas} replicas", f"{key}=0")


def _check_teachers(c: Config) -> None:
    check_names(c.teachers)
    _check_warm_up(c.sft, c.teachers)
    own, changed = c.distillation, sorted(c.distillation.model_fields_set)
    if not c.teachers and own != DistillationConfig():
        key = f"distillation.{changed[0]}"
        rule = "there is no teacher"
        raise bad_value(key, getattr(own, changed[0]), rule, "teachers.NAME.path=FOLDER")
    if not c.teachers:
        return
    if c.trainer.engine != "fsdp":
        rule = f"trainer.engine={c.trainer.engine} has no teachers"
        raise bad_value("teachers", ", ".join(c.teachers), rule, "trainer.engine=fsdp")
    outside = {name: one for name, one in c.teachers.items() if one.outside}
    _check_outside(outside, own, c.rollout, c.trainer)
    loss = c.actor.policy_loss
    if not own.candidates and loss.loss.select:
        raise bad_value(
            "actor.policy_loss.loss_mode",
            loss.loss_mode,
            "it chooses tokens by their advantages, before the teachers have a part in them",
            "another loss_mode, or distillation.loss_mode=forward_kl_topk",
        )
    if c.learns_from_rewards:
        return
    if c.algorithm.needs_critic:
        raise bad_value(
            "distillation.use_task_rewards",
            False,
            f"the critic of {c.algorithm.adv_estimator} learns from rewards",
            "algorithm.adv_estimator=grpo",
        )
    if c.algorithm.filter_groups.enable:
        raise bad_value(
            "algorithm.filter_groups.enable",
            True,
            "it drops samples by their rewards, which are not trained on",
            "algorithm.filter_groups.enable=false, or distillation.use_task_rewards=true",
        )


def _check_warm_up(sft: SftConfig, teachers: Mapping[str, TeacherConfig]) -> None:
    changed = sorted(sft.model_fields_set & {"teacher_coef", "teacher_topk"})
    defaults = SftConfig()
    if not sft.teacher:
        for name in changed:
            if getattr(sft, name) != getattr(defaults, name):
                rule, fix = "the warm-up has no teacher", "sft.teacher=NAME, one of teachers"
                raise bad_value(f"sft.{name}", getattr(sft, name), rule, fix)
        return
    if not sft.steps:
        raise bad_value("sft.teacher", sft.teacher, "there is no warm-up", "sft.steps=100")
    if sft.teacher not in teachers:
        known = ", ".join(teachers) or "teachers.NAME.path=FOLDER"
        raise bad_value("sft.teacher", sft.teacher, "there is no such teacher", known)
    if teachers[sft.teacher].outside:
        rule = "it is outside of the trainer and gives log-probs of given tokens alone"
        fix = f"teachers.{sft.teacher}.path=FOLDER with place=trainer"
        raise bad_value("sft.teacher", sft.teacher, rule, fix)


def _check_outside(
    outside: Mapping[str, TeacherConfig],
    own: DistillationConfig,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
) -> None:
    """Refuse what teachers outside of the trainer cannot give."""
    for name, teacher in outside.items():
        key = f"teachers.{name}"
        if own.candidates:
            rule = f"{key} is outside of the trainer and gives log-probs of the drawn tokens alone"
            fix = f"distillation.loss_mode=k1, or {key}.path=FOLDER with {key}.place=trainer"
            raise bad_value("distillation.loss_mode", own.loss_mode, rule, fix)
        if teacher.base_url and rollout.temperature != 1:
            rule = f"{key}.base_url gives log-probs at temperature 1"
            fix = f"rollout.temperature=1, or {key}.path=FOLDER in place of base_url"
            raise bad_value("rollout.temperature", rollout.temperature, rule, fix)
        longest = teacher.wait_deadline_s + teacher.timeout_s
        if teacher.on_failure == "wait" and longest >= trainer.wait_deadline_s:
            rule = f"with {key}.timeout_s, must be less than trainer.wait_deadline_s"
            fix = f"trainer.wait_deadline_s={2 * longest:g}"
            raise bad_value(f"{key}.wait_deadline_s", teacher.wait_deadline_s, rule, fix)


def _check_groups(algorithm: AlgorithmConfig, rollout: RolloutConfig, *, rewarded: bool) -> None:
    name = algorithm.adv_estimator
    if not rewarded:
        return
    if rollout.n == 1 and algorithm.estimator.group_relative and algorithm.norm_adv_by_std_in_grpo:
        raise bad_value(
            "rollout.n",
            1,
            f"{name} compares the responses to a prompt with each other, so all advantages of a "
            "group of one are 0",
            "rollout.n=8 (or algorithm.norm_adv_by_std_in_grpo=false, to measure speed only)",
        )
    for norm in ("reward_norm", "adv_norm"):
        for key, level in getattr(algorithm, norm).levels.items():
            if rollout.n == 1 and level == "group":
                raise bad_value(
                    f"algorithm.{norm}.{key}",
                    level,
                    "with rollout.n=1, a group has nothing to compare a response with",
                    f"rollout.n=8, or algorithm.{norm}.{key}=batch",
                )
    if rollout.n == 1 and algorithm.filter_groups.enable:
        raise bad_value(
            "algorithm.filter_groups.enable",
            True,
            "a group of one always has equal outcomes, so every sample would be dropped",
            "rollout.n=8",
        )


def _check_filter(algorithm: AlgorithmConfig, trainer: TrainerConfig, a: AsyncConfig) -> None:
    if algorithm.filter_groups.enable and trainer.deterministic and a.staleness_threshold > 0:
        raise bad_value(
            "algorithm.filter_groups.enable",
            True,
            "with staleness, timing decides which version draws the sample that replaces a dropped "
            "one",
            "async_training.staleness_threshold=0, or trainer.deterministic=false",
        )


def _check_critic(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> None:
    if algorithm.needs_critic:
        return
    for key, value in (
        ("trainer.critic_warmup", trainer.critic_warmup),
        ("algorithm.bootstrap_truncated", algorithm.bootstrap_truncated),
    ):
        if value:
            raise bad_value(
                key,
                value,
                f"{algorithm.adv_estimator} has no critic",
                "algorithm.adv_estimator=gae, or remove the key",
            )


def _check_windows(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, owners: Mapping[str, str]
) -> None:
    """Refuse what a response that is trained in windows cannot have."""
    scored = "a response has its score at its end, and its windows are trained before"
    name, levels = algorithm.adv_estimator, algorithm.reward_norm.levels
    filters, kl = algorithm.filter_groups.enable, algorithm.use_kl_in_reward
    refused: dict[str, tuple[object, bool, str, str]] = {
        "algorithm.adv_estimator": (name, name != "gae", scored, "gae"),
        "rollout.n": (rollout.n, rollout.n > 1, "each response is a sample of its own", "1"),
        "algorithm.filter_groups.enable": (filters, filters, scored, "false"),
        "algorithm.use_kl_in_reward": (kl, kl, scored, "false"),
        **{
            f"algorithm.reward_norm.{key}": (level, bool(level), scored, "null")
            for key, level in levels.items()
        },
        **{
            key: (value, bool(value), "a response is one turn of the policy alone", "its default")
            for key, value in owners.items()
        },
    }
    for key, (value, wrong, rule, fix) in refused.items():
        if wrong and algorithm.tppo.window:
            rule = f"with algorithm.tppo.window={algorithm.tppo.window}, {rule}"
            raise bad_value(key, value, rule, f"{key}={fix}, or algorithm.tppo.window=0")


def _check_overlong(reward: RewardConfig, rollout: RolloutConfig) -> None:
    buffer, limit = reward.overlong_buffer, rollout.max_response_length
    if buffer.enable and not 0 < buffer.len <= limit:
        raise bad_value(
            "reward.overlong_buffer.len",
            buffer.len,
            f"must be from 1 to rollout.max_response_length = {limit}",
            f"reward.overlong_buffer.len={max(1, limit // 5)}",
        )


def placed(
    reward: RewardConfig, teachers: Mapping[str, TeacherConfig] = _NO_TEACHERS
) -> dict[str, PlaceConfig]:
    """Return the frozen models with processes of their own, by the name of their section.

    Those of rewards come first. Only a run that trains has teachers.
    """
    rewards = {f"{k}.model": one.model for k, one in reward.parts.items() if one.kind == "model"}
    own = {f"teachers.{k}": one for k, one in teachers.items() if one.place == "own"}
    return {**rewards, **own}


def _check_devices(models: Mapping[str, PlaceConfig], sides: Sides) -> None:
    """Refuse a place of a frozen model that cannot work."""
    for key, model in models.items():
        if model.device == "cpu":
            continue
        trainer = sides.trainer
        if trainer.runtime == "ray" and "cuda" in (model.device, trainer.device):
            raise on_ray(key, model.device)
        if model.share != "none" and sides.colocated:
            kind = "teacher" if key.startswith("teachers.") else "reward model"
            raise bad_value(
                f"{key}.share",
                model.share,
                "trainer and rollouts pass the memory of their GPUs to each other, and a "
                f"{kind} takes no turns",
                f"{key}.share=none with GPUs of its own, {key}.device=cpu, or separate devices",
            )


def _check_components(reward: RewardConfig, algorithm: AlgorithmConfig) -> None:
    """Refuse the name of a component that no part of reward.mix has."""
    known = {"overlong_reward", *reward.mix}
    gdpo, groups = algorithm.needs_components, algorithm.filter_groups
    used = [("algorithm.gdpo_reward_keys", name) for name in algorithm.gdpo_reward_keys if gdpo]
    if groups.enable and groups.metric not in ("score", "reward"):
        used.append(("algorithm.filter_groups.metric", groups.metric))
    for key, name in used:
        if reward.mix and name.partition("/")[0] not in known:
            parts = ", ".join(reward.mix)
            rule = f"the parts of reward.mix are {parts}"
            raise bad_value(key, name, rule, f"one of {parts}, or PART/COMPONENT")


def on_ray(key: str, device: str) -> ConfigError:
    """Return the error for a frozen model that would use GPUs beside Ray."""
    rule = "Ray reserves the cluster's GPUs, and such workers run on the driver's node"
    return bad_value(f"{key}.device", device, rule, f"{key}.device=cpu, or trainer.runtime=local")


def _check_kl(algorithm: AlgorithmConfig, batch: int) -> None:
    ctrl = algorithm.kl_ctrl
    if algorithm.use_kl_in_reward and ctrl.type == "adaptive" and 5 * ctrl.horizon <= batch * 2:
        raise bad_value(
            "algorithm.kl_ctrl.horizon",
            ctrl.horizon,
            f"must be over 0.4 x {batch} = {batch * 2 / 5:g}: a local step has {batch} "
            "trajectories, and with this horizon one step could set the coefficient to 0",
            f"algorithm.kl_ctrl.horizon={10 * batch}",
        )


def _check_correction(algorithm: AlgorithmConfig, actor: ActorConfig, a: AsyncConfig) -> None:
    correction, bypass = algorithm.rollout_correction, a.use_rollout_log_probs
    prefix, mode = "algorithm.rollout_correction", actor.policy_loss.loss_mode
    if bypass and correction.rollout_is and actor.policy_loss.loss.reads_old:
        raise bad_value(
            f"{prefix}.rollout_is",
            correction.rollout_is,
            f"with use_rollout_log_probs=true, the ratio of {mode} already is current / rollout, "
            "and weights would count it twice",
            "async_training.use_rollout_log_probs=false, or actor.policy_loss.loss_mode=reinforce",
        )
    if bypass and correction.proximal != "recompute":
        raise bad_value(
            f"{prefix}.proximal",
            correction.proximal,
            "with use_rollout_log_probs=true, the old policy of the ratio is the rollout's",
            "async_training.use_rollout_log_probs=false",
        )


def _check_replay(
    mode: str, rollout: RolloutConfig, algorithm: AlgorithmConfig, a: AsyncConfig
) -> None:
    key, proximal = "model.router_replay", algorithm.rollout_correction.proximal
    if mode == "R3" and rollout.engine in ("torch", "sglang"):
        raise bad_value(
            key,
            mode,
            f"millrace's {rollout.engine} engine does not return the experts of a token",
            "rollout.engine=vllm, or model.router_replay=R2",
        )
    if mode == "R2" and (a.use_rollout_log_probs or proximal != "recompute"):
        raise bad_value(
            key,
            mode,
            "it replays the pass that computes the old log-probs, and this run has no such pass",
            "async_training.use_rollout_log_probs=false with "
            "algorithm.rollout_correction.proximal=recompute, or model.router_replay=R3",
        )


def _check_trust(
    algorithm: AlgorithmConfig, policy_loss: PolicyLossConfig, a: AsyncConfig, lag: int
) -> None:
    """Refuse a lag of several versions unless something limits the effect of stale tokens."""
    if lag <= 1 or not (why := _untrusted(algorithm, policy_loss, a)):
        return
    ordered = a.staleness_threshold > 0
    key = "async_training.staleness_threshold" if ordered else "async_training.lookahead"
    raise bad_value(
        key,
        a.staleness_threshold if ordered else a.lookahead,
        f"samples may be {lag} versions old (the lag bound), and {why}",
        "one of " + "; ".join([*_corrections(policy_loss, a), f"{key}={0 if ordered else 1}"]),
    )


def _check_quantised(
    model: ModelConfig,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    policy_loss: PolicyLossConfig,
    a: AsyncConfig,
) -> None:
    """Refuse rollouts in 8 bits whose difference from the trainer's policy nothing limits."""
    key, value = "rollout.quantization", rollout.quantization
    if value is None:
        return
    if (engine := rollout.engine) in ("torch", "sglang"):  # also where a layer chose the engine
        rule = f"rollout.engine={engine} does not read it"
        raise bad_value(key, value, rule, f"rollout.engine=vllm, or {key}=null")
    if model.dtype != "bfloat16":
        rule = f"its kernels multiply bfloat16 models, and model.dtype={model.dtype}"
        raise bad_value(key, value, rule, f"model.dtype=bfloat16, or {key}=null")
    if model.router_replay != "disabled" or model.shape.num_experts:
        rule = "the weights of experts have no sync in 8 bits yet"
        raise bad_value(key, value, rule, f"{key}=null, or a dense model")
    if why := _untrusted(algorithm, policy_loss, a):
        rule = f"rollouts in 8 bits draw from another policy than the trainer's, and {why}"
        fixes = [*_corrections(policy_loss, a), f"{key}=null"]
        raise bad_value(key, value, rule, "one of " + "; ".join(fixes))


def _untrusted(
    algorithm: AlgorithmConfig, policy_loss: PolicyLossConfig, a: AsyncConfig
) -> str | None:
    """Return why nothing limits the effect of tokens of another policy. None if something does."""
    correction, mode, loss = algorithm.rollout_correction, policy_loss.loss_mode, policy_loss.loss
    bypass = a.use_rollout_log_probs
    rejects = correction.rollout_rs or correction.m2_threshold
    if (bypass and loss.bounds_stale) or correction.rollout_is or rejects:
        return None
    if bypass:
        return f"actor.policy_loss.loss_mode={mode} does not bound the ratio"
    if loss.reads_old:
        return (
            "the ratio uses the trainer's own log-probs, so nothing corrects for the policy that "
            "drew the tokens"
        )
    return f"{mode} has no ratio, so nothing corrects for the policy that drew the tokens"


def _corrections(policy_loss: PolicyLossConfig, a: AsyncConfig) -> list[str]:
    """Return the settings that limit the effect of tokens of another policy."""
    mode, loss, bypass = policy_loss.loss_mode, policy_loss.loss, a.use_rollout_log_probs
    correct, prefix = not (bypass and loss.reads_old), "algorithm.rollout_correction"
    return [
        *(["async_training.use_rollout_log_probs=true"] if loss.bounds_stale else []),
        *([f"{prefix}.rollout_is=token"] if correct else []),
        *(
            ["@policy_loss(bounds_stale=True), if it does"]
            if ":" in mode and not loss.bounds_stale
            else []
        ),
        f"{prefix}.rollout_rs=token_k1 {prefix}.rollout_rs_threshold=0.5_2.0",
        *(
            []
            if loss.bounds_stale
            else ["actor.policy_loss.loss_mode=vanilla async_training.use_rollout_log_probs=true"]
        ),
    ]
