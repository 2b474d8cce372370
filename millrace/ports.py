"""The ports: protocols for engines, weight sync, environments and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from millrace.types import (
    Completion,
    Ending,
    Floats,
    PolicyVersion,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Tokens,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    import torch

Phase = Literal["sft", "rl"]
"""The supervised warm-up ("sft") or reinforcement learning ("rl")."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Totals of one rollout engine since its start. A difference gives those of a period."""

    tokens: int = 0
    """Tokens drawn."""
    prefill_tokens: int = 0
    """Tokens read into KV caches. After an interruption they are read and counted again."""
    busy_slot_s: float = 0.0
    """Integral of occupied decode slots, in slot-seconds."""
    slots: int = 0
    """The number of decode slots."""
    reused_tokens: int = 0
    """Tokens of contexts whose KV was there already. They are not in prefill_tokens."""
    evicted_tokens: int = 0
    """Tokens of idle sessions whose KV had to make room."""
    cancelled_tokens: int = 0
    """The tokens of cancelled requests: no call returned them."""

    def __add__(self, other: RolloutStats) -> RolloutStats:
        names = (f.name for f in fields(self))
        return RolloutStats(*(getattr(self, n) + getattr(other, n) for n in names))


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Whole samples for one call of `step`. Advantages are computed over all of them."""

    samples: tuple[Sample, ...]
    version: PolicyVersion
    """The policy version of the weights at the start of the current window.

    It is live, or on its way to the rollouts.
    """
    lr_scale: float = 1.0
    """Factor on the learning rate that the policy's schedule gives each optimizer step."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of a train engine on one batch."""

    optimizer_steps: int
    """Steps of the LR schedule, including skipped ones."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the batch's optimizer steps that were not skipped, by the metric's full name.

    A metric that needs such a step is missing if there was none.
    """
    totals: dict[str, float] = field(default_factory=dict)
    """Counts over the batch, by the metric's full name. They are summed, never averaged."""
    skipped_steps: int = 0
    """The part of optimizer_steps that was skipped.

    A step is skipped if its gradient is not finite or there is nothing to learn from.
    """
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Seconds of the parts of this call, by name. No two parts run at the same time.

    The names are verl's, but for teacher: old_log_prob, ref, values, teacher, adv, update_critic,
    update_actor. A part that did not run is missing. Time of no part is in no name. Equal reports
    may differ in it.
    """
    values: tuple[Floats, ...] = ()
    """V of the state before each token of the trajectories that go on, in order.

    They are those of the critic at the batch's arrival.
    """


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The transfer of one version to every replica. The version is not live yet."""

    bytes: int
    seconds: float


class Prompts(Protocol):
    """The prompt stream. The i-th prompt of the run is a pure function of i."""

    def __getitem__(self, index: int, /) -> Prompt: ...


class RolloutEngine(Protocol):
    """One replica that draws tokens. It takes and returns tokens, so text is never re-tokenised."""

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Continue `tokens`. Return one segment for each version that drew tokens.

        The last segment's `stop` is the reason why it ended. After `interrupt()` it is INTERRUPTED.
        The result is an empty tuple if the interruption came before any token. `session` names the
        trajectory. Calls of one session may go to the same replica, for its KV cache.
        """
        ...

    async def interrupt(self) -> None:
        """End every running interruptible `generate` between two tokens. Return after them."""
        ...

    async def stats(self) -> RolloutStats: ...

    async def close(self) -> None: ...


class ReplicaSleeper(Protocol):
    """The rollout side of shared devices. It takes memory in two parts, around a weight sync."""

    async def sleep(self, keep_weights: bool = True) -> None:
        """Free the device's memory. The caller makes sure that nothing runs.

        A second call while asleep is legal. Without `keep_weights` the engine may discard its
        weights, and then a sync comes before `wake`.
        """
        ...

    async def wake_weights(self) -> None:
        """Allocate the memory of the weights again, for a sync. Nothing is drawn before `wake`."""
        ...

    async def wake(self) -> None:
        """Allocate all memory again. The weights are those of the last version."""
        ...


class Replica(RolloutEngine, ReplicaSleeper, Protocol):
    """A rollout engine for any placement."""


class Sleeper(Protocol):
    """The training side of shared devices."""

    async def sleep(self) -> None:
        """Free the device's memory. The state and a staged save are kept."""
        ...

    async def wake(self) -> None:
        """Allocate the memory again."""
        ...


