"""The whole configuration: its sections, and the numbers that follow from them.

Each section has a file of its own. Every key has a default there, and a docstring that explains it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from millrace.config.agent_keys import AgentConfig
from millrace.config.algorithm_keys import ActorConfig, AlgorithmConfig, CriticConfig
from millrace.config.data_keys import DataConfig, RewardConfig
from millrace.config.model_keys import ModelConfig, SftConfig
from millrace.config.rollout_keys import RolloutConfig
from millrace.config.section import NoEffectOnWeights, Rule, Section
from millrace.config.teacher_keys import DistillationConfig, TeacherConfig
from millrace.config.trainer_keys import (
    GuardConfig,
    ObserveConfig,
    ReportConfig,
    SyncConfig,
    TrainerConfig,
)
from millrace.errors import bad_value
from millrace.schedule.modes import ModeName, name_of, overridden, update_steps
from millrace.schedule.schedule import OnSync, Placement, Schedule


@dataclass(frozen=True, slots=True)
class Sides:
    """The training side and the rollout side.

    `colocated` says that they take turns on the same devices.
    """

    trainer: TrainerConfig
    rollout: RolloutConfig
    colocated: bool

    @property
    def share_nodes(self) -> bool:
        """Whether the devices of both sides fit together on one node."""
        both = self.trainer.n_gpus_per_node + self.rollout.n_gpus_per_node
        return self.colocated or both <= (self.trainer.gpus_in_node or 8)

    @property
    def devices(self) -> int:
        """Number of devices of both sides together."""
        both = (self.trainer.ranks, self.rollout.devices)
        return max(both) if self.colocated else sum(both)

    @property
    def nodes_needed(self) -> int:
        """The nodes of the larger side if the sides share nodes, else the sum of both."""
        nnodes = (self.trainer.nnodes, self.rollout.nnodes)
        return max(nnodes) if self.share_nodes else sum(nnodes)


class AsyncConfig(Section):
    require_batches: int = Field(1, ge=1)
    """Mini-batches in one local step.

    The trainer takes them at once and makes one optimizer step for each of them in each of
    actor.ppo_epochs.
    """
    trigger_parameter_sync_step: int = Field(1, ge=1)
    """Local steps between two weight syncs."""
    staleness_threshold: float = Field(0.0, ge=0, le=1000)
    """How many samples may be in flight beyond one window, as a share of the window.

    The capacity is (1 + staleness_threshold) x window. 0 is on-policy within each window.
    """
    partial_rollout: bool = False
    """true means on_sync=interrupt."""
    on_sync: OnSync = OnSync.DRAIN
    """The fate of running trajectories at a weight sync.

    drain waits for them. interrupt stops them and continues them with the new version. swap changes
    the weights while they run.
    """
    placement: Placement = Placement.SEPARATE
    """separate gives each side its own devices.

    colocated puts both sides on the same devices, which they use in turns.
    """
    overlap_sync: bool = False
    """Train the next samples while a version is sent to the rollouts.

    Each trainer rank keeps a copy of its share of the weights until they are sent. Needs
    placement=separate and a staleness_threshold over 0. The trainer still waits for a version that
    is checkpointed.
    """
    lookahead: int = Field(0, ge=0)
    """How many samples the trainer searches for a ready one, counted from the oldest.

    1 trains in strict order of admission. 0 means one window if there is staleness, and 1 otherwise
    and in deterministic runs.
    """
    use_rollout_log_probs: bool = True
    """Which old log-probs PPO uses.

    true (bypass) takes the rollout's. false (decoupled) takes the trainer's, by
    algorithm.rollout_correction.proximal. algorithm.rollout_correction.bypass_mode is another name
    of this key.
    """

    @property
    def colocated(self) -> bool:
        return self.placement is Placement.COLOCATED

    def rules(self, here: str) -> Iterator[Rule]:
        yield (
            self.partial_rollout and self.on_sync is not OnSync.INTERRUPT,
            "on_sync",
            "partial_rollout=true means on_sync=interrupt",
            "remove one of the two keys",
        )
        yield (
            self.overlap_sync and (self.colocated or not self.staleness_threshold),
            "overlap_sync",
            "while a version is sent, the trainer needs other samples to train and devices of its "
            "own",
            "async_training.placement=separate async_training.staleness_threshold=0.5",
        )


Work = Literal["train", "sft", "eval"]
"""The work of a command: a run, the warm-up alone, or the use of a policy that is not trained."""

DEFAULT_SAMPLES = 100
"""The samples that a run trains if no key sets a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeProgress:
    """Progress of the run before this attempt, from its checkpoint."""

    version: int = 0
    samples: int = 0
    optimizer_steps: int | None = None
    """None in a checkpoint of an older millrace: as many as the Schedule takes for the samples."""


