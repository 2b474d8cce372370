"""`millrace bench agents`: modes and numbers of sessions, with turns, tools and their delays.

The episodes go through the real loops, sessions and engines. Only the tools are drawn: how many
turns an episode has, how many tokens each turn and each result has, and how long a tool takes.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millrace.errors import LimitReached, bad_value
from millrace.extras.bench.modes import Arm, Figures, Measure, arms_of, names_of, run_arms, run_once
from millrace.observe.progress import Progress
from millrace.ports import PolicySession
from millrace.rollout.lengths import DrawnLengths
from millrace.run.session import Session
from millrace.schedule.modes import MODES
from millrace.types import Ending, Score, tokens_of

OWN_LENGTHS = ["rollout.ignore_eos=true", "rollout.drawn_lengths.enable=false"]
"""The agent draws the length of each turn."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The agent's response lengths and delays. All are log-normal."""

    turns: DrawnLengths
    draw: DrawnLengths
    """Tokens of a turn of the policy."""
    result: DrawnLengths
    """Tokens of a tool's result."""
    tool_ms: DrawnLengths
    """Milliseconds of a tool's call."""

    def __str__(self) -> str:
        return f"tool {self.tool_ms.median / 1000:g} s"


@dataclass(slots=True)
class Totals:
    """The sums over all finished episodes."""

    episodes: int = 0
    turns: int = 0
    tokens: int = 0
    """Tokens that the policy drew."""
    wall_s: float = 0.0
    draw_s: float = 0.0
    """Seconds in `draw`: at the gate, in the engine's queue, and at the engine."""
    tool_s: float = 0.0
    cut: int = 0
    """Episodes that a limit ended."""


@dataclass(slots=True)
class DrawnAgent:
    """An agent with drawn turns, tools and delays. Half of its episodes succeed."""

    workload: Workload
    seed: int
    totals: Totals = field(default_factory=Totals)

    async def play(self, session: PolicySession) -> Ending:
        """Play an episode. It is the same in every mode and on every machine."""
        own, w, clock = Totals(episodes=1), self.workload, asyncio.get_running_loop().time
        rng = random.Random(f"agent/{self.seed}/{session.name}")
        begin, context, after = clock(), session.prompt.tokens, None
        turns = w.turns.of(rng.getrandbits(63))
        for number in range(turns):
            since, wanted = clock(), w.draw.of(rng.getrandbits(63))
            try:
                turn = await session.draw(context, after=after, max_tokens=wanted)
            except LimitReached:
                own.cut = 1
                break
            own.draw_s += clock() - since
            own.turns += 1
            own.tokens += len(turn.tokens)
            if number + 1 < turns:
                since = clock()
                await asyncio.sleep(w.tool_ms.of(rng.getrandbits(63)) / 1000)
                own.tool_s += clock() - since
                size, after = w.result.of(rng.getrandbits(63)), turn.number
                context = tokens_of(rng.choices(session.prompt.tokens, k=size))
        own.wall_s = clock() - begin
        for name in Totals.__slots__:  # type: ignore[attr-defined]
            setattr(self.totals, name, getattr(self.totals, name) + getattr(own, name))
        return Ending(score=Score(float(rng.random() < 0.5)))

    async def close(self) -> None:
        return None


def drawn_of(option: str, value: str, scale: float = 1.0) -> DrawnLengths:
    """Return the distribution MEDIAN,SIGMA,CUT. Raises ConfigError."""
    parts = value.split(",")
    try:
        median, sigma, cut = (float(part) for part in parts)
    except ValueError:
        median = sigma = cut = math.nan
    if not (0 < median <= cut < math.inf and 0 <= sigma < math.inf):
        rule = "must be MEDIAN,SIGMA,CUT: a log-normal distribution, cut at CUT"
        raise bad_value(option, value, rule, f"{option} 4,0.5,16")
    return DrawnLengths(median * scale, sigma, round(cut * scale))


