"""Checks of keys in different sections that contradict each other.

Each error names the key, its value, the rule and the fix. A section checks its own keys itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millrace.config.algorithm_keys import AlgorithmConfig, PolicyLossConfig
from millrace.config.data_keys import RewardConfig
from millrace.config.endpoint_keys import PlaceConfig
from millrace.config.keys import AsyncConfig, Config
from millrace.config.model_keys import SftConfig
from millrace.config.plugins import Named, find, load_if_given
from millrace.config.section import Rule
from millrace.config.serving_checks import serving_rules
from millrace.config.teacher_keys import DistillationConfig, TeacherConfig
from millrace.config.trainer_keys import LOGGERS, too_many_devices
from millrace.errors import ConfigError, bad_value
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import OnSync

_NO_TEACHERS: Mapping[str, TeacherConfig] = {}


def check(config: Config) -> None:
    """Raise ConfigError for the first rule that the configuration breaks."""
    find("rollout.engine", config.rollout.engine, Named("rollout_engines"), "rollout.engine={}")
    find("trainer.engine", config.trainer.engine, Named("train_engines"), "trainer.engine={}")
    for name in config.trainer.logger:
        find("trainer.logger", name, LOGGERS, "trainer.logger=[{}]")
    config.refuse(_rules(config))


def _rules(c: Config) -> Iterator[Rule]:
    """Yield the rules among keys of different sections, in the order of their checks."""
    # -- lengths, batches and intervals
    trainer, a, ranks, longest = c.trainer, c.async_training, c.context_size, c.rollout.max_len
    share = f", on {ranks} ranks together" if ranks > 1 else ""
    yield (
        c.actor.ppo_max_token_len_per_gpu * ranks < longest,
        "actor.ppo_max_token_len_per_gpu",
        "must fit the longest trajectory, which has rollout.max_prompt_length + "
        f"rollout.max_response_length = {longest} tokens{share}",
        f"actor.ppo_max_token_len_per_gpu={-(-longest // ranks)} or more, or shorter lengths",
    )
    size = c.actor.ulysses_sequence_parallel_size
    yield (
        trainer.engine == "fsdp" and trainer.ranks % size,
        "actor.ulysses_sequence_parallel_size",
        f"must divide the number of ranks, trainer.nnodes x n_gpus_per_node = {trainer.ranks}",
        f"trainer.n_gpus_per_node={size}, or a divisor of {trainer.ranks}",
    )
    for name, optim in (("actor", c.actor.optim), ("critic", c.critic.optim)):
        key = f"{name}.optim.optimizer"
        rule = "with trainer.offload_policy no rank has a whole matrix on its device"
        wrong = optim.optimizer == "muon" and trainer.offload_policy
        yield wrong, key, rule, f"{key}=adamw, or trainer.offload_policy=false"
    batch, mini = c.data.train_batch_size, c.actor.ppo_mini_batch_size
    yield (
        batch and not (c.mode and MODES[c.mode].batch_is_window),
        "data.train_batch_size",
        "a streaming mode has no train batch",
        "data.train_batch_size=0: the window is actor.ppo_mini_batch_size x "
        "async_training.require_batches x async_training.trigger_parameter_sync_step",
    )
    step = mini * a.require_batches
    yield (
        batch and batch != step * a.trigger_parameter_sync_step,
        "data.train_batch_size",
        "the window is ppo_mini_batch_size x require_batches x trigger_parameter_sync_step = "
        f"{mini} x {a.require_batches} x {a.trigger_parameter_sync_step}",
        f"a multiple of {step}, without async_training.trigger_parameter_sync_step",
    )
    c.end(1)  # The data has a row at least. Its number decides only which key ends the run.
    freqs = trainer.test_freq, c.rollout.test_freq
    yield (
        all(freqs) and freqs[0] != freqs[1],
        "rollout.test_freq",
        f"trainer.test_freq is {trainer.test_freq}, and both keys set the same interval",
        "rollout.test_freq=0, or trainer.test_freq=0",
    )
    schedule = c.schedule
    yield (
        trainer.deterministic and schedule.on_sync is not OnSync.DRAIN,
        "trainer.deterministic",
        f"with on_sync={schedule.on_sync.value}, timing decides which version draws a token",
        "async_training.on_sync=drain, or trainer.deterministic=false",
    )
    yield (
        trainer.deterministic and schedule.lookahead > 1,
        "async_training.lookahead",
        "with a look-ahead over 1, timing decides the order of training",
        "async_training.lookahead=1, or trainer.deterministic=false",
    )

    # -- engines and their devices
    t, r, colocated = c.trainer, c.rollout, c.async_training.colocated
    yield from serving_rules(r, t)
    if checks := load_if_given("trainer.engine", t.engine, "train_checks"):
        checks.check_keys(t, c.model, c.actor, c.algorithm)
    too_many, key, rule, fix = too_many_devices("rollout.", r.n_gpus_per_node, t.gpus_in_node)
    yield too_many, f"rollout.{key}", rule, fix
    yield (
        colocated and (t.nnodes, t.n_gpus_per_node) != (r.nnodes, r.n_gpus_per_node),
        "async_training.placement",
        "both sides share the same devices of the same nodes, but trainer.nnodes x "
        f"n_gpus_per_node = {t.nnodes} x {t.n_gpus_per_node} and rollout.nnodes x "
        f"n_gpus_per_node = {r.nnodes} x {r.n_gpus_per_node}",
        f"rollout.nnodes={t.nnodes} rollout.n_gpus_per_node={t.n_gpus_per_node}",
    )
    most, key = r.max_replicas, "rollout.max_replicas"
    rule = "trainer.runtime=local has no nodes that join"
    fix = "trainer.runtime=ray, or `millrace scale RUN rollout=N`"
    yield most and t.runtime != "ray", key, rule, fix
    rule = "in a colocated mode the number of replicas is fixed"
    yield most and colocated, key, rule, f"a mode with separate devices, or {key}=0"
    yield 0 < most < r.replicas, key, f"the run starts with {r.replicas} replicas", f"{key}=0"

    yield from _teacher_rules(c)
    # -- estimators, rewards, and the groups that they need
    algorithm, name, groups = c.algorithm, c.algorithm.adv_estimator, c.algorithm.filter_groups
    player = c.agents.agent_kind
    owners = {"data.sampler": c.data.sampler, "teachers": ", ".join(c.teachers)}
    owners |= {f"agents.{player}": player and str(getattr(c.agents, player))}
    # These come first: the next ones ask for groups, which windows refuse.
    yield from _window_rules(algorithm, c.rollout.n, owners)
    single = c.learns_from_rewards and c.rollout.n == 1
    yield (
        single and algorithm.estimator.group_relative and algorithm.norm_adv_by_std_in_grpo,
        "rollout.n",
        f"{name} compares the responses to a prompt with each other, so all advantages of a group "
        "of one are 0",
        "rollout.n=8 (or algorithm.norm_adv_by_std_in_grpo=false, to measure speed only)",
    )
    for norm in ("reward_norm", "adv_norm"):
        for level_key, level in getattr(algorithm, norm).levels.items():
            key = f"algorithm.{norm}.{level_key}"
            rule = "with rollout.n=1, a group has nothing to compare a response with"
            yield single and level == "group", key, rule, f"rollout.n=8, or {key}=batch"
    key = "algorithm.filter_groups.enable"
    rule = "a group of one always has equal outcomes, so every sample would be dropped"
    yield single and groups.enable, key, rule, "rollout.n=8"
    stale = c.async_training.staleness_threshold > 0
    yield (
        groups.enable and c.trainer.deterministic and stale,
        key,
        "with staleness, timing decides which version draws the sample that replaces a dropped one",
        "async_training.staleness_threshold=0, or trainer.deterministic=false",
    )
    for key in ("trainer.critic_warmup", "algorithm.bootstrap_truncated"):
        fix = "algorithm.adv_estimator=gae, or remove the key"
        yield c.value_of(key) and not algorithm.needs_critic, key, f"{name} has no critic", fix
    buffer, limit = c.reward.overlong_buffer, c.rollout.max_response_length
    yield (
        buffer.enable and not 0 < buffer.len <= limit,
        "reward.overlong_buffer.len",
        f"must be from 1 to rollout.max_response_length = {limit}",
        f"reward.overlong_buffer.len={max(1, limit // 5)}",
    )
    for key, model in placed(c.reward, c.teachers).items():
        cuda = model.device != "cpu" and "cuda" in (model.device, c.trainer.device)
        if cuda and c.trainer.runtime == "ray":
            raise on_ray(key, model.device)
        kind = "teacher" if key.startswith("teachers.") else "reward model"
        shares = model.device != "cpu" and model.share != "none"
        yield (
            shares and c.async_training.colocated,
            f"{key}.share",
            "trainer and rollouts pass the memory of their GPUs to each other, and a "
            f"{kind} takes no turns",
            f"{key}.share=none with GPUs of its own, {key}.device=cpu, or separate devices",
        )
    parts, known = ", ".join(c.reward.mix), {"overlong_reward", *c.reward.mix}
    keys = algorithm.gdpo_reward_keys if algorithm.needs_components else ()
    used = [("algorithm.gdpo_reward_keys", key) for key in keys]
    if groups.enable and groups.metric not in ("score", "reward"):
        used.append(("algorithm.filter_groups.metric", groups.metric))
    for key, component in used:
        if c.reward.mix and component.partition("/")[0] not in known:
            rule = f"the parts of reward.mix are {parts}"
            raise bad_value(key, component, rule, f"one of {parts}, or PART/COMPONENT")
    ctrl, batch = algorithm.kl_ctrl, c.schedule.step_size * c.rollout.n
    adaptive = algorithm.use_kl_in_reward and ctrl.type == "adaptive"
    yield (
        adaptive and 5 * ctrl.horizon <= batch * 2,
        "algorithm.kl_ctrl.horizon",
        f"must be over 0.4 x {batch} = {batch * 2 / 5:g}: a local step has {batch} trajectories, "
        "and with this horizon one step could set the coefficient to 0",
        f"algorithm.kl_ctrl.horizon={10 * batch}",
    )

    # -- tokens that another policy than the trainer's has drawn
    algorithm, a, policy_loss = c.algorithm, c.async_training, c.actor.policy_loss
    correction, bypass = algorithm.rollout_correction, a.use_rollout_log_probs
    prefix, decoupled = "algorithm.rollout_correction", "async_training.use_rollout_log_probs=false"
    yield (
        bypass and correction.rollout_is and policy_loss.loss.reads_old,
        f"{prefix}.rollout_is",
        f"with use_rollout_log_probs=true, the ratio of {policy_loss.loss_mode} already is "
        "current / rollout, and weights would count it twice",
        f"{decoupled}, or actor.policy_loss.loss_mode=reinforce",
    )
    computed = correction.proximal == "recompute"
    rule = "with use_rollout_log_probs=true, the old policy of the ratio is the rollout's"
    yield bypass and not computed, f"{prefix}.proximal", rule, decoupled
    key, replay, engine = "model.router_replay", c.model.router_replay, c.rollout.engine
    rule = "millrace's torch engine does not return the experts of a token"
    fix = f"rollout.engine=vllm, or {key}=R2"
    yield replay == "R3" and engine == "torch", key, rule, fix
    yield (
        replay == "R2" and (bypass or not computed),
        key,
        "it replays the pass that computes the old log-probs, and this run has no such pass",
        f"{decoupled} with {prefix}.proximal=recompute, or {key}=R3",
    )
    lag, why = c.schedule.lag_bound, _untrusted(algorithm, policy_loss, a)
    ordered = a.staleness_threshold > 0
    key = "async_training.staleness_threshold" if ordered else "async_training.lookahead"
    fixes = _corrections(policy_loss, a)
    yield (
        lag > 1 and why,
        key,
        f"samples may be {lag} versions old (the lag bound), and {why}",
        "one of " + "; ".join([*fixes, f"{key}={0 if ordered else 1}"]),
    )
    if c.rollout.quantization is None:
        return
    key, dtype = "rollout.quantization", c.model.dtype
    rule = f"rollout.engine={engine} does not read it"  # also where a layer chose the engine
    yield engine in ("torch", "sglang"), key, rule, f"rollout.engine=vllm, or {key}=null"
    rule = f"its kernels multiply bfloat16 models, and model.dtype={dtype}"
    yield dtype != "bfloat16", key, rule, f"model.dtype=bfloat16, or {key}=null"
    rule = "the weights of experts have no sync in 8 bits yet"
    experts = replay != "disabled" or c.model.shape.num_experts
    yield experts, key, rule, f"{key}=null, or a dense model"
    rule = f"rollouts in 8 bits draw from another policy than the trainer's, and {why}"
    yield why, key, rule, "one of " + "; ".join([*fixes, f"{key}=null"])


def _teacher_rules(c: Config) -> Iterator[Rule]:
    """Yield the rules of teachers."""
    sft, own, teachers = c.sft, c.distillation, c.teachers
    idle, fix = "the warm-up has no teacher", "sft.teacher=NAME, one of teachers"
    for name in sorted(sft.model_fields_set & {"teacher_coef", "teacher_topk"}):
        given = getattr(sft, name) != SftConfig.model_fields[name].default
        yield not sft.teacher and given, f"sft.{name}", idle, fix
    key = "sft.teacher"
    yield sft.teacher and not sft.steps, key, "there is no warm-up", "sft.steps=100"
    known = ", ".join(teachers) or "teachers.NAME.path=FOLDER"
    yield sft.teacher and sft.teacher not in teachers, key, "there is no such teacher", known
    rule = "it is outside of the trainer and gives log-probs of given tokens alone"
    fix = f"teachers.{sft.teacher}.path=FOLDER with place=trainer"
    yield sft.teacher and teachers[sft.teacher].outside, key, rule, fix
    if not teachers:
        changed = min(own.model_fields_set, default="loss_mode")
        given = own != DistillationConfig()
        fix = "teachers.NAME.path=FOLDER"
        yield given, f"distillation.{changed}", "there is no teacher", fix
        return
    if c.trainer.engine != "fsdp":
        rule = f"trainer.engine={c.trainer.engine} has no teachers"
        raise bad_value("teachers", ", ".join(teachers), rule, "trainer.engine=fsdp")
    for name, teacher in teachers.items():
        if not teacher.outside:
            continue
        key = f"teachers.{name}"
        rule = f"{key} is outside of the trainer and gives log-probs of the drawn tokens alone"
        fix = f"distillation.loss_mode=k1, or {key}.path=FOLDER with {key}.place=trainer"
        yield own.candidates, "distillation.loss_mode", rule, fix
        rule = f"{key}.base_url gives log-probs at temperature 1"
        fix = f"rollout.temperature=1, or {key}.path=FOLDER in place of base_url"
        yield teacher.base_url and c.rollout.temperature != 1, "rollout.temperature", rule, fix
        longest = teacher.wait_deadline_s + teacher.timeout_s
        yield (
            teacher.on_failure == "wait" and longest >= c.trainer.wait_deadline_s,
            f"{key}.wait_deadline_s",
            f"with {key}.timeout_s, must be less than trainer.wait_deadline_s",
            f"trainer.wait_deadline_s={2 * longest:g}",
        )
    yield (
        not own.candidates and c.actor.policy_loss.loss.select,
        "actor.policy_loss.loss_mode",
        "it chooses tokens by their advantages, before the teachers have a part in them",
        "another loss_mode, or distillation.loss_mode=forward_kl_topk",
    )
    rule = f"the critic of {c.algorithm.adv_estimator} learns from rewards"
    alone = not c.learns_from_rewards
    key = "distillation.use_task_rewards"
    yield alone and c.algorithm.needs_critic, key, rule, "algorithm.adv_estimator=grpo"
    yield (
        alone and c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable",
        "it drops samples by their rewards, which are not trained on",
        "algorithm.filter_groups.enable=false, or distillation.use_task_rewards=true",
    )


def _window_rules(algorithm: AlgorithmConfig, n: int, owners: Mapping[str, str]) -> Iterator[Rule]:
    """Yield what a response that is trained in windows cannot have."""
    window = algorithm.tppo.window
    scored = "a response has its score at its end, and its windows are trained before"
    levels = algorithm.reward_norm.levels
    refused = {
        "algorithm.adv_estimator": (algorithm.adv_estimator != "gae", scored, "gae"),
        "rollout.n": (n > 1, "each response is a sample of its own", "1"),
        "algorithm.filter_groups.enable": (algorithm.filter_groups.enable, scored, "false"),
        "algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, scored, "false"),
        **{f"algorithm.reward_norm.{k}": (level, scored, "null") for k, level in levels.items()},
    }
    for key, (wrong, rule, fix) in refused.items():
        rule = f"with algorithm.tppo.window={window}, {rule}"
        yield window and wrong, key, rule, f"{key}={fix}, or algorithm.tppo.window=0"
    for key, value in owners.items():
        if window and value:
            rule = (
                f"with algorithm.tppo.window={window}, a response is one turn of the policy alone"
            )
            fix = f"{key}=its default, or algorithm.tppo.window=0"
            raise bad_value(key, value, rule, fix)


def placed(
    reward: RewardConfig, teachers: Mapping[str, TeacherConfig] = _NO_TEACHERS
) -> dict[str, PlaceConfig]:
    """Return the frozen models with processes of their own, by the name of their section.

    Those of rewards come first. Only a run that trains has teachers.
    """
    rewards = {f"{k}.model": one.model for k, one in reward.parts.items() if one.kind == "model"}
    own = {f"teachers.{k}": one for k, one in teachers.items() if one.place == "own"}
    return {**rewards, **own}


def on_ray(key: str, device: str) -> ConfigError:
    """Return the error for a frozen model that would use GPUs beside Ray."""
    rule = "Ray reserves the cluster's GPUs, and such workers run on the driver's node"
    return bad_value(f"{key}.device", device, rule, f"{key}.device=cpu, or trainer.runtime=local")


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
