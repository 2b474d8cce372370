"""One attempt at a run: the driver's code over simulated workers, and the faults that hit it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from millrace.errors import MillraceError, NoDevices, RewardError, WorkerError
from millrace.extras.faults.checks import ROWS, Violation, prompt_at, score_of, text_of
from millrace.extras.faults.disk import Died, View
from millrace.extras.faults.engines import (
    FaultyRollouts,
    FaultyTrainer,
    Ranks,
    Receiver,
    RolloutRoot,
    Sender,
    TrainerRoot,
)
from millrace.extras.faults.network import Link, SimWorker
from millrace.extras.faults.scenario import DEADLINE_S, HEARTBEAT_S, SYNC_TIMEOUT_S, Fault
from millrace.extras.faults.state import World
from millrace.extras.faults.wire import Wire
from millrace.observe.progress import Progress, State
from millrace.persist.history import History, audit
from millrace.pipeline.checkpoint import Checkpoints, read_ledger
from millrace.pipeline.journal_file import Batch
from millrace.pipeline.record import RunRecord
from millrace.process.rpc import Limit, Peer
from millrace.replicas.roster import Change, ReplicaState
from millrace.run.engines import Engines, engines_of
from millrace.run.evaluate import make_validator
from millrace.run.folder import RunDir
from millrace.run.session import Session
from millrace.run.signals import StopRequest
from millrace.run.start import start_state
from millrace.run.train import train_to_end
from millrace.schedule.ledger import Ledger
from millrace.types import Completion, Prompt, Score
from millrace.waits.answer import ProcessStatus, Pulse, answer_of
from millrace.waits.registry import Event, Registry, current, within

BACK_S = 7.0
"""How long a node may be back until the worker of its replica begins to start."""
EVENTS = 20_000
"""The most events of an attempt. Tasks that never wait pass it."""


class NoView:
    """Progress that nobody looks at."""

    def open(self) -> None: ...

    def update(self, state: State, event: str) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Prompts:
    """The problems of a simulated run."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Prompt:
        return prompt_at(index)

    def where(self, index: int) -> str:
        return f"row {index}"

    def rows_at(self, index: int) -> int:
        return ROWS

    def prompt_of(self, index: int, row: int) -> Prompt:
        return prompt_at(index, row)

    where_of = where


class Problems:
    """The problems and the tokenizer of a simulated run."""

    def __init__(self) -> None:
        self.train = Prompts()
        self.val = [prompt_at(10_000 + i) for i in range(3)]
        self.chat = self

    @staticmethod
    def decode(tokens: Any) -> str:
        return text_of(tokens)


