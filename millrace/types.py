"""The nouns of millrace: frozen data, standard library only.

A **Sample** is a prompt with its n trajectories. A **Trajectory** is one episode. A **Thread** is a
sequence of tokens in it that only grows. One response to one prompt is a single thread. A
**Segment** is a run of tokens by one author. Several turns, tool calls and partial rollouts all have
this shape: they are more segments. Every sampled token has the log-prob with which it was drawn.
Every segment has the policy version that drew it.

Token ids are `array('i')` (int32), and log-probs are `array('f')` (float32). Both are compact, and
`torch.frombuffer` reads them in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

PolicyVersion = int
"""The number of weight syncs so far. 0 is the start. It is neither a time stamp nor a step."""

if TYPE_CHECKING:
    Tokens = array[int]
    Floats = array[float]
    Experts = array[int]
else:  # array has no type parameters before Python 3.12
    Tokens = array
    """array('i'): int32 token ids."""
    Floats = array
    """array('f'): float32 values."""
    Experts = array
    """array('B') or array('H'): numbers of experts, in the smallest type that holds them."""


def tokens_of(ids: Any = ()) -> Tokens:
    """Return int32 token ids from any iterable of integers."""
    return array("i", ids)


def floats_of(values: Any = ()) -> Floats:
    """Return float32 values from any iterable of numbers."""
    return array("f", values)


def joined(parts: Iterable[Tokens]) -> Tokens:
    """Return the tokens of all parts, in order."""
    whole = tokens_of()
    for part in parts:
        whole.extend(part)
    return whole


def joined_experts(parts: Iterable[Experts | None]) -> Experts | None:
    """Return the experts of all parts, in order. None if no part has any."""
    whole: Experts | None = None
    for part in parts:
        if part is not None:
            whole = part[:] if whole is None else whole + part
    return whole


Message = dict[str, Any]
"""One message in OpenAI's form: "role", "content", and "tool_calls" or "tool_call_id"."""


