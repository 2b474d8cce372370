"""The invariants of a run, checked after every event, from what happened and not from the Ledger.

| name | invariant |
|---|---|
| I1 | every admitted prompt is trained once or dropped once with a reason; nothing else is trained |
| I2 | versions grow; a replica serves only proven weights, and never older ones than the live |
| I3 | no sample and no token is older than the bound when it is trained |
| I5 | after any faults, the run trains the same samples and tokens as without them |
| I6 | an attempt completes, or ends in a bounded time with a typed error that a fault explains |
| I7 | a resume starts from the last checkpoint that was written, if nothing damaged it |
| I8 | a finished sample that the journal has synced is not drawn again for the same prompt |
| I9 | nothing runs after the end of an attempt |
| I10 | the row of each prompt is that of the sampler, in any world and after any resume |
| I11 | each token of a response is trained once, in order, in one window; a response ends once |
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from millrace.data.curriculum import Outcomes
from millrace.extras.faults.engines import Lineage, checksum
from millrace.pipeline.journal_file import Batch
from millrace.pipeline.journal_file import checksum as prompt_checksum
from millrace.replicas.roster import Change, ReplicaState
from millrace.rollout.dynamic_sampling import EQUAL_OUTCOMES
from millrace.rollout.episode import request_seed
from millrace.schedule.ledger import Ledger, LedgerSnapshot, State
from millrace.schedule.schedule import OnSync, Schedule
from millrace.simulate.engines import target_length
from millrace.types import Prompt, Sample, SamplingParams, joined, tokens_of
from millrace.waits.registry import Event


class Violation(Exception):
    """An invariant does not hold. The bug is in millrace."""


def prompt_at(index: int, *rows: int) -> Prompt:
    """Return the i-th prompt. Its first token is the length of its responses.

    With a sampler, its second one is its row.
    """
    length = 4 + zlib.crc32(b"length/%d" % index) % 40
    return Prompt(index, tokens_of([length, *rows]), str(index), "sim")


ROWS = 50
"""The rows of a run with a sampler."""


def pick(i: int, rows: Sequence[Any], outcomes: Outcomes) -> int:
    """Return the row of prompt i: a sampler that depends on each bit of the past."""
    past = outcomes.rows.tobytes() + outcomes.scores.tobytes()
    return zlib.crc32(past, i) % len(rows)


def score_of(prompt: Prompt, text: str) -> float:
    """Return the score of a response. Every response to every fourth prompt scores 0."""
    if prompt.index % 4 == 0:
        return 0.0
    return zlib.crc32(f"{prompt.index}/{text}".encode()) % 7 / 7


def text_of(tokens: Any) -> str:
    return str(tokens[:6].tolist())


class Expected:
    """The draws and steps of a run without faults, as a pure function of its numbers."""

    def __init__(
        self,
        seed: int,
        n: int,
        limit: int,
        params: SamplingParams,
        filters: bool,
        lag: int,
        size: int = 0,
    ) -> None:
        self.size = size
        """The most tokens that one sample draws of a response, or 0."""
        self._lag = lag
        self._rows: list[int] = []
        self._seed, self._n, self._limit, self._params = seed, n, limit, params
        self._filters = filters
        self._drawn: dict[tuple[int, int], list[int]] = {}

    def tokens(self, index: int, k: int) -> list[int]:
        """Return the tokens of the k-th response to a prompt."""
        found = self._drawn.get((index, k))
        if found is None:
            prompt, size = prompt_at(index), self._params.max_tokens
            found = self._drawn[index, k] = self._draw(index, k, prompt, size)
        return found

    def left(self, prompt: Prompt) -> int:
        """Return how many tokens the only response of a sample may still have."""
        return self._params.max_tokens - len(prompt.response_before)

    def window(self, prompt: Prompt) -> list[int]:
        """Return the tokens that a sample draws of its only response."""
        size = min(self.size, self.left(prompt))
        return self._draw(prompt.index, 0, prompt_at(prompt.in_stream), size)

    def _draw(self, index: int, k: int, prompt: Prompt, size: int) -> list[int]:
        seed = request_seed(self._seed, index, k)
        length = target_length(prompt.tokens, SamplingParams(size, seed=seed))
        return [1 + (seed * 31 + place * 17) % 97 for place in range(length)]

    def row(self, index: int) -> int:
        """Return the row that the sampler gives a prompt, if every sample has a score."""
        import numpy

        for i in range(len(self._rows), index + 1):
            past = max(0, i - self._lag)
            scores = numpy.array([self._score(j) for j in range(past)], "<f8")
            rows = numpy.array(self._rows[:past], "<i8")
            self._rows.append(pick(i, range(ROWS), Outcomes(rows, scores)))
        return self._rows[index]

    def _score(self, index: int) -> float:
        texts = [text_of(tokens_of(self.tokens(index, k))) for k in range(self._n)]
        return sum(score_of(prompt_at(index), text) for text in texts) / self._n

    def kept(self, index: int) -> bool:
        """Whether dynamic sampling keeps the sample of a prompt."""
        if not self._filters:
            return True
        prompt = prompt_at(index)
        texts = (text_of(tokens_of(self.tokens(index, k))) for k in range(self._n))
        return len({score_of(prompt, text) for text in texts}) > 1

    def lineage(self) -> Lineage:
        """Return the samples that the whole run trains, in strict order of admission."""
        kept: Lineage = []
        index = 0
        while len(kept) < self._limit:
            if self.kept(index):
                kept.append(index)
            index += 1
        return kept


class Checks:
    """Follows one run over all of its attempts."""

    def __init__(self, schedule: Schedule, expected: Expected, filters: bool) -> None:
        self._schedule, self._expected, self._filters = schedule, expected, filters
        self.digest = 0
        """A checksum of all events: two runs of one seed have the same."""
        self.lag = 0
        """The largest lag of a sample."""
        self.early_syncs = 0
        """Windows that a stop cut short. Each may add one version to the lag of a sample."""
        self._weights: dict[int, int] = {}
        """The checksum of the weights of each version of this attempt."""
        self._published = -1
        self._written = -1
        """The version of the last checkpoint that was written, and is not damaged."""
        self._begun: dict[tuple[str, str], int] = {}
        self._stale: dict[str, int] = {}
        """The replicas that are STALE, and the versions that went live meanwhile."""
        self._lost: Counter[str] = Counter()
        """How often each replica was lost in this attempt."""
        self._ever_dropped: set[int] = set()
        self._running: set[int] = set()
        self._live: set[int] = set()
        self._trained: Lineage = []
        self._samples: dict[int, Sample] = {}
        """The samples that were trained last under each number."""
        self._steps: list[Sample] = []
        self._finished: Counter[int] = Counter()
        self._equal: Counter[int] = Counter()
        self._durable: dict[int, tuple[int, int]] = {}
        """Finished samples that the journal has synced: newest version, and checksum of the prompt."""
        self._unscored = False
        """Whether a sample was dropped without a score, so that rows are not known."""
        self._made: dict[int, list[int]] = {}
        """The samples of each version of any attempt."""
        self._ledger: Ledger
        self._next = 0

    def begin(self, ledger: Ledger, snapshot: LedgerSnapshot | None, lineage: Lineage) -> None:
        """Begin an attempt from a checkpoint, or from the start."""
        self._ledger = ledger
        self._published = ledger.version
        self._weights = {ledger.version: checksum(lineage)}
        self._trained, self._steps = list(lineage), []
        self._begun.clear()
        self._stale.clear()
        self._lost.clear()
        self._running.clear()
        self._finished.clear()
        self._equal.clear()
        slots = [i for i, _ in snapshot.slots] if snapshot else []
        self._live, self._next = set(slots), snapshot.admitted if snapshot else 0
        gone = set(range(self._next)) - self._live - set(lineage)
        self._true("I1", len(slots) == len(self._live), "a checkpoint has a sample twice")
        self._true("I1", not self._live & set(lineage), "a checkpoint has a trained sample")
        self._true("I1", len(set(lineage)) == len(lineage), "the weights have a sample twice")
        self._true("I1", gone <= self._ever_dropped, f"a checkpoint lost {gone}")
        self._true("I1", ledger.retired == len(lineage), "retired and trained samples differ")
        lost = f"version {self._written} was saved, and the run resumes from {ledger.version}"
        self._true("I7", ledger.version >= self._written, lost)
        self._written = ledger.version if snapshot else -1
        self._agree()
        self._agree_on_slots()

    def damaged(self) -> None:
        """Note that the newest checkpoint is damaged. Older ones may be gone."""
        self._written = -1
        self.forgets()

    def forgets(self) -> None:
        """Note that the disk may have lost or refused a part of the journal."""
        self._durable.clear()

    def synced(self, batch: Batch) -> None:
        """Note what the journal has synced."""
        for one in batch.finished:
            versions = [v for t in one.trajectories for v in t.versions]
            self._durable[one.sample_id] = max(versions, default=0), one.prompt

    def see(self, event: Event) -> None:
        """Check what an event changes."""
        told = f"{event.time:.6f}/{event.track}/{event.name}/{event.phase}/{event.key}"
        self.digest = zlib.crc32(told.encode(), self.digest)
        if event.track == "samples" and event.phase == "at":
            self._move(event)
            return
        self._agree()  # Moves of several samples are several events, so not after each of them.
        if event.name == "request":
            self._request(event)
        elif (act := self._ACTS.get((event.track, event.name))) is not None:
            act(self, event)

    def _move(self, event: Event) -> None:
        if event.name == "equal_outcomes":
            self._equal[self._ledger.version] += 1
            return
        i = int(event.key)
        if event.name == State.WAITING and i not in self._live:
            self._true("I1", i == self._next, f"sample {i} was admitted, expected {self._next}")
            self._next += 1
            self._live.add(i)
            most = int((1 + self._schedule.staleness_threshold) * self._schedule.window + 1e-9)
            self._true("I3", len(self._live) <= most, f"{len(self._live)} of {most} slots in use")
        elif event.name == "dropped":
            self._live.discard(i)
            self._ever_dropped.add(i)
            self._unscored |= event.facts.get("reason") != EQUAL_OUTCOMES
        elif event.name == "retired":
            self._true("I1", i in self._live, f"sample {i} was retired without a slot")
            self._live.discard(i)
        elif event.name == State.SEALED:
            self._sealed(self._ledger.version + 1, self._ledger.ids(State.SEALED))
        elif event.name == State.RUNNING:
            self._running.add(i)
        elif event.name == State.READY and i in self._running:
            self._finished[self._ledger.version] += 1

    def _sealed(self, version: int, ids: list[int]) -> None:
        if self._made.setdefault(version, ids) != ids:
            # Tokens of the version before the restart are of other weights.
            self._made = {v: made for v, made in self._made.items() if v < version}
            self._made[version] = ids
            self._durable = {i: one for i, one in self._durable.items() if one[0] < version}

    def _agree(self) -> None:
        """Compare the Ledger's slots with the samples that must have one."""
        ledger = self._ledger
        ledger.check()
        equal = ledger.occupied == len(self._live)
        self._true("I1", equal and ledger.admitted == self._next, "a sample came or went unseen")

    def _agree_on_slots(self) -> None:
        slots = set(self._ledger.totals().slots)
        if slots != self._live:
            raise Violation(f"I1: slots {slots}, expected {self._live}")

    def _stepped(self, event: Event) -> None:
        samples: Sequence[Sample] = event.facts["samples"]
        version: int = event.facts["version"]
        bound = self._schedule.lag_bound + self.early_syncs
        for sample in samples:
            i = sample.prompt.index
            self._true("I1", i not in self._trained, f"sample {i} was trained twice")
            self._trained.append(i)
            if not (self._unscored or self._expected.size) and sample.prompt.tokens[1:]:
                row, known = sample.prompt.tokens[1], self._expected.row(i)
                self._true("I10", row == known, f"prompt {i} has row {row}, expected {known}")
            lag = version - sample.admitted_version
            self.lag = max(self.lag, lag)
            self._true("I3", lag <= bound, f"sample {i} has lag {lag}, the bound is {bound}")
            scores = {t.score.value for t in sample.trajectories if t.score is not None}
            equal = self._filters and len(scores) == 1
            self._true("I5", not equal, f"sample {i} has equal outcomes and is trained")
            for k, trajectory in enumerate(sample.trajectories):
                self._trajectory(i, k, trajectory.versions, version, bound)
                in_windows = self._expected.size
                expected = self._expected
                tokens = expected.window(sample.prompt) if in_windows else expected.tokens(i, k)
                same = trajectory.tokens.tolist() == tokens
                self._true("I5", same, f"trajectory {i}/{k} has other tokens than it should")
            if self._expected.size:
                self._window(sample)
        self._steps += samples

    def _window(self, sample: Sample) -> None:
        """Check that a sample continues what the weights were trained on, and nothing else."""
        prompt, before = sample.prompt, sample.prompt.continues
        own = prompt_at(prompt.in_stream).tokens
        if before is not None:
            earlier = [self._samples[i] for i in self._trained[:-1] if i in self._samples]
            earlier = [one for one in earlier if one.prompt.first == before.first]
            so_far = joined(one.trajectories[0].tokens for one in earlier)
            self._true("I11", len(earlier) == before.number, f"{prompt.index} lost a window")
            self._true("I11", all(one.goes_on for one in earlier), "a response ended before")
            self._true("I11", prompt.response_before == so_far, f"{prompt.index} lost tokens")
            values = [float(token) for token in so_far]
            self._true("I11", [*before.values] == values, f"{prompt.index} has other values")
            own += so_far
        self._true("I11", prompt.tokens == own, f"sample {prompt.index} has another prompt")
        drawn = sum(len(t.tokens) for t in sample.trajectories)
        goes_on = drawn == self._expected.size < self._expected.left(prompt)
        self._true("I11", sample.goes_on == goes_on, f"{prompt.index} ended elsewhere")
        ended = all(t.score is not None for t in sample.trajectories)
        self._true("I11", ended != sample.goes_on, f"the score of {prompt.index} is early or lost")
        self._samples[prompt.index] = sample

    def _trajectory(
        self, i: int, k: int, versions: Sequence[int], version: int, bound: int
    ) -> None:
        ordered = list(versions) == sorted(versions)
        self._true("I2", ordered, f"trajectory {i}/{k} goes back in versions: {versions}")
        if versions:
            lag = version - versions[0]
            self._true("I3", 0 <= lag <= bound, f"trajectory {i}/{k} has a token of lag {lag}")
        if self._schedule.on_sync is OnSync.DRAIN:
            one = len(set(versions)) <= 1
            self._true("I2", one, f"trajectory {i}/{k} spans {versions} in drain mode")

    def sealed(self, version: int, lineage: Lineage) -> None:
        """Note the weights that the trainer sends as `version`."""
        self._weights.setdefault(version, checksum(lineage))

    def serves(self, name: str, version: int, weights: int) -> None:
        """Check the weights that a replica serves with."""
        known = self._weights.get(version)
        wrong = f"{name} serves version {version}, which nobody sent"
        self._true("I2", known is not None, wrong)
        wrong = f"{name} serves other weights as version {version}"
        self._true("I2", weights == known, wrong)

    def _publish(self, event: Event) -> None:
        version = event.facts["version"]
        follows = version == self._published + 1
        self._true("I2", follows, f"version {version} after {self._published}")
        self._published = version
        self._agree_on_slots()
        for name in self._stale:
            self._stale[name] += 1
            idle = self._stale[name] > 1
            self._true("I6", not idle, f"{name} runs again, and does not serve after two versions")
        ids = event.facts["ids"]
        if len(ids) < self._schedule.window and self._ledger.remaining():
            self.early_syncs += 1

    def _request(self, event: Event) -> None:
        key = event.track, event.key
        if event.phase == "begin":
            self._begun[key] = self._ledger.version
            i = event.key.partition("/")[0]
            if i.isdecimal() and (known := self._durable.get(int(i))) is not None:
                # After a resume, a sample may be admitted before or after another version, and
                # then a window of another response has its number.
                prompt = dict(self._ledger.snapshot().slots)[int(i)].prompt
                again = prompt_checksum(prompt.tokens) == known[1]
                text = f"sample {i} was finished and synced, and is drawn again"
                self._true("I8", not again, text)
            return
        live = self._begun.pop(key, -1)
        versions = [version for version, _ in event.facts.get("versions", ())]
        if versions:
            text = f"{event.track} drew {event.key} with versions {versions}, live was {live}"
            self._true("I2", versions[0] >= live, text)
            self._true("I2", versions[-1] <= self._ledger.version + 1, text)

    def _row(self, event: Event) -> None:
        """Compute the figures of a version's row again."""
        row, version = event.facts["row"], int(event.key)
        if (size := int(row["train/samples"])) and size <= len(self._steps):
            mine, self._steps = self._steps[:size], self._steps[size:]
            values = [t.score.value for s in mine for t in s.trajectories if t.score is not None]
            if values:
                self._near("reward/mean", row, sum(values) / len(values))
            else:
                self._true("I6", "reward/mean" not in row, "a reward without a score")
        dropped, kept = self._equal.pop(version - 1, 0), self._finished.pop(version - 1, 0)
        if self._filters:
            share = dropped / max(1, dropped + kept)
            self._near("filter_groups/drop_share", row, share)

    def _near(self, name: str, row: dict[str, float], value: float) -> None:
        said = row.get(name, float("nan"))
        self._true("I5", abs(said - value) < 1e-9, f"{name} is {said}, expected {value}")

    def _wrote(self, event: Event) -> None:
        if "folder" in event.facts:  # A save that fails has none.
            self._written = int(event.key)

    def replica(self, change: Change, faults: Counter[str]) -> None:
        """Check the move of a replica. `faults` has the faults of each that may cost it."""
        name = f"rollout-{change.replica}"
        self._stale.pop(name, None)
        if change.to is ReplicaState.STALE:
            self._stale[name] = 0
        elif change.to in (ReplicaState.LOST, ReplicaState.RETIRED):
            self._lost[name] += 1
            explained = self._lost[name] <= faults[name]
            self._true("I6", explained, f"{name} was lost without a fault: {change.why}")

    def saved(self) -> None:
        """Check that an attempt that ends without an error has saved its last version."""
        version = self._ledger.version
        text = f"the attempt ends at version {version}, and saved {self._written}"
        self._true("I7", self._written == version, text)

    def complete(self, lineage: Lineage, *, drops: bool) -> None:
        """Check a run that says it is complete. `drops` says whether rewards failed."""
        trained, limit = set(lineage), self._ledger.limit
        self._true("I1", len(trained) == len(lineage), "the weights have a sample twice")
        self._true("I1", len(lineage) == limit, f"{len(lineage)} samples of {limit} are trained")
        self._true("I1", not self._live, f"slots {self._live} are left at the end")
        missing = set(range(self._next)) - trained - self._ever_dropped
        self._true("I1", not missing, f"nothing happened to {missing}")
        last = {self._samples[i].prompt.first: i for i in self._trained if i in self._samples}
        going_on = sum(self._samples[i].goes_on for i in last.values())
        if not drops and len(lineage) == len(self._samples.keys() & trained):
            resting = self._ledger.resting
            self._true("I11", going_on == resting, f"{going_on} responses go on, {resting} rest")
        if self._schedule.lookahead == 1 and not drops:
            expected = self._expected.lineage()
            self._true("I5", lineage == expected, f"trained {lineage}, expected {expected}")

    @staticmethod
    def _true(name: str, fact: bool, text: str) -> None:
        if not fact:
            raise Violation(f"{name}: {text}")

    _ACTS: ClassVar[dict[tuple[str, str], Callable[[Checks, Event], None]]] = {
        ("trainer", "stepped"): _stepped,
        ("run", "published"): _publish,
        ("run", "row"): _row,
        ("checkpoint", "write"): _wrote,
    }