class Reward:
    """The reward of a simulated run. It can fail and hang."""

    whole_group = False

    def __init__(self, seconds: float) -> None:
        self.failures = 0
        """How many of the next calls fail."""
        self.hangs_s = 0.0
        """The time that the next call takes before it fails at its deadline."""
        self.failed = False
        self._seconds = seconds

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        hangs, self.hangs_s = self.hangs_s, 0.0
        await asyncio.sleep(hangs or self._seconds)
        if hangs or self.failures:
            self.failures -= not hangs
            self.failed = True
            raise RewardError("timeout" if hangs else "raised", "a simulated fault")
        return [Score(score_of(prompt, one.text)) for one in completions]

    def take_figures(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        return None


class Attempt:
    """An attempt at the run of a world."""

    def __init__(
        self, world: World, number: int, acts: Mapping[str, Callable[[Attempt, Fault], None]]
    ) -> None:
        """`acts` has what each kind of fault does."""
        self.world, self.number = world, number
        self._acts = acts
        self.view = View(world.disk)
        self.died = asyncio.Event()
        self.stopped = False
        self.died_at = 0.0
        """When the last fault fired that may end the attempt."""
        self.violation: Violation | None = None
        self.fired: list[Fault] = []
        self.deadly: list[Fault] = []
        """The fired faults that may end the attempt."""
        self.recovers: Callable[[], bool] = lambda: False
        """Returns whether lost ranks of the trainer must be recovered now."""
        self.reward = Reward(world.scenario.cost.reward_s)
        self.stop = StopRequest()
        self.workers: dict[str, SimWorker] = {}
        self._old: list[SimWorker] = []
        """Workers that were lost."""
        self.wires: list[Wire] = []
        """Where the replicas meet the ranks, one for each incarnation of the trainer."""
        self._waiting = [f for f in world.scenario.faults if f.attempt == number]
        self._targets = {f.target for f in self._waiting if f.trigger.on != "time"}
        self._counts: dict[str, int] = {}
        self._moments: dict[str, list[Fault]] = {}
        """The faults that each count may fire."""
        for fault in self._waiting:
            on = f"{fault.target}/{fault.trigger.on}" if fault.target else fault.trigger.on
            self._moments.setdefault(on, []).append(fault)
        self._timers: list[asyncio.TimerHandle] = []
        self._engines: Engines | None = None
        """The engines while they are supervised."""
        self._gone: dict[str, float] = {}
        """When the node of each replica is back."""

    async def run(self) -> bool:
        """Run the attempt as `millrace train` does. Return whether the run is complete."""
        self._pulse = Pulse(Registry("driver", asyncio.get_running_loop().time))
        with within(self._pulse.registry.root):
            return await self._run()

    def answers(self) -> list[ProcessStatus]:
        """Return what all processes say about their waits, as `millrace why` gathers it."""
        workers = [worker.answer() for worker in self.workers.values()]
        return [answer_of(self._pulse, stacks=False), *workers]

    async def _run(self) -> bool:
        world = self.world
        self._start_workers()
        self._arm()
        folder = cast("Any", world.path(self.view))
        try:
            checkpoint, damaged = Checkpoints(folder, keep=1).newest()
            for why in damaged:
                world.tell(f"skipped a damaged checkpoint: {why}")
            origin = f"resumes from {checkpoint.name}" if checkpoint else "starts"
            world.tell(f"attempt {self.number + 1} {origin}")
            session = await self._session(RunDir(folder, checkpoint))
            ledger = await start_state(session)
            snapshot = read_ledger(checkpoint) if checkpoint else None
            lineage = self._trainers()[0].lineage
            self._check(world.checks.begin, ledger, snapshot, lineage)
            engines = session.engines
            with engines.pool.roster.subscribe(self._replica):
                async with engines.keeper.supervise():
                    engines.keeper.begin(engines.scaler.follow(), "scaling")
                    self._engines = engines
                    try:
                        return await self._train(session, ledger)
                    finally:
                        self._engines = None
        finally:
            for worker in [*self.workers.values(), *self._old]:
                await worker.close()

    async def _train(self, s: Session, ledger: Ledger) -> bool:
        """Run the loops with their record, as `run_training` does."""
        s.checkpoints.supersede(ledger.version)
        history, c = History(s.run.path, ledger.totals()), s.config.trainer
        async with asyncio.TaskGroup() as tasks:
            record = RunRecord(
                history=history,
                checkpoints=s.checkpoints,
                engine=s.engines.train,
                validator=make_validator(s, s.engines.pool),
                sinks=(),
                progress=s.progress,
                save_freq=c.save_freq,
                async_save=c.async_save,
                test_freq=s.config.test_freq,
                guard=None,
                counts=(counts := s.counts),
                deadline_s=c.wait_deadline_s,
                tasks=tasks,
            )
            async with s.journal(ledger, history.attempt, tasks, self._synced) as kept:
                with current().registry.watched_by(self._see, record):
                    loops = train_to_end(s, ledger, self.stop, record, {}, kept, counts)
                    complete, *_ = await loops
        history.end(ledger.totals(), complete)
        self._check(self._after, s, ledger, record, complete)
        return complete

    def _synced(self, batch: Batch) -> None:
        if not self.view.dead:
            self.world.checks.synced(batch)

    def _after(self, s: Session, ledger: Ledger, record: RunRecord, complete: bool) -> None:
        """Check the state of an attempt that ended without an error."""
        found = audit(s.run.path)
        if found.lost or found.trained_twice:
            raise Violation(f"I1: the history says {found}")
        silent = [f for f in self.fired if f.seconds and f.target.startswith("trainer")]
        faults = sum(f.takes_ranks for f in self.fired) + len(silent) // 2  # Two add up.
        if (losses := s.engines.train.losses) > faults:
            raise Violation(f"I6: the trainer was lost {losses} times by {faults} faults")
        self.world.checks.saved()
        if complete:
            lineage = self._engine_of(s.engines.train.peers[0]).lineage
            self.world.checks.complete(lineage, drops=self.world.drops)
            if record.last is None or record.last.version != ledger.version:
                raise Violation("I5: the final weights were not validated")

    async def _session(self, run: RunDir) -> Session:
        scenario = self.world.scenario
        peers = {name: worker.peer for name, worker in self.workers.items()}
        trainers = [peer for name, peer in peers.items() if name.startswith("trainer")]
        rollouts = [peer for name, peer in peers.items() if name.startswith("rollout")]
        config = scenario.config
        engines = engines_of(
            config.sides, trainers, rollouts, restarts=True, starter=self, note=self.world.tell
        )
        await engines.sync.connect()
        self.recovers = lambda: bool(engines.train.able and config.trainer.save_freq)
        progress = Progress(NoView(), "simulated", scenario.mode, lambda: 0.0)
        problems, reward = cast("Any", Problems()), cast("Any", self.reward)
        return Session(config, run, problems, engines, reward, progress)

    def scale(self, more: int) -> None:
        """Ask for more or fewer replicas, as `millrace scale` does."""

        if (engines := self._engines) is None:
            return

        async def ask() -> None:
            try:
                await engines.scaler.scale(len(engines.pool.roster.members) + more)
            except MillraceError as error:
                self.world.tell(f"no other number of replicas: {error}")

        engines.keeper.begin(ask(), "scaling")

    def node_leaves(self, name: str, seconds: float) -> None:
        """Kill a replica. Its node comes back after `seconds`, and the replica soon after that."""
        loop = asyncio.get_running_loop()
        self._gone[name] = loop.time() + seconds
        self.workers[name].kill()
        back_s = seconds + BACK_S + self.world.scenario.start_s
        loop.call_later(back_s, self._back, int(name.removeprefix("rollout-")))

    def _back(self, replica: int) -> None:
        """Check that a replica whose node is back is in the run."""
        engines, scaled = self._engines, any("scale" in fault.kind for fault in self.fired)
        if engines is None or scaled:
            return
        out = engines.pool.roster.state(replica) is ReplicaState.LEFT
        if out and not self.view.dead:
            self.violation = self.violation or Violation(f"I6: rollout-{replica} never came back")
            self.kill()

    async def start(self, replica: int, started: Callable[[Peer], None]) -> Peer:
        """Start the worker of a lost replica anew."""
        await asyncio.sleep(self.world.scenario.start_s)
        if self.view.dead:
            raise WorkerError("the driver is dead")
        name = f"rollout-{replica}"
        if self._gone.get(name, 0.0) > asyncio.get_running_loop().time():
            raise NoDevices(f"the node of {name} is gone")
        self._old += [self.workers[name]] if name in self.workers else []
        self._start_replica(replica)
        return self.workers[name].peer

    async def start_ranks(self, started: Callable[[Peer], None]) -> list[Peer]:
        """Start all ranks of a lost trainer anew."""
        await asyncio.sleep(self.world.scenario.start_s)
        if self.view.dead:
            raise WorkerError("the driver is dead")
        self._old += self._ranks()
        self._start_ranks()
        for worker in self._ranks():
            started(worker.peer)
        return [worker.peer for worker in self._ranks()]

    def release(self, replica: int) -> None:
        """Do nothing: a simulated machine has room for every worker."""

    async def limit(self) -> Limit:
        """Return that there is no room for more while a node is gone."""
        gone = any(end > asyncio.get_running_loop().time() for end in self._gone.values())
        members = len(self._engines.pool.roster.members) if self._engines is not None else 0
        return Limit(members if gone else None, "a node is gone")

    async def meet(self, replica: int, peer: Peer) -> None:
        """Tell a replica at which wire it meets the present ranks."""
        await peer.call("connect", (len(self.wires) - 1,))

    async def end(self, peer: Peer) -> None:
        """End a worker, also if it stands still."""
        for worker in [*self.workers.values(), *self._old]:
            if worker.peer is peer:
                worker.kill()

    def _start_workers(self) -> None:
        self._start_ranks()
        for k in range(self.world.scenario.replicas):
            self._start_replica(k)

    def _start_ranks(self) -> None:
        scenario = self.world.scenario
        ranks = Ranks(scenario.ranks)
        wire = Wire(scenario.ranks, scenario.cost, SYNC_TIMEOUT_S)
        self.wires.append(wire)
        for rank in range(scenario.ranks):
            engine = FaultyTrainer(scenario.cost, rank, ranks, self.view, scenario.write_s)
            name = f"trainer-{rank}"
            sender = Sender(engine, wire, name, self._seals)
            self._start(name, TrainerRoot(engine, sender), wire)

    def _start_replica(self, k: int) -> None:
        name, scenario = f"rollout-{k}", self.world.scenario
        replica = FaultyRollouts(scenario.cost, scenario.slots, self._serves(name))
        root = RolloutRoot(replica, self.wires, name)
        self._start(name, root, root.receiver)

    def _start(self, name: str, root: Any, wire: Wire | Receiver) -> None:
        called = self._called if name in self._targets else None
        worker = SimWorker(name, root, Link(self.world.dice), DEADLINE_S, called)
        worker.on_death += [partial(wire.break_off, name), root.engine.end]
        worker.beat(HEARTBEAT_S)
        self.workers[name] = worker

    def _trainers(self) -> list[FaultyTrainer]:
        return [worker.root.engine for worker in self._ranks()]

    def _engine_of(self, peer: Peer) -> FaultyTrainer:
        """Return the engine of a rank. A complete run leaves new ranks behind in their recovery."""
        workers = [*self._ranks(), *self._old]
        return next(cast("FaultyTrainer", w.root.engine) for w in workers if w.peer is peer)

    def _ranks(self) -> list[SimWorker]:
        return [w for name, w in sorted(self.workers.items()) if name.startswith("trainer")]

    def _seals(self, version: int, lineage: list[int]) -> None:
        self._check(self.world.checks.sealed, version, lineage)

    def _serves(self, name: str) -> Any:
        def serves(version: int, weights: int) -> None:
            self._check(self.world.checks.serves, name, version, weights)

        return serves

    # -- checks

    def _replica(self, change: Change) -> None:
        if not self.view.dead:
            self.world.tell(f"rollout-{change.replica} is {change.to}  {change.why}".rstrip())
        faults = Counter(fault.target for fault in self.fired if fault.loses)
        self._check(self.world.checks.replica, change, faults)

    def _see(self, event: Event) -> None:
        if self.view.dead:
            raise Died
        self._check(self.world.checks.see, event)
        self._count("event")
        if self._counts["event"] > EVENTS:
            self._check(self._endless)

    def _endless(self) -> None:
        raise Violation(f"I6: {EVENTS} events did not end the attempt")

    def _check(self, check: Callable[..., None], *args: Any) -> None:
        """Run a check. A violation ends the world, also if the code under test hides it."""
        if self.view.dead:
            return
        try:
            check(*args)
        except Violation as violation:
            self.violation = self.violation or violation
            self.kill()
            raise Died from violation

    # -- faults

    def _arm(self) -> None:
        """Set the timers of this attempt's faults, and what counts changes of the disk."""
        loop = asyncio.get_running_loop()
        for fault in self._waiting:
            if fault.trigger.on == "time":
                self._timers.append(loop.call_later(fault.trigger.at, self._fire, fault))
        self.world.disk.before = self._changes

    def _changes(self, operation: str, path: str) -> None:
        self._count("disk")

    def _called(self, worker: str, method: str) -> None:
        self._count(f"{worker}/{method}")

    def _count(self, name: str) -> None:
        number = self._counts[name] = self._counts.get(name, 0) + 1
        for fault in self._moments.get(name, ()):
            if fault.trigger.at == number:
                self._fire(fault)

    def _fire(self, fault: Fault) -> None:
        if self.view.dead or fault not in self._waiting:
            return
        self._waiting.remove(fault)
        self.fired.append(fault)
        taken = sum(one.takes_ranks for one in self.fired)
        recovers = self.recovers() and taken <= self.world.scenario.config.trainer.max_restarts
        if not fault.survivable or (fault.takes_ranks and not recovers):
            self.deadly.append(fault)
            self.died_at = asyncio.get_running_loop().time()
        self.world.outcome.fired[fault.kind] += 1
        self.world.tell(f"FAULT {fault}")
        self._acts[fault.kind](self, fault)

    def expect_no_recovery(self) -> None:
        """Let the loss of ranks end the attempt: a run that stops has no time to recover them."""
        self.recovers = lambda: False
        self.deadly += [fault for fault in self.fired if fault.takes_ranks]
        self.died_at = asyncio.get_running_loop().time()

    def kill(self) -> None:
        """Kill the driver, and with it all workers."""
        self.view.dead = True
        for worker in self.workers.values():
            worker.kill()
        self.died.set()

    def abandon(self) -> None:
        """Let nothing of this attempt have an effect from now on."""
        self.view.dead = True
        for timer in self._timers:
            timer.cancel()
