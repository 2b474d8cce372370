"""`millrace train`: one run, from its start state to its end or to a stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from millrace.config import Config, GuardConfig, RolloutConfig
from millrace.errors import GapError
from millrace.observe import gap, trackers
from millrace.observe.guard import CAUSES, Guard
from millrace.observe.metrics import RunCounts
from millrace.observe.progress import Progress
from millrace.observe.sinks import make_sinks
from millrace.observe.trackers import About
from millrace.persist.history import History
from millrace.persist.run_reader import RunReader
from millrace.pipeline.checkpoint import read_manifest
from millrace.pipeline.journal import Journal
from millrace.pipeline.proof import Limits, Proof
from millrace.pipeline.record import RunRecord
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.validation import Result
from millrace.replicas.pool import RolloutPool
from millrace.replicas.roster import Change, Roster
from millrace.rollout.dynamic_sampling import DynamicSampling
from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.retry import RetryingReward
from millrace.rollout.sample import SampleRoller
from millrace.rollout.shaping import OverlongBuffer
from millrace.run import starts, supervised
from millrace.run.agents import limits_of
from millrace.run.callbacks import Callback, Callbacks
from millrace.run.evaluate import make_validator
from millrace.run.problems import user_metrics_of
from millrace.run.session import Session, open_session
from millrace.run.signals import StopRequest
from millrace.run.start import start_state
from millrace.schedule.ledger import Ledger
from millrace.sync.background import abandonable
from millrace.types import SamplingParams
from millrace.waits.registry import Watcher, acting, at, current, part

if TYPE_CHECKING:
    from millrace.report.record import EventRecorder

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    run_dir: Path
    mode: str
    versions: int
    optimizer_steps: int
    samples_trained: int
    train_seconds: float
    """Seconds from the first rollout to the last step, of this attempt."""
    first: Result | None
    """Validation of the start weights."""
    last: Result | None
    """Validation of the final weights."""
    complete: bool
    checkpoint: Path | None
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of start, warm-up and training."""
    report: Path | None = None
    """The run's report, if one was written."""
    advice: str = ""
    """What would make the run faster, or why nothing is known to."""


async def train(
    config: Config, progress: Progress, stop: StopRequest, callbacks: Sequence[Callback] = ()
) -> Outcome:
    """Run a new run, or the rest of a resumed one: prepare, warm up, train, validate."""
    folder = None
    try:
        async with open_session(config, progress) as s:
            started = time.perf_counter()
            ledger = await start_state(s)
            warm, folder = time.perf_counter(), s.run.path
            outcome = await run_training(s, ledger, stop, callbacks)
            outcome.timings.update(
                warm_up=warm - started if s.run.resume_from is None and config.sft.steps else 0.0,
                train=outcome.train_seconds,
            )
    finally:
        stop.detach()
        report = None
        if folder is not None and config.report.enable:
            report = await write_report(folder, progress)
    if report is None:  # the report has computed it
        progress.phase("computing the advice")
    return replace(outcome, report=report, advice=await unless_stopped(first_advice, folder) or "")


async def write_report(folder: Path, progress: Progress) -> Path | None:
    """Write the report of a run that has ended in whatever way. Return None if that fails."""
    progress.phase("computing the advice, and writing the report")
    try:
        from millrace.report.page.write import write_report as work

        if (written := await unless_stopped(work, [folder])) is None:
            progress.note(f"stopped before the report was written: `millrace report {folder}`")
        return written
    except Exception as error:  # noqa: BLE001 - a run does not fail because its report does
        progress.note(f"warning: there is no report: {type(error).__name__}: {error}")
        return None


