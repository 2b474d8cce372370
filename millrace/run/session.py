"""A session: the data, the prompts and the engines that a command works with."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from millrace.config import Config
from millrace.config.checks import placed
from millrace.config.explain import facts
from millrace.config.keys import NO_PROGRESS, Derived, ResumeProgress, Work
from millrace.config.section import Fixed, NoEffectOnWeights
from millrace.config.teacher_keys import CLIENT_KEYS
from millrace.data.curriculum import FILE, Curriculum
from millrace.errors import MillraceError, bad_value
from millrace.observe import trackers
from millrace.observe.files import flat
from millrace.observe.metrics import RunCounts
from millrace.observe.progress import Progress
from millrace.pipeline import journal as journals
from millrace.pipeline import journal_file
from millrace.pipeline.checkpoint import Checkpoints, read_manifest
from millrace.pipeline.journal import Journal
from millrace.pipeline.journal_file import FORMAT, Batch, Header
from millrace.pipeline.replay import Replay
from millrace.ports import Agent
from millrace.rewards.mix import RunReward
from millrace.rollout.episode import SingleTurn
from millrace.run import problems as problems_
from millrace.run import rows
from millrace.run.agents import open_agent
from millrace.run.algorithms import tried
from millrace.run.engines import Engines, build_engines, open_runtime, start_workers
from millrace.run.folder import RunDir, open_eval_dir, open_run_dir, release
from millrace.run.machine import check_machine, check_shape
from millrace.run.mirror import Mirror, open_mirror
from millrace.run.problems import Problems
from millrace.run.rewards import (
    check_columns,
    devices_of,
    make_reward,
    open_caches,
    try_rewards,
)
from millrace.run.stall import watched
from millrace.run.starts import beside, part, shown
from millrace.run.teachers import OutsideTeachers, open_teachers
from millrace.schedule.ledger import Ledger, LedgerSnapshot
from millrace.sync.background import abandonable
from millrace.waits import wait_server
from millrace.waits.registry import starting


@dataclass(frozen=True)
class Session:
    """The parts that every step of a run uses."""

    config: Config
    run: RunDir
    problems: Problems
    engines: Engines
    reward: RunReward
    progress: Progress
    agent: Agent = field(default_factory=SingleTurn)
    """Who plays the episodes."""
    mirror: Mirror | None = None
    """Copies checkpoints to another place."""
    rows: str = ""
    """The name of the rows and their order, by which a journal knows its run."""
    teachers: OutsideTeachers = field(default_factory=OutsideTeachers)
    """The teachers outside of the trainer."""

    @cached_property
    def checkpoints(self) -> Checkpoints:
        keep, mirror = self.config.trainer.max_ckpt_to_keep, self.mirror
        offer = {"offer": mirror.offer} if mirror else {}
        return Checkpoints(self.run.path, keep=keep, more=self._picks, **offer)

    def _picks(self, snapshot: LedgerSnapshot) -> dict[str, bytes]:
        return {FILE: self.curriculum.dump(snapshot.admitted)} if self.curriculum else {}

    @cached_property
    def curriculum(self) -> Curriculum | None:
        """The prompts in the order of the user's sampler, if the run has one."""
        spec, schedule = self.config.data.sampler, self.config.schedule
        return problems_.curriculum_of(spec, schedule, self.problems.train)

    @property
    def derived(self) -> Derived:
        """The numbers of the whole run, with what earlier attempts have trained."""
        trained = trained_by(self.run.resume_from)
        return self.config.derived(len(self.problems.train), trained)

    @asynccontextmanager
    async def journal(
        self,
        ledger: Ledger,
        attempt: int,
        tasks: asyncio.TaskGroup,
        synced: Callable[[Batch], None] = lambda batch: None,
    ) -> AsyncIterator[Journal | None]:
        """Keep the journal of an attempt. `ledger` follows what earlier attempts left.

        Lost ranks of the trainer are recovered from it.
        """
        journal = await asyncio.to_thread(self._journal, ledger, attempt, synced)
        writer = tasks.create_task(journal.run(), name="journal") if journal else None
        past = Replay(
            self.checkpoints,
            ledger,
            journal.since if journal else None,
            self.curriculum or self.problems.train,
            horizon=self.derived.lr_horizon,
            origin=self.run.resume_from,
            fresh=not self.config.sft.steps,
        )
        with self.engines.train.recalled(past):
            yield journal
        if writer is not None:
            writer.cancel()

    def _journal(
        self, ledger: Ledger, attempt: int, synced: Callable[[Batch], None]
    ) -> Journal | None:
        """Return the journal. Without checkpoints it would grow for ever, so there is none."""
        trainer, folder = self.config.trainer, self.run.path / "journal"
        if not (trainer.journal and trainer.save_freq):
            journal_file.remove(folder, 0, before=attempt)
            return None
        samples, training = digests(self.config.model_dump(mode="json"), self.rows)
        header = Header(FORMAT, attempt, ledger.version, samples, training)
        return journals.resume(
            folder,
            ledger,
            header,
            save_freq=trainer.save_freq,
            note=self.progress.note,
            synced=synced,
        )

    @property
    def counts(self) -> RunCounts:
        """The counts of the run up to its checkpoint, with the lengths of its warm-ups."""
        c, horizon = self.config, self.derived.lr_horizon
        lengths = {
            "actor_warmup_steps": c.actor.optim.warmup_steps(horizon),
            "critic_warmup_steps": c.critic.optim.warmup_steps(horizon),
        }
        checkpoint = self.run.resume_from
        steps = {"optimizer_steps": c.steps_taken(trained_by(checkpoint))}
        return RunCounts(
            {**steps, **(read_manifest(checkpoint).counts if checkpoint else {}), **lengths}
        )