class Author(StrEnum):
    """The author of a segment."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    """Tool results and user turns. They are context for the policy and are never trained."""


class Stop(StrEnum):
    """The reason why a run of generated tokens ended."""

    EOS = "eos"
    STRING = "string"
    """One of the stop strings appeared."""
    LENGTH = "length"
    """The response reached the token limit, which truncates it."""
    INTERRUPTED = "interrupted"
    """New weights are about to arrive. The response continues later from its tokens so far."""


WINDOW = "window"
"""The ending of a trajectory whose response another sample continues."""

UNFINISHED = (None, Stop.INTERRUPTED)
"""The stops of a turn that is still drawn."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The settings with which one response is drawn."""

    max_tokens: int
    """Limit on new tokens, at least 1."""
    temperature: float = 1.0
    """Softmax temperature. 0 is greedy, and then the log-probs are those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Strings that end a response. The response keeps the tokens that complete the string."""
    seed: int = 0
    """Seed of this request's own random stream.

    With the same weights, the result depends on nothing else.
    """
    offset: int = 0
    """Tokens of this response that are already drawn.

    A resumed response continues its random stream from this position.
    """
    ignore_eos: bool = False
    """Draw exactly `max_tokens` tokens, for workloads with fixed lengths."""
    interruptible: bool = True
    """Whether `interrupt()` ends this request. It does not interrupt validation."""
    experts_from: int | None = None
    """The first token, the prompt's included, whose experts are returned. None returns none."""

    def with_seed(self, seed: int) -> SamplingParams:
        """Return the settings with this seed. `replace` takes three times as long."""
        before = self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop
        after = self.offset, self.ignore_eos, self.interruptible, self.experts_from
        return SamplingParams(*before, seed, *after)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens by one author."""

    tokens: Tokens
    author: Author = Author.POLICY
    version: PolicyVersion = -1
    """The policy version that drew every token of this segment. -1 for the environment."""
    log_probs: Floats = field(default_factory=floats_of)
    """log p(token) of the full distribution at the sampling temperature, one for each token.

    Empty for the environment.
    """
    stop: Stop | None = None
    """The reason why it ended. None if another segment of the same turn follows."""
    reward: float | None = None
    """A reward for the turn that this segment ends. It is trained at the segment's last token."""
    kv_version: PolicyVersion | None = None
    """The oldest version that may have computed K and V of its context. None if it is `version`."""
    experts: Experts | None = None
    """The experts that the engine routed tokens to: [tokens, layers, experts of a token], flat.

    The tokens end before the last one of this segment, which the engine has not read yet. They
    begin where those of the thread's segment before end. None if nobody asked for them.
    """

    def __post_init__(self) -> None:
        if self.author is Author.POLICY and len(self.log_probs) != len(self.tokens):
            raise ValueError(
                f"a policy segment of {len(self.tokens)} tokens has {len(self.log_probs)} log-probs"
            )


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy in an episode: what others said before it, and what it drew.

    The turns of an episode form a tree. A turn continues another one, or it starts a thread.
    """

    number: int
    """Position in the order in which turns were asked for, from 0."""
    after: int | None
    """The turn that this one continues. None if `context` is the opening of a thread."""
    context: Tokens
    """What the environment, tools and users said since `after`, or the whole opening."""
    segments: tuple[Segment, ...] = ()
    """What the policy drew. There are several segments if weights changed during the turn."""

    @property
    def tokens(self) -> Tokens:
        """Return the tokens that the policy drew. Nobody may change them."""
        if len(self.segments) == 1:
            return self.segments[0].tokens
        return joined(segment.tokens for segment in self.segments)

    @property
    def stop(self) -> Stop | None:
        """Return the reason why the turn ended."""
        return self.segments[-1].stop if self.segments else None

    @property
    def unfinished(self) -> bool:
        """Whether the policy still draws the turn, or a cancelled call left it so."""
        return self.stop in UNFINISHED


@dataclass(frozen=True, slots=True)
class Ending:
    """How an episode ended."""

    reason: str = "done"
    """"done", or the limit that ended it: "turns", "tokens" or "context"."""
    score: Score | None = None
    """The score that the agent or its environment gave. None leaves it to the reward function."""
    messages: tuple[Message, ...] = ()
    """The conversation by author, for rewards and transcripts.

    Empty if the episode is one prompt and one response.
    """


@dataclass(frozen=True, slots=True)
class Continuation:
    """The response that a sample continues, where responses are trained in windows."""

    first: int
    """The sample that has the first window of the response."""
    number: int
    """The number of this window, from 1."""
    prompt_tokens: int
    """The first tokens of `Prompt.tokens` that are the prompt. The others are the response so far."""
    values: Floats
    """V of the state before each token of the response so far, when its window was trained."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of data, ready to roll out."""

    index: int
    """The sample that this prompt starts. It is also the position in the prompt stream, from 0,
    unless `position` is set.
    """
    tokens: Tokens
    text: str
    """The text of the tokens, for transcripts."""
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """Every other column of the row, for reward functions in TRL's signature."""
    position: int | None = None
    """Position in the prompt stream, if samples that continue responses came before it."""
    continues: Continuation | None = None
    """The response that this sample continues. Its tokens so far follow those of the prompt."""

    @property
    def first(self) -> int:
        """Return the sample that has the first window of the response."""
        return self.index if self.continues is None else self.continues.first

    @property
    def response_before(self) -> Tokens:
        """Return the tokens of the response that earlier samples drew."""
        start = len(self.tokens) if self.continues is None else self.continues.prompt_tokens
        return self.tokens[start:]

    @property
    def in_stream(self) -> int:
        """Return the position in the prompt stream."""
        return self.index if self.position is None else self.position


TURN_REWARDS = "turn_rewards"
"""The component of a score that is the sum of the rewards of single turns, if there are any."""
DEAD_REWARDS = "dead_rewards"
"""The count of an episode's dead turns that had a reward. It is lost with its turn."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score that a reward function gave one trajectory."""

    value: float
    """The value that training uses."""
    extra: dict[str, float] = field(default_factory=dict)
    """Named components. They are logged, and estimators over several rewards can use them."""
    raw: float | None = None
    """The value from the reward function, if shaping changed it. None if `value` is unshaped."""
    answer: str | None = None
    """The answer that the reward function found. Empty if there is none.

    None means that the whole response is the answer.
    """

    @property
    def unshaped(self) -> float:
        """Return the value before any shaping."""
        return self.value if self.raw is None else self.raw


