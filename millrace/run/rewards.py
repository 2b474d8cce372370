"""The reward of a run: its devices, its pools, its caches and its sandbox."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

import millrace
from millrace.config import AgentConfig, RewardConfig, RewardModelConfig
from millrace.config.checks import on_ray, placed
from millrace.config.endpoint_keys import PlaceConfig
from millrace.config.keys import Sides
from millrace.config.reward_keys import OneReward
from millrace.data import hub
from millrace.data.prompts import PromptStream
from millrace.data.rows import problem
from millrace.data.sources import Rows
from millrace.data.user_code import is_in_driver
from millrace.errors import ConfigError, EpisodeError, bad_value
from millrace.persist import ownership
from millrace.rewards.builtin import BUILTIN
from millrace.rewards.mix import RunReward
from millrace.rewards.pool import RewardPool
from millrace.rewards.sources import scorer_of
from millrace.rewards.start import DriverLauncher, Launcher, ProcessHandle, arguments, how
from millrace.rewards.trial import ROWS, try_functions
from millrace.rewards.wire import Job
from millrace.runtime.local import visible_gpus
from millrace.types import Prompt

if TYPE_CHECKING:
    from millrace.tools.start import Running


_LOOKED_AT = 64
"""Rows of each source whose columns are looked at."""


def make_reward(given: RewardConfig, agents: AgentConfig, sides: Sides) -> RunReward:
    """Return the reward of a configuration, not yet started.

    Raise ConfigError if a reward model is missing, if the machine lacks GPUs for it, or if millrace
    did not make the folder of a judge's cache.
    """
    environments: dict[str, list[dict[str, str]]] = {}
    models: dict[str, RewardModelConfig] = {}
    devices = devices_of(placed(given), sides)
    for section, part in given.parts.items():
        if part.judge.cache_dir and part.kind == "judge":
            ownership.check(Path(part.judge.cache_dir), f"{section}.judge.cache_dir")
        if part.kind != "model":
            continue
        device, environments[section] = devices[f"{section}.model"]
        models[section] = part.model.model_copy(update={"device": device})
        _check_path(f"{section}.model.path", part.model.path)
    launchers: dict[str, Launcher] = {}
    for section, part in given.parts.items():
        if part.sandbox:
            launchers[section] = SandboxLauncher(section, part.function)
        elif is_in_driver(part.function):
            launchers[section] = DriverLauncher()
    reward = RunReward(_with_models(given, models), environments, launchers)
    if agents.agent_kind:
        reward.first = partial(scorer_line, agents, given)
    return reward


def devices_of(
    models: Mapping[str, PlaceConfig], sides: Sides
) -> dict[str, tuple[str, list[dict[str, str]]]]:
    """Return the device of each frozen model with processes of its own, by its section.

    The variables of each of its workers follow, if it has GPUs. Raise ConfigError if the machine
    lacks GPUs for one.
    """
    found: dict[str, tuple[str, list[dict[str, str]]]] = {}
    gpus = visible_gpus() if sides.trainer.device != "cpu" else []
    free = list(gpus[sides.devices :])
    for key, model in models.items():
        found[key] = "cpu", []
        if model.device == "cuda" or (model.device == "auto" and gpus):
            names = _gpus_for(key, model, sides, gpus, free)
            found[key] = "cuda", [{"CUDA_VISIBLE_DEVICES": name} for name in names]
    return found


def scorer_line(agents: AgentConfig, reward: RewardConfig, prompt: Prompt) -> str:
    """Return what a run says once: who scores an episode whose agent gave no reward."""
    names = []
    for section, part in reward.parts.items():
        if part.kind == "function" and not part.function:
            own = scorer_of(prompt.data_source, prompt.extra_info) or "none"
            names.append(f"the scorer of data source {prompt.data_source!r}: {own}")
        else:
            names.append(f"{section}.{part.kind}={part.function}".rstrip("="))
    return (
        f"rewards: agents.{agents.agent_kind} returned none for an episode, so it is scored by "
        f"{', '.join(names)}"
    )


def open_caches(
    reward: RunReward, run: Path, note: Callable[[str], object] = warnings.warn
) -> None:
    """Open the caches of judges, in the run's folder unless a key names another one.

    `note` gets a message if a cache fails later. Raise ConfigError if a folder is not millrace's
    own, or cannot be used.
    """
    for judge, chosen in reward.caches().items():
        folder = Path(chosen) if chosen else run / "judge"
        key = f"{judge.job.key}.cache_dir"
        if chosen:
            ownership.claim(folder, key)
        elif not folder.is_dir() or folder.is_symlink():  # a link is replaced and not followed
            try:
                ownership.remove(folder)
                folder.mkdir()
            except OSError as error:
                raise ownership.unwritable(folder, error, key) from None
        judge.open_cache(folder, note)


async def try_rewards(
    config: RewardConfig, reward: RunReward, train: PromptStream, note: Callable[[str], object]
) -> None:
    """Try the user's functions on the first rows. Raise ConfigError if each call of one fails."""
    pairs = zip(reward.parts.values(), config.parts.values(), strict=True)
    tried = [part for part, keys in pairs if keys.trial]
    if tried:
        rows = [train[i] for i in range(min(ROWS, len(train)))]
        chat = train.chat  # A finished response has the end of the sequence too.
        await try_functions(tried, rows, lambda text: [*chat.encode(text), *chat.eos_ids[:1]], note)


