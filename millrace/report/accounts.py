"""The accounts of a run: every token in one bucket, every second of a device in one state.

| bucket | the tokens of |
|---|---|
| trained | trajectories whose version is live, without the next two |
| rejected | the same, where an off-policy correction removed the token from the loss |
| filtered | the same, where overlong_filtering removed the token from the loss |
| dead | turns of agents that nobody received, or that another draw replaced |
| cancelled | requests that were cancelled, by an agent or with a failed sample |
| baseline | greedy responses, whose scores are a baseline (remax) |
| dropped/REASON | samples that were dropped |
| evaluated | validations, and proofs of the engines |
| regenerated | requests and trajectories that a stop threw away; the resumed run draws them again |
| lost | an attempt that was killed, after the checkpoint, that no journal had |
| held | samples in a slot, and requests that run |

| track | states |
|---|---|
| trainer | the parts of the trainer's time (observe/timing.py) |
| a replica | generate, validate, and the states of an idle replica |
| shared devices | the trainer's parts in its turn, and a replica's states otherwise |

| idle replica | waits for |
|---|---|
| sync | the end of a pause: a sync, a save, or running trajectories in drain mode |
| wait_trajectories | trajectories on other replicas; their samples have the slots |
| wait_rewards | rewards; their samples have the slots |
| wait_teachers | teachers outside of the trainer alone; their samples have the slots |
| wait_tools | tools and environments of sessions; their samples have the slots |
| wait_trainer | the trainer; READY and TAKEN samples have the slots |
| wait_sync | the next version; trained samples have the slots |
| tail | the end of the run: every sample that it needs is admitted |
| other | none of these: the run starts, a slot is free, or all replicas start anew |

All replicas that are idle at a moment wait for the same. In a trace this state has a track of its own.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from millrace.observe.timing import ActorClock, Integral, Seconds, StateClock, split
from millrace.ports import RolloutStats
from millrace.schedule.ledger import LedgerSnapshot, Slot, State
from millrace.schedule.schedule import Schedule
from millrace.waits.registry import OTHER, Event

PREFIX = "tokens/"
"""The buckets have this prefix among the counts of a checkpoint."""

VALIDATION = "val/"
"""The sessions of a validation have this prefix."""


class TokenAccount:
    """A watcher. It counts the tokens of every request until their sample leaves its slot."""

    names = frozenset({"request", "stats", "dropped", "stepped", "published", "recalled"})

    def __init__(
        self,
        counts: Mapping[str, float] | None = None,
        slots: Iterable[tuple[int, Slot]] = (),
        generated: int = 0,
    ) -> None:
        """Continue the account of a checkpoint.

        `counts` has its counts, `slots` its samples. `generated` is the total that earlier attempts
        have recorded. What they drew after the checkpoint is lost.
        """
        self.buckets: Counter[str] = Counter()
        for name, count in (counts or {}).items():
            if name.startswith(PREFIX):
                self.buckets[name.removeprefix(PREFIX)] = int(count)
        self._in_slots = {sample_id: tokens_of_slot(slot) for sample_id, slot in slots}
        self._dropped: dict[int, tuple[str, int]] = {}
        """Reason and tokens of every sample that was dropped since the last version."""
        self._steps: deque[tuple[int, Counter[str]]] = deque()
        """The first sample of each step that is not live, and the step's tokens by bucket."""
        self._start: dict[str, RolloutStats] = {}
        self._now: dict[str, RolloutStats] = {}
        known = self.buckets.total() + sum(self._in_slots.values())
        self.buckets["lost"] += max(0, generated - known)
        self._earlier = max(generated, known)
        self._returned = self._cancelled = 0
        """Tokens of this attempt that a request returned, and those of cancelled requests."""

    def __call__(self, event: Event) -> None:
        if event.name == "request":
            if event.phase == "begin":
                return
            tokens, sample = event.facts.get("tokens", 0), event.key.partition("/")[0]
            self._returned += tokens
            if event.key.startswith(VALIDATION):
                self.buckets["evaluated"] += tokens
            else:
                self._in_slots[int(sample)] = self._in_slots.get(int(sample), 0) + tokens
        elif event.name == "stats":
            new: RolloutStats = event.facts["stats"]
            self._start.setdefault(event.track, new)
            known = self._now.get(event.track, new)
            self.buckets["cancelled"] += new.cancelled_tokens - known.cancelled_tokens
            self._cancelled += new.cancelled_tokens - known.cancelled_tokens
            self._now[event.track] = new
        elif event.name == "dropped":
            sample_id = int(event.key)
            reason, tokens = event.facts["reason"], self._in_slots.pop(sample_id, 0)
            self._dropped[sample_id] = reason, tokens
            self.buckets[f"dropped/{reason}"] += tokens
        elif event.name == "recalled":
            # What the journal has of a sample. It may be more than earlier lines recorded.
            sample_id, tokens = int(event.key), event.facts["tokens"]
            found = max(0, tokens - self._in_slots.get(sample_id, 0))
            self._in_slots[sample_id] = self._in_slots.get(sample_id, 0) + found
            recorded = min(found, self.buckets["lost"])
            self.buckets["lost"] -= recorded
            self._earlier += found - recorded
        elif event.name == "stepped":
            self._add_step(event)
        elif event.name == "published":
            self._publish(set(event.facts["ids"]))

    def _add_step(self, event: Event) -> None:
        samples, totals = event.facts["samples"], event.facts["report"].totals
        step: Counter[str] = Counter()
        for bucket in ("rejected", "filtered"):
            step[bucket] = int(totals.get(f"train/{bucket}_tokens", 0))
        for sample in samples:
            step["trained"] += sum(t.num_policy_tokens for t in sample.trajectories)
            step["dead"] += sum(t.dead_tokens for t in sample.trajectories)
            if sample.greedy is not None:
                step["baseline"] += sample.greedy.num_policy_tokens
                step["dead"] += sample.greedy.dead_tokens
        step["trained"] -= step["rejected"] + step["filtered"]
        self._steps.append((samples[0].prompt.index, step))

    def _publish(self, ids: set[int]) -> None:
        drawn = sum(self._in_slots.pop(sample_id, 0) for sample_id in ids)
        live: Counter[str] = Counter()
        # With overlap_sync, the first steps of the next version come before this event.
        while self._steps and self._steps[0][0] in ids:
            live += self._steps.popleft()[1]
        self.buckets += live
        self.buckets["regenerated"] += drawn - live.total()
        self._dropped.clear()

    @property
    def generated(self) -> int:
        """Return the tokens that were drawn so far, over all attempts.

        A token counts when its engine reports it or when its request returns.
        """
        reported = sum(now.tokens - self._start[track].tokens for track, now in self._now.items())
        return self._earlier + max(reported, self._returned + self._cancelled)

    def read(self) -> int:
        """Return the tokens that this attempt has read into KV caches."""
        last, first = self._now.values(), (self._start[track] for track in self._now)
        return sum(s.prefill_tokens for s in last) - sum(s.prefill_tokens for s in first)

    def totals(self) -> dict[str, int]:
        """Return every bucket that has tokens. They add up to `generated`."""
        held = self.generated - self.buckets.total()
        return dict(self.buckets + Counter(held=held))

    def counts(self, snapshot: LedgerSnapshot) -> dict[str, float]:
        """Return the counts for the checkpoint of `snapshot`.

        The samples of its slots are held there, also those that were dropped since then.
        """
        buckets = self._buckets_at(snapshot)
        return {f"{PREFIX}{name}": float(count) for name, count in buckets.items()}

    def _buckets_at(self, snapshot: LedgerSnapshot) -> Counter[str]:
        """Return the buckets without the samples that were dropped after `snapshot`."""
        slots, buckets = dict(snapshot.slots), Counter(self.buckets)
        for sample_id, (reason, tokens) in self._dropped.items():
            if sample_id in slots or sample_id >= snapshot.admitted:
                buckets[f"dropped/{reason}"] -= tokens
        return buckets

    def end(self, snapshot: LedgerSnapshot) -> None:
        """Settle the account of an attempt that ended in order. No request runs any more.

        The last checkpoint has the samples of `snapshot`. All other tokens are thrown away.
        """
        self.buckets = self._buckets_at(snapshot)
        self._dropped.clear()
        held = sum(tokens_of_slot(slot) for _, slot in snapshot.slots)
        self.buckets["regenerated"] += self.generated - self.buckets.total() - held


