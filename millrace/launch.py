"""The composition root: a configuration becomes workers, engines, loops, and a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from millrace import problems as problems_
from millrace.assemble import Engines, build_engines, open_runtime
from millrace.beside import abandonable
from millrace.config import Config
from millrace.environments.single_turn import SingleTurn
from millrace.errors import ConfigError, MillraceError, bad_value
from millrace.observe.guard import Guard
from millrace.observe.progress import Progress
from millrace.observe.sinks import make_sinks, read_rows
from millrace.observe.stopwatch import Stopwatch
from millrace.pipeline.checkpoint import Checkpoints, read_ledger
from millrace.pipeline.history import History
from millrace.pipeline.record import RunRecord
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline, settle
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.stop import StopRequest
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.pipeline.validation import Result, Validator
from millrace.problems import Problems
from millrace.rewards.pool import RewardPool
from millrace.rollout.dynamic_sampling import DynamicSampling
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.sample import SampleRoller
from millrace.rollout.shaping import OverlongBuffer
from millrace.run_dir import RunDir, open_eval_dir, open_run_dir, release
from millrace.schedule.ledger import Ledger
from millrace.schedule.modes import name_of
from millrace.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    run_dir: Path
    mode: str
    versions: int
    optimizer_steps: int
    samples_trained: int
    train_seconds: float
    """From the first rollout to the last step, of this attempt."""
    first: Result | None
    """Validation of the start weights."""
    last: Result | None
    """Validation of the final weights."""
    complete: bool
    checkpoint: Path | None
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of start, warm-up and training."""


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that a run's steps have in common."""

    config: Config
    run: RunDir
    problems: Problems
    engines: Engines
    reward: RewardPool
    progress: Progress

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.run.path, keep=self.config.trainer.max_ckpt_to_keep)


@asynccontextmanager
async def open_session(
    config: Config, progress: Progress, *, run: RunDir | None = None, rollout: bool = True
) -> AsyncIterator[Session]:
    """Check the data and the reward function, then make the folder, the prompts and the engines. Ends all of it."""
    problems_.check_machine(config)
    # In threads that are left behind: Ctrl-C is the event loop's, and ends a long load at once.
    sources = await abandonable(problems_.load, config)
    reward = RewardPool(config.reward)
    try:
        if rollout:
            await reward.start()
        trains = run is None
        if run is None:  # every byte of a checkpoint is read
            run = await abandonable(open_run_dir, config)
        for note in (*config.notes, *run.notes):
            progress.note(note)
        try:
            problems = await abandonable(problems_.prepare, config, sources, run.model)
            if trains and run.resume_from is not None:
                _check_end(config, config.derived(len(problems.train)).samples, run.resume_from)
        except MillraceError:
            run.discard()
            raise
        problems_.copy_config(config.model, run.model)
        if problems.train.filtered:
            progress.note(
                f"left out {problems.train.filtered} prompts over rollout.max_prompt_length"
            )
        progress.phase("starting engines")
        async with AsyncExitStack() as stack:
            try:
                runtime = await stack.enter_async_context(
                    open_runtime(config, run, rollout=rollout)
                )
            except ConfigError:  # devices that are not there
                run.discard()
                raise
            engines = await build_engines(runtime, config, run, rollout=rollout)
            yield Session(config, run, problems, engines, reward, progress)
    finally:
        await reward.close()
        if run is not None:
            release(run.path)


def _check_end(config: Config, samples: int, checkpoint: Path) -> None:
    """A run that has trained more than it is to train would have no end."""
    trained = read_ledger(checkpoint).retired
    if trained > samples:
        key, value = "rollout.total_rollout_steps", config.rollout.total_rollout_steps
        if samples < value:
            key, value = "trainer.total_epochs", config.trainer.total_epochs
        rule = f"the run would end after {samples} samples, and the checkpoint {checkpoint} has trained {trained}"
        raise bad_value(
            key,
            value,
            rule,
            f"a larger one, or millrace export {checkpoint} FOLDER to keep what there is",
        )


async def warm_up(s: Session) -> float:
    """Supervised steps on demonstrations. Returns the last step's loss."""
    steps, size = s.config.sft.steps, s.config.sft.batch_size
    await s.engines.train.begin("sft", steps)
    loss, examples = float("nan"), s.problems.examples(0, size)
    for k in range(steps):
        step = asyncio.ensure_future(s.engines.train.sft_step(examples))
        # The next one is made meanwhile: in a thread, for a batch is not gone before the loop has written all of it.
        examples = await asyncio.to_thread(
            s.problems.examples, (k + 1) * size, size if k + 1 < steps else 0
        )
        loss = (await step).metrics["sft/loss"]
        s.progress.phase("supervised warm-up", k + 1, steps, f"loss {loss:.3f}")
    return loss


