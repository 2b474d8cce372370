"""The keys of the training side, of the weight sync, of the guard, and of what a run leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from millrace.config.plugins import Named
from millrace.config.section import (
    STREAM,
    Choices,
    Fixed,
    Home,
    NoEffectOnWeights,
    OneOrMore,
    ReadWith,
    Rule,
    Section,
    Switch,
)
from millrace.errors import bad_value

Size = Annotated[int, Field(ge=1)]
_MEGATRON = ReadWith({"trainer.engine": ("megatron",)})
_FULL = ReadWith(
    {".recompute_granularity": ("full",)},
    {".recompute_granularity": (None,), "model.gradient_checkpointing": (True,)},
)


class MegatronConfig(Section):
    tensor_model_parallel_size: Annotated[Size, _MEGATRON] = 1
    """Ranks that share every matrix of a layer."""
    pipeline_model_parallel_size: Annotated[Size, _MEGATRON] = 1
    """Stages, each with an equal number of consecutive layers."""
    context_parallel_size: Annotated[Size, _MEGATRON] = 1
    """Ranks that share the tokens of a micro-batch. They exchange heads for tokens in attention."""
    expert_model_parallel_size: Annotated[Size, _MEGATRON] = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: Annotated[int, _MEGATRON] = Field(0, ge=0)
    """Ranks that share every matrix of an expert. 0 means tensor_model_parallel_size."""
    sequence_parallel: Annotated[bool, _MEGATRON] = False
    """Divide the tokens outside of attention and MLP among the ranks of tensor parallelism.

    It needs less memory for activations, and no more time.
    """
    use_distributed_optimizer: Annotated[bool, _MEGATRON] = True
    """Divide the optimizer state among the ranks of data parallelism."""
    overlap_grad_reduce: Annotated[bool, _MEGATRON] = False
    """Sum the gradients of a layer while the backward pass computes those of the next one."""
    overlap_param_gather: Annotated[bool, _MEGATRON] = False
    """Gather the weights of a layer while the forward pass computes the layer before.

    Needs use_distributed_optimizer and overlap_grad_reduce.
    """
    recompute_granularity: Annotated[Literal["full", "selective"] | None, _MEGATRON] = None
    """The activations that the backward pass recomputes: whole layers, or recompute_modules.

    null follows model.gradient_checkpointing, which means full.
    """
    recompute_method: Annotated[Literal["uniform", "block"], _FULL] = "uniform"
    """With full: uniform recomputes every layer, in groups of recompute_num_layers.

    block recomputes the first recompute_num_layers layers of each stage.
    """
    recompute_num_layers: Annotated[Size, _FULL] = 1
    """The layers of one group, or of one stage."""
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "mlp", "moe"], ...],
        OneOrMore,
        ReadWith({".recompute_granularity": ("selective",)}),
    ] = ("core_attn",)
    """With selective: the parts of a layer that are recomputed: attention, or the MLP or experts.

    Megatron recomputes norms only with TransformerEngine.
    """

    @property
    def expert_tensor(self) -> int:
        """The size of expert tensor parallelism, after the default is resolved."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def rules(self, here: str) -> Iterator[Rule]:
        tensor, key = self.tensor_model_parallel_size, f"{here}tensor_model_parallel_size"
        yield (
            self.sequence_parallel and tensor == 1,
            "sequence_parallel",
            "the ranks of tensor parallelism divide the tokens, and there is one",
            f"{key}=2, or {here}sequence_parallel=false",
        )
        gathers = self.use_distributed_optimizer and self.overlap_grad_reduce
        yield (
            self.overlap_param_gather and not gathers,
            "overlap_param_gather",
            "only a distributed optimizer gathers weights, and Megatron overlaps this only "
            "together with the gradients",
            f"{here}use_distributed_optimizer=true {here}overlap_grad_reduce=true",
        )
        if self.expert_model_parallel_size == 1 and self.expert_tensor < tensor:
            # Megatron then takes experts for dense weights, and trains them wrongly.
            rule = f"without expert parallelism it must be {key} = {tensor}"
            fix = f"{here}expert_tensor_parallel_size={tensor}, or "
            fix += f"{here}expert_model_parallel_size={tensor}"
            raise bad_value(f"{here}expert_tensor_parallel_size", self.expert_tensor, rule, fix)


