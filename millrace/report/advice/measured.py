"""The figures of a steady part of a run that advice reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.observe.timing import GEN, IDLE
from millrace.report.accounts.pace import StepCost
from millrace.schedule.schedule import Schedule

WITH_TRAINER = ("taken", "trained", "sealed")
"""The states of samples that the trainer has."""

ALWAYS = 0.9
"""Share of the time from which on a reward worker is busy all the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The numbers of a configuration that advice reads."""

    schedule: Schedule
    mode: str
    n: int
    """Trajectories of each sample."""
    trainers: int
    """Devices of the trainer."""
    rollouts: int
    """Devices of the rollouts. On shared devices, the same devices as the trainer's."""
    replicas: int
    slots: int
    """Decode slots of all replicas."""
    reward_workers: int = 0
    """Processes that compute the reward. 0 means that their number is no limit."""
    test_freq: int = 0
    test_key: str = "trainer.test_freq"
    """The key that sets it."""
    save_freq: int = 0
    async_save: bool = True
    trainer_node: int = 0
    """Devices of a node of the trainer, if it has several nodes. Else 0."""
    rollout_node: int = 0
    share_cores: bool = False
    """Whether the devices are processes on the cores of one CPU: more of them compute no more."""

    def override(self, side: str, devices: int) -> str:
        """Return the override that gives a side this number of devices."""
        node = self.trainer_node if side == "trainer" else self.rollout_node
        if node:
            return f"{side}.nnodes={devices // node}"
        return f"{side}.n_gpus_per_node={devices}"

    @property
    def node_devices(self) -> int:
        """Return the least number of devices that can change sides."""
        return max(1, self.trainer_node, self.rollout_node)

    @property
    def devices(self) -> int:
        return self.trainers if self.schedule.colocated else self.trainers + self.rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Totals over the counted versions of a run."""

    setup: Setup
    versions: int
    seconds: float
    trainer: dict[str, float]
    """The trainer's seconds by part. They add up to `seconds`."""
    held: dict[str, float]
    """Sample-seconds in each state of the Ledger."""
    samples: int
    """Samples that were trained."""
    busy_slot_s: float
    """Seconds of decode slots that drew tokens."""
    drawn_tokens: float
    read_tokens: float
    """Tokens that engines read into KV caches: prompts, and interrupted responses."""
    reused_tokens: float = 0.0
    """Tokens of contexts whose KV was there already. They are not in `read_tokens`."""
    agents: bool = False
    """Whether the responses are those of agents, with several turns."""
    prompt_tokens: float
    """Tokens of the prompts, once for each response of a trained or dropped sample."""
    trained_tokens: float
    """Tokens of the responses that were trained."""
    dropped_tokens: dict[str, float] = field(default_factory=dict)
    """Tokens of dropped samples, by reason."""
    request_s: float = 0.0
    """Seconds of all requests inside an engine, the wait for a decode slot included."""
    tool_s: float = 0.0
    """Seconds in which sessions waited for tools and environments."""
    score_s: float = 0.0
    """Seconds of all calls of the reward, the wait for a worker included."""
    reward_wait_s: float = 0.0
    """Mean seconds in which a replica's devices wait for nothing but rewards."""
    scores: float = 0.0
    """Calls of the reward."""
    any_score_s: float = 0.0
    """Seconds with at least one call of the reward."""
    hold_s: float = 0.0
    """Seconds in which rollouts were paused for a sync."""
    mean_length: float = 1.0
    """Mean length of the responses, in tokens."""
    longest_of_n: float = 1.0
    """Mean length of the longest response of a sample, from the percentiles of the lengths."""
    longest: float = 0.0
    """Mean over versions of the longest response, in tokens."""
    more_ready: int = 0
    """Change of the stock of finished samples that wait for the trainer."""
    more_running: int = 0
    """Change of the number of samples that are under way."""
    step_cost: StepCost | None = None
    """The cost that explains the drawn tokens best. None if the loads were alike."""
    flat_cost: StepCost | None = None
    """The flattest cost that is likely. At few requests its steps are the longest."""

    @property
    def step_growth(self) -> float | None:
        """Return the share of a decode step that grows with the requests in it."""
        if self.step_cost is None:
            return None
        grows = self.step_cost.each_s * self.busy_slots / self.setup.replicas
        return grows / max(1e-12, self.step_cost.fixed_s + grows)

    @property
    def rate(self) -> float:
        """Return the samples that were trained per second."""
        return self.samples / self.seconds

    @property
    def version_s(self) -> float:
        return self.seconds / self.versions

    def share(self, *parts: str) -> float:
        """Return the share of parts of the trainer's time."""
        return sum(self.trainer.get(part, 0.0) for part in parts) / self.seconds

    @property
    def trainer_idle(self) -> float:
        return self.share(*IDLE)

    @property
    def rewards_bind(self) -> bool:
        """Whether every reward worker is busy all the time.

        Many calls that wait for a moment are a burst: the worker has nothing to do between bursts.
        """
        workers = self.setup.reward_workers
        always = self.any_score_s >= ALWAYS * self.seconds
        return always and 0 < workers <= self.score_s / self.seconds

    @property
    def starved(self) -> float:
        """Return the share of the time in which the trainer waits for samples."""
        return self.share(*GEN)

    @property
    def busy_slots(self) -> float:
        """Return the mean number of decode slots that draw."""
        return self.busy_slot_s / self.seconds

    @property
    def usable_slots(self) -> int:
        """Return the decode slots that the Schedule can fill."""
        return min(self.setup.slots, self.setup.schedule.capacity * self.setup.n)

    @property
    def rollouts_idle(self) -> float:
        return max(0.0, 1 - self.busy_slots / self.usable_slots)

    def mean(self, *states: str) -> float:
        """Return the mean number of samples in these states."""
        return sum(self.held.get(state, 0.0) for state in states) / self.seconds

    @property
    def occupied(self) -> float:
        return self.mean(*self.held)

    @property
    def with_trainer(self) -> float:
        return self.mean(*WITH_TRAINER)

    @property
    def stock_share(self) -> float:
        """Return the change of the stock of finished samples, as a share of the trained ones."""
        return self.more_ready / max(1, self.samples)

    @property
    def read_again(self) -> float:
        """Return the tokens that engines read once more, for each drawn token.

        A token is read or found in a cache once for each response that needs it. Of the contexts beyond
        the prompts, the same share was read as of all contexts. This is too little, because a response
        is never in a cache. Prompts of validations count too, and nothing shows how many they are. Turns
        of agents read long contexts without a sync, so the result for agents is 0.
        """
        if self.agents:
            return 0.0
        contexts = self.read_tokens + self.reused_tokens
        further = max(0.0, contexts - self.prompt_tokens)
        return further * self.read_tokens / max(1.0, contexts) / max(1.0, self.drawn_tokens)

    @property
    def drop_share(self) -> float:
        """Return the share of dropped tokens among those of finished samples."""
        dropped = sum(self.dropped_tokens.values())
        return dropped / max(1.0, dropped + self.trained_tokens)