class TrainEngine(Protocol):
    """One policy under training, with the critic and the reference that its algorithm needs.

    The driver calls a method on every rank at once, with the same arguments. It awaits all ranks.
    Every rank returns the same value.
    """

    async def begin(self, phase: Phase, horizon: int) -> None:
        """Start a phase of `horizon` optimizer steps, with a fresh optimizer and LR schedule.

        It comes before the first step and before `load`. The policy keeps its weights. The critic
        and the reference start from them.
        """
        ...

    async def step(self, batch: TrainBatch) -> StepReport:
        """Compute advantages over the batch. Then make `ppo_epochs` passes of optimizer steps.

        A step is over a mini-batch of `ppo_mini_batch_size` samples.
        """
        ...

    async def sft_step(self, examples: list[tuple[Tokens, ...]]) -> StepReport:
        """Take one supervised step. An example is (prompt, response, context, response, ...).

        The report has at least the metric sft/loss.
        """
        ...

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        """Return log p(token) under the current weights, one list for each trajectory.

        A list has the tokens of the policy's segments, in order.
        """
        ...

    async def reference_log_probs(
        self, samples: tuple[Sample, ...], seconds: float, eight_bit: bool = False
    ) -> list[list[list[float]]]:
        """Return two lists for each trajectory: `log_probs` of an independent model, and ranks.

        The model has a wider dtype. A rank is the probability of all likelier tokens, with half of
        that of equally likely ones. Trajectories that are not read within `seconds` have NaN. Return
        an empty list if the model has no room. With `eight_bit`, its linear layers compute as
        those of a rollout engine in 8 bits.
        """
        ...

    async def displace(self, away: bool) -> None:
        """Change every weight that a sync sends by about 9 %, or undo that bit for bit, once."""
        ...

    async def save(self, folder: str, staged: bool = False) -> None:
        """Save the current weights, optimizer, LR schedule and random state to an existing folder.

        With `staged`, return once they are copied to host memory. They are then written in the
        background, and `saved` waits for the end. Otherwise they are written on return. At most one
        save is under way: the next one waits for it.
        """
        ...

    async def saved(self) -> None:
        """Wait until a staged save is written. Raise its error if it failed."""
        ...

    async def load(self, folder: str) -> None:
        """Load the state that `save` wrote, with any number of ranks."""
        ...

    async def export(self, folder: str) -> None:
        """Write a Hugging Face model folder, in the serving dtype."""
        ...

    async def close(self) -> None: ...


