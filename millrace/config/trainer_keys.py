"""The keys of the training side, of the weight sync and of the guard."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.config.section import Section
from millrace.errors import ConfigError, bad_value


class TrainerConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Nodes of the training side."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Devices (GPUs; processes on a CPU) of the training side on each of its nodes: the ranks of
    the train engine."""
    fsdp_size: int = Field(0, ge=0)
    """Ranks that share one copy of the model, its gradients and its moments, each holding a part; 0
    is all ranks. Fewer make several copies, each on consecutive ranks (HSDP): between copies
    gradients alone are exchanged, once for each mini-batch."""
    gpus_in_node: int = Field(0, ge=0)
    """Devices that one node has. Where both sides' devices fit one node, they share nodes;
    elsewhere each side has its own. 0 means 8, but a Ray cluster is asked: sides share as many
    nodes as its nodes' sizes allow."""
    runtime: Literal["local", "ray"] = "local"
    """Where engines live: processes on this machine, or Ray actors in a placement group."""
    ray_address: str = ""
    """HOST:PORT of a running Ray cluster, or auto to find it; empty starts one on this machine.
    `--address` sets both keys."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs if there are any."""
    threads: int = Field(0, ge=0)
    """Torch threads of each engine process; 0 shares a node's cores among its devices (sides that
    share devices take turns)."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the model, the order of the data and every random stream of sampling."""
    deterministic: bool = False
    """Same seed, same bits, whatever the timing: fixed shapes, one thread. Needs on_sync=drain;
    slower."""
    total_epochs: int = Field(0, ge=0)
    """At most so many samples are trained as that many passes over the training data have; for a
    sample that is dropped a later one is trained. 0 sets no limit (rollout.total_rollout_steps
    does)."""
    save_freq: int = Field(0, ge=0)
    """Versions between two checkpoints; 0 saves at the end alone. A run that is told to stop always
    saves."""
    async_save: bool = True
    """Write checkpoints while the next versions train: the trainer stands still for a copy to host
    memory, which takes as much of it as the state has until it is written: for each copy of the
    model 12 bytes a parameter, as many of a critic's, 4 of the reference's. From GPUs it takes up
    to twice that, which is kept for the next one: pinned memory comes in powers of two. false
    stands still for the writing and needs none of it. So does the last save of a run, which nothing
    trains after."""
    save_last: bool = True
    """Save a checkpoint when the run is complete. Without it there is nothing to export: for
    benchmarks."""
    test_freq: int = Field(0, ge=0)
    """Versions between two validations; 0 validates on the final weights alone. rollout.test_freq
    says the same."""
    val_before_train: bool = True
    """Validate the start weights too: the "before" of every comparison."""
    max_ckpt_to_keep: int = Field(2, ge=1)
    """Checkpoints kept; the oldest goes first."""
    resume: str = "never"
    """never, auto (the newest whole checkpoint of run_dir, if there is one), or the folder of a
    checkpoint."""
    run_dir: str = ""
    """Folder of the run; empty makes runs/<recipe>-<number>."""
    logger: tuple[Literal["tensorboard"], ...] = ("tensorboard",)
    """Sinks beside metrics.jsonl, which is always written."""
    critic_warmup: int = Field(0, ge=0)
    """First optimizer steps in which the critic alone is trained."""
    offload: bool = True
    """Colocated, on GPUs: weights and optimizer state wait in host memory while rollouts run. false
    leaves them on the GPU: no time is lost, and rollout.gpu_memory_utilization must leave room for
    them."""
    offload_policy: bool = False
    """On GPUs: weights, gradients and optimizer state live in host memory, 16 to 24 bytes a
    parameter (pinned blocks come in powers of two); a layer's weights come to the GPU for its
    passes, and AdamW steps on the CPU. Slower: for models that do not fit otherwise."""
    wait_deadline_s: float = Field(1800.0, gt=0)
    """Seconds any wait may take before the run fails and names who waited for what."""
    stop_grace_s: float = Field(8.0, ge=0)
    """Seconds that a run which is told to stop may spend on finishing its window before it syncs
    early and saves."""

    @property
    def ranks(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    @property
    def shard_size(self) -> int:
        """The ranks that share one copy of the model. The ranks of the first copy send weights."""
        return self.fsdp_size or self.ranks

    def check(self) -> None:
        self._check_address()
        if self.ranks % self.shard_size:
            raise bad_value(
                "trainer.fsdp_size",
                self.fsdp_size,
                "each copy of the model takes as many ranks, and trainer.nnodes x n_gpus_per_node = "
                f"{self.ranks} are not a multiple",
                f"a divisor of {self.ranks}, or trainer.fsdp_size=0 for one copy",
            )
        if self.gpus_in_node and self.n_gpus_per_node > self.gpus_in_node:
            raise too_many_devices("trainer", self.n_gpus_per_node, self.gpus_in_node)

    def _check_address(self) -> None:
        if "://" in self.ray_address:
            raise bad_value(
                "trainer.ray_address",
                self.ray_address,
                "the driver is a part of the cluster: neither Ray Client nor the job server can carry it",
                "trainer.ray_address=auto on a node of the cluster, or its HOST:PORT of "
                "`ray start --head`",
            )
        if self.ray_address and self.runtime != "ray":
            raise bad_value(
                "trainer.ray_address",
                self.ray_address,
                "the local runtime joins no cluster",
                "trainer.runtime=ray, or trainer.ray_address=''",
            )


def too_many_devices(side: str, devices: int, limit: int) -> ConfigError:
    """Return the error for a side that wants more devices of a node than a node has."""
    key = f"{side}.n_gpus_per_node"
    rule = f"a node has trainer.gpus_in_node = {limit} devices"
    return bad_value(key, devices, rule, f"{key}={limit} or less")


class SyncConfig(Section):
    bucket_mb: int = Field(64, ge=1)
    """MiB of weights packed into one message."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds one transfer may take."""


class GuardConfig(Section):
    enable: bool = True
    """Watch the metrics of each version; an alarm says what is wrong, why and what to change, and
    is `alarm/<name>` in them."""
    max_zero_variance_share: float = Field(0.95, ge=0)
    """zero_variance: a larger train/zero_advantage_share. Groups that were dropped before training
    are not in it."""
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
    """log_prob_gap: a larger actor/log_prob_gap_same_version, the mean |trainer's - rollout's
    log-prob| of tokens that the live version drew, in the first optimizer step: the same weights,
    so engines alone differ."""
    equal_reward_versions: int = Field(3, ge=1)
    """equal_rewards: reward/std of 0 in this many versions in a row."""

    def check(self) -> None:
        if self.min_grad_rows > self.grad_rows:
            raise bad_value(
                "guard.min_grad_rows",
                self.min_grad_rows,
                f"the median is of guard.grad_rows = {self.grad_rows} rows at most",
                f"guard.min_grad_rows={self.grad_rows} or less",
            )
