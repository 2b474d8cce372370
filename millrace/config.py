"""The whole configuration: frozen models, a docstring under every field, every default in one place.

More than 400 lines, because one file is where a user looks for a key. Reading recipes, overrides and their error messages
is in recipe.py; the numbers that follow from a configuration are in `Config.derived`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from millrace.errors import bad_value
from millrace.schedule.schedule import OnSync, Placement, Schedule

Mode = Literal[
    "colocate_sync",
    "on_policy_pipeline",
    "one_step_off",
    "stream_off_policy",
    "async_staleness",
    "async_partial",
    "async_swap",
    "colocate_partial",
]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class TrainerConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Nodes of the training side."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Devices (GPUs; processes on a CPU) of the training side on each of its nodes: the ranks of the train engine."""
    gpus_in_node: int = Field(0, ge=0)
    """Devices that one node has; 0 means 8. Where both sides' devices fit one node, they share nodes."""
    runtime: Literal["local", "ray"] = "local"
    """Where engines live: processes on this machine, or Ray actors in placement groups."""
    ray_address: str = ""
    """Address of a running Ray cluster ("auto" finds it); empty starts one on this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs if there are any."""
    threads: int = Field(0, ge=0)
    """Torch threads of each engine process on a CPU; 0 shares the cores: all of them in colocated placement, where sides
    take turns, otherwise one for each process."""
    seed: int = Field(0, ge=0)
    """Seed of the model, the order of the data and every random stream of sampling."""
    deterministic: bool = False
    """Same seed, same bits, whatever the timing: fixed shapes, one thread. Needs on_sync=drain; slower."""
    total_epochs: int = Field(0, ge=0)
    """Most passes over the training data; 0 sets no limit (rollout.total_rollout_steps does)."""
    save_freq: int = Field(0, ge=0)
    """Versions between two checkpoints; 0 saves at the end alone. A run that is told to stop always saves."""
    test_freq: int = Field(0, ge=0)
    """Versions between two validations; 0 validates on the final weights alone. rollout.test_freq says the same."""
    val_before_train: bool = True
    """Validate the start weights too: the "before" of every comparison."""
    max_ckpt_to_keep: int = Field(2, ge=1)
    """Checkpoints kept; the oldest goes first."""
    resume: str = "never"
    """never, auto (the newest whole checkpoint of run_dir, if there is one), or the folder of a checkpoint."""
    run_dir: str = ""
    """Folder of the run; empty makes runs/<recipe>-<number>."""
    logger: tuple[Literal["tensorboard"], ...] = ("tensorboard",)
    """Sinks beside metrics.jsonl, which is always written."""
    wait_deadline_s: float = Field(1800.0, gt=0)
    """Seconds any wait may take before the run fails and names who waited for what."""
    stop_grace_s: float = Field(8.0, ge=0)
    """Seconds that a run which is told to stop may spend on finishing its window before it syncs early and saves."""


class ValidationConfig(Section):
    n: int = Field(1, ge=1)
    """Responses for each problem: the k of mean@k, best@k and maj@k."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature of validation; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of validation."""
    greedy: bool = True
    """Also draw one greedy response for each problem, reported as val/<data_source>/greedy."""


class RolloutConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Nodes of the rollout side."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Devices (GPUs; processes on a CPU) of the rollout side on each of its nodes: the replicas of the rollout engine."""
    engine: Literal["torch"] = "torch"
    """Rollout engine."""
    n: int = Field(8, ge=1)
    """Trajectories for each sample."""
    total_rollout_steps: int = Field(100, ge=1)
    """Samples that the run trains in all. Dropped samples are replaced and do not count."""
    test_freq: int = Field(0, ge=0)
    """Versions between two validations; the same key as trainer.test_freq, which it fills where that is 0."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of sampling; log-probs are those of this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; must be 1 in training."""
    top_k: int = Field(0, ge=0)
    """Most likely tokens kept; must be 0 (all) in training."""
    max_prompt_length: int = Field(512, ge=1)
    """Tokens; a longer prompt is an error, or left out where data.filter_overlong_prompts is on."""
    max_response_length: int = Field(512, ge=1)
    """Tokens of a response, of all its segments together."""
    max_num_seqs: int = Field(64, ge=1)
    """Decode slots of each replica: requests that decode together."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the end-of-sequence token."""
    ignore_eos: bool = False
    """Decode to the length limit whatever is drawn: for workloads with set lengths."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """KV caches of running requests when on_sync=swap changes the weights: kept, or read again with the new weights."""
    val_kwargs: ValidationConfig = ValidationConfig()
    """Sampling of validation."""


Sources = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""One source, or a list of them."""