@asynccontextmanager
async def open_session(
    config: Config,
    progress: Progress,
    *,
    work: Work = "train",
    scored: bool = True,
) -> AsyncIterator[Session]:
    """Open the data, the reward function, the folder, the prompts and the engines.

    Workers and rewards start while the prompts are rendered. A refused run leaves no folder.
    Everything is closed at exit. `scored` says whether the rewards score rows of the configuration,
    so that they can be checked on those.
    """
    trains, rollout = work != "eval", work != "sft"
    given, config = config, config.for_work(work)
    check_machine(config)
    run: RunDir | None = None
    if work == "train":
        trackers.check(config.trainer.logger)
        with starting("checks of your algorithm"):
            await tried(config, progress.note)
    # A long load runs in a thread, so that Ctrl-C reaches the event loop and ends it at once.
    shown_slowly = problems_.shown_slowly(progress.phase)
    with starting("data"):
        sources = await abandonable(
            problems_.load, config, scored=rollout, note=progress.note, progress=shown_slowly
        )
    sides = config.sides
    reward = await abandonable(make_reward, config.reward, config.agents, sides)
    reward.note = progress.note
    refusable = True
    try:
        # in a thread too: the check reads every byte of a checkpoint
        run = await abandonable(open_run_dir if trains else open_eval_dir, given)
        for note in (*config.notes, *run.notes):
            progress.note(note)
        async with AsyncExitStack() as stack:
            watching = watched(run.path, config.trainer, progress.note)
            watchman = await stack.enter_async_context(watching)
            nccl = config.sync.backend == "auto"
            opened = open_runtime(sides, run.logs, nccl=nccl, rollout=rollout, note=progress.note)
            runtime = await stack.enter_async_context(opened)
            watchman.side.more = runtime.answers
            folder = problems_.weights_folder(config.model, run.model)
            async with (
                beside(part("rewards", reward.start() if rollout else asyncio.sleep(0))) as rewards,
                beside(start_workers(runtime, sides, folder, rollout)) as workers,
            ):
                if rollout:
                    open_caches(reward, run.path, progress.note)
                prepared = _prepared(config, run, progress, work, sources, folder)
                config, problems, rows_key = await prepared
                outside = OutsideTeachers(
                    config.teachers,
                    temperature=config.rollout.temperature,
                    devices=devices_of(placed(config.reward, config.teachers), sides),
                    note=progress.note,
                )
                longest = config.rollout.max_len
                taught = open_teachers(outside, problems.train, longest)
                teachers = await stack.enter_async_context(taught)
                if problems.train.ahead is not None:
                    stack.callback(problems.train.ahead.close)
                where = problems.chat.tokenizer, run.path, progress.note
                player = open_agent(config.agents, config.rollout, *where)
                agent = await stack.enter_async_context(player)
                await rewards
                if rollout and scored:
                    parts = config.reward.parts
                    check_columns(reward.facts(), parts, sources.scored(), progress.note)
                if rollout and scored and not config.agents.agent_kind:
                    with starting("reward trial"):
                        await try_rewards(config.reward, reward, problems.train, progress.note)
                refusable = False
                # A refused run prints nothing but its error.
                if trains:
                    progress.note(f"run folder: {run.path}")
                await stack.enter_async_context(shown(progress, watchman.ask))
                peers = await workers
            copies = open_mirror(run.store, config.trainer, run.path, progress)
            mirror = await stack.enter_async_context(copies)
            with starting("engines"):
                engines = await build_engines(
                    *(runtime, config, run, peers),
                    restarts=True,
                    trains=trains,
                    note=progress.note,
                )
            keeper = engines.keeper
            await stack.enter_async_context(keeper.supervise())
            keeper.begin(engines.scaler.serve(run.path / wait_server.FOLDER), "scaling")
            keeper.begin(engines.scaler.follow(), "scaling")
            made = config, run, problems, engines, reward, progress, agent, mirror
            yield Session(*made, rows_key, teachers)
    except MillraceError:
        if run is not None and refusable:  # If workers fail, their logs stay.
            run.discard()
        raise
    finally:
        await reward.close()
        if run is not None:
            release(run.path)