def tokens_of_slot(slot: Slot) -> int:
    """Return the policy's tokens that a checkpoint has of one slot."""
    trajectories = slot.progress
    if slot.sample is not None:
        trajectories = slot.sample.trajectories
        trajectories += () if slot.sample.greedy is None else (slot.sample.greedy,)
    return sum(t.num_policy_tokens + t.dead_tokens for t in trajectories)


_ROLLOUTS_TURN = ("wait_samples", "wait_prev_gen")
"""The parts of the trainer's time in which the rollouts have shared devices."""

IDLE, LEFT, NONE_IDLE = "idle", "left", "none_idle"
"""Further states of a replica, and of the track of idle replicas."""
IDLE_TRACK = "rollouts"
"""The track whose state is that of all idle replicas."""

_OF_TRAINER = (State.READY, State.TAKEN)
_OF_SYNC = (State.TRAINED, State.SEALED)


class FlowAccount:
    """A watcher of samples, requests, rewards and teachers. Validations do not count."""

    names = frozenset({"request", "score", "log_probs", "retired", "dropped", *map(str, State)})

    def __init__(self, now: float) -> None:
        self.slots = {state: Integral(now) for state in State}
        """Sample-seconds by state, and the number of samples in it."""
        self.drawing, self.scoring = Integral(now), Integral(now)
        """Seconds of all requests, and of all calls of the reward."""
        self.reading = Integral(now)
        """Seconds of all calls of teachers outside of the trainer."""
        self.any_score = Integral(now)
        """Seconds with at least one call of the reward."""
        self.requests = self.tokens = self.scores = self.retired = 0
        """Requests and their tokens, calls of the reward, and samples that have come to an end."""
        self._states: dict[str, State] = {}

    def __call__(self, event: Event) -> None:
        now, track, name, phase, key, facts = event
        by = 1 if phase == "begin" else -1
        if track == "samples":
            self._move(event)
        elif key.startswith(VALIDATION):
            return
        elif name == "request":
            self.drawing.change(now, by)
            if phase == "end":
                self.requests += 1
                self.tokens += facts.get("tokens", 0)
        elif name == "log_probs":
            self.reading.change(now, by)
        elif name == "score":
            self.scoring.change(now, by)
            if (self.scoring.level > 0) != self.any_score.level:
                self.any_score.change(now, 1 if self.scoring.level > 0 else -1)
            self.scores += phase == "end"

    def _move(self, event: Event) -> None:
        ends = event.name in ("retired", "dropped")
        if not ends and event.name not in self.slots:
            return
        if (before := self._states.pop(event.key, None)) is not None:
            self.slots[before].change(event.time, -1)
        if ends:
            self.retired += event.name == "retired"
        else:
            self._states[event.key] = state = State(event.name)
            self.slots[state].change(event.time, 1)

    def count(self, *states: State) -> int:
        """Return the number of samples in these states."""
        return sum(self.slots[state].level for state in states)