class DataConfig(Section):
    train_files: Sources = ()
    """Sources: .parquet, .jsonl or .json files, hub ids (owner/name:split), reasoning_gym:NAME?param=value, task:NAME?param=value."""
    val_files: Sources = ()
    """Sources of held-out problems."""
    train_batch_size: int = Field(0, ge=0)
    """Samples of one window in colocate_sync and one_step_off: sets trigger_parameter_sync_step. 0 leaves the trigger as
    given; must be 0 in streaming modes."""
    gen_batch_size: int = Field(1, ge=1)
    """Samples admitted at a time; streaming modes admit one by one, so 1."""
    prompt_key: str = "prompt"
    """Column of the prompt: messages, or a string."""
    shuffle: bool = True
    """Whether each epoch's order is drawn from trainer.seed."""
    filter_overlong_prompts: bool = False
    """Leave out prompts over rollout.max_prompt_length, with a count, instead of refusing the data."""
    train_max_samples: int = Field(0, ge=0)
    """First rows that are used; 0 uses all."""
    val_max_samples: int = Field(0, ge=0)
    """First validation rows that are used; 0 uses all."""


class RewardConfig(Section):
    function: str = ""
    """path.py:name or module:name of a reward function in verl's or TRL's signature; empty takes the data source's own."""
    num_workers: int = Field(1, ge=1)
    """Processes that call reward functions. A coroutine function is awaited, many at a time, in each of them."""
    max_concurrency: int = Field(1024, ge=1)
    """Coroutines awaited at a time in each process."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds one call may take; a worker that runs past it is killed and replaced."""
    max_error_share: float = Field(0.2, ge=0, le=1)
    """The run fails if more than this share of the last 50 samples was dropped for reward errors."""


