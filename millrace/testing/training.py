"""The conformance checks of train engines, on separate devices and on shared devices."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millrace.ports import Sleeper, TrainBatch, TrainEngine
from millrace.testing.rollouts import joined
from millrace.types import (
    Author,
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)

_CLOCKS_S = 0.01
"""Largest difference between the clocks of the engine and of the check, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCase:
    """The inputs and limits of the checks of a train engine."""

    mini_batch_size: int = 4
    """The engine's ppo_mini_batch_size.

    The engine's ppo_epochs and temperature must be 1. Its learning rate must be large enough for
    an effect in `learn_steps` steps.
    """
    vocab_size: int = 8
    """All token ids below this number are in the model's vocabulary."""
    learn_steps: int = 8
    exact: bool = True
    """Whether the same calls on a fresh engine give the same bits."""
    displaced: float = 1e-3
    """Displaced weights move some log-prob by more than this, and no rounding does."""
    tolerance: float = 1e-4
    """Largest difference between log-probs of one trajectory in different batches.

    If `exact` is false, this also limits the differences between engines.
    """


async def check_train_engine(
    make: Callable[[], Awaitable[TrainEngine]], case: TrainCase | None = None
) -> None:
    """Run every check of a TrainEngine on fresh engines from `make`.

    All engines from `make` must start from the same weights, in the phase "rl".
    """
    await _check_training(_TRAIN_CHECKS, make, case or TrainCase())


class SleepingTrainEngine(TrainEngine, Sleeper, Protocol):
    """A train engine for any placement: it can also sleep."""


async def check_sleeping_train_engine(
    make: Callable[[], Awaitable[SleepingTrainEngine]], case: TrainCase | None = None
) -> None:
    """Run the checks of a TrainEngine, and those for shared devices."""
    await check_train_engine(make, case)
    await _check_training(_SLEEPER_CHECKS, make, case or TrainCase())


async def _check_training(
    checks: Sequence[Callable[[Any, Any, TrainCase], Awaitable[None]]],
    make: Callable[[], Awaitable[TrainEngine]],
    case: TrainCase,
) -> None:
    for check in checks:
        engine, other = await make(), await make()
        try:
            await check(engine, other, case)
        finally:
            await engine.close()
            await other.close()


def train_samples(case: TrainCase, count: int, seed: int = 0) -> tuple[Sample, ...]:
    """Return ragged samples of 4 trajectories.

    The first two have a reward. The second and the fourth contain a turn of the environment.
    """
    rng = random.Random(seed)

    def ids(length: int) -> Tokens:
        return tokens_of(rng.randrange(case.vocab_size) for _ in range(length))

    def drawn(length: int, stop: Stop | None) -> Segment:
        log_prob = -math.log(case.vocab_size)
        return Segment(ids(length), version=0, log_probs=floats_of([log_prob] * length), stop=stop)

    def trajectory(j: int) -> Trajectory:
        turns = (
            (drawn(rng.randint(1, 5), None), Segment(ids(2), Author.ENVIRONMENT)) if j % 2 else ()
        )
        return Trajectory.of((*turns, drawn(rng.randint(1, 6), Stop.EOS)), Score(float(j < 2)))

    return tuple(
        Sample(
            Prompt(i, ids(rng.randint(1, 4)), "", "check"), tuple(trajectory(j) for j in range(4))
        )
        for i in range(count)
    )


def _difference(a: list[list[float]], b: list[list[float]]) -> float:
    assert [len(x) for x in a] == [len(x) for x in b], (
        "log_probs of the same samples have different shapes"
    )
    return max(
        (
            abs(x - y)
            for row, other in zip(a, b, strict=True)
            for x, y in zip(row, other, strict=True)
        ),
        default=0.0,
    )


async def _optimizer_steps_are_counted(
    engine: TrainEngine, _: TrainEngine, case: TrainCase
) -> None:
    clock = asyncio.get_running_loop().time
    for count, steps in ((case.mini_batch_size, 1), (2 * case.mini_batch_size + 1, 3), (1, 1)):
        start = clock()
        report = await engine.step(TrainBatch(train_samples(case, count), 0))
        wall = clock() - start
        assert report.optimizer_steps == steps, (
            f"{count} samples by {case.mini_batch_size}: {report.optimizer_steps} steps"
        )
        parts = report.seconds
        assert all(s >= 0 for s in parts.values()) and sum(parts.values()) <= wall + _CLOCKS_S, (
            f"no two parts of a call run at the same time, found {parts} in {wall} s"
        )
        bad = {
            k: v
            for k, v in report.metrics.items()
            if not (isinstance(v, float) and math.isfinite(v))
        }
        assert not bad, f"metrics are finite floats, found {bad}"