class WeightSource(Protocol):
    """The in-process side of a trainer rank, from which a sync reads.

    A shard is a tensor's name, its whole shape, its dtype in the transfer, the first row that this
    rank sends, and its rows. Every row has one sender. Only values may change later.
    """

    @property
    def device(self) -> torch.device:
        """Return the compute device. The weights may be in host memory."""
        ...

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, torch.Tensor]]:
        """Yield every served tensor, in model order, without adapters. It may be collective."""
        ...

    def adapters(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, torch.Tensor]]:
        """Yield the adapters of each W, in float32, if model.lora_rank is set.

        They are W.lora_A [rank, in] and W.lora_B [out, rank].
        """
        ...

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every whole tensor, in the serving dtype, in model order. It is collective."""
        ...


class TrainRank(TrainEngine, Sleeper, WeightSource, Protocol):
    """One rank of a train engine in its worker. The author of an engine writes only this."""


class WeightSync(Protocol):
    """Carries weights from the train engine to every replica."""

    async def keep(self, version: PolicyVersion) -> None:
        """Keep a copy of the current weights as `version`, for `transfer`.

        Afterwards the train engine may step at once.
        """
        ...

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Send the kept weights, or else the current ones, to every replica.

        A replica stores them next to its live weights, and rollouts continue. A checksum proves the
        transfer. Raises SyncError, with the replica and the tensor, if the received weights differ
        from the sent ones.
        """
        ...

    async def activate(self, version: PolicyVersion) -> float:
        """Make the transferred weights live on every replica. Return the seconds without decoding."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """The next message of an environment."""

    tokens: Tokens


class Environment(Protocol):
    """One conversation, for a single use.

    Call `open` once, then `reply` for each message of the policy, until it returns None.
    """

    async def open(self, prompt: Prompt) -> Tokens:
        """Return the tokens that the policy continues first."""
        ...

    async def reply(self, segments: tuple[Segment, ...]) -> Reply | None:
        """Return the environment's turn after the policy's latest segments.

        None means that the trajectory is finished.
        """
        ...

    async def score(self) -> Score | None:
        """Return the score of the conversation. None leaves it to the reward function."""
        ...

    async def close(self) -> None: ...


class PolicySession(Protocol):
    """The policy's side of one episode. It draws turns and counts limits."""

    @property
    def name(self) -> str:
        """Return the name of the trajectory, such as "17/3"."""
        ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def turns(self) -> Sequence[Turn]:
        """Return the finished turns by number. A number that is missing is still drawn."""
        ...

    async def draw(
        self,
        context: Tokens,
        *,
        after: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Draw the policy's turn after `context`.

        `context` follows the turn `after`. If `after` is None, it is the opening of a new thread.
        The call lasts through syncs and interruptions. `max_tokens` can only lower the limits of
        the run. A turn that reaches a limit ends with Stop.LENGTH. Raises LimitReached if the
        limits leave no room for a token.
        """
        ...

    def tokens(self, turn: int) -> Tokens:
        """Return all tokens from the opening of the thread to the end of `turn`."""
        ...

    def kill(self, turn: int) -> None:
        """Mark a turn as dead: nobody received it. It is counted and never trained."""
        ...

    def reward(self, value: float, turn: int | None = None) -> None:
        """Add a reward for a turn, or for the last one. It is trained at the turn's last token."""
        ...

    def count(self, name: str, value: float = 1.0) -> None:
        """Add `value` to the episode's count of `name`, for the metric agents/`name`."""
        ...


class Agent(Protocol):
    """Plays episodes with the policy: an environment, a function or a program.

    One agent serves every episode of a run.
    """

    async def play(self, session: PolicySession) -> Ending:
        """Play one episode.

        Raises EpisodeError if something other than the policy failed. The sample is then counted
        and replaced, and never scored 0. LimitReached may pass through: the episode then ends at
        that limit, and is scored.
        """
        ...

    async def close(self) -> None: ...


class RewardFunction(Protocol):
    """Scores the trajectories of one prompt."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Return one Score for each completion.

        Raises RewardError. An error is never a silent 0.
        """
        ...

    async def close(self) -> None: ...


class Teacher(Protocol):
    """A frozen model outside of the trainer, from which the policy learns."""

    async def log_probs(self, prompt: Prompt, trajectory: Trajectory) -> Floats:
        """Return log p of each token that the policy drew, thread after thread, at temperature 1.

        Raises TeacherError.
        """
        ...


class WeightHolder(Protocol):
    """The in-process side of a replica, to which a sync writes."""

    def weights(self) -> Mapping[str, Any]:
        """Return the live tensors by name, in model order."""
        ...

    async def swap(self, version: PolicyVersion, staged: Mapping[str, Any]) -> float:
        """Copy `staged` over the live tensors between two tokens. Return the pause in seconds."""
        ...