class _Replica:
    """One replica: its requests, and the seconds of its states."""

    def __init__(self, now: float) -> None:
        self.work = IDLE
        """`generate`, `validate` or `idle`."""
        self.clock = StateClock(now)
        self._requests = {"generate": 0, "validate": 0}

    def change(self, event: Event) -> bool:
        """Count the begin or the end of a request. Return whether that changes the work."""
        requests = self._requests
        requests["validate" if event.key.startswith(VALIDATION) else "generate"] += (
            1 if event.phase == "begin" else -1
        )
        before, self.work = self.work, IDLE
        if requests["generate"] or requests["validate"]:
            self.work = "generate" if requests["generate"] else "validate"
            self.clock.switch(event.time, self.work)
        return self.work != before


class DeviceAccount:
    """A watcher of every device. It comes after `flow`, which watches the same events."""

    def __init__(
        self,
        now: float,
        schedule: Schedule,
        flow: FlowAccount,
        *,
        trainers: int,
        replicas: Mapping[str, int],
        limit: int | None = None,
        retired: int = 0,
        tools: bool = False,
    ) -> None:
        """`trainers` is the number of train ranks. `replicas` has each replica's devices, by track.

        `limit` is the number of samples that the run trains. `retired` of them are trained already.
        `tools` says whether sessions wait for tools and environments.
        """
        self._schedule, self._flow = schedule, flow
        self._trainers, self._devices = trainers, dict(replicas)
        self._limit, self._retired, self._tools = limit, retired, tools
        self._trainer, self._steps = ActorClock(now, "trainer"), Seconds()
        self._replicas = {track: _Replica(now) for track in replicas}
        self._left: dict[str, Seconds] = {}
        """The seconds of replicas until they left the run."""
        self._pauses = 0
        self._lost: set[str] = set()
        """The replicas that do not run."""
        self._idle_shown = OTHER
        self._tell: Callable[[Event], None] = lambda event: None

    def tell(self, now: float, tell: Callable[[Event], None]) -> None:
        """Give each change of a replica's state to `tell` from now on, and the states of now.

        The state of all idle replicas is that of the track `rollouts`.
        """
        self._tell = tell
        for event in self.states(now):
            tell(event)

    def states(self, now: float) -> list[Event]:
        """Return the states of now as events: those of the trainer and of the replicas."""
        shown = {track: replica.work for track, replica in self._replicas.items()}
        shown = {"trainer": self._trainer.state} | shown | {IDLE_TRACK: self._idle_shown}
        return [Event(now, track, state, "state") for track, state in shown.items()]

    def _show(self, now: float, track: str, state: str) -> None:
        self._tell(Event(now, track, state, "state"))

    def __call__(self, event: Event) -> None:
        name, track = event.name, event.track
        if name == "request":
            if track not in self._replicas and event.phase == "begin":
                self._join(event)  # It joined before the run had its watch.
            if (replica := self._replicas.get(track)) is not None:
                if not replica.change(event):
                    return  # Requests go on, so idle replicas wait for the same as before.
                self._show(event.time, track, replica.work)
        elif name == "score":
            if not self._tools and not self._flow.reading.level:
                return  # Else it may change what idle replicas wait for.
        elif name == "log_probs" or track == "samples":
            pass  # They may change the same.
        elif track == "trainer" and (event.phase == "state" or name == "relabelled"):
            self._trainer(event)
        elif name == "replica_stale" and track not in self._replicas:
            self._join(event)
        elif name == "replica_left" and track in self._replicas:  # its seconds stay
            spent = self._replicas.pop(track).clock.until(event.time)
            self._left[track] = self._left.get(track, Seconds()) + spent
            self._lost.discard(track)
            self._show(event.time, track, LEFT)
        elif name in ("replica_lost", "replica_retired") and track in self._replicas:
            self._lost.add(track)
        elif name == "replica_live":
            self._lost.discard(track)
        elif name == "stepped":
            self._steps.update(event.facts["report"].seconds)
        elif name == "pause":
            self._pauses += 1 if event.phase == "begin" else -1
        idle = [replica for replica in self._replicas.values() if replica.work == IDLE]
        state = self._idle_state() if idle else NONE_IDLE
        for replica in idle:
            replica.clock.switch(event.time, state)
        if state != self._idle_shown:
            self._idle_shown = state
            self._show(event.time, IDLE_TRACK, state)

    def _join(self, event: Event) -> None:
        """Count the seconds of a replica from now on."""
        self._devices.setdefault(event.track, next(iter(self._devices.values()), 1))
        self._replicas[event.track] = _Replica(event.time)
        self._show(event.time, event.track, IDLE)

    def _idle_state(self) -> str:
        """Return the state of every replica that has no request."""
        flow, part = self._flow, self._trainer.state
        if self._schedule.colocated and part not in _ROLLOUTS_TURN:
            return part
        if self._pauses:
            return "sync"
        occupied = flow.count(*State)
        if self._limit is not None and self._retired + flow.retired + occupied >= self._limit:
            return "tail"
        if occupied < self._schedule.capacity:
            return "other"
        trainer, sync = flow.count(*_OF_TRAINER), flow.count(*_OF_SYNC)
        if max(trainer, sync) >= occupied - trainer - sync:
            return "wait_trainer" if trainer >= sync else "wait_sync"
        if len(self._lost) == len(self._replicas):
            return "other"  # They start anew.
        if flow.drawing.level:
            return "wait_trajectories"
        if flow.reading.level and not flow.scoring.level:
            return "wait_teachers"
        return "wait_tools" if self._tools and not flow.scoring.level else "wait_rewards"

    def seconds(self, now: float) -> dict[str, tuple[int, Seconds]]:
        """Return the number of devices and the seconds of one of them by state, by track.

        On shared devices the trainer's parts are among the states of the tracks `shared-0`, ...
        """
        tracks = {
            track: (self._devices[track], replica.clock.until(now))
            for track, replica in self._replicas.items()
        }
        for track, seconds in self._left.items():
            more = tracks[track][1] if track in tracks else Seconds()
            tracks[track] = self._devices[track], seconds + more
        if self._schedule.colocated:
            tracks = {f"shared-{i}": found for i, found in enumerate(tracks.values())}
            trains = tracks
        else:
            trains = {"trainer": (self._trainers, self._trainer.until(now))}
        for _, seconds in trains.values():
            seconds.update(split(seconds.pop("train", 0.0), self._steps))
        return {track: (count, +seconds) for track, (count, seconds) in (trains | tracks).items()}


