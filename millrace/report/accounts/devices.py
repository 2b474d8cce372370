"""The account of time: every second of every device has one state, and samples wait in states.

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

from collections.abc import Callable, Mapping

from millrace.observe.timing import ActorClock, Integral, Seconds, StateClock, split
from millrace.report.accounts.tokens import VALIDATION
from millrace.schedule.ledger import State
from millrace.schedule.schedule import Schedule
from millrace.waits.registry import OTHER
from millrace.waits.stream import Event

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

    @property
    def occupied(self) -> int:
        """The number of samples in a slot."""
        return len(self._states)

    def count(self, one: State, other: State) -> int:
        """Return the number of samples in one of two states."""
        return self.slots[one].level + self.slots[other].level


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
        occupied = flow.occupied
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