def check_columns(
    facts: Mapping[str, tuple[Sequence[str], Sequence[str]]],
    parts: Mapping[str, OneReward],
    sources: Sequence[tuple[Rows, str]],
    note: Callable[[str], object],
) -> None:
    """Raise ConfigError if a function needs a column that no row of a source has.

    `facts` are those of `RunReward.facts`, and `sources` are rows with the column of their prompts.
    """
    for section, (needed, notes) in facts.items():
        for line in notes:
            note(line)
        for rows, prompt_key in sources if needed else ():
            for begin, part in zip((0, *rows.ends), rows.parts, strict=False):
                looked_at = range(begin, begin + min(part.size, _LOOKED_AT))
                entries = [problem(rows, i, prompt_key=prompt_key) for i in looked_at]
                have = {name for e in entries for name in (*e.columns, *e.extra_info)}
                if missing := sorted(set(needed) - have):
                    key, spec = f"{section}.function", parts[section].function
                    inside = ", ".join(sorted(have)) or "none"
                    rule = f"takes {missing[0]}, and no row of {part.source} has such a column. "
                    rule += f"They have {inside}"
                    fix = f"a column {missing[0]} in the rows, or a default for the parameter"
                    raise bad_value(key, spec, rule, fix)


async def check_functions(
    reward: RewardConfig, sources: Sequence[tuple[Rows, str]], note: Callable[[str], object]
) -> None:
    """Load the user's functions in a process, as a run does, and check their columns.

    One in a sandbox is left out, because this machine may have none.
    """
    for section, one in reward.parts.items():
        if one.kind != "function" or one.function in BUILTIN or one.sandbox:
            continue
        pool = RewardPool(one.model_copy(update={"num_workers": 1}), section)
        try:
            await pool.start()
            check_columns(
                {section: (pool.hello.columns, pool.hello.notes)}, reward.parts, sources, note
            )
        finally:
            await pool.close()


def _check_path(key: str, path: str) -> None:
    """Raise ConfigError if the path is neither a model's folder nor a model of the hub."""
    folder = Path(path)
    fix = "the folder or hub id of a Hugging Face sequence classifier"
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise bad_value(key, path, "the folder has no config.json", fix)
        return
    rule = "is a file" if folder.exists() else f"no such folder (from {Path.cwd()})"
    if not folder.exists() and hub.NAME.fullmatch(path):
        if not (why := hub.refusal("model", path)):
            return
        rule += f", and {why}"
    raise bad_value(key, path, rule, fix)


def _gpus_for(
    key: str, model: PlaceConfig, sides: Sides, gpus: list[str], free: list[str]
) -> list[str]:
    """Return the GPU of each worker. Workers that own GPUs take them from `free`."""
    count, ranks = model.num_workers, sides.trainer.ranks
    if not gpus:
        rule = "this machine has no GPU that millrace may use"
        raise bad_value(f"{key}.device", model.device, rule, f"{key}.device=cpu")
    if sides.trainer.runtime == "ray":
        raise on_ray(key, model.device)
    if model.share != "none":
        shared = gpus[:ranks] if model.share == "trainer" else gpus[ranks : len(gpus) - len(free)]
        if not shared:
            needed = sides.devices
            rule = f"trainer and rollouts need {needed} GPUs, and this machine has {len(gpus)}"
            fix = f"trainer.device=cpu with {key}.share=none, or more GPUs"
            raise bad_value(f"{key}.share", model.share, rule, fix)
        return [shared[worker % len(shared)] for worker in range(count)]
    if count > len(free):
        rule = (
            f"trainer and rollouts take {sides.devices} of this machine's "
            f"{len(gpus)} GPUs, and {len(free)} are left"
        )
        fix = f"fewer workers, {key}.share=rollout, or {key}.device=cpu"
        raise bad_value(f"{key}.num_workers", count, rule, fix)
    return [free.pop(0) for _ in range(count)]


