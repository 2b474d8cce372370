"""A session: the data, the prompts and the engines that a command works with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.config import Config
from millrace.errors import ConfigError, MillraceError, bad_value
from millrace.observe.progress import Progress
from millrace.pipeline.checkpoint import Checkpoints, read_ledger
from millrace.rewards.pool import RewardPool
from millrace.run import problems as problems_
from millrace.run.engines import Engines, build_engines, open_runtime
from millrace.run.folder import RunDir, open_run_dir, release
from millrace.run.problems import Problems
from millrace.sync.background import abandonable


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
