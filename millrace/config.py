"""The whole configuration: frozen models, a docstring under every field, every default in one place.

More than 400 lines, because one file is where a user looks for a key. Reading recipes, overrides and their error messages
is in recipe.py, cross-checks in config_checks.py; the numbers that follow from a configuration are in `Config.derived`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from millrace.algorithms.modes import AggMode, LossMode
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
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


class TrainerConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Nodes of the training side."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Devices (GPUs; processes on a CPU) of the training side on each of its nodes: the ranks of the train engine."""
    fsdp_size: int = Field(0, ge=0)
    """Ranks that share one copy of the model, its gradients and its moments, each holding a part; 0 is all ranks. Fewer make several
    copies, each on consecutive ranks (HSDP): between copies gradients alone are exchanged, once for each mini-batch."""
    gpus_in_node: int = Field(0, ge=0)
    """Devices that one node has. Where both sides' devices fit one node, they share nodes; elsewhere each side has its own.
    0 means 8, but a Ray cluster is asked: sides share as many nodes as its nodes' sizes allow."""
    runtime: Literal["local", "ray"] = "local"
    """Where engines live: processes on this machine, or Ray actors in a placement group."""
    ray_address: str = ""
    """HOST:PORT of a running Ray cluster, or auto to find it; empty starts one on this machine. `--address` sets both keys."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs if there are any."""
    threads: int = Field(0, ge=0)
    """Torch threads of each engine process; 0 shares a node's cores among its devices (sides that share devices take turns)."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the model, the order of the data and every random stream of sampling."""
    deterministic: bool = False
    """Same seed, same bits, whatever the timing: fixed shapes, one thread. Needs on_sync=drain; slower."""
    total_epochs: int = Field(0, ge=0)
    """At most so many samples are trained as that many passes over the training data have; for a sample that is dropped a later one is
    trained. 0 sets no limit (rollout.total_rollout_steps does)."""
    save_freq: int = Field(0, ge=0)
    """Versions between two checkpoints; 0 saves at the end alone. A run that is told to stop always saves."""
    async_save: bool = True
    """Write checkpoints while the next versions train: the trainer stands still for a copy to host memory, which takes as much of
    it as the state has until it is written: for each copy of the model 12 bytes a parameter, as many of a critic's, 4 of the
    reference's. From GPUs it takes up to twice that, which is kept for the next one: pinned memory comes in powers of two. false
    stands still for the writing and needs none of it. So does the last save of a run, which nothing trains after."""
    save_last: bool = True
    """Save a checkpoint when the run is complete. Without it there is nothing to export: for benchmarks."""
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
    critic_warmup: int = Field(0, ge=0)
    """First optimizer steps in which the critic alone is trained."""
    offload: bool = True
    """Colocated, on GPUs: weights and optimizer state wait in host memory while rollouts run. false leaves them on the GPU: no
    time is lost, and rollout.gpu_memory_utilization must leave room for them."""
    offload_policy: bool = False
    """On GPUs: weights, gradients and optimizer state live in host memory, 16 to 24 bytes a parameter (pinned blocks come in powers
    of two); a layer's weights come to the GPU for its passes, and AdamW steps on the CPU. Slower: for models that do not fit otherwise."""
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


class DrawnLengthsConfig(Section):
    enable: bool = False
    """Workloads without weights: each response ends at a length drawn from a log-normal distribution, whatever the model says,
    and rollout.max_response_length cuts it. Training only; the same lengths in every mode."""
    median: float = Field(0.0, ge=0)
    """Tokens."""
    sigma: float = Field(1.0, ge=0)
    """Standard deviation of the lengths' natural logarithm: 0 makes all alike, 1 has 5 % over five medians."""


class RolloutConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Nodes of the rollout side."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Devices (GPUs; processes on a CPU) of the rollout side on each of its nodes. A replica of the engine takes
    tensor_model_parallel_size of them."""
    engine: Literal["torch", "vllm"] = "torch"
    """Rollout engine: torch decodes with the transformers model in the worker; vllm needs vLLM (docs/vllm.md)."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    """Devices of one replica, over which the model is split; above 1 with engine=vllm alone."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """vllm: share of a GPU's memory for weights and KV cache. Staged weights of the next version come on top."""
    enforce_eager: bool = False
    """vllm: no CUDA graphs."""
    enable_prefix_caching: bool = True
    """vllm: requests of one policy version share the KV cache of equal prefixes; siblings of a sample read their prompt once."""
    max_num_batched_tokens: int = Field(8192, ge=1)
    """vllm: tokens of one engine step, prefill and decode together."""
    free_cache_engine: bool = True
    """vllm, colocated: weights and KV cache give their memory back while training runs. false keeps them on the GPU: no time is
    lost, and gpu_memory_utilization must leave room for training."""
    engine_kwargs: dict[str, Any] = {}
    """vllm: further arguments of its AsyncEngineArgs."""
    n: int = Field(8, ge=1, le=65536)
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
    drawn_lengths: DrawnLengthsConfig = DrawnLengthsConfig()
    """Responses of lengths drawn from a distribution."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """KV caches of running requests when on_sync=swap changes the weights: kept, or read again with the new weights."""
    val_kwargs: ValidationConfig = ValidationConfig()
    """Sampling of validation."""


OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)

Sources = Annotated[tuple[str, ...], OneOrMore]
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


class OverlongBufferConfig(Section):
    enable: bool = False
    """DAPO's soft punishment of long responses, in training: 0 up to rollout.max_response_length - len tokens, from there
    linear down to -penalty_factor at the limit. Added to the score; `reward/overlong_reward/mean` is its mean."""
    len: int = Field(0, ge=0)
    """Tokens before the limit over which the penalty grows."""
    penalty_factor: float = Field(1.0, ge=0)
    """Largest penalty."""


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
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    """Overlong reward shaping."""


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
    gradient_checkpointing_share: float = Field(1.0, gt=0, le=1)
    """Share of the decoder layers that do so; the others keep theirs. The less, the faster, as far as memory goes."""
    compile: bool = False
    """torch.compile each decoder layer, and the log-probs' passes over the vocabulary, for training. The first step waits for it."""
    trust_remote_code: bool = False
    """Whether code in the model's folder may run."""
    lora_rank: int = Field(0, ge=0)
    """Train low-rank adapters of this rank and leave the model's own weights as they are; 0 trains all weights. Needs the extra
    millrace[lora]."""
    lora_alpha: float = Field(16.0, gt=0)
    """What adapters add is scaled by lora_alpha / lora_rank."""
    target_modules: Annotated[tuple[str, ...], OneOrMore] = ("all-linear",)
    """Which linear modules of the decoder layers get adapters: all-linear, or ends of their names, such as [q_proj, v_proj]."""

    @property
    def lora_scale(self) -> float:
        """Of B @ A, where there are adapters."""
        return self.lora_alpha / self.lora_rank


class SftConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised optimizer steps before RL; 0 skips the warm-up. A model.path that is set over them
    makes them 0."""
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


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate; 0 trains nothing, to measure."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up; the first one has lr / lr_warmup_steps."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; its horizon is the true number of optimizer steps of the run."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of lr at the end of linear and cosine."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay, on matrices alone."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0 does not clip."""


KlType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "k3+", "low_var_kl+"
]


class PolicyLossConfig(Section):
    loss_mode: LossMode = "vanilla"
    """Policy loss; docs/algorithms.md has their formulas."""
    tau_pos: float = Field(1.0, gt=0)
    """sapo: temperature of its gate for advantages over 0."""
    tau_neg: float = Field(1.05, gt=0)
    """sapo: temperature of its gate for other advantages."""
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """clip_cov: share of the mini-batch's tokens that are detached."""
    clip_cov_lb: float = 1.0
    """clip_cov: least covariance of a token that may be detached."""
    clip_cov_ub: float = 5.0
    """clip_cov: largest covariance of a token that may be detached."""
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """kl_cov: share of the mini-batch's tokens, those of largest covariance, that get a KL penalty."""
    ppo_kl_coef: float = Field(0.1, ge=0)
    """kl_cov: weight of that penalty."""
    dppo_clip_c: float = Field(20.0, gt=1)
    """dppo_tv, dppo_kl: bound on the ratio as a weight."""
    dro_beta: float = Field(0.05, gt=0)
    """dro: weight of the squared log-ratio, on the scale of the advantages."""


class ActorConfig(Section):
    ppo_mini_batch_size: int = Field(32, ge=1)
    """Samples in one optimizer step, global over all devices."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over each batch that the trainer takes."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """Tokens packed into one micro-batch on one device."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Which loss, and what belongs to it alone."""
    clip_ratio_low: float = Field(0.2, gt=0, le=1)
    """PPO clip below 1; gspo, cispo and geo_mean clip their own ratios by it, dppo_* differences of probabilities or KL."""
    clip_ratio_high: float = Field(0.2, gt=0)
    """PPO clip above 1; larger than clip_ratio_low is DAPO's clip-higher."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip: bound on the ratio for negative advantages."""
    loss_agg_mode: AggMode | None = None
    """How token losses become one number, always over the global mini-batch and what rejection leaves of it; null is
    seq-mean-token-mean for gspo, sapo and geo_mean, and token-mean for the others."""
    loss_scale_factor: float = Field(0.0, ge=0)
    """Divisor of seq-mean-token-sum-norm; 0 takes rollout.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy, the weights that RL started from, to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Weight of that KL."""
    kl_loss_type: KlType = "low_var_kl"
    """Its estimator; a + takes the value of the one and the gradient of k2, which is that of the KL."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""


class CriticConfig(Section):
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """The critic's optimizer; its schedule has the actor's horizon."""
    cliprange_value: float = Field(0.5, gt=0)
    """Values may move this far from those of the batch's arrival before the value loss stops to reward it."""