LOGGERS = Named("trackers", ("console", "tensorboard"))
"""The names in trainer.logger: trackers, and sinks in the run's folder."""


def _resume_of(value: Any) -> Any:
    """Return the word that `trainer.resume=true` or `=no` means."""
    return ("auto" if value else "never") if isinstance(value, bool) else value


class TrainerConfig(Section):
    nnodes: Annotated[int, NoEffectOnWeights()] = Field(1, ge=1)
    """Nodes of the training side."""
    n_gpus_per_node: Annotated[int, NoEffectOnWeights()] = Field(1, ge=1)
    """Devices of the training side on each of its nodes: GPUs, or processes on a CPU.

    Each is one rank of the train engine.
    """
    engine: Annotated[str, Named("train_engines"), Switch()] = "fsdp"
    """Train engine. megatron needs the extra millrace[megatron]; docs/megatron.md compares them."""
    megatron: MegatronConfig = MegatronConfig()
    """How trainer.engine=megatron divides a model among its ranks."""
    fsdp_size: int = Field(0, ge=0)
    """Ranks that share one copy of the model, its gradients and its optimizer state.

    0 means all ranks. A smaller number makes several copies, each on consecutive ranks (HSDP).
    Copies exchange only gradients, once for each mini-batch.
    """
    gpus_in_node: Annotated[int, NoEffectOnWeights()] = Field(0, ge=0)
    """Devices that one node has.

    If the devices of both sides fit on one node, the sides share nodes. Otherwise each side has its
    own nodes. 0 means 8, or the sizes that a Ray cluster reports: the sides then share as many
    nodes as those sizes allow.
    """
    runtime: Annotated[Literal["local", "ray"], NoEffectOnWeights()] = "local"
    """Where engines run.

    local starts processes on this machine. ray starts Ray actors in a placement group.
    """
    ray_address: Annotated[str, NoEffectOnWeights()] = ""
    """HOST:PORT of a running Ray cluster, or auto to find it.

    Empty starts a cluster on this machine. `--address` sets this key and runtime=ray.
    """
    device: Annotated[Literal["auto", "cpu", "cuda"], NoEffectOnWeights()] = "auto"
    """Device type of the engines. auto uses GPUs if there are any."""
    threads: Annotated[int, NoEffectOnWeights()] = Field(0, ge=0)
    """Torch threads of each engine process.

    0 divides the cores of a node by its devices. Sides that share devices take turns, so both get
    the same cores.
    """
    seed: Annotated[int, Fixed(STREAM)] = Field(0, ge=0, lt=2**63)
    """Seed of the model, of the order of the data and of every random stream of sampling."""
    deterministic: bool = False
    """The same seed gives the same bits, whatever the timing.

    It uses fixed shapes and one thread, and is slower. Needs on_sync=drain.
    """
    total_epochs: int = Field(0, ge=0)
    """Passes over the training data.

    The run trains at most total_epochs x rows samples. A later sample replaces a dropped one. 0
    sets no limit.
    """
    total_training_steps: int = Field(0, ge=0)
    """Policy versions after which the run ends, over all its attempts.

    A resume with another window ends at the same version. 0 sets no limit. The smallest of this
    limit, total_epochs and rollout.total_rollout_steps ends the run.
    """
    save_freq: Annotated[int, NoEffectOnWeights()] = Field(0, ge=0)
    """Versions between two checkpoints.

    0 saves only at the end. A run that is stopped always saves.
    """
    async_save: Annotated[bool, NoEffectOnWeights()] = True
    """Write checkpoints while the next versions train.

    The trainer waits only for a copy to host memory. The copy is kept until it is written. For each
    copy of the model, this takes 12 bytes for each parameter of the policy, 12 of the critic and 4
    of the reference. With GPUs it can take twice as much, because pinned memory has sizes of powers
    of two. The next checkpoint reuses this memory. With false, and at the last save of a run, the
    trainer waits for the writing and needs no copy.
    """
    save_last: Annotated[bool, NoEffectOnWeights()] = True
    """Save a checkpoint when the run is complete.

    false is for benchmarks: such a run leaves nothing to export.
    """
    test_freq: Annotated[int, NoEffectOnWeights()] = Field(0, ge=0)
    """Versions between two validations.

    0 validates only the final weights. rollout.test_freq is another name of this key.
    """
    val_before_train: Annotated[bool, NoEffectOnWeights()] = True
    """Validate the start weights too, for the "before" of each comparison."""
    val_only: bool = False
    """Validate and train nothing, as `millrace eval` does."""
    journal: Annotated[bool, NoEffectOnWeights()] = True
    """Keep every finished sample, and the progress of running ones, on disk between checkpoints.

    A resume uses them again instead of drawing them again. It needs trainer.save_freq, and the disk
    space of the samples between the oldest kept checkpoint and now: 8 bytes for each token.
    """
    max_ckpt_to_keep: Annotated[int, NoEffectOnWeights()] = Field(2, ge=1)
    """Number of checkpoints to keep. The oldest one is deleted first."""
    mirror: Annotated[str, NoEffectOnWeights()] = ""
    """Address where a copy of each checkpoint goes, such as s3://bucket/runs/mine.

    Any address of fsspec works; S3 needs millrace[s3]. Keys come from the environment alone. With
    resume=auto, a run without its own checkpoints fetches the newest one from there.
    """
    resume: Annotated[str, BeforeValidator(_resume_of), Home, NoEffectOnWeights()] = "never"
    """Which checkpoint the run resumes from: never, auto, or the folder of a checkpoint.

    auto takes the newest whole checkpoint of run_dir, if there is one. true means auto, and false
    means never.
    """
    run_dir: Annotated[str, Home, NoEffectOnWeights()] = ""
    """Folder of the run. Empty makes a new folder runs/<recipe>-<number>."""
    logger: Annotated[tuple[Annotated[str, LOGGERS], ...], NoEffectOnWeights()] = ("tensorboard",)
    """Further sinks of the metrics. metrics.jsonl is always written.

    console prints a line for each version if the output is no terminal. Without it, there is a line
    at most every 5 seconds. Keys of trackers come from the environment alone.
    """
    project_name: Annotated[str, NoEffectOnWeights()] = Field("millrace", min_length=1)
    """Project of the run in wandb and Trackio, and its experiment in MLflow. `name` names the run
    there."""
    prometheus_port: Annotated[int, NoEffectOnWeights()] = Field(0, ge=0, le=65535)
    """Port on loopback where trainer.logger=[prometheus] serves the newest figures.

    0 takes a free port. The run prints the address.
    """
    critic_warmup: int = Field(0, ge=0)
    """The first training step that trains the policy too. Before it, only the critic is trained.

    Training steps count from 1, as in verl: 0 and 1 train both from the start. A training step is
    one window in the modes colocate_sync and one_step_off, and one local step in all other modes.
    """
    offload: Annotated[bool, NoEffectOnWeights()] = True
    """Colocated, on GPUs: move weights and optimizer state to host memory while rollouts run.

    false keeps them on the GPU and saves the time of the moves. rollout.gpu_memory_utilization must
    then leave room for them.
    """
    offload_policy: Annotated[bool, NoEffectOnWeights()] = False
    """On GPUs: keep weights, gradients and optimizer state in host memory.

    This takes 16 to 24 bytes for each parameter, because pinned blocks have sizes of powers of two.
    A layer's weights come to the GPU for its passes, and AdamW runs on the CPU. It is slower: use
    it for models that do not fit otherwise.
    """
    wait_deadline_s: Annotated[float, NoEffectOnWeights()] = Field(1800.0, gt=0)
    """Seconds that any wait may take.

    After that, the run fails. The error names the waiting task and the event that it waits for.
    """
    max_restarts: Annotated[int, NoEffectOnWeights()] = Field(3, ge=0)
    """Restarts of a lost trainer until the next checkpoint. 0 ends the run at the first loss.

    All ranks start anew from the newest checkpoint, and train the steps since then again. These
    steps come from the journal.
    """
    max_skipped_steps: Annotated[int, NoEffectOnWeights()] = Field(3, ge=1)
    """Optimizer steps in a row without a finite loss and gradient, after which the run ends.

    Such a step changes no weight. The last batch is then in RUN/nonfinite-VERSION.json.
    """
    stall_s: Annotated[float, NoEffectOnWeights()] = Field(300.0, ge=0)
    """Seconds without any progress after which the run says who holds it up.

    The report goes to the progress and to RUN/stall-TIME.txt. Tokens, micro-batches, buckets of a
    sync, scores and moves of samples count as progress, so a slow run raises no alarm. 0 switches
    it off. `millrace why RUN` asks at any moment.
    """
    on_stall: Annotated[Literal["report", "stop"], NoEffectOnWeights()] = "report"
    """What follows that report: nothing, or the end of the run with exit code 1.

    With report, trainer.wait_deadline_s still bounds every wait.
    """
    stop_grace_s: Annotated[float, NoEffectOnWeights()] = Field(8.0, ge=0)
    """Seconds that a stopped run may spend to finish its window.

    After that, it syncs early and saves.
    """

    @property
    def ranks(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    @property
    def shard_size(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.fsdp_size or self.ranks

    def rules(self, here: str) -> Iterator[Rule]:
        key, ray = "ray_address", self.ray_address
        yield (
            "://" in ray,
            key,
            "the driver must run inside the cluster, so Ray Client does not work",
            "trainer.ray_address=auto on a node of the cluster, or its HOST:PORT of "
            "`ray start --head`",
        )
        yield (
            not re.fullmatch(r"(auto|[^\s-]\S*:[0-9]{1,5})?", ray),
            key,
            "must be HOST:PORT or auto",
            "the HOST:PORT that `ray start --head` printed",
        )
        yield (
            self.prometheus_port and "prometheus" not in self.logger,
            "prometheus_port",
            f"trainer.logger=[{','.join(self.logger)}] does not read it",
            "a trainer.logger with prometheus, or trainer.prometheus_port=0",
        )
        rule, fix = "trainer.runtime=local uses no Ray cluster", "trainer.runtime=ray, or "
        yield ray and self.runtime != "ray", key, rule, f"{fix}trainer.ray_address=''"
        ranks = self.ranks
        yield (
            ranks % self.shard_size,
            "fsdp_size",
            f"must divide the number of ranks, trainer.nnodes x n_gpus_per_node = {ranks}",
            f"a divisor of {ranks}, or trainer.fsdp_size=0 for one copy",
        )
        yield too_many_devices(here, self.n_gpus_per_node, self.gpus_in_node)
        if self.mirror and not re.fullmatch(r"[a-z][a-z0-9+]*://[^\s@]+", self.mirror):
            rule = "must be an address with a protocol, and without a user and a password"
            fix = "an address such as s3://bucket/runs/mine, with its keys in the environment, or "
            shown = re.sub(r"//[^/]*@", "//...@", self.mirror)
            raise bad_value("trainer.mirror", shown, rule, f"{fix}file:///FOLDER")


def too_many_devices(side: str, devices: int, limit: int) -> Rule:
    """Return the rule that a side wants no more devices of a node than a node has, if that is known."""
    rule = f"a node has trainer.gpus_in_node = {limit} devices"
    fix = f"{side}n_gpus_per_node={limit} or less"
    return limit and devices > limit, "n_gpus_per_node", rule, fix


class SyncConfig(Section):
    bucket_mb: int = Field(64, ge=1)
    """MiB of weights that are packed into one message."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds that one transfer may take."""
    backend: Literal["auto", "gloo"] = "auto"
    """The transport of the weights. auto is NCCL between GPUs and gloo between CPUs.

    gloo between GPUs goes through host memory. It is slower, and works where NCCL does not: without
    a network that NCCL can use, and with several workers on one GPU.
    """


class GuardConfig(Section):
    enable: bool = True
    """Check the metrics of each version.

    An alarm names the problem, its cause and a fix, and is written to the metrics as
    `alarm/<name>`.
    """
    max_zero_variance_share: float = Field(0.95, ge=0)
    """Alarm zero_variance: train/zero_advantage_share is larger than this.

    Groups that were dropped before training do not count.
    """
    max_clip_ratio: float = Field(0.5, ge=0)
    """Alarm truncation: response_length/clip_ratio is larger than this."""
    min_entropy_share: float = Field(0.02, ge=0)
    """Alarm entropy_collapse: actor/entropy is below this share of its mean in the first rows."""
    min_entropy: float = Field(1e-3, ge=0)
    """Alarm entropy_collapse: actor/entropy is below this, in nats per token."""
    entropy_rows: int = Field(5, ge=1)
    """Rows in the mean of min_entropy_share. In earlier rows, only min_entropy applies."""
    min_ess: float = Field(0.2, ge=0)
    """Alarm low_ess: rollout_corr/rollout_is_eff_sample_size is smaller than this."""
    max_grad_spike: float = Field(10.0, gt=0)
    """Alarm gradient_spike: actor/grad_norm is more than this many times its running median."""
    grad_rows: int = Field(20, ge=1)
    """Earlier rows that the median is taken over."""
    min_grad_rows: int = Field(5, ge=1)
    """Rows that the median needs before the alarm applies."""
    on_gap: Literal["stop", "warn"] = "stop"
    """What follows if rollout engines and trainer disagree on the same weights.

    A run draws with every engine and compares before its first step. It compares again at every
    version. stop ends the run with an error, after a checkpoint if it has trained. warn prints it.
    """
    max_log_prob_gap: float | None = Field(None, gt=0)
    """The limit of actor/log_prob_gap_same_version.

    Unset, it is three times the gap that the dtype explains: that of the trainer to an independent
    model in a wider dtype, measured at the start.
    """
    max_quantization_gap: Annotated[float, ReadWith({"rollout.quantization": ("fp8",)})] = Field(
        0.1, gt=0
    )
    """The largest gap, in nats, that 8 bits alone may make at the start. on_gap decides.

    A loss clips tokens whose ratio to the policy that drew them is far from 1. At 0.1, that is about
    one token in eight before any training. At 0.21, SmolLM2 hardly learned. Later versions may have
    a half more.
    """
    equal_reward_versions: int = Field(3, ge=1)
    """Alarm equal_rewards: reward/std is 0 in this many consecutive versions."""

    def rules(self, here: str) -> Iterator[Rule]:
        yield (
            self.min_grad_rows > self.grad_rows,
            "min_grad_rows",
            f"the median has at most guard.grad_rows = {self.grad_rows} rows",
            f"guard.min_grad_rows={self.grad_rows} or less",
        )


class ObserveConfig(Section):
    metrics: Annotated[str, Choices(("",))] = ""
    """More metrics of each version: path.py:name of a function of your own.

    It gets the samples that trained the version. docs/own_algorithm.md explains it.
    """


class ReportConfig(Section):
    enable: bool = True
    """Write RUN/report.html at the end of the run."""
    trace: bool = True
    """Write RUN/trace/ as the run goes. Perfetto opens these files."""
    trace_mb: int = Field(512, ge=1)
    """MiB of the traces of all attempts. Beyond it, the trace ends."""
    trace_load: float = Field(0.005, gt=0, le=1)
    """Share of a core that the trace's thread may take: 0.01 is 1 %. Beyond it, the trace has one
    sample in 2, 4, ... 64. The states of devices stay exact. 1 has all samples."""
    samples: float = Field(1.0, ge=0, le=1)
    """Share of the samples whose texts are kept in RUN/samples/. 0 keeps none."""
    samples_mb: int = Field(512, ge=1)
    """MiB of RUN/samples/. Beyond it, no more samples are kept."""
    price: float = Field(0.0, ge=0)
    """Money that one device costs per hour. 0 prints no money."""