async def _log_probs_are_those_of_the_policys_tokens(
    engine: TrainEngine, _: TrainEngine, case: TrainCase
) -> None:
    samples = train_samples(case, 3)
    together = await engine.log_probs(samples)
    own = [
        [s for s in t.segments if s.author is Author.POLICY]
        for x in samples
        for t in x.trajectories
    ]
    assert [len(x) for x in together] == [len(joined(x)) for x in own], (
        "one log-prob for each token of the policy, by trajectory"
    )
    assert all(math.isfinite(x) and x <= 1e-6 for row in together for x in row), (
        "log-probs are finite and not positive"
    )
    alone = [row for sample in samples for row in await engine.log_probs((sample,))]
    worst = _difference(together, alone)
    assert worst <= case.tolerance, (
        f"log-probs differ by {worst} between batches: a row depends on other rows"
    )


async def _displaced_weights_come_back(
    engine: TrainEngine, _: TrainEngine, case: TrainCase
) -> None:
    samples = train_samples(case, 3)
    before = await engine.log_probs(samples)
    for away in (False, True, True):
        await engine.displace(away)
    moved = _difference(before, await engine.log_probs(samples))
    found = await engine.reference_log_probs(samples, 60.0)
    reference, ranks = [row[0] for row in found], [row[1] for row in found]
    assert all(0 < x < 1 for row in ranks for x in row), "a rank is a probability"
    own = await engine.log_probs(samples)
    assert not reference or _difference(own, reference) < case.displaced, (
        f"an independent model differs by {_difference(own, reference)} from the displaced weights"
    )
    assert moved > case.displaced, f"displaced weights moved log-probs by only {moved}"
    for again in range(2):
        await engine.displace(False)
        back = _difference(before, await engine.log_probs(samples))
        assert back == 0.0, (
            f"log-probs differ by {back} after {again + 1} calls that bring weights back"
        )


async def _rewarded_trajectories_become_likelier(
    engine: TrainEngine, _: TrainEngine, case: TrainCase
) -> None:
    samples = train_samples(case, case.mini_batch_size)

    async def gap() -> float:
        means = [sum(row) / len(row) for row in await engine.log_probs(samples)]
        return sum(x if i % 4 < 2 else -x for i, x in enumerate(means))

    before = await gap()
    for step in range(case.learn_steps):
        await engine.step(TrainBatch(samples, step))
    after = await gap()
    assert after > before, (
        f"log-prob of rewarded minus other trajectories: {before} before, {after} after"
    )


async def _a_rate_of_zero_keeps_the_weights(
    engine: TrainEngine, _: TrainEngine, case: TrainCase
) -> None:
    samples = train_samples(case, case.mini_batch_size)
    before = await engine.log_probs(samples)
    report = await engine.step(TrainBatch(samples, 0, 0.0))
    worst = _difference(before, await engine.log_probs(samples))
    assert report.optimizer_steps == 1, (
        f"{report.optimizer_steps} steps are counted with lr_scale 0"
    )
    assert worst <= (0.0 if case.exact else case.tolerance), (
        f"log-probs differ by {worst} after a step with lr_scale 0"
    )


async def _same_calls_same_weights(
    engine: TrainEngine, other: TrainEngine, case: TrainCase
) -> None:
    samples = train_samples(case, 3)
    results = []
    for each in (engine, other):
        for seed in range(3):
            await each.step(TrainBatch(train_samples(case, case.mini_batch_size + 1, seed), seed))
        results.append(await each.log_probs(samples))
    worst = _difference(*results)
    assert worst <= (0.0 if case.exact else case.tolerance), (
        f"the same steps on two engines differ by {worst}"
    )


async def _a_checkpoint_resumes_exactly(
    engine: TrainEngine, other: TrainEngine, case: TrainCase
) -> None:
    samples = train_samples(case, 3)

    def batch(seed: int) -> TrainBatch:
        return TrainBatch(train_samples(case, case.mini_batch_size, seed), seed)

    for seed in range(2):
        await engine.step(batch(seed))
    with tempfile.TemporaryDirectory() as folder:
        await engine.save(folder)
        await other.load(folder)
    limit = 0.0 if case.exact else case.tolerance
    for seed in (2, 3):
        worst = _difference(await engine.log_probs(samples), await other.log_probs(samples))
        assert worst <= limit, (
            f"log-probs differ by {worst} after a checkpoint and {seed - 2} more steps"
        )
        reports = [await each.step(batch(seed)) for each in (engine, other)]
        if case.exact:
            assert reports[0] == reports[1], (
                f"a step after a checkpoint reports {reports[1]}, and without it {reports[0]}"
            )


async def _nothing(engine: TrainEngine) -> None:
    return None


async def _a_nap(engine: SleepingTrainEngine) -> None:
    await engine.sleep()
    await engine.wake()


async def _a_staged_checkpoint_survives_sleep(
    engine: SleepingTrainEngine, other: SleepingTrainEngine, case: TrainCase
) -> None:
    await _a_staged_checkpoint_is_the_state_at_its_cut(engine, other, case, _a_nap)


