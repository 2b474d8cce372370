"""Compares a governor of the staleness with fixed values of it, in seconds to a reward.

    python benchmarks/governed.py rates [--costs FILE] [--out FILE.jsonl]
    python benchmarks/governed.py learn [--costs FILE] [--out FILE.jsonl] [--seeds N] [--jobs N]
    python benchmarks/governed.py table FILE.jsonl [--best FILE.jsonl]

Both parts run the real loops and the real Ledger on the virtual clock, so the machine's speed changes
nothing. `rates` has samples a second. In `learn`, the train engine also learns: it draws the response
of every trajectory with the weights of the versions that the simulation gave its tokens, and makes
the real optimizer step. The task, the loss and the start model are those of the quickstart. `--costs`
has the quickstart's, from `millrace calibrate`. Those of H200s are the shapes of lending.py.

A GovernedLedger admits fewer samples than its capacity. Everything else is the package's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from command import millrace
from lending import SHAPES, Shape
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from millrace.config import recipe
from millrace.extras.plan import costs as plan_costs
from millrace.extras.plan.simulation import Rows, _Prompts, measured_lengths
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import DeviceSharing
from millrace.ports import StepReport, TrainBatch, TransferReport
from millrace.replicas.pool import RolloutPool
from millrace.rewards.builtin import default as score_by_data_source
from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.sample import SampleRoller
from millrace.run import problems
from millrace.schedule.ledger import Ledger, Topic
from millrace.schedule.schedule import OnSync, Schedule
from millrace.simulate import clock
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.train.fsdp.engine import build as build_train_engine
from millrace.types import (
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Trajectory,
    floats_of,
    tokens_of,
)

FIXED = (0.0, 0.1, 0.3, 0.5, 1.0, 2.0)
LEARNED = ("0", "0.5", "1", "2", "auto")
CEILING = 2.0
VERSIONS = {"rates": 30, "learn": 40}
TARGETS = (0.7, 0.8, 0.85)


@dataclass
class Governor:
    """The staleness of the next version, from the row of the last one.

    | the row shows | staleness |
    |---|---|
    | an effective share of tokens under `least_ess`, or k3 over `most_k3` | `step` less |
    | a trainer that waits over 5 % of the time, and rollouts with over 5 % free | `step` more |
    | a trainer that waits under 1 % of the time | half a step less |

    The first line that is true counts. The result is from 0 to the ceiling.
    """

    ceiling: float = CEILING
    now: float = 0.5
    step: float = 0.25
    least_ess: float = 0.9
    most_k3: float = 0.05

    def next(self, row: dict[str, float]) -> float:
        shares = {k: v for k, v in row.items() if k.startswith("staleness/token_share/")}
        ess = sum(v * row.get(k.replace("token_share", "ess"), 1.0) for k, v in shares.items())
        waits = row.get("timing_s/wait_samples", 0.0) + row.get("timing_s/wait_prev_gen", 0.0)
        waits /= row["perf/time_per_version"]
        change = 0.0
        if (shares and ess < self.least_ess) or row.get("rollout_corr/k3_kl", 0.0) > self.most_k3:
            change = -self.step
        elif waits > 0.05 and row["rollouter/idle_ratio"] > 0.05:
            change = self.step
        elif waits < 0.01:
            change = -self.step / 2
        self.now = min(self.ceiling, max(0.0, self.now + change))
        return self.now


class GovernedLedger(Ledger):
    """A Ledger that admits at most `most` samples, which is never over its capacity."""

    def __init__(self, schedule: Schedule, limit: int) -> None:
        super().__init__(schedule, limit)
        self.most = schedule.capacity

    def can_admit(self) -> bool:
        return self.occupied < self.most and super().can_admit()

    def govern(self, staleness: float) -> None:
        self.most = min(
            self.schedule.capacity, replace(self.schedule, staleness_threshold=staleness).capacity
        )
        self.changed.add(Topic.SLOTS)


@dataclass(frozen=True)
class Growing(DrawnLengths):
    """Lengths that grow as the run proceeds. `progress` is from 0 to 1."""

    by: float = 1.0
    progress: list[float] = field(default_factory=lambda: [0.0])

    def of(self, seed: int) -> int:
        drawn = DrawnLengths(self.median, self.sigma, self.limit).of(seed)
        return max(1, min(self.limit, round(drawn * self.by ** self.progress[0])))


def shapes(costs: Path | None) -> dict[str, Shape]:
    """Return the shapes by name. Each has two devices."""
    long = SHAPES["1.5B, median 250, sigma 0.8, 2 GPUs"]
    found = {
        "SmolLM2, sums": SHAPES["SmolLM2, sums, 2 GPUs"],
        "1.5B, long tail": long,
        "1.5B, equal lengths": replace(long, lengths=DrawnLengths(250, 0.0, 1024)),
        "1.5B, lengths grow fourfold": replace(long, lengths=Growing(120, 0.8, 2048, 4.0)),
        "1.5B, lengths shrink to a quarter": replace(long, lengths=Growing(480, 0.8, 2048, 0.25)),
    }
    if costs is not None:
        known = plan_costs.load(costs)
        model = known.model_of(schedule_of(32, 0.5), n=8, trainers=1, read=6)
        found["quickstart"] = Shape(2, 32, 256, model, measured_lengths(known.lengths, 8))
    return found


def schedule_of(prompts: int, staleness: float) -> Schedule:
    one = Schedule(
        ppo_mini_batch_size=prompts,
        trigger_parameter_sync_step=2,
        staleness_threshold=staleness,
        on_sync=OnSync.INTERRUPT,
    )
    return replace(one, lookahead=one.window if staleness else 1)


class Learner:
    """The quickstart's policy under training, with the weights of all live versions."""

    def __init__(self, model: str, seed: int, folder: str, samples: int) -> None:
        keys = [f"model.path={model}", "sft.steps=0", f"trainer.seed={seed}"]
        config = recipe.load("quickstart", keys)
        self.tasks = problems.prepare(config, problems.load(config), Path(folder))
        self.engine = build_train_engine(config, folder, rank=0, world_size=1)
        asyncio.run(self.engine.begin("rl", config.schedule.optimizer_steps(samples)))
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.seed, self.steps = seed, 0
        self.eos, self.limit = self.tasks.chat.eos_ids[0], config.rollout.max_response_length

    def keep(self, version: int) -> None:
        self.weights[version] = {name: w.clone() for name, w in self.engine.full_weights()}
        for old in [v for v in self.weights if v < version - 8]:
            del self.weights[old]

    @torch.inference_mode()
    def draw(
        self, prompts: Sequence[Prompt], versions: Sequence[Sequence[int]], seed: int
    ) -> list[Trajectory]:
        """Return a scored response to each prompt. `versions` has that of each of its tokens."""
        random, most = torch.Generator().manual_seed(seed), max(len(p.tokens) for p in prompts)
        rows, wide = len(prompts), most + self.limit
        ids, mask = torch.zeros((rows, wide), dtype=torch.long), torch.zeros((rows, wide))
        for i, prompt in enumerate(prompts):
            ids[i, most - len(prompt.tokens) : most] = torch.tensor(prompt.tokens.tolist())
            mask[i, most - len(prompt.tokens) :] = 1
        drawn: list[list[tuple[int, float, int]]] = [[] for _ in prompts]
        left = list(range(rows))
        for place in range(self.limit):
            uniform = torch.rand(rows, generator=random)
            for version in sorted({versions[i][place] for i in left}):
                at = [i for i in left if versions[i][place] == version]
                seen, end = mask[at, : most + place], most + place
                inputs = {
                    "input_ids": ids[at, :end], "attention_mask": seen, "use_cache": False,
                    "position_ids": (seen.cumsum(1) - 1).clamp(min=0).long(), "logits_to_keep": 1,
                }  # fmt: skip
                logits = functional_call(self.model, self.weights[version], (), inputs).logits
                log = logits[:, -1].double().log_softmax(-1)
                cut = log.exp().cumsum(-1) < uniform[at, None]
                tokens = cut.sum(-1).clamp(max=log.shape[1] - 1)
                ids[at, end] = tokens
                chosen = log.gather(1, tokens[:, None])[:, 0]
                for i, token, p in zip(at, tokens.tolist(), chosen.tolist(), strict=True):
                    drawn[i].append((token, p, version))
            left = [i for i in left if drawn[i][-1][0] != self.eos]
        return [self._finished(*one) for one in zip(prompts, drawn, strict=True)]

    def _finished(self, prompt: Prompt, drawn: list[tuple[int, float, int]]) -> Trajectory:
        parts = []
        for version in dict.fromkeys(v for *_, v in drawn):
            mine = [(token, p) for token, p, v in drawn if v == version]
            tokens, log_probs = tokens_of(t for t, _ in mine), floats_of(p for _, p in mine)
            parts.append(Segment(tokens, version=version, log_probs=log_probs))
        ended = Stop.EOS if drawn[-1][0] == self.eos else Stop.LENGTH
        parts[-1] = replace(parts[-1], stop=ended)
        text = self.tasks.chat.decode(tokens_of(t for t, *_ in drawn))
        value = score_by_data_source(
            prompt.data_source, text, prompt.ground_truth, prompt.extra_info
        )
        return Trajectory.of(
            tuple(parts), Score(float(value["score"] if isinstance(value, dict) else value))
        )

    def step(self, batch: TrainBatch) -> StepReport:
        """Draw what the simulated trajectories stand for, and train on it."""
        prompts = [self.tasks.train[s.prompt.index] for s in batch.samples]
        n, flat = len(batch.samples[0].trajectories), [p for p in prompts for _ in range(8)]
        versions = [self._versions(t) for s in batch.samples for t in s.trajectories]
        self.steps += 1
        drawn = self.draw(flat, versions, 1000 * self.seed + self.steps)
        samples = tuple(
            Sample(p, tuple(drawn[n * k : n * (k + 1)]), s.admitted_version)
            for k, (p, s) in enumerate(zip(prompts, batch.samples, strict=True))
        )
        work = self.engine.step(TrainBatch(samples, batch.version, batch.lr_scale))
        try:
            work.send(None)  # the engine computes in this thread, and waits for nothing
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        raise RuntimeError("the train engine waits")

    def _versions(self, simulated: Trajectory) -> list[int]:
        """Return the version of each of 8 tokens, which stand for equal shares of a response."""
        whole = [s.version for s in simulated.segments for _ in s.tokens]
        return [whole[k * len(whole) // self.limit] for k in range(self.limit)]

    def held_out(self, version: int) -> float:
        found = self.draw(self.tasks.val, [[version] * self.limit] * len(self.tasks.val), 7)
        return statistics.mean(t.score.value for t in found if t.score)


class LearningEngine(SimTrainEngine):
    """A simulated train engine that also learns, if it has a learner."""

    learner: Learner | None = None

    async def step(self, batch: TrainBatch) -> StepReport:
        report = await super().step(batch)
        self.trained.clear()
        if self.learner is None:
            return report
        return replace(report, metrics=self.learner.step(batch).metrics)


class LearningSync(SimWeightSync):
    keep_weights: Callable[[int], None] = staticmethod(lambda version: None)

    async def transfer(self, version: int) -> TransferReport:
        self.keep_weights(version)
        return await super().transfer(version)


class Governing(Rows):
    """Rows that govern the Ledger, and measure the reward of each version."""

    def attach(self, queue: SampleQueue, shape: Shape, arm: str, learner: Learner | None) -> None:
        self.queue, self.shape, self.learner = queue, shape, learner
        self.governor = Governor() if arm == "auto" else None
        self.curve: list[dict[str, float]] = []

    def row(self, version: int, row: dict[str, float]) -> None:
        super().row(version, row)
        ledger = self.queue.ledger
        if isinstance(self.shape.lengths, Growing):
            self.shape.lengths.progress[0] = ledger.retired / (ledger.limit or 1)
        point = {"samples": float(ledger.retired), "seconds": asyncio.get_running_loop().time()}
        names = ("trainer/idle_ratio", "rollouter/idle_ratio", "staleness/mean")
        point |= {name: round(row.get(name, 0.0), 4) for name in names}
        if self.learner:
            point["reward"] = self.learner.held_out(version)
        if self.governor and isinstance(ledger, GovernedLedger):
            point["auto"] = self.governor.next(row)
            self.queue.do(ledger.govern, point["auto"])
        self.curve.append(point)


def run(shape: Shape, arm: str, versions: int, learner: Learner | None = None) -> list[dict[str, float]]:
    """Return the points of a run in async_partial on two devices: one for each version."""
    schedule = schedule_of(shape.prompts, CEILING if arm == "auto" else float(arm))
    if isinstance(shape.lengths, Growing):
        shape.lengths.progress[0] = 0.0

    async def simulated() -> list[dict[str, float]]:
        ledger = GovernedLedger(schedule, versions * schedule.window)
        queue, kept = SampleQueue(ledger, deadline_s=1e8), Governing()
        kept.attach(queue, shape, arm, learner)
        if kept.governor:
            ledger.govern(kept.governor.now)
        engines = [SimRolloutEngine(shape.cost, slots=shape.slots)]
        limit = SamplingParams(max_tokens=shape.lengths.limit)
        parts = SingleTurn(), SimReward(shape.cost), lambda _: "", limit, 8
        roller = SampleRoller(*parts, seed=0, lengths=shape.lengths)
        rollouter = Rollouter(queue, _Prompts(6), RolloutPool(engines), roller)
        train, sync = LearningEngine(shape.cost), LearningSync(shape.cost, engines)
        if learner:
            train.learner, sync.keep_weights = learner, learner.keep
        trainer = Trainer(queue, rollouter, train, DeviceSharing(), sync, kept)
        await trainer.begin()
        await run_pipeline(rollouter, trainer)
        return kept.curve

    return clock.run(simulated())


def rate(curve: list[dict[str, float]]) -> float:
    """Return samples a second between the fifth version and the last but four."""
    first, last = curve[4], curve[-5]
    return (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])


def to_reward(curve: list[dict[str, float]], target: float, axis: str) -> float | None:
    """Return where the mean reward of three versions first reaches a target, between two points."""
    means = [statistics.mean(p["reward"] for p in curve[max(0, k - 2) : k + 1]) for k in range(len(curve))]
    for k, reached in enumerate(means):
        if reached >= target:
            before = curve[k - 1][axis] if k else 0.0
            share = (target - means[k - 1]) / (reached - means[k - 1]) if k else 1.0
            return before + share * (curve[k][axis] - before)
    return None


def learned(case: tuple[str, str, int, str], costs: Path | None, versions: int) -> dict[str, Any]:
    """Return a run that learns, from the start model of its seed."""
    name, arm, seed, model = case
    torch.set_num_threads(1)
    shape = shapes(costs)[name]
    with TemporaryDirectory() as folder:
        learner = Learner(model, seed, folder, versions * 2 * shape.prompts)
        curve = run(shape, arm, versions, learner)
    return {"part": "learn", "shape": name, "arm": arm, "seed": seed, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("rates", "learn", "table"))
    parser.add_argument("files", nargs="*", type=Path, help="rows of earlier runs, for `table`")
    parser.add_argument("--costs", type=Path, help="those of the quickstart")
    parser.add_argument("--shapes", nargs="*", help="some of the shapes, by the start of their names")
    parser.add_argument("--versions", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="add the rows to this file as JSON lines")
    options = parser.parse_args()
    if options.part == "table":
        text = "".join(path.read_text() for path in options.files)
        return show([json.loads(line) for line in text.splitlines()])
    versions = options.versions or VERSIONS[options.part]
    names = [n for n in shapes(options.costs) if n.startswith(tuple(options.shapes or [""]))]
    rows = []
    if options.part == "rates":
        for name, arm in product(names, [*map(str, FIXED), "auto"]):
            curve = run(shapes(options.costs)[name], arm, versions)
            rows.append({"part": "rates", "shape": name, "arm": arm, "rate": rate(curve), "curve": curve})
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
        return show(rows)
    with TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(options.jobs) as jobs:
        models = [
            millrace("sft", "quickstart", f"trainer.run_dir={folder}/{s}", f"trainer.seed={s}")["model"]
            for s in range(options.seeds)
        ]
        cases = [(n, arm, s, str(models[s])) for s in range(options.seeds) for n, arm in product(names, LEARNED)]
        for row in jobs.imap(partial(learned, costs=options.costs, versions=versions), cases):
            rows.append(row)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the samples a second, and the mean samples and seconds to each target."""
    for name in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == name]
        for row in mine:
            if row["part"] == "rates":
                print(f"| {name} | {row['arm']} | {row['rate']:.2f} |")
        for arm, target in product(LEARNED, TARGETS):
            arms = [row["curve"] for row in mine if row["part"] == "learn" and row["arm"] == arm]
            for axis in ("samples", "seconds") if arms else ():
                found = [to_reward(curve, target, axis) for curve in arms]
                if None not in found:
                    each = ", ".join(f"{one:.4g}" for one in found)
                    print(f"| {name} | {arm} | {target} | {axis} | {statistics.mean(found):.4g} | {each} |")


if __name__ == "__main__":
    main()