@dataclass(frozen=True, slots=True)
class Thread:
    """A sequence of tokens that only grows: an opening, and what policy and others add to it."""

    segments: tuple[Segment, ...] = ()
    """The policy's segments are trained here. They are in no other thread of the trajectory."""
    opening: Tokens | None = None
    """The tokens before the segments. None if they are the prompt's."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The input of a reward function: the policy's last message, and the conversation before it."""

    text: str
    """The policy's last message. The words of a tool or a user are never in it."""
    messages: tuple[Message, ...] = ()
    """The conversation by author. Empty if the episode is one prompt and one response."""
    tokens: Tokens = field(default_factory=tokens_of)
    """All tokens after the prompt, in the last thread."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: its threads, how it ended, and its score."""

    threads: tuple[Thread, ...] = ()
    """In the order of their last turns. Each drawn turn is trained in exactly one of them."""
    score: Score | None = None
    ended: str = ""
    """The reason of its `Ending`, or "window". Empty if it is unfinished."""
    messages: tuple[Message, ...] = ()
    """The conversation by author. Empty if the episode is one prompt and one response."""
    dead_tokens: int = 0
    """Tokens of turns that nobody received, or that another draw replaced. They are in no thread."""
    counts: dict[str, float] = field(default_factory=dict)
    """What the session counted, for the metrics agents/*. Empty without an agent."""
    teachers: dict[str, Floats] = field(default_factory=dict)
    """log p of each policy token, thread after thread, by the name of a teacher outside the trainer.

    Empty until the trajectory is finished and its teachers have answered.
    """

    @classmethod
    def of(cls, segments: tuple[Segment, ...] = (), score: Score | None = None) -> Trajectory:
        """Return the trajectory of a single thread after the prompt.

        It is finished if its last segment is.
        """
        done = bool(segments) and segments[-1].stop not in UNFINISHED
        return cls((Thread(segments),), score, "done" if done else "")

    def with_score(self, score: Score) -> Trajectory:
        """Return the trajectory with this score. `replace` takes twice as long."""
        rest = self.ended, self.messages, self.dead_tokens, self.counts, self.teachers
        return Trajectory(self.threads, score, *rest)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return all segments, thread after thread."""
        if len(self.threads) == 1:
            return self.threads[0].segments
        return tuple(segment for thread in self.threads for segment in thread.segments)

    @property
    def stop(self) -> Stop | None:
        """Return the reason why it ended. None or INTERRUPTED means that it is unfinished.

        LENGTH means that a limit of the episode or of its last turn cut it.
        """
        if self.goes_on:
            return Stop.INTERRUPTED
        if self.ended not in ("", "done"):
            return Stop.LENGTH
        segments = self.threads[-1].segments if self.threads else ()
        return segments[-1].stop if segments else None

    @property
    def finished(self) -> bool:
        return bool(self.ended)

    @property
    def goes_on(self) -> bool:
        """Whether another sample continues the response. This one has no score."""
        return self.ended == WINDOW

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all authors after the openings."""
        return sum([len(s.tokens) for s in self.segments])

    @property
    def num_policy_tokens(self) -> int:
        """Return the number of tokens that the policy drew, in all turns of its threads."""
        return sum([len(s.tokens) for s in self.segments if s.author is Author.POLICY])

    @property
    def tokens(self) -> Tokens:
        """Return all tokens after the openings, thread after thread."""
        return joined(s.tokens for s in self.segments)

    @property
    def last_turn(self) -> Tokens:
        """Return the tokens of the last turn that the policy drew, in the last thread."""
        if len(self.threads) == 1 == len(self.threads[0].segments):
            return self.threads[0].segments[0].tokens
        turn: list[Tokens] = []
        for segment in reversed(self.threads[-1].segments if self.threads else ()):
            if turn and (segment.author is not Author.POLICY or segment.stop not in UNFINISHED):
                break
            if segment.author is Author.POLICY:
                turn.append(segment.tokens)
        return joined(reversed(turn))

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Return the versions of the policy's segments. They never decrease within a thread."""
        return tuple(s.version for s in self.segments if s.author is Author.POLICY and s.tokens)


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with its n trajectories.

    It is the unit of admission, accounting, transfer and advantage.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    admitted_version: PolicyVersion = 0
    greedy: Trajectory | None = None
    """The greedy response, for an estimator that uses its score as the baseline (remax).

    It is never trained and is not one of the n.
    """

    @property
    def goes_on(self) -> bool:
        """Whether another sample continues its response."""
        return any(t.goes_on for t in self.trajectories)
