"""The ports: what the pipeline needs of engines, weight sync, environments and rewards. Protocols, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from millrace.types import PolicyVersion, Prompt, Sample, SamplingParams, Score, Segment, Tokens

if TYPE_CHECKING:
    import torch

Phase = Literal["sft", "rl"]
"""The supervised warm-up, or reinforcement learning."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Running totals of one rollout engine since it started; figures of a period are differences."""

    tokens: int = 0
    """Tokens drawn."""
    prefill_tokens: int = 0
    """Tokens read into KV caches, again after an interruption."""
    busy_slot_s: float = 0.0
    """Integral of occupied decode slots, in slot-seconds."""
    slots: int = 0
    """Decode slots."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Whole samples for one call of `step`; advantages are taken over all of them."""

    samples: tuple[Sample, ...]
    version: PolicyVersion
    """The policy version that the weights were when their current window began: the live one, or one on its way to the rollouts."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a train engine did with one batch."""

    optimizer_steps: int
    """Steps of the LR schedule's clock, those that were skipped included."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the batch's optimizer steps, by the metric's full name."""
    totals: dict[str, float] = field(default_factory=dict)
    """Counts over the batch, by the metric's full name: added up, never averaged."""
    skipped_steps: int = 0
    """Of optimizer_steps: left out, for a gradient that is not finite or nothing to learn from. `metrics` are of the others; what
    they cannot say without one is missing."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One version on its way to every replica, not live yet."""

    bytes: int
    seconds: float


class RolloutEngine(Protocol):
    """One replica that draws tokens. Tokens in, tokens out: what the model said is never tokenised again."""

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Continue `tokens`. One segment for each version that drew tokens; the last one's `stop` says why it ended.

        After `interrupt()` the last segment's stop is INTERRUPTED; an empty tuple says that nothing was drawn before it.
        `session` names the trajectory: calls of one session may be routed to the same replica for its KV cache.
        """
        ...

    async def interrupt(self) -> None:
        """End every running interruptible generation between two tokens; return when all of them have returned."""
        ...

    async def stats(self) -> RolloutStats: ...

    async def close(self) -> None: ...


class ReplicaSleeper(Protocol):
    """The rollout side of shared devices: memory comes back in two parts, around a weight sync."""

    async def sleep(self, keep_weights: bool = True) -> None:
        """Give the device's memory back. Called with nothing running, and again while asleep.

        Without `keep_weights` the engine may discard its weights: a sync comes before `wake`.
        """
        ...

    async def wake_weights(self) -> None:
        """Take the memory of the weights again, for a sync. Nothing is drawn before `wake`."""
        ...

    async def wake(self) -> None:
        """Take all memory again; the weights are those of the last version."""
        ...


class Replica(RolloutEngine, ReplicaSleeper, Protocol):
    """A rollout engine for any placement."""


class Sleeper(Protocol):
    """The training side of shared devices."""

    async def sleep(self) -> None:
        """Give the device's memory back. The state stays as it is, and so does a staged save."""
        ...

    async def wake(self) -> None:
        """Take the memory again."""
        ...


class TrainEngine(Protocol):
    """One policy under training, with the critic and the reference that its algorithm needs.

    The driver calls a method on every rank at once, with the same arguments, and awaits all of them.
    Every rank returns the same value.
    """

    async def begin(self, phase: Phase, horizon: int) -> None:
        """Start a phase of `horizon` optimizer steps, with a fresh optimizer and LR schedule.

        Called before the first step and before `load`. The policy's weights stay. The critic and
        the reference start from them.
        """
        ...

    async def step(self, batch: TrainBatch) -> StepReport:
        """Advantages, then `ppo_epochs` passes of optimizer steps over mini-batches of `ppo_mini_batch_size` samples."""
        ...

    async def sft_step(self, examples: list[tuple[Tokens, Tokens]]) -> StepReport:
        """One supervised step on (prompt, response) pairs. Its metrics have at least sft/loss."""
        ...

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        """log p(token) under the current weights, by trajectory, for the tokens of the policy's segments in order."""
        ...

    async def save(self, folder: str, staged: bool = False) -> None:
        """Weights, optimizer, LR schedule and random state as they are now, into an existing folder.

        `staged`: return once they are copied to host memory; they are written while whatever is called next goes on, and `saved`
        says when. Otherwise they are written on return. At most one save is under way: the next waits for it.
        """
        ...

    async def saved(self) -> None:
        """Until what a staged save began is written. Raises what it failed with."""
        ...

    async def load(self, folder: str) -> None:
        """Take the state that `save` wrote, at any number of ranks."""
        ...

    async def export(self, folder: str) -> None:
        """Write a Hugging Face model folder, in the dtype that is served."""
        ...

    async def close(self) -> None: ...


class WeightSource(Protocol):
    """The in-process side of a trainer rank that a sync reads from.

    A shard is a tensor's name, its whole shape, its dtype on the way, and this rank's rows of it.
    """

    @property
    def device(self) -> torch.device:
        """Where it computes. Its weights may be in host memory."""
        ...

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, torch.Tensor]]:
        """Every tensor that is served, in model order and in the serving dtype, without adapters."""
        ...

    def adapters(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, torch.Tensor]]:
        """With model.lora_rank: W.lora_A [rank, in] and W.lora_B [out, rank] of each W, in float32."""
        ...

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor whole, in the serving dtype, in model order. Collective over the ranks."""
        ...


class TrainRank(TrainEngine, Sleeper, WeightSource, Protocol):
    """One rank of a train engine in its worker: all that an author of an engine writes."""


class WeightSync(Protocol):
    """Carries weights from the train engine to every replica. Built with both."""

    async def keep(self, version: PolicyVersion) -> None:
        """Keep the current weights as `version`, which `transfer` then brings: the train engine may step on meanwhile."""
        ...

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Bring the current weights, or those that were kept, to every replica, beside the live ones, proven by a checksum. Rollouts go on.

        Raises SyncError, with replica and tensor, if what arrived is not what was sent.
        """
        ...

    async def activate(self, version: PolicyVersion) -> float:
        """Make the transferred weights live on every replica, between two tokens. Returns the seconds without decoding."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment says next."""

    tokens: Tokens


class Environment(Protocol):
    """One conversation, single use: open, then reply to each message of the policy until it says None."""

    async def open(self, prompt: Prompt) -> Tokens:
        """The tokens that the policy continues first."""
        ...

    async def reply(self, segments: tuple[Segment, ...]) -> Turn | None:
        """The environment's turn after the policy's latest segments, or None if the trajectory is done."""
        ...

    async def close(self) -> None: ...


class RewardFunction(Protocol):
    """Scores the trajectories of one prompt."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Score]:
        """One Score for each completion. Raises RewardError; an error is never a silent 0."""
        ...

    async def close(self) -> None: ...


class WeightHolder(Protocol):
    """The in-process side of a replica that a sync writes to."""

    def weights(self) -> Mapping[str, Any]:
        """Live tensors by name, in the model's own order."""
        ...

    async def swap(self, version: PolicyVersion, staged: Mapping[str, Any]) -> float:
        """Copy `staged` over the live tensors between two tokens. Returns the seconds in which nothing was decoded."""
        ...