def _number(option: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise bad_value(option, value, "must be numbers from 0 between commas", f"{option} 1,4")
    return number


def workloads_of(turns: str, draw: str, result: str, tools: Sequence[str]) -> list[Workload]:
    """Return a workload for each distribution of a tool's seconds."""
    lengths = drawn_of("--turns", turns), drawn_of("--draw", draw), drawn_of("--result", result)
    return [Workload(*lengths, drawn_of("--tool", tool, 1000)) for tool in tools]


def agent_arms(
    modes: Sequence[str],
    splits: Sequence[str],
    staleness: str,
    workloads: Sequence[Workload],
) -> dict[Arm, Workload]:
    """Return an arm for each mode, split, staleness and workload, with its workload.

    `staleness` has values between commas. A mode that fixes its staleness has one arm for all of
    them.
    """
    arms: dict[Arm, Workload] = {}
    values = [_number("--staleness", value) for value in staleness.split(",") if value]
    for workload in workloads:
        for arm in arms_of(modes, splits):
            free = MODES[arm.mode].staleness_threshold is None
            for value in values if free and values else [None]:
                arms[replace(arm, staleness=value, note=str(workload))] = workload
    return arms


async def bench_agents(
    path: Path,
    overrides: Sequence[str],
    arms: dict[Arm, Workload],
    folder: Path,
    progress: Progress,
    figures: list[Figures],
    *,
    skip: int,
    repeats: int,
) -> None:
    """Run every arm `repeats` times and append the figures of each run to `figures`."""

    async def begin(s: Session) -> Measure:
        async def measure(arm: Arm, turn: int, session: Session) -> Figures:
            agent = DrawnAgent(arms[arm], session.config.trainer.seed)
            measured = await run_once(replace(session, agent=agent), skip)
            return names_of(arm, turn) | measured | _figures(agent, measured, session)

        return measure

    await run_arms(
        path,
        [*overrides, *OWN_LENGTHS],
        list(arms),
        folder,
        progress,
        figures,
        begin,
        skip=skip,
        repeats=repeats,
    )


def _figures(agent: DrawnAgent, measured: Figures, s: Session) -> Figures:
    """Return the seconds of an episode by what the session did, and the sessions by it.

    Seconds are those of all finished episodes. The share of the gate is that of the counted
    versions.
    """
    t, config = agent.totals, s.config
    if not t.episodes:
        raise bad_value("rollout.total_rollout_steps", 0, "no episode finished", "a larger value")
    draws = measured["drawing"] + measured["at_gate"]
    gate = measured["at_gate"] / draws if draws else 0.0
    slots = config.rollout.max_num_seqs * config.rollout.replicas
    return {
        "tool_median_s": agent.workload.tool_ms.median / 1000,
        "sessions": config.schedule.capacity * config.rollout.n,
        "slots": slots,
        "turns_per_s": measured["drawn_tokens_per_s"] * t.turns / max(1, t.tokens),
        "episodes_cut": t.cut / t.episodes,
        "episode_s": t.wall_s / t.episodes,
        "tool_s": t.tool_s / t.episodes,
        "model_s": t.draw_s * (1 - gate) / t.episodes,
        "gate_s": t.draw_s * gate / t.episodes,
    }


def agents_table(figures: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of runs, the base first within each delay of tools."""
    base: dict[float, float] = {}
    for f in figures:
        if f["mode"] == "colocate_sync":
            base[f["tool_median_s"]] = max(base.get(f["tool_median_s"], 0.0), f["turns_per_s"])
    rows = [
        "| arm | sessions | turns/s | ratio | busy slots | drawing | at the gate | with tools "
        "| episode s | tool s | model s | gate s | read per drawn | idle trainer | staleness |",
        "|---" + "|--:" * 14 + "|",
    ]
    for f in sorted(figures, key=lambda f: (f["tool_median_s"], f["turns_per_s"])):
        first = base.get(f["tool_median_s"])
        ratio = f"{f['turns_per_s'] / first:.2f}" if first else "-"
        drawing = f["drawing"]
        cells = [
            f["arm"],
            f["sessions"],
            f"{f['turns_per_s']:.1f}",
            ratio,
            f"{min(drawing, f['slots']) / f['slots']:.0%}",
            *(f"{f[name]:.1f}" for name in ("drawing", "at_gate", "waiting")),
            *(f"{f[name]:.2f}" for name in ("episode_s", "tool_s", "model_s", "gate_s")),
            f"{f['read_per_drawn']:.2f}",
            f"{f['trainer_idle']:.0%}",
            f"{f['staleness']:.2f}",
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