NO_PROGRESS = ResumeProgress()


class Config(Section):
    """The configuration of a run. `millrace train --help-config` prints every key."""

    name: str = Field("run", pattern=r"^\w[\w.-]*$")
    """Name of the recipe. The run's folder starts with it."""
    mode: ModeName | None = None
    """A named set of values for async_training.

    The README has a table of modes. A key in the same recipe or in a later layer overrides the
    mode.
    """
    trainer: TrainerConfig = TrainerConfig()
    """Training devices, and settings of the whole run."""
    rollout: RolloutConfig = RolloutConfig()
    """Rollout devices, sampling and the rollout engine."""
    data: DataConfig = DataConfig()
    """Problems to train and validate on."""
    reward: RewardConfig = RewardConfig()
    """Reward functions."""
    agents: AgentConfig = AgentConfig()
    """Who plays an episode with the policy: environments, tools, or any agent program."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    sft: SftConfig = SftConfig()
    """Supervised warm-up before RL."""
    actor: ActorConfig = ActorConfig()
    """Policy loss and optimizer."""
    critic: CriticConfig = CriticConfig()
    """The critic of algorithm.adv_estimator=gae.

    It has the policy's architecture and start weights, and a scalar head.
    """
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, KL and off-policy correction."""
    teachers: dict[str, TeacherConfig] = Field({})
    """Frozen models to learn from, by name, such as teachers.math.path=./math-model."""
    distillation: DistillationConfig = DistillationConfig()
    """What the policy learns from its teachers."""
    async_training: AsyncConfig = AsyncConfig()
    """When samples are drawn, trained and synced."""
    sync: Annotated[SyncConfig, NoEffectOnWeights()] = SyncConfig()
    """Weight sync."""
    guard: Annotated[GuardConfig, NoEffectOnWeights()] = GuardConfig()
    """Alarms for runs that stop learning. The limits are far from the values of a healthy run."""
    observe: Annotated[ObserveConfig, NoEffectOnWeights()] = ObserveConfig()
    """Metrics of your own."""
    report: Annotated[ReportConfig, NoEffectOnWeights()] = ReportConfig()
    """Files for readers of the run: a trace, samples and a report."""
    _notes: tuple[str, ...] = PrivateAttr(())
    _translated: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about how the recipe was read."""
        return (*filter(None, [self.mode_note]), *self._notes)

    @property
    def translated(self) -> tuple[str, ...]:
        """One line for each setting in verl's words: what it became, or why it is needless."""
        return self._translated

    def with_notes(self, *notes: str, translated: Sequence[str] = ()) -> Config:
        """Return a copy with `notes` added."""
        copy = self.model_copy()
        copy._notes = (*self._notes, *notes)
        copy._translated = (*self._translated, *translated)
        return copy

    @model_validator(mode="after")
    def _check_sections(self) -> Config:
        self.check()
        return self

    def rules(self, here: str) -> Iterator[Rule]:
        for name in self.teachers:
            if not re.fullmatch(r"[A-Za-z]\w*", name):
                rule = "a teacher's name begins with a letter and has letters, digits and _ alone"
                raise bad_value("teachers", name, rule, "another name for this teacher")
        yield from ()

    @property
    def schedule(self) -> Schedule:
        """The Schedule that these keys describe."""
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
    def mode_name(self) -> str:
        """The name of the mode that the Schedule describes. Overrides may have changed `mode`."""
        return name_of(self.schedule, self.mode)

    @property
    def mode_note(self) -> str:
        """Say which numbers of `mode` are overridden, and what the run is then. "" if none is."""
        schedule = self.schedule
        lost = overridden(schedule, self.mode) if self.mode else {}
        changed = [f"{key}={getattr(schedule, key)} and not {lost[key]}" for key in lost]
        return f"mode={self.mode} has {', '.join(changed)}: {self.mode_name}" if changed else ""

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs a frozen copy of the start weights."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def learns_from_rewards(self) -> bool:
        return not self.teachers or self.distillation.use_task_rewards

    def for_work(self, work: Work) -> Self:
        """Return a copy with the teachers of this work alone: an eval has none."""
        if work == "train":
            return self
        teacher = self.sft.teacher if work == "sft" else ""
        names = () if teacher else ("teacher", "teacher_coef", "teacher_topk")
        plain = {name: SftConfig.model_fields[name].default for name in names}
        teachers = {teacher: self.teachers[teacher]} if teacher else {}
        update = {"teachers": teachers, "distillation": DistillationConfig()}
        return self.model_copy(update=update | {"sft": self.sft.model_copy(update=plain)})

    @property
    def critic_warmup_steps(self) -> int:
        """Optimizer steps at the start of the run that train only the critic."""
        a, epochs = self.async_training, self.actor.ppo_epochs
        steps = update_steps(self.mode, a.trigger_parameter_sync_step, a.require_batches, epochs)
        return max(0, self.trainer.critic_warmup - 1) * steps

    @property
    def test_freq(self) -> int:
        return self.trainer.test_freq or self.rollout.test_freq

    @property
    def context_size(self) -> int:
        """Number of trainer ranks that share the tokens of a micro-batch."""
        if self.trainer.engine == "megatron":
            return self.trainer.megatron.context_parallel_size
        return self.actor.ulysses_sequence_parallel_size

    @property
    def data_ranks(self) -> int:
        """Number of trainer ranks that read different rows, or of their groups."""
        parts = self.context_size
        if self.trainer.engine == "megatron":
            own = self.trainer.megatron
            parts *= own.tensor_model_parallel_size * own.pipeline_model_parallel_size
        return self.trainer.ranks // parts

    @property
    def max_tokens(self) -> int:
        """Number of tokens in a full micro-batch."""
        return self.actor.ppo_max_token_len_per_gpu * self.context_size

    @property
    def largest_batch(self) -> dict[str, int]:
        """The tokens of the largest micro-batch on a device, and the micro-batches of a step.

        It is full, with actor.ppo_max_token_len_per_gpu tokens, unless all rows of an optimizer
        step fit when they are as long as they can be. Rows of a sample share their prompt. Agents
        have any number of rows. Two micro-batches stand for several.
        """
        rollout, actor = self.rollout, self.actor
        samples = -(-actor.ppo_mini_batch_size // self.data_ranks)
        if self.agents.agent_kind or samples * rollout.n * rollout.max_len > self.max_tokens:
            return {"tokens": actor.ppo_max_token_len_per_gpu, "micro_batches": 2}
        read = rollout.max_prompt_length + rollout.n * rollout.max_response_length
        return {"tokens": -(-samples * read // self.context_size), "micro_batches": 1}

    @property
    def sides(self) -> Sides:
        """The devices of both sides, with the default of the rollouts that depends on who plays."""
        rollout = self.rollout
        if rollout.session_kv_slots is None:
            keeps = self.agents.agent_kind and rollout.engine == "torch"
            slots = rollout.max_num_seqs if keeps and not self.trainer.deterministic else 0
            rollout = rollout.model_copy(update={"session_kv_slots": slots})
        return Sides(self.trainer, rollout, self.async_training.colocated)

    def limits(self, rows: int | None, trained: ResumeProgress = NO_PROGRESS) -> dict[str, int]:
        """Return the number of samples that each key allows, for the keys that set a limit.

        `rows` is the number of training rows, or None if the data has no end. `trained` is what the
        checkpoint of a resume has trained. Raises ConfigError if no key ends the run.
        """
        samples, c = self.rollout.total_rollout_steps, self.trainer
        found = {"rollout.total_rollout_steps": samples} if samples else {}
        if rows and c.total_epochs:
            found["trainer.total_epochs"] = rows * c.total_epochs
        if c.total_training_steps:
            left = c.total_training_steps - trained.version
            found["trainer.total_training_steps"] = trained.samples + left * self.schedule.window
        if not found and samples is None:
            return {"rollout.total_rollout_steps": DEFAULT_SAMPLES}
        if not found:
            raise bad_value(
                "rollout.total_rollout_steps",
                0,
                "0 sets no limit, and no other key ends the run",
                "trainer.total_training_steps=100, which counts policy versions; "
                "trainer.total_epochs=1, if the data has an end; or rollout.total_rollout_steps=100",
            )
        return found

    def end(self, rows: int | None, trained: ResumeProgress = NO_PROGRESS) -> tuple[str, int]:
        """Return the key that ends the run, and the samples that it allows: the smallest limit."""
        limits = self.limits(rows, trained)
        return min(limits.items(), key=lambda limit: limit[1])

    def end_note(self, rows: int | None, trained: ResumeProgress = NO_PROGRESS) -> str:
        """Return a note on the key that ends the run, if several keys set a limit. Else ""."""
        limits = self.limits(rows, trained)
        first, *others = sorted(limits, key=limits.__getitem__)
        later = " and ".join(f"{key}={self.value_of(key)} ({limits[key]:,})" for key in others)
        return later and (
            f"{first}={self.value_of(first)} ends the run after {limits[first]:,} samples, "
            f"before {later}"
        )

    @property
    def window_note(self) -> str:
        """Return a note on a window that cuts no response. Else ""."""
        window, longest = self.algorithm.tppo.window, self.rollout.max_response_length
        if window < longest:
            return ""
        why = f"the longest has rollout.max_response_length={longest} tokens"
        return f"algorithm.tppo.window={window} cuts no response: {why}"

    def with_warm_up_of(self, counts: Mapping[str, float]) -> Config:
        """Return a copy whose warm-ups have the lengths of the run's first start, from `counts`.

        A share of a run that is now longer would begin the warm-up again.
        """
        config = self
        for name in ("actor", "critic"):
            section, steps = getattr(self, name), counts.get(f"{name}_warmup_steps")
            if section.optim.lr_warmup_steps_ratio and steps is not None:
                fixed = {"lr_warmup_steps": int(steps), "lr_warmup_steps_ratio": 0.0}
                own = section.model_copy(update={"optim": section.optim.model_copy(update=fixed)})
                config = config.model_copy(update={name: own})
        return config

    def steps_taken(self, trained: ResumeProgress) -> int:
        """Return the number of optimizer steps that a checkpoint has taken."""
        if trained.optimizer_steps is not None:
            return trained.optimizer_steps
        return self.schedule.optimizer_steps(trained.samples, self.actor.ppo_epochs)

    def derived(self, rows: int | None = None, trained: ResumeProgress = NO_PROGRESS) -> Derived:
        """Return every number that follows from the keys, by the arguments of `limits`."""
        schedule = self.schedule
        _, samples = self.end(rows, trained)
        left = max(0, samples - trained.samples)
        steps = self.steps_taken(trained)
        steps += schedule.optimizer_steps(left, self.actor.ppo_epochs)
        return Derived(
            window=schedule.window,
            capacity=schedule.capacity,
            lag_bound=schedule.lag_bound,
            lookahead=schedule.lookahead,
            versions=trained.version + schedule.versions(left),
            optimizer_steps=steps,
            lr_horizon=steps,
            lr_warmup_steps=self.actor.optim.warmup_steps(steps),
            samples=samples,
            trajectories=samples * self.rollout.n,
            nodes_needed=self.sides.nodes_needed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """The numbers that follow from a configuration, before anything runs."""

    window: int
    """Samples that are trained for each version."""
    capacity: int
    """Largest number of samples in flight at once."""
    lag_bound: int
    """Largest number of versions between admission and training."""
    lookahead: int
    """Look-ahead in samples, after the default is resolved."""
    versions: int
    """Number of weight syncs."""
    optimizer_steps: int
    lr_horizon: int
    """Optimizer steps of the learning rate schedule."""
    lr_warmup_steps: int
    """Optimizer steps of the policy's warm-up."""
    samples: int
    trajectories: int
    nodes_needed: int