async def unless_stopped(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Run `work` on a run that has ended, in a thread. Return None if a stop comes first.

    The stop ends only this wait. The run keeps its result or its error.
    """
    try:
        return await abandonable(work, *args, **kwargs)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        return None


def first_advice(folder: Path) -> str:
    """Return the first sentence of advice on a run, or why there is none."""
    try:
        from millrace.report.advice import advise

        return str(advise(RunReader(folder).read())[0])
    except Exception as error:  # noqa: BLE001 - a run does not fail because its advice does
        return f"none: {type(error).__name__}: {error}"


async def run_training(
    s: Session, ledger: Ledger, stop: StopRequest, callbacks: Sequence[Callback] = ()
) -> Outcome:
    """Run the RL part, from the state that `start_state` made to the end, or to a stop."""
    c = s.config.trainer
    # This attempt trains the versions after the checkpoint again, so their rows are removed. A
    # validation of the start weights stays: it is the "before" of this attempt too.
    known = RunReader(s.run.path)
    if s.run.resume_from is not None:
        for note in known.read().notes:
            s.progress.note(f"warning: {note}")
    rows, validated = (
        {version: row for version, row in table.items() if version <= ledger.version}
        for table in (known.rows, known.validations)
    )
    sinks = make_sinks(s.run.path, c.logger, ledger.version if ledger.version or validated else -1)
    s.checkpoints.supersede(ledger.version)
    history, counts = History(s.run.path, ledger.totals()), s.counts
    called = Callbacks(callbacks, s, counts, stop)
    grouped = s.config.learns_from_rewards and s.config.rollout.n > 1
    complete = False
    user = user_metrics_of(s.config.observe.metrics, s.problems.chat, s.progress.note)
    outside = trackers.start(c.logger, about(s), s.progress.note)
    sinks += outside
    recorder = make_event_recorder(s, ledger, history.attempt)
    try:
        async with asyncio.TaskGroup() as tasks:
            record = RunRecord(
                history=history,
                checkpoints=s.checkpoints,
                engine=s.engines.train,
                validator=make_validator(s, s.engines.pool),
                sinks=sinks,
                progress=s.progress,
                save_freq=c.save_freq,
                async_save=c.async_save,
                test_freq=s.config.test_freq,
                guard=make_guard(s.config.guard, rows, grouped=grouped),
                counts=counts,
                deadline_s=c.wait_deadline_s,
                tasks=tasks,
                figures=lambda version: {
                    **(user.row(version) if user else {}),
                    **figures(s),
                    **trackers.dropped(outside),
                },
                tokens=recorder.counts,
                on_gap=lambda figures: refuse(
                    s, stop, of_version(figures, s.config.rollout.quantization)
                ),
                on_row=called.see,
            )
            watchers: list[Watcher] = [
                *recorder.watchers,
                record,
                called,
                *([user] if user else []),
            ]
            with current().registry.watched_by(*watchers):
                if why := supervised.restart_reason():
                    at("run", "restarted", why=why)
                async with s.journal(ledger, history.attempt, tasks) as kept:
                    loops = train_to_end(s, ledger, stop, record, validated, kept, counts)
                    complete, start, seconds = await loops
        history.end(ledger.totals(), complete)
        if complete and ledger.resting:
            s.progress.note(
                f"{ledger.resting} responses had not ended at the end of the run: their windows "
                "trained the policy, and the critic saw none of their tokens"
            )
        recorder.end(ledger.snapshot())
    finally:
        for tracker in outside:  # all of them end at the same time
            tracker.finish(complete)
        with ExitStack() as ends:
            for sink in sinks:
                ends.callback(sink.close, complete)
            await unless_stopped(recorder.close)
    return Outcome(
        run_dir=s.run.path,
        mode=s.config.mode_name,
        versions=ledger.version,
        optimizer_steps=int(counts.counts["optimizer_steps"]),
        samples_trained=ledger.retired,
        train_seconds=seconds,
        first=record.first,
        last=record.last if complete else None,
        complete=complete,
        checkpoint=next(reversed(s.checkpoints.all()), None),
        timings={"start": start},
    )


def figures(s: Session) -> dict[str, float]:
    """Return the figures of a row that the loops do not know."""
    copies = s.mirror.figures() if s.mirror is not None else {}
    if s.curriculum is not None:
        copies |= s.curriculum.take_figures()
    asked = s.reward.take_figures() | s.teachers.take_figures()
    return asked | s.engines.keeper.figures() | copies


def make_event_recorder(s: Session, ledger: Ledger, attempt: int) -> EventRecorder:
    """Return what watches this attempt at the run."""
    from millrace.report.record import Devices, EventRecorder
    from millrace.runtime.local import visible_gpus

    c, checkpoint = s.config, s.run.resume_from
    tracks = (f"rollout-{i}" for i in range(c.rollout.replicas))
    on_cpu = c.trainer.device == "cpu" or not visible_gpus()
    devices = Devices(
        c.trainer.ranks,
        dict.fromkeys(tracks, c.rollout.tensor_model_parallel_size),
        share_cores=on_cpu and c.trainer.runtime == "local",
        tools=not isinstance(s.agent, SingleTurn),
    )
    counts = read_manifest(checkpoint).counts if checkpoint else {}
    recorder = EventRecorder(
        s.run.path,
        attempt,
        ledger,
        counts,
        devices,
        c.report,
        asyncio.get_running_loop().time,
        s.progress.note,
        s.problems.chat.decode,
    )
    supervised.send_status(supervised.DriverStatus(attempt=attempt, version=ledger.version))
    return recorder


def about(s: Session) -> About:
    """Return what trackers show of the run."""
    c = s.config
    return About(
        folder=s.run.path,
        project=c.trainer.project_name,
        name=c.name,
        config=c.model_dump(mode="json"),
        port=c.trainer.prometheus_port,
        resumed=s.run.resume_from is not None,
    )


async def train_to_end(
    s: Session,
    ledger: Ledger,
    stop: StopRequest,
    record: RunRecord,
    validated: dict[int, dict[str, float]],
    journal: Journal | None,
    counts: RunCounts,
) -> tuple[bool, float, float]:
    """Run both loops. Returns whether the run is complete, and the seconds of start and training.

    `validated` has the validations of earlier attempts, by version.
    """
    c, clock = s.config.trainer, asyncio.get_running_loop().time
    derived, engines = s.derived, s.engines
    queue = SampleQueue(ledger, deadline_s=c.wait_deadline_s, journal=journal)
    if s.curriculum is not None and s.run.resume_from is not None:
        slots = ((i, slot.sample) for i, slot in ledger.snapshot().slots)
        s.curriculum.restore(s.run.resume_from, ledger.admitted, slots)
    rollouter = make_rollouter(s, queue, engines.pool)
    proof = make_proof(s, rollouter, stop) if s.config.guard.enable else None
    ports = engines.train, engines.turns, engines.sync, record
    trainer = Trainer(queue, rollouter, *ports, proof, lambda: counts.lr_scale)
    s.progress.phase(starts.SYNC + (", and the proof of the engines" if proof else ""))
    with acting("trainer"), part("sync_transfer"):
        await trainer.begin()
    record.gap_limit = proof.limit if proof else None
    started = await starts.report(engines, s.run.path, ledger.version, s.progress.note)
    if 0 in validated:
        record.first = Result(0, validated[0], ())
    elif ledger.version == 0 and c.val_before_train:
        with acting("trainer"), part("wait_validation"):
            await validate_now(trainer, record, "validating the start weights")
    # The earlier attempt may have abandoned the validation of its last version.
    if ledger.version and ledger.version not in validated:
        record.validate(ledger.version)
    s.progress.training(
        ledger.retired,
        derived.samples,
        ledger.version,
        derived.versions,
        each_version="console" in c.logger,
    )

    def abandon() -> None:
        record.abandon_validation()
        engines.train.stop(c.stop_grace_s)

    stop.attach(queue, c.stop_grace_s, abandon)
    start = clock()
    with saved_without_replicas(engines.pool.roster, stop):
        trained = await run_pipeline(rollouter, trainer)
        seconds = clock() - start
        with acting("trainer"), part("save_checkpoint"):
            complete = await finish_run(trained, trainer, record, stop, save_last=c.save_last)
    if complete:
        with acting("trainer"), part("wait_validation"):
            await validate_now(trainer, record, "validating the final weights")
    await engines.pool.stats()  # The last figures of the accounts.
    if stop.error is not None:
        raise stop.error
    return complete, started, seconds


@contextmanager
def saved_without_replicas(roster: Roster, stop: StopRequest) -> Iterator[None]:
    """Stop and save the run once every replica is given up, and then raise ReplicaLost.

    Every change of a replica is an event on its track.
    """
    roster.check()
    stream = current().registry

    def changed(change: Change) -> None:
        stream.at(f"rollout-{change.replica}", f"replica_{change.to}", why=change.why)
        if roster.over:
            stop.request()

    roster.saves = True
    try:
        with roster.subscribe(changed):
            yield
    finally:
        roster.saves = False
    roster.check()


async def validate_now(trainer: Trainer, record: RunRecord, phase: str) -> None:
    """Validate the live weights. Send them again if the replicas that had them are lost."""
    while not await record.validate_now(trainer.queue.ledger.version, phase):
        await trainer.republish_live()
        trainer.rollouter.pool.roster.check()


async def finish_run(
    trained: bool, trainer: Trainer, record: RunRecord, stop: StopRequest, *, save_last: bool
) -> bool:
    """Wait for the last validation and checkpoint of a run. Returns whether the run is complete.

    `trained` says whether the run trained all its samples. A stop may come while such a run waits
    here. It then saves too, but is not complete.
    """
    if trained:
        await record.validated()
        await record.checkpointed()
        if save_last or stop.requested:
            await trainer.stop()
        stop.detach()
    complete = trained and not stop.requested
    if not complete:
        record.abandon_validation()
    return complete


def make_rollouter(s: Session, queue: SampleQueue, pool: RolloutPool) -> Rollouter:
    """Return the rollout loop that the configuration describes."""
    c, rollout = s.config, s.config.rollout
    overlong, groups = c.reward.overlong_buffer, c.algorithm.filter_groups
    params = SamplingParams(
        rollout.max_response_length,
        rollout.temperature,
        stop=rollout.stop,
        ignore_eos=rollout.ignore_eos,
        experts_from=0 if c.model.router_replay == "R3" else None,
    )
    roller = SampleRoller(
        s.agent,
        RetryingReward(s.reward, c.reward.retries),
        s.problems.chat.decode,
        params,
        rollout.n,
        c.trainer.seed,
        limits=limits_of(c.agents, c.rollout),
        overlong=OverlongBuffer(params.max_tokens, overlong.len, overlong.penalty_factor)
        if overlong.enable
        else None,
        greedy_baseline=c.algorithm.needs_greedy,
        lengths=drawn_lengths(c.rollout),
        whole_group=s.reward.whole_group,
        retries=c.agents.tries,
        teachers_of=s.teachers.of,
        window=c.algorithm.tppo.window,
    )
    sampling = DynamicSampling(
        groups.metric, max_num_gen_batches=groups.max_num_gen_batches, window=c.schedule.window
    )
    prompts = s.curriculum or s.problems.train
    return Rollouter(
        queue,
        prompts,
        pool,
        roller,
        max_error_share=c.reward.max_error_share,
        where=prompts.where,
        dynamic_sampling=sampling if groups.enable else None,
        curriculum=s.curriculum,
    )


def drawn_lengths(rollout: RolloutConfig) -> DrawnLengths | None:
    """Return the distribution of response lengths, or None if the configuration sets none."""
    drawn = rollout.drawn_lengths
    return (
        DrawnLengths(drawn.median, drawn.sigma, rollout.max_response_length)
        if drawn.enable
        else None
    )


def make_guard(
    section: GuardConfig, rows: dict[int, dict[str, float]], *, grouped: bool
) -> Guard | None:
    """Return the guard, after it has read the rows of earlier attempts."""
    if not section.enable:
        return None
    if not grouped:  # equal rewards do not stop it
        section = section.model_copy(update={"max_zero_variance_share": 1.0})
    guard = Guard(section)
    for version, row in rows.items():
        guard.check(version, row)
    return guard


def make_proof(s: Session, rollouter: Rollouter, stop: StopRequest) -> Proof:
    """Return what proves the engines of a run."""
    c, engines, replicas = s.config, s.engines, rollouter.roller
    dtype = c.rollout.quantization or c.model.dtype
    limits = Limits(
        dtype,
        least_limit(c.trainer.device, dtype),
        c.rollout.max_len,
        c.schedule.capacity * replicas.num_responses,
        c.guard.max_log_prob_gap,
        c.guard.max_quantization_gap if c.rollout.quantization else None,
    )
    return Proof(
        *(engines.train, engines.pool, engines.sync, engines.turns, s.problems.train),
        *(replicas.params, c.schedule, limits),
        incarnation=lambda: engines.train.incarnation,
        note=s.progress.note,
        refuse=lambda error: refuse(s, stop, error),
        stops=c.guard.on_gap == "stop",
    )


def least_limit(device: str, dtype: str) -> float:
    """Return the smallest limit of a gap. Floors of small models are too small to be measured."""
    from millrace.runtime.local import visible_gpus

    on_gpu = device == "cuda" or (device == "auto" and bool(visible_gpus()))
    return gap.LEAST_TF32 if on_gpu and dtype == "float32" else gap.LEAST[dtype]


def of_version(figures: str, quantization: str | None) -> GapError:
    """Return the error of a version whose engines disagree."""
    coarse = f"rollout.quantization={quantization} is too coarse for what the policy became"
    causes = [
        *([coarse] if quantization else []),
        "a jump since the proof: old KV, graphs or kernels",
        CAUSES["log_prob_gap"].rstrip("."),
    ]
    return gap.disagreement(figures, causes)


def refuse(s: Session, stop: StopRequest, error: GapError) -> None:
    """Stop a run whose engines disagree, as a signal would. It saves a checkpoint, and then fails."""
    if s.config.guard.on_gap == "warn":
        s.progress.note(f"warning: {error}")
    elif stop.error is None:
        stop.error = error
        stop.request()
