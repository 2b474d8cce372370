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
from millrace.rewards.mix import RunReward
from millrace.run import problems as problems_
from millrace.run.engines import Engines, build_engines, open_runtime
from millrace.run.folder import RunDir, open_run_dir, release
from millrace.run.problems import Problems
from millrace.run.rewards import make_reward, open_caches
from millrace.sync.background import abandonable


@dataclass(frozen=True, slots=True)
class Session:
    """The parts that every step of a run uses."""

    config: Config
    run: RunDir
    problems: Problems
    engines: Engines
    reward: RunReward
    progress: Progress

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.run.path, keep=self.config.trainer.max_ckpt_to_keep)


@asynccontextmanager
async def open_session(
    config: Config, progress: Progress, *, run: RunDir | None = None, rollout: bool = True
) -> AsyncIterator[Session]:
    """Open the data, the reward function, the folder, the prompts and the engines.

    The data and the reward function are checked before the folder is made. Everything is closed at
    exit.
    """
    problems_.check_machine(config)
    # A long load runs in a thread, so that Ctrl-C reaches the event loop and ends it at once.
    sources = await abandonable(problems_.load, config, scored=rollout)
    reward = await abandonable(make_reward, config)
    reward.note = progress.note
    try:
        if rollout:
            await reward.start()
        trains = run is None
        if run is None:  # in a thread too: the check reads every byte of a checkpoint
            run = await abandonable(open_run_dir, config)
        for note in (*config.notes, *run.notes):
            progress.note(note)
        try:
            if rollout:
                open_caches(reward, run.path, progress.note)
            problems = await abandonable(problems_.prepare, config, sources, run.model)
            if trains and run.resume_from is not None:
                check_end(config, len(problems.train), run.resume_from)
        except MillraceError:
            run.discard()
            raise
        problems_.copy_config(config.model, run.model)
        if problems.train.filtered:
            progress.note(
                f"left out {problems.train.filtered} prompts that are longer than "
                "rollout.max_prompt_length"
            )
        progress.phase("starting engines")
        async with AsyncExitStack() as stack:
            try:
                runtime = await stack.enter_async_context(
                    open_runtime(config, run, rollout=rollout)
                )
            except ConfigError:  # the machine lacks the devices
                run.discard()
                raise
            engines = await build_engines(runtime, config, run, rollout=rollout)
            yield Session(config, run, problems, engines, reward, progress)
    finally:
        await reward.close()
        if run is not None:
            release(run.path)


def check_end(config: Config, rows: int, checkpoint: Path) -> None:
    """Raise ConfigError if the checkpoint has trained more samples than the run has."""
    trained = read_ledger(checkpoint).retired
    key, samples = config.end(rows)
    if trained > samples:
        rule = (
            f"the run would end after {samples} samples, and the checkpoint {checkpoint} has "
            f"trained {trained}"
        )
        raise bad_value(
            key,
            config.value_of(key),
            rule,
            f"a larger value, or `millrace export {checkpoint} FOLDER` to use the trained model",
        )