class KlCtrlConfig(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive steers the coefficient to target_kl."""
    kl_coef: float = Field(0.001, ge=0)
    """Coefficient, or where an adaptive one starts."""
    target_kl: float = Field(0.1, gt=0)
    """KL per token that the adaptive coefficient aims at."""
    horizon: int = Field(10000, ge=1)
    """Trajectories over which the adaptive coefficient may change by a fifth."""


class FilterGroupsConfig(Section):
    enable: bool = False
    """Dynamic sampling (DAPO): a sample whose trajectories all have the same outcome is dropped, counted as `equal_outcomes`,
    and another prompt takes its slot at once."""
    metric: str = "score"
    """What is compared: score (of the reward function, before any shaping), reward (what is trained on), or the name of a
    component that the reward function returns, such as acc."""
    max_num_gen_batches: int = Field(20, ge=0)
    """The run fails if more than this many windows of samples are dropped for one version; 0 sets no limit."""


class CorrectionConfig(Section):
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights of the policy that the loss is taken against over the one that drew the tokens: of each token, or of
    whole responses. Without use_rollout_log_probs that is the trainer's own policy over the rollout's; with it, and a loss
    without a ratio (gpg, reinforce), the current one's over the rollout's."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates weights to it (TIS); "lo_hi" sets those outside to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide weights, after truncation, by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection, a comma list of token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3, seq_max_k2|k3: all must accept."""
    rollout_rs_threshold: float | str | tuple[float | str, ...] | None = None
    """Bounds, one for each of rollout_rs or one for all: "lo_hi" on the ratio for k1 (u alone means 1/u to u), an upper bound
    on the divergence for k2 and k3."""
    rollout_token_veto_threshold: float | None = Field(None, gt=0)
    """Reject whole responses in which one token's ratio is under this."""
    max_token_age: int | None = Field(None, ge=0)
    """Reject tokens drawn more than this many versions before the live one."""
    reject_before_baseline: bool = False
    """Responses that are rejected whole are in no group's baseline either."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """The policy that PPO's ratio is taken against without use_rollout_log_probs: the trainer's at the batch's arrival, which
    takes a forward pass, or interpolated between rollout and current log-probs by each token's version, which takes none."""

    @property
    def active(self) -> bool:
        return bool(
            self.rollout_is
            or self.rollout_rs
            or self.rollout_token_veto_threshold
            or self.max_token_age is not None
        )


Estimator = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "remax",
    "gae",
    "gdpo",
    "optimal_token_baseline",
]


class AlgorithmConfig(Section):
    adv_estimator: Estimator = "grpo"
    """Advantage estimator; docs/algorithms.md has their formulas. gae trains a critic."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (grpo, grpo_passk, gdpo); off is Dr.GRPO."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards (gae, reinforce_plus_plus)."""
    lam: float = Field(1.0, ge=0, le=1)
    """gae's lambda."""
    bootstrap_truncated: bool = False
    """gae: a response that the length limit cut ends in the critic's value, not in its score (T-PPO's EGAE)."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """gdpo: components of the reward, by the names that the reward function returns; empty takes all of them."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """gdpo: their weights; empty is 1 for each."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl's coefficient times the KL to the reference policy from the reward of each token."""
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"
    """Estimator of that KL."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    """Its coefficient."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling."""
    overlong_filtering: bool = False
    """Responses cut by the length limit count in baselines, but none of their tokens is trained."""
    rollout_correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""


class AsyncConfig(Section):
    require_batches: int = Field(1, ge=1)
    """Mini-batches in one local step: what the trainer takes at once. Each is an optimizer step (times ppo_epochs)."""
    trigger_parameter_sync_step: int = Field(1, ge=1)
    """Local steps between two weight syncs."""
    staleness_threshold: float = Field(0.0, ge=0, le=1000)
    """Samples under way beyond one window, as a share of it: capacity = (1 + this) x window. 0 is on-policy by window."""
    partial_rollout: bool = False
    """true means on_sync: interrupt."""
    on_sync: OnSync = OnSync.DRAIN
    """What happens to running trajectories at a sync: drain, interrupt or swap."""
    placement: Placement = Placement.SEPARATE
    """Whether both sides have devices of their own (separate) or take turns on the same ones (colocated)."""
    overlap_sync: bool = False
    """Go on training while a version is on its way to the rollouts: each trainer rank keeps a copy of its share of the weights until they
    are sent. Needs devices of the trainer's own and a staleness_threshold over 0. Versions that are checkpointed are awaited."""
    lookahead: int = Field(0, ge=0)
    """How far past the oldest sample the trainer may look for a ready one. 1 is strict order of admission; 0 is one window
    where there is staleness, and 1 elsewhere and in deterministic runs."""
    use_rollout_log_probs: bool = True
    """true (bypass): the old log-probs of PPO are those of the rollout; false (decoupled): the trainer's own, by
    algorithm.rollout_correction.proximal. algorithm.rollout_correction.bypass_mode says the same."""


