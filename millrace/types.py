"""The nouns of millrace: frozen data, standard library only.

A **Sample** is a prompt with its n trajectories, a **Trajectory** is one response, a **Segment** is a run of tokens by one
author. Several turns, tool calls and partial rollouts are the same shape: more segments. Every sampled token carries
the log-prob with which it was drawn, every segment the policy version that drew it.

Token ids are `array('i')` (int32) and log-probs `array('f')` (float32): compact, and `torch.frombuffer` reads them in place.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

PolicyVersion = int
"""How many times weights were synced. 0 is the start. Never a time stamp, never a step."""

if TYPE_CHECKING:
    Tokens = array[int]
    Floats = array[float]
else:  # array has no type parameters before Python 3.12
    Tokens = array
    """array('i'): int32 token ids."""
    Floats = array
    """array('f'): float32 values."""


def tokens_of(ids: Any = ()) -> Tokens:
    """int32 token ids from any iterable of integers."""
    return array("i", ids)


def floats_of(values: Any = ()) -> Floats:
    """float32 values from any iterable of numbers."""
    return array("f", values)


class Author(StrEnum):
    """Who wrote a segment."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    """Tool results, user turns: context for the policy, never trained."""


class Stop(StrEnum):
    """Why a run of generated tokens ended."""

    EOS = "eos"
    STRING = "string"
    """One of the stop strings appeared."""
    LENGTH = "length"
    """The token limit was reached: the response is truncated."""
    INTERRUPTED = "interrupted"
    """Weights are about to change: the response goes on later, from the tokens it has."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is drawn."""

    max_tokens: int
    """Limit on new tokens, at least 1."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy (log-probs are then those of temperature 1)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the tokens that complete one are kept."""
    seed: int = 0
    """Seed of this request's own random stream. With the same weights, the result depends on nothing else."""
    offset: int = 0
    """Tokens of this response already drawn: a resumed response goes on in its random stream where it stopped."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever is drawn: workloads with set lengths."""
    interruptible: bool = True
    """Whether `interrupt()` ends this request. Validation is not interrupted."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens by one author."""

    tokens: Tokens
    author: Author = Author.POLICY
    version: PolicyVersion = -1
    """The exact policy version that drew every token here; -1 for the environment."""
    log_probs: Floats = field(default_factory=floats_of)
    """log p(token) of the full distribution at the sampling temperature, one for each token; empty for the environment."""
    stop: Stop | None = None
    """Why it ended; None if another segment of the same response follows."""

    def __post_init__(self) -> None:
        if self.author is Author.POLICY and len(self.log_probs) != len(self.tokens):
            raise ValueError(
                f"a policy segment of {len(self.tokens)} tokens has {len(self.log_probs)} log-probs"
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of data, ready to roll out."""

    index: int
    """Position in the prompt stream, from 0: the identity of the sample that is made from it."""
    tokens: Tokens
    text: str
    """What the tokens say, for transcripts."""
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """Every other column of the row, for reward functions in TRL's signature."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function said of one trajectory."""

    value: float
    """What is trained on."""
    extra: dict[str, float] = field(default_factory=dict)
    """Named components: logged, and usable by estimators over several rewards."""
    raw: float | None = None
    """What the reward function said, where shaping came after it; None where `value` is that."""

    @property
    def unshaped(self) -> float:
        """The value before any shaping."""
        return self.value if self.raw is None else self.raw


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response: what was said, by whom, at which version, and what it was worth."""

    segments: tuple[Segment, ...] = ()
    score: Score | None = None

    @property
    def stop(self) -> Stop | None:
        """Why it ended; None or INTERRUPTED while it is unfinished."""
        return self.segments[-1].stop if self.segments else None

    @property
    def finished(self) -> bool:
        return self.stop not in (None, Stop.INTERRUPTED)

    @property
    def num_tokens(self) -> int:
        """Response tokens of all authors."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def num_policy_tokens(self) -> int:
        """Response tokens that the policy drew, in all its turns."""
        return sum(len(s.tokens) for s in self.segments if s.author is Author.POLICY)

    @property
    def tokens(self) -> Tokens:
        """All response tokens, in order."""
        joined = tokens_of()
        for segment in self.segments:
            joined.extend(segment.tokens)
        return joined

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Versions of the policy's segments, in order of writing. Never decreasing."""
        return tuple(s.version for s in self.segments if s.author is Author.POLICY and s.tokens)

    def extend(self, segments: tuple[Segment, ...]) -> Trajectory:
        """The trajectory with `segments` appended."""
        return replace(self, segments=self.segments + segments)


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with its n trajectories: the unit of admission, accounting, transfer and advantage."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    admitted_version: PolicyVersion = 0
    greedy: Trajectory | None = None
    """The greedy response, where an estimator takes its score as the baseline (remax). Never trained, and none of the n."""

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest version in any trajectory that is trained; the version at admission if nothing was drawn."""
        return min(
            (v for t in self.trajectories for v in t.versions), default=self.admitted_version
        )