class ModelShape(Section):
    hidden_size: int = Field(64, ge=1)
    """Width."""
    num_hidden_layers: int = Field(3, ge=1)
    """Decoder layers."""
    num_attention_heads: int = Field(4, ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(2, ge=1)
    """Key and value heads."""
    intermediate_size: int = Field(192, ge=1)
    """Width of the MLP."""
    tie_word_embeddings: bool = True
    """One matrix for input and output embeddings."""
    vocab_size: int = Field(0, ge=0)
    """0 is as large as the tokenizer needs. Set it for shapes without a tokenizer."""


class ModelConfig(Section):
    path: str = ""
    """Folder or hub id of a Hugging Face causal model with its tokenizer; empty makes a Qwen2-shaped one on the spot."""
    shape: ModelShape = ModelShape()
    """Shape of the model that is made on the spot, with random weights."""
    tokenizer: Literal["chars", "bpe"] = "chars"
    """Tokenizer of a model made on the spot: the training data's characters, or byte pairs learned from it."""
    tokenizer_vocab_size: int = Field(512, ge=8)
    """Most tokens of a bpe tokenizer made on the spot."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the rollout engine's weights and of the train engine's computation. Master weights are always float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    trust_remote_code: bool = False
    """Whether code in the model's folder may run."""


class SftConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised optimizer steps before RL; 0 skips the warm-up."""
    batch_size: int = Field(128, ge=1)
    """Demonstrations in one step."""
    lr: float = Field(5e-3, gt=0)
    """Peak learning rate; linear to 0 after the warm-up steps."""
    lr_warmup_steps: int = Field(20, ge=0)
    """Steps of linear warm-up."""
    messiness: float = Field(0.0, ge=0, le=1)
    """Share of demonstrations that are corrupted: the model then knows the form but not the answer, and RL has work."""
    files: Sources = ()
    """Sources of demonstrations; empty takes data.train_files, whose rows must have an `answer` or a ground truth."""


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up; the first one has lr / lr_warmup_steps."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; its horizon is the true number of optimizer steps of the run."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of lr at the end of linear and cosine."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay, on matrices alone."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0 does not clip."""


class ActorConfig(Section):
    ppo_mini_batch_size: int = Field(32, ge=1)
    """Samples in one optimizer step, global over all devices."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over each batch that the trainer takes."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """Tokens packed into one micro-batch on one device."""
    clip_ratio_low: float = Field(0.2, gt=0, lt=1)
    """PPO clip below 1."""
    clip_ratio_high: float = Field(0.2, gt=0)
    """PPO clip above 1; larger than clip_ratio_low is DAPO's clip-higher."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip: bound on the ratio for negative advantages."""
    loss_agg_mode: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number, always over the global mini-batch."""
    loss_scale_factor: float = Field(0.0, ge=0)
    """Divisor of seq-mean-token-sum-norm; 0 takes rollout.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""


class AlgorithmConfig(Section):
    adv_estimator: Literal["grpo"] = "grpo"
    """Advantage estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; off is Dr.GRPO."""


class AsyncConfig(Section):
    require_batches: int = Field(1, ge=1)
    """Mini-batches in one local step: what the trainer takes at once. Each is an optimizer step (times ppo_epochs)."""
    trigger_parameter_sync_step: int = Field(1, ge=1)
    """Local steps between two weight syncs."""
    staleness_threshold: float = Field(0.0, ge=0)
    """Samples under way beyond one window, as a share of it: capacity = (1 + this) x window. 0 is on-policy by window."""
    partial_rollout: bool = False
    """true means on_sync: interrupt."""
    on_sync: OnSync = OnSync.DRAIN
    """What happens to running trajectories at a sync: drain, interrupt or swap."""
    placement: Placement = Placement.SEPARATE
    """Whether both sides have devices of their own (separate) or take turns on the same ones (colocated)."""
    lookahead: int = Field(0, ge=0)
    """How far past the oldest sample the trainer may look for a ready one. 1 is strict order of admission; 0 is one window
    where there is staleness, and 1 elsewhere and in deterministic runs."""
    use_rollout_log_probs: bool = True
    """true: the old log-probs of PPO are those of the rollout; false: the trainer's own, computed when a batch arrives."""


class SyncConfig(Section):
    bucket_mb: int = Field(64, ge=1)
    """MiB of weights packed into one message."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds one transfer may take."""


class Config(Section):
    """A run. `millrace train --help-config` prints this tree."""

    name: str = Field("run", pattern=r"^\w[\w.-]*$")
    """Name of the recipe: the run folder's prefix."""
    mode: Mode | None = None
    """A name for settings of async_training; see the README's table. Keys set beside or after it override it."""
    trainer: TrainerConfig = TrainerConfig()
    """The training side, and the run as a whole."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout side."""
    data: DataConfig = DataConfig()
    """Problems."""
    reward: RewardConfig = RewardConfig()
    """Reward functions."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    sft: SftConfig = SftConfig()
    """Supervised warm-up before RL."""
    actor: ActorConfig = ActorConfig()
    """Policy loss and optimizer."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages."""
    async_training: AsyncConfig = AsyncConfig()
    """The Schedule."""
    sync: SyncConfig = SyncConfig()
    """Weight sync."""

    @model_validator(mode="after")
    def _cross_check(self) -> Config:
        for check in (_check_sampling, _check_lengths, _check_batches, _check_determinism, _check_placement, _check_model):
            check(self)
        return self

    @property
    def schedule(self) -> Schedule:
        """The Schedule that these keys make."""
        a = self.async_training
        strict = Schedule(
            ppo_mini_batch_size=self.actor.ppo_mini_batch_size,
            require_batches=a.require_batches,
            trigger_parameter_sync_step=a.trigger_parameter_sync_step,
            staleness_threshold=a.staleness_threshold,
            on_sync=a.on_sync,
            placement=a.placement,
        )
        free = a.staleness_threshold > 0 and not self.trainer.deterministic
        return replace(strict, lookahead=a.lookahead or (strict.window if free else 1))

    @property
    def test_freq(self) -> int:
        return self.trainer.test_freq or self.rollout.test_freq

    @property
    def trainer_ranks(self) -> int:
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def replicas(self) -> int:
        return self.rollout.nnodes * self.rollout.n_gpus_per_node

    def derived(self, rows: int | None = None) -> Derived:
        """Every number that follows. `rows` is the size of the training data, where it has one."""
        schedule = self.schedule
        samples = self.rollout.total_rollout_steps
        if rows is not None and self.trainer.total_epochs:
            samples = min(samples, rows * self.trainer.total_epochs)
        steps = schedule.optimizer_steps(samples, self.actor.ppo_epochs)
        return Derived(
            window=schedule.window,
            capacity=schedule.capacity,
            lag_bound=schedule.lag_bound,
            lookahead=schedule.lookahead,
            versions=schedule.versions(samples),
            optimizer_steps=steps,
            lr_horizon=steps,
            samples=samples,
            trajectories=samples * self.rollout.n,
            nodes_needed=nodes_needed(self),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """What a configuration comes to, before anything runs."""

    window: int
    """Samples trained for each version."""
    capacity: int
    """Samples under way at once, at most."""
    lag_bound: int
    """Versions between admission and training, at most."""
    lookahead: int
    """Resolved look-ahead, in samples."""
    versions: int
    """Weight syncs."""
    optimizer_steps: int
    lr_horizon: int
    """Optimizer steps of the LR schedule."""
    samples: int
    trajectories: int
    nodes_needed: int


def sides_share_nodes(config: Config) -> bool:
    """Whether both sides' devices on a node fit one node together. Colocated sides share the devices themselves."""
    t, r = config.trainer, config.rollout
    colocated = config.async_training.placement is Placement.COLOCATED
    return colocated or t.n_gpus_per_node + r.n_gpus_per_node <= (t.gpus_in_node or 8)


def nodes_needed(config: Config) -> int:
    """max(nnodes) where the per-node sum of both sides fits a node, else the sum."""
    nnodes = (config.trainer.nnodes, config.rollout.nnodes)
    return max(nnodes) if sides_share_nodes(config) else sum(nnodes)


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
    if c.rollout.n == 1 and c.algorithm.norm_adv_by_std_in_grpo:
        raise bad_value(
            "rollout.n",
            1,
            "a group of one has nothing to be compared with: its std is 0, so are all advantages, and nothing is learned",
            "rollout.n=8 (to measure speed alone, algorithm.norm_adv_by_std_in_grpo=false)",
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
        raise bad_value("data.gen_batch_size", c.data.gen_batch_size, "samples are admitted one by one", "data.gen_batch_size=1")
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
    limit = t.gpus_in_node
    for key, value in (("trainer.n_gpus_per_node", t.n_gpus_per_node), ("rollout.n_gpus_per_node", r.n_gpus_per_node)):
        if limit and value > limit:
            raise bad_value(key, value, f"a node has trainer.gpus_in_node = {limit} devices", f"{key}={limit} or less")
    if c.async_training.placement is Placement.COLOCATED and c.trainer_ranks != c.replicas:
        raise bad_value(
            "async_training.placement",
            "colocated",
            f"both sides share the same devices, but trainer.nnodes x n_gpus_per_node = {c.trainer_ranks} and "
            f"rollout.nnodes x n_gpus_per_node = {c.replicas}",
            f"rollout.nnodes={t.nnodes} rollout.n_gpus_per_node={t.n_gpus_per_node}",
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


MODES: dict[str, dict[str, Any]] = {
    "colocate_sync": {"placement": "colocated", "staleness_threshold": 0.0, "on_sync": "drain"},
    "on_policy_pipeline": {
        "placement": "separate",
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": 0.0,
        "on_sync": "drain",
    },
    "one_step_off": {
        "placement": "separate",
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": 1.0,
        "on_sync": "drain",
        "lookahead": 1,
    },
    "stream_off_policy": {"placement": "separate", "staleness_threshold": 0.0, "on_sync": "drain"},
    "async_staleness": {"placement": "separate", "on_sync": "drain"},
    "async_partial": {"placement": "separate", "on_sync": "interrupt"},
    "async_swap": {"placement": "separate", "on_sync": "swap"},
    "colocate_partial": {"placement": "colocated", "on_sync": "interrupt"},
}
"""What each mode fixes; recipe.py fills in the rest (a trigger over 1 for stream_off_policy, a staleness over 0 for async)."""