async def _a_staged_checkpoint_is_the_state_at_its_cut(
    engine: TrainEngine,
    other: TrainEngine,
    case: TrainCase,
    between: Callable[[Any], Awaitable[None]] = _nothing,
) -> None:
    """Check that later calls before `saved` do not change a staged checkpoint.

    These calls are steps, `between` and another save.
    """
    samples, batches = (
        train_samples(case, 3),
        [TrainBatch(train_samples(case, case.mini_batch_size, k), k) for k in range(3)],
    )
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as later:
        cuts, reports = [], [await engine.step(batches[0])]
        for k, target in enumerate((folder, later), start=1):
            cuts.append(await engine.log_probs(samples))
            await engine.save(target, True)
            reports.append(await engine.step(batches[k]))
            await between(engine)
        await engine.saved()
        await engine.saved()
        for target, cut, batch, report in zip(
            (folder, later), cuts, batches[1:], reports[1:], strict=True
        ):
            await other.load(target)
            worst = _difference(cut, await other.log_probs(samples))
            assert worst <= (0.0 if case.exact else case.tolerance), (
                f"log-probs of a staged save differ by {worst} from its cut's"
            )
            again = await other.step(batch)
            assert again == report or not case.exact, (
                f"a step after loading a staged save reports {again}, the original {report}"
            )


async def _a_phase_begins_with_the_current_weights(
    engine: TrainEngine, other: TrainEngine, case: TrainCase
) -> None:
    """Check that `begin` keeps the weights and starts a new optimizer, whatever came before."""
    samples, batch = (
        train_samples(case, 3),
        TrainBatch(train_samples(case, case.mini_batch_size), 0),
    )
    for each, seeds in ((engine, (1, 2)), (other, (2, 1))):
        for seed in seeds:
            await each.step(TrainBatch(train_samples(case, case.mini_batch_size, seed), seed))
    before = await engine.log_probs(samples)
    await engine.begin("rl", 100)
    assert _difference(before, await engine.log_probs(samples)) == 0.0, "begin changed the weights"
    with tempfile.TemporaryDirectory() as folder:
        await engine.save(folder)
        await other.begin("rl", 100)
        await other.load(folder)
    results = []
    for each in (engine, other):
        await each.step(batch)
        results.append(await each.log_probs(samples))
    assert _difference(*results) <= (0.0 if case.exact else case.tolerance), (
        "a step after begin depends on the steps before it"
    )


async def _supervised_steps_lower_their_loss(
    engine: TrainEngine, _: TrainEngine, case: TrainCase
) -> None:
    examples: list[tuple[Tokens, ...]] = [
        (x.prompt.tokens, x.trajectories[0].segments[-1].tokens)
        for x in train_samples(case, case.mini_batch_size)
    ]
    await engine.begin("sft", 2 * case.learn_steps)
    reports = [await engine.sft_step(examples) for _ in range(case.learn_steps)]
    losses = [report.metrics["sft/loss"] for report in reports]
    assert all(report.optimizer_steps == 1 for report in reports), "one call is one step"
    assert losses[-1] < losses[0], f"the supervised loss went from {losses[0]} to {losses[-1]}"
    await engine.begin("rl", 100)
    await engine.step(TrainBatch(train_samples(case, case.mini_batch_size), 0))


async def _an_export_is_a_model_folder(
    engine: TrainEngine, _: TrainEngine, case: TrainCase
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await engine.export(folder)
        names = {path.name for path in Path(folder).iterdir()}
    assert "config.json" in names and any(name.endswith(".safetensors") for name in names), (
        f"an export has config.json and safetensors, found {sorted(names)}"
    )


async def _training_sleeps_and_wakes(
    engine: SleepingTrainEngine, _: SleepingTrainEngine, case: TrainCase
) -> None:
    samples = train_samples(case, case.mini_batch_size)
    await engine.step(TrainBatch(samples, 0))
    before = await engine.log_probs(samples)
    await engine.sleep()
    await engine.wake()
    assert _difference(before, await engine.log_probs(samples)) == 0.0, "log-probs changed in sleep"
    await engine.step(TrainBatch(samples, 1))


_TRAIN_CHECKS = (
    _optimizer_steps_are_counted,
    _log_probs_are_those_of_the_policys_tokens,
    _displaced_weights_come_back,
    _rewarded_trajectories_become_likelier,
    _a_rate_of_zero_keeps_the_weights,
    _same_calls_same_weights,
    _a_checkpoint_resumes_exactly,
    _a_staged_checkpoint_is_the_state_at_its_cut,
    _a_phase_begins_with_the_current_weights,
    _supervised_steps_lower_their_loss,
    _an_export_is_a_model_folder,
)
_SLEEPER_CHECKS = (_training_sleeps_and_wakes, _a_staged_checkpoint_survives_sleep)