async def start_state(s: Session) -> Ledger:
    """The ledger and the weights that training starts from: a checkpoint's, or warmed-up ones."""
    derived = s.config.derived(len(s.problems.train))
    if s.run.resume_from is not None:
        s.progress.note(f"going on from {s.run.resume_from}")
        await s.engines.train.begin("rl", derived.lr_horizon)
        await s.engines.train.load(str(s.run.resume_from / "engine"))
        return Ledger.restore(s.config.schedule, read_ledger(s.run.resume_from), derived.samples)
    ledger = Ledger(s.config.schedule, derived.samples)
    if s.config.sft.steps:
        await warm_up(s)
    await s.engines.train.begin("rl", derived.lr_horizon)
    if s.config.sft.steps:  # a killed run need not warm up again
        s.checkpoints.supersede(-1)
        await s.checkpoints.save(ledger.snapshot(), s.engines.train)
    return ledger


def make_validator(s: Session) -> Validator | None:
    """None without validation data."""
    if not s.problems.val:
        return None
    rollout, kwargs = s.config.rollout, s.config.rollout.val_kwargs
    params = SamplingParams(
        rollout.max_response_length, kwargs.temperature, kwargs.top_p, stop=rollout.stop
    )
    return Validator(
        s.problems.val,
        s.engines.pool,
        s.reward,
        s.problems.chat.decode,
        params,
        kwargs.n,
        kwargs.greedy,
        s.config.trainer.seed,
        s.config.reward.max_error_share,
    )


def make_rollouter(s: Session, queue: SampleQueue) -> Rollouter:
    c, rollout = s.config, s.config.rollout
    overlong, groups = c.reward.overlong_buffer, c.algorithm.filter_groups
    params = SamplingParams(
        rollout.max_response_length,
        rollout.temperature,
        stop=rollout.stop,
        ignore_eos=rollout.ignore_eos,
    )
    roller = SampleRoller(
        lambda prompt: SingleTurn(),
        s.reward,
        s.problems.chat.decode,
        params,
        rollout.n,
        c.trainer.seed,
        overlong=OverlongBuffer(params.max_tokens, overlong.len, overlong.penalty_factor)
        if overlong.enable
        else None,
        greedy_baseline=c.algorithm.adv_estimator == "remax",
        lengths=drawn_lengths(c),
    )
    sampling = DynamicSampling(
        groups.metric, max_num_gen_batches=groups.max_num_gen_batches, window=c.schedule.window
    )
    return Rollouter(
        queue,
        s.problems.train,
        s.engines.pool,
        roller,
        max_error_share=c.reward.max_error_share,
        dynamic_sampling=sampling if groups.enable else None,
    )


def drawn_lengths(config: Config) -> DrawnLengths | None:
    """The distribution of response lengths, where the configuration sets one."""
    drawn = config.rollout.drawn_lengths
    return (
        DrawnLengths(drawn.median, drawn.sigma, config.rollout.max_response_length)
        if drawn.enable
        else None
    )


def make_guard(config: Config, rows: dict[int, dict[str, float]]) -> Guard | None:
    """The guard, having seen the rows of the attempts before."""
    if not config.guard.enable:
        return None
    guard = Guard(config.guard)
    for version, row in rows.items():
        guard.check(version, row)
    return guard


async def run_training(s: Session, ledger: Ledger, stop: StopRequest) -> Outcome:
    """The RL part: from the state that `start_state` made to the end, or to a stop."""
    c = s.config.trainer
    # Rows of versions that this attempt makes again go; at version 0 that is all of them. The
    # validation of the start weights stays: it is the "before" of this attempt too.
    rows, done = (
        read_rows(s.run.path, ledger.version) if s.run.resume_from is not None else ({}, {})
    )
    sinks = make_sinks(s.run.path, c.logger, ledger.version if ledger.version or done else -1)
    s.checkpoints.supersede(ledger.version)
    history = History(s.run.path, ledger.totals())
    try:
        async with asyncio.TaskGroup() as tasks:
            record = RunRecord(
                history=history,
                checkpoints=s.checkpoints,
                engine=s.engines.train,
                validator=make_validator(s),
                sinks=sinks,
                progress=s.progress,
                save_freq=c.save_freq,
                async_save=c.async_save,
                test_freq=s.config.test_freq,
                guard=make_guard(s.config, rows),
                deadline_s=c.wait_deadline_s,
                tasks=tasks,
            )
            complete, seconds = await _train_to_end(s, ledger, stop, record, done)
            if complete:
                await record.validate_now(ledger.version, "validating the final weights")
        history.end(ledger.totals(), complete)
    finally:
        for sink in sinks:
            sink.close()
    return Outcome(
        run_dir=s.run.path,
        mode=mode_of(s.config),
        versions=ledger.version,
        optimizer_steps=s.config.schedule.optimizer_steps(
            ledger.retired, s.config.actor.ppo_epochs
        ),
        samples_trained=ledger.retired,
        train_seconds=seconds,
        first=record.first,
        last=record.last if complete else None,
        complete=complete,
        checkpoint=next(reversed(s.checkpoints.all()), None),
    )