async def _prepared(
    config: Config,
    run: RunDir,
    progress: Progress,
    work: Work,
    sources: problems_.Sources,
    folder: str,
) -> tuple[Config, Problems, str]:
    """Return the configuration with what a checkpoint has, the problems, and the name of the rows.

    Checks what the problems decide. `folder` has the model's weights.
    """
    trains, checkpoint, key = work != "eval", run.resume_from, ""
    with starting("prompts"):
        problems = await abandonable(
            problems_.prepare,
            config,
            sources,
            run.model,
            checkpoint=checkpoint if trains else None,
            ahead=trains,
            tries=work == "train",
            note=progress.note,
            progress=problems_.shown_slowly(progress.phase),
        )
        if trains:
            rows.write(run.path, await abandonable(rows.identity_of, problems.train, sources.val))
            key = await abandonable(rows.training_key, problems.train)
    if checkpoint is not None:
        config = config.with_warm_up_of(read_manifest(checkpoint).counts)
    problems_.copy_config(config.model, run.model)
    check_shape(config.model, config.actor, config.trainer, folder)
    if trains:
        check_end(config, len(problems.train), checkpoint)
    end = config.end_note(len(problems.train), trained_by(checkpoint))
    notes = (end, config.window_note) if work == "train" else ()
    for text in filter(None, (*problems.notes, *notes)):
        progress.note(text)
    return config, problems, key


def digests(values: dict[str, Any], rows: str = "") -> tuple[str, str]:
    """Return digests of the settings that shape samples, and of those that shape weights too.

    `values` is a configuration as plain data, and `rows` names the rows of the training data. The
    journal has both digests.
    """
    keys = dict(flat(values))
    teachers = values.get("teachers") or {}
    free = tuple(f"{key}." for key, _ in facts(NoEffectOnWeights))
    free += tuple(f"teachers.{name}.{key}." for name in teachers for key in CLIENT_KEYS)
    samples = {key: keys.get(key) for key, _ in facts(Fixed)} | {"rows": rows}
    outside = {
        name: (one["model"] if one["base_url"] else one["path"], one["data_sources"])
        for name, one in teachers.items()
        if one["base_url"] or one["place"] == "own"
    }
    if outside:  # a finished sample has their log-probs
        samples["teachers"] = outside
    training = {key: value for key, value in keys.items() if not f"{key}.".startswith(free)}
    first, second = (
        hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:16]
        for part in (samples, training)
    )
    return first, second


def trained_by(checkpoint: Path | None) -> ResumeProgress:
    """Return what the checkpoint has trained, or nothing if there is none."""
    if checkpoint is None:
        return NO_PROGRESS
    manifest = read_manifest(checkpoint)
    steps = manifest.counts.get("optimizer_steps")
    return ResumeProgress(
        version=manifest.version,
        samples=manifest.retired,
        optimizer_steps=None if steps is None else int(steps),
    )


def check_end(config: Config, row_count: int, checkpoint: Path | None) -> None:
    """Raise ConfigError if the checkpoint has trained more than the run allows."""
    trained = trained_by(checkpoint)
    key, samples = config.end(row_count, trained)
    if trained.samples > samples:
        end, reached = f"{samples} samples", f"trained {trained.samples}"
        if key == "trainer.total_training_steps":
            end, reached = f"version {config.value_of(key)}", f"version {trained.version}"
        raise bad_value(
            key,
            config.value_of(key),
            f"the run would end after {end}, and the checkpoint {checkpoint} has {reached}",
            f"a larger value, or `millrace export {checkpoint} FOLDER` to use the trained model",
        )
