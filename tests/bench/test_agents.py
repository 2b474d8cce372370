"""`bench agents`: the episodes are the same everywhere, and their seconds add up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.extras.bench.agents import (
    DrawnAgent,
    agent_arms,
    agents_table,
    drawn_of,
    workloads_of,
)
from millrace.extras.bench.modes import Arm
from millrace.rollout.session import NO_LIMITS, Limits, Session
from millrace.simulate import clock
from millrace.types import (
    Prompt,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)
from tests.e2e import runs

WORKLOADS = workloads_of("3,0.5,6", "5,0.5,16", "4,0.5,16", ["0.5,1,10"])


def played(name: str, token_s: float, limits: Limits = NO_LIMITS) -> tuple[Trajectory, DrawnAgent]:
    """Play an episode with an engine that draws a token in each `token_s`."""
    agent, prompt = DrawnAgent(WORKLOADS[0], 7), Prompt(3, tokens_of([5, 6]), "p", "d")

    async def draw(tokens: Tokens, params: SamplingParams, name: str) -> tuple[Segment, ...]:
        await asyncio.sleep(token_s * params.max_tokens)
        drawn = tokens_of(range(params.max_tokens))
        floats = floats_of([-1.0] * len(drawn))
        return (Segment(drawn, version=0, log_probs=floats, stop=Stop.LENGTH),)

    async def main() -> Trajectory:
        session = Session(draw, prompt, SamplingParams(200), name, limits)
        return session.trajectory(await agent.play(session))

    return clock.run(main()), agent


def test_an_episode_is_a_function_of_its_name_and_its_seconds_add_up() -> None:
    whole = set()
    for i in range(20):
        (first, fast), (second, slow) = (played(f"3/{i}", t) for t in (0.01, 2.0))
        assert first.tokens == second.tokens and first.score == second.score
        assert fast.totals.tool_s == pytest.approx(slow.totals.tool_s)
        for agent, trajectory, token_s in ((fast, first, 0.01), (slow, second, 2.0)):
            t = agent.totals
            assert t.tool_s + t.draw_s == pytest.approx(t.wall_s)
            assert t.tokens == trajectory.num_policy_tokens
            assert t.draw_s == pytest.approx(token_s * t.tokens)
            assert (t.episodes, t.cut) == (1, 0)
        whole.add(tuple(first.tokens))
    assert len(whole) == 20


def test_an_episode_that_a_limit_ends_is_counted() -> None:
    longest = max(range(20), key=lambda i: played(f"3/{i}", 0.0)[1].totals.turns)
    trajectory, agent = played(f"3/{longest}", 0.0, Limits(max_turns=2))
    assert (agent.totals.turns, agent.totals.cut) == (2, 1)
    assert trajectory.finished


def test_a_mode_that_fixes_its_staleness_has_one_arm() -> None:
    arms = agent_arms(["colocate_sync", "async_swap"], ["1+1"], "1,4", WORKLOADS)
    note = "tool 0.5 s"
    assert list(arms) == [
        Arm("colocate_sync", 2, 2, note=note),
        Arm("async_swap", 1, 1, staleness=1.0, note=note),
        Arm("async_swap", 1, 1, staleness=4.0, note=note),
    ]
    assert [str(arm) for arm in arms][1] == "async_swap 1+1, staleness 1, tool 0.5 s"
    assert len(agent_arms(["async_swap"], ["1+1"], "", WORKLOADS)) == 1
    with pytest.raises(ConfigError, match="--staleness"):
        agent_arms(["async_swap"], ["1+1"], "1,x", WORKLOADS)


@pytest.mark.parametrize("value", ["4", "4,1", "4,1,2", "0,1,2", "a,b,c", "4,-1,9", "4,nan,9"])
def test_a_distribution_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--turns = .*MEDIAN,SIGMA,CUT"):
        drawn_of("--turns", value)


def test_bench_agents_compares_arms_on_the_same_episodes(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    size = ["rollout.total_rollout_steps=32", "actor.ppo_mini_batch_size=4", "rollout.n=4"]
    size += ["rollout.max_response_length=128", "actor.ppo_max_token_len_per_gpu=1024"]
    size += ["rollout.max_num_seqs=32", "rollout.session_kv_slots=32"]
    options = ["--modes", "async_swap", "--staleness", "0.5,1", "--tool", "0.02,1,0.2"]
    options += ["--turns", "3,0.5,4", "--draw", "5,0.5,10", "--result", "5,0.5,10"]
    done = runs.millrace(
        "bench", "agents", str(runs.RECIPE), *size, *options, "--folder", str(folder), "--json"
    )
    found = done.json
    assert found["complete"] and len(found["runs"]) == 2
    for f in found["runs"]:
        parts = f["tool_s"] + f["model_s"] + f["gate_s"]
        assert parts == pytest.approx(f["episode_s"], rel=0.05), "they add up to the wall time"
        assert f["turns_per_s"] > 0 and f["episodes_cut"] == 0.0
        assert f["waiting"] > 0 and 0 < f["drawing"] <= f["sessions"]
    table = agents_table(found["runs"])
    assert table.count("\n") == 3 and table.count("| - |") == 2, "no arm is the base"