WIDTH = math.log(1.1)
"""Loads that differ by a tenth are in different bins."""

WAIT = "full"
"""The bin of the time in which requests wait for a slot."""


@dataclass(slots=True)
class _Engine:
    """The requests of one engine, and its decode slots, since a time."""

    since: float
    level: int = 0
    slots: int = 0


class LoadAccount:
    """A watcher of requests: how long each engine drew with how many of them.

    It shows whether more requests make the decode step longer: versions have different loads, so
    their tokens show it. At most as many requests draw as the engine has decode slots. While all
    slots are busy, other requests wait, and a new one begins in most steps. Some engines need much
    longer for a step that also reads a prompt, so that time has a bin of its own.
    """

    names = frozenset({"stats", "request"})

    def __init__(self) -> None:
        self._full = [0.0, 0.0]
        self.bins: dict[str, list[float]] = {WAIT: self._full}
        self._engines: dict[str, _Engine] = {}
        self._bins: dict[int, list[float]] = {}
        """The bin of each load that occurred. A logarithm for each event takes too long."""

    def __call__(self, event: Event) -> None:
        now = event.time
        engine = self._engines.get(event.track)
        if engine is None:
            engine = self._engines[event.track] = _Engine(now)
        waits = engine.level > engine.slots
        load = engine.slots if waits else engine.level
        seconds, engine.since = now - engine.since, now
        if load > 0 and seconds > 0:
            if (bin_ := self._full if waits else self._bins.get(load)) is None:
                name = str(int(math.log(load) / WIDTH))
                bin_ = self._bins[load] = self.bins.setdefault(name, [0.0, 0.0])
            bin_[0] += seconds
            bin_[1] += seconds * load
        if event.name == "request":
            engine.level += 1 if event.phase == "begin" else -1
        else:
            engine.slots = event.facts["stats"].slots