class GuardConfig(Section):
    enable: bool = True
    """Watch the metrics of each version; an alarm says what is wrong, why and what to change, and is `alarm/<name>` in them."""
    max_zero_variance_share: float = Field(0.95, ge=0)
    """zero_variance: a larger train/zero_advantage_share. Groups that were dropped before training are not in it."""
    max_clip_ratio: float = Field(0.5, ge=0)
    """truncation: a larger response_length/clip_ratio."""
    min_entropy_share: float = Field(0.02, ge=0)
    """entropy_collapse: actor/entropy below this share of its mean in the first rows ..."""
    min_entropy: float = Field(1e-3, ge=0)
    """... or below this, in nats per token."""
    entropy_rows: int = Field(5, ge=1)
    """Rows that make that mean; until there are as many, min_entropy alone counts."""
    min_ess: float = Field(0.2, ge=0)
    """low_ess: a smaller rollout_corr/rollout_is_eff_sample_size."""
    max_grad_spike: float = Field(10.0, gt=0)
    """gradient_spike: actor/grad_norm over this many times its running median."""
    grad_rows: int = Field(20, ge=1)
    """Rows before this one that the median is of."""
    min_grad_rows: int = Field(5, ge=1)
    """Rows that it needs."""
    max_log_prob_gap: float = Field(0.01, ge=0)
    """log_prob_gap: a larger actor/log_prob_gap_same_version, the mean |trainer's - rollout's log-prob| of tokens that the live
    version drew, in the first optimizer step: the same weights, so engines alone differ."""
    equal_reward_versions: int = Field(3, ge=1)
    """equal_rewards: reward/std of 0 in this many versions in a row."""


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
    critic: CriticConfig = CriticConfig()
    """The value model of adv_estimator=gae: the policy's architecture and start weights with a scalar head."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, KL and off-policy correction."""
    async_training: AsyncConfig = AsyncConfig()
    """The Schedule."""
    sync: SyncConfig = SyncConfig()
    """Weight sync."""
    guard: GuardConfig = GuardConfig()
    """The guard on learning: limits, far outside of what a run that learns shows."""
    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the recipe was read."""
        return self._notes

    def with_notes(self, *notes: str) -> Config:
        copy = self.model_copy()
        copy._notes = (*self._notes, *notes)
        return copy

    @model_validator(mode="after")
    def _cross_check(self) -> Config:
        from millrace.config_checks import check

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
            overlap_sync=a.overlap_sync,
        )
        free = a.staleness_threshold > 0 and not self.trainer.deterministic
        return replace(strict, lookahead=a.lookahead or (strict.window if free else 1))

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the start weights takes part."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.adv_estimator == "gae"

    @property
    def test_freq(self) -> int:
        return self.trainer.test_freq or self.rollout.test_freq

    @property
    def trainer_ranks(self) -> int:
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def shard_size(self) -> int:
        """Trainer ranks that share one copy of the model; those of the first copy send weights."""
        return self.trainer.fsdp_size or self.trainer_ranks

    @property
    def rollout_devices(self) -> int:
        return self.rollout.nnodes * self.rollout.n_gpus_per_node

    @property
    def replicas(self) -> int:
        """Rollout engines."""
        return self.rollout_devices // self.rollout.tensor_model_parallel_size

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


MODES: dict[str, dict[str, Any]] = {
    "colocate_sync": {
        "placement": "colocated",
        "staleness_threshold": 0.0,
        "on_sync": "drain",
        "overlap_sync": False,
    },
    "on_policy_pipeline": {
        "placement": "separate",
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": 0.0,
        "on_sync": "drain",
        "overlap_sync": False,
    },
    "one_step_off": {
        "placement": "separate",
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": 1.0,
        "on_sync": "drain",
        "lookahead": 1,
    },
    "stream_off_policy": {
        "placement": "separate",
        "staleness_threshold": 0.0,
        "on_sync": "drain",
        "overlap_sync": False,
    },
    "async_staleness": {"placement": "separate", "on_sync": "drain"},
    "async_partial": {"placement": "separate", "on_sync": "interrupt"},
    "async_swap": {"placement": "separate", "on_sync": "swap"},
    "colocate_partial": {"placement": "colocated", "on_sync": "interrupt", "overlap_sync": False},
}
"""What each mode fixes; recipe.py fills in the rest (a trigger over 1 for stream_off_policy, a staleness over 0 for async)."""