def _with_models(reward: RewardConfig, placed: dict[str, RewardModelConfig]) -> RewardConfig:
    """Return the configuration with the devices that were chosen."""
    if "reward" in placed:
        return reward.model_copy(update={"model": placed["reward"]})
    mix = {
        name: part.model_copy(update={"model": placed.get(f"reward.mix.{name}", part.model)})
        for name, part in reward.mix.items()
    }
    return reward.model_copy(update={"mix": mix})


_PROCESSES = 64
_FOR_EVER = 10**9
_PACKAGES = ("site-packages", "dist-packages")


class SandboxLauncher:
    """Starts the workers of one reward in a sandbox. The pool ends them by their deadlines."""

    def __init__(self, section: str, function: str) -> None:
        """`section` is the section of the reward, and `function` its key."""
        from millrace.tools.sandbox import Sandbox

        self._key, self._function = f"{section}.sandbox", function
        packages = [
            str(p.resolve()) for p in map(Path, sys.path) if p.name in _PACKAGES and p.is_dir()
        ]
        package = Path(millrace.__file__).resolve().parent
        own = [str(path) for path in _places(function)]
        self._paths = [*packages, str(package.parent), *(str(Path(p).parent) for p in own)]
        self._own = own
        self._sandbox = Sandbox(
            readable=[*packages, str(package), *own],
            instead=f"{self._key}=false, which runs the function as you and with your rights",
        )

    async def check(self) -> None:
        """Make a trial run. Raise ConfigError if this machine cannot isolate the function."""
        from millrace.tools.sandbox import SandboxRefused

        for place in self._own:
            if os.geteuid() == 0 and not os.stat(place).st_mode & 0o004:
                rule = f"a user without rights runs the function, and cannot read {place}"
                raise bad_value(self._key, True, rule, f"chmod -R o+rX {place}")
        try:
            await self._sandbox.check()
        except SandboxRefused as refused:
            raise ConfigError(f"{self._key} = True: the reward cannot run: {refused}") from refused

    async def start(
        self, job: Job, connection: int, output: int, environment: Mapping[str, str]
    ) -> ProcessHandle:
        from millrace.tools.start import Limits

        memory = job.memory_mb << 20 or psutil.virtual_memory().total
        limits = Limits(_FOR_EVER, _FOR_EVER, memory, _PROCESSES, address=-1)
        where, _, name = self._function.rpartition(":")
        if where.endswith(".py"):  # the sandbox has another current folder
            path = Path(where).expanduser().resolve()
            job = msgspec.structs.replace(job, spec=job.spec | {"function": f"{path}:{name}"})
        program = [self._sandbox.python, "-s", "-B", *arguments(0, 0, job)]
        variables = {"PYTHONPATH": os.pathsep.join(self._paths)}
        try:
            running = await self._sandbox.open(
                program, limits, streams=(connection, output, output), environment=variables
            )
        except EpisodeError as error:
            raise OSError(str(error)) from error
        return _Isolated(running, job)


class _Isolated:
    def __init__(self, running: Running, job: Job) -> None:
        self._running, self._job = running, job
        self.pid: int = running.process.pid

    def kill(self) -> None:
        self._running.release()

    async def ended(self) -> str:
        words = await self._running.end()
        return _how(words, self._job)


def _how(words: Mapping[str, Any], job: Job) -> str:
    """Return how a worker ended, in the words of the sandbox's watcher."""
    if "failed" in words:
        return f"a sandbox that did not start ({words['failed']})"
    if words.get("reason") == "memory":
        return f"more memory than {job.key}.memory_mb = {job.memory_mb}"
    if words.get("reason") == "processes":
        return f"more than {_PROCESSES} processes"
    return how(words.get("status", -signal.SIGKILL))


def _places(function: str) -> Iterator[Path]:
    """Yield the folder or the package of a user's function. A built-in one has none."""
    where, colon, _ = function.rpartition(":")
    if where.endswith(".py"):
        yield Path(where).expanduser().resolve().parent
    elif colon:
        # `python -m`, which starts a worker, looks in the current folder too.
        found = PathFinder.find_spec(where.partition(".")[0], [os.getcwd(), *sys.path])
        origin = [found.origin] if found and found.origin else []
        for place in (found.submodule_search_locations or origin) if found else ():
            if Path(place).exists():
                yield Path(place).resolve()