async def _train_to_end(
    s: Session,
    ledger: Ledger,
    stop: StopRequest,
    record: RunRecord,
    done: dict[int, dict[str, float]],
) -> tuple[bool, float]:
    """Run both loops. Returns whether the run is complete, and the seconds of training.

    `done` has the validations of the attempts before, by version.
    """
    c, clock = s.config.trainer, asyncio.get_running_loop().time
    derived = s.config.derived(len(s.problems.train))
    queue = SampleQueue(ledger, deadline_s=c.wait_deadline_s)
    rollouter = make_rollouter(s, queue)
    train, pool = s.engines.train, s.engines.pool
    turns = turns_of(s.config.schedule.colocated, pool, train)
    trainer = Trainer(queue, rollouter, train, turns, s.engines.sync, record, Stopwatch(clock))
    s.progress.phase("first weight sync")
    await trainer.begin()
    if 0 in done:
        record.first = Result(0, done[0], ())
    elif ledger.version == 0 and c.val_before_train:
        await record.validate_now(0, "validating the start weights")
    if ledger.version and ledger.version not in done:  # the attempt before this one gave it up
        record.validate(ledger.version)
    s.progress.training(ledger.retired, derived.samples, ledger.version, derived.versions)
    stop.attach(queue, c.stop_grace_s, record.abandon_validation)
    start = clock()
    trained = await run_pipeline(rollouter, trainer)
    seconds = clock() - start
    return await settle(trained, trainer, record, stop, save_last=c.save_last), seconds


async def train(config: Config, progress: Progress, stop: StopRequest) -> Outcome:
    """One run, or what is left of it: prepare, warm up, train, validate on the final weights."""
    begin = time.perf_counter()
    async with open_session(config, progress) as s:
        started = time.perf_counter()
        ledger = await start_state(s)
        warm = time.perf_counter()
        outcome = await run_training(s, ledger, stop)
        outcome.timings.update(
            start=started - begin, warm_up=warm - started, train=outcome.train_seconds
        )
        return outcome


async def supervise(config: Config, progress: Progress) -> dict[str, Any]:
    """`millrace sft`: the warm-up alone, and its weights as a Hugging Face folder."""
    if config.trainer.run_dir and (Path(config.trainer.run_dir) / "sft").exists():
        rule = "has a supervised model in its folder sft"
        raise bad_value("trainer.run_dir", config.trainer.run_dir, rule, "another folder")
    async with open_session(config, progress, rollout=False) as s:
        start = time.perf_counter()
        loss = await warm_up(s)
        seconds = time.perf_counter() - start
        folder = s.run.path / "sft"
        await s.engines.train.export(str(folder))
        s.problems.chat.tokenizer.save_pretrained(folder)
    return {
        "run_dir": str(s.run.path),
        "model": str(folder),
        "steps": config.sft.steps,
        "loss": loss,
        "seconds": seconds,
        "complete": True,
    }


async def evaluate(config: Config, progress: Progress) -> dict[str, Any]:
    """`millrace eval`: validation on a checkpoint (trainer.resume), a model (model.path), or the warmed-up model."""
    if not config.data.val_files:
        raise bad_value(
            "data.val_files",
            (),
            "there is nothing to evaluate on",
            "data.val_files=[task:sort_digits?split=val&size=256]",
        )
    run = open_eval_dir(config)
    async with open_session(config, progress, run=run) as s:
        ledger = await start_state(s)
        await s.engines.publish(ledger.version)
        validator = make_validator(s)
        assert validator is not None
        phase = f"validating version {ledger.version} on {len(s.problems.val)} problems"
        progress.phase(phase)
        result = await validator.run(ledger.version, partial(progress.phase, phase))
    return {
        "run_dir": str(run.path),
        "version": result.version,
        "val": result.values,
        "complete": True,
    }


def mode_of(config: Config) -> str:
    """Return the name of what the run's Schedule does, which overrides may have changed from `config.mode`."""
    return name_of(config.schedule, config.mode)
