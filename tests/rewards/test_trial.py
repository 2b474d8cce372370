"""The trial of a user's reward function before a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.config import RewardConfig
from millrace.errors import ConfigError
from millrace.rewards.mix import RunReward
from millrace.rewards.trial import answers_to, try_functions
from millrace.types import Prompt, tokens_of

PROMPTS = [Prompt(i, tokens_of([1]), f"{i} + {i}?", "sums", str(2 * i)) for i in range(3)]


def lines_of(tmp_path: Path, code: str, **keys: Any) -> list[str]:
    """Return what a trial of the function `f` says."""
    file = tmp_path / "mine.py"
    file.write_text(code)
    config = RewardConfig.model_validate({"function": f"{file}:f", **keys})

    async def run() -> list[str]:
        lines: list[str] = []
        reward = RunReward(config)
        try:
            await reward.start()
            chosen = reward.parts.values() if config.trial else ()
            await try_functions(chosen, PROMPTS, lambda text: range(len(text)), lines.append)
            assert reward.take_figures() == {}
        finally:
            await reward.close()
        return lines

    return asyncio.run(run())


@pytest.mark.parametrize(
    "code",
    [
        "def f(solution_str, ground_truth): return float(ground_truth == solution_str)",
        "def f(solution_str, ground_truth): return float(f'#### {ground_truth}' in solution_str)",
        "async def f(completions, **k): return [float(len(c)) for c in completions]",
        "def f(completions, completion_ids): return [float(len(ids) > 99) for ids in completion_ids]",
        # It needs two answers.
        "from statistics import stdev\n"
        "def f(completions): return [len(c) / (1 + stdev(map(len, completions))) for c in completions]",
        "def f(solution_str): return {'score': len(solution_str), 'x': float('nan')}",
    ],
)
def test_a_function_with_different_scores_gets_no_warning(tmp_path: Path, code: str) -> None:
    assert not [line for line in lines_of(tmp_path, code) if "warning" in line]


@pytest.mark.parametrize("returned", ["0.0", "1"])
def test_equal_scores_of_made_up_and_true_answers_are_named(tmp_path: Path, returned: str) -> None:
    (line,) = lines_of(tmp_path, f"def f(solution_str): return {returned}")
    assert "warning: reward.function" in line and f"gives {returned[0]} for each of 18" in line


def test_a_score_that_depends_on_the_other_answers_is_named(tmp_path: Path) -> None:
    code = "def f(completions): return [len(c) / len(completions) for c in completions]"
    (line,) = lines_of(tmp_path, code)
    assert line.startswith("reward.function") and "all of a sample" in line


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(solution_str): return nope", r"NameError(?s:.*)line 1, in f"),
        ("def f(solution_str): return None", "not_a_number"),
        ("def f(completions): return [None for _ in completions]", "not_for_the_task"),
        ("def f(completions, level): return [1.0]", "no_column"),
        ("import os\ndef f(solution_str): os._exit(3)", "worker_died"),
    ],
)
def test_a_function_that_always_fails_ends_the_start(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward\.function = (?s:.*){said}(?s:.*)Fix: "):
        lines_of(tmp_path, code)
    assert lines_of(tmp_path, code, trial=False) == []


def test_one_that_hangs_costs_one_deadline(tmp_path: Path) -> None:
    code = "import time\ncalls = open(__file__ + '.calls', 'a')\n"
    code += "def f(solution_str):\n    print('x', file=calls, flush=True)\n    time.sleep(600)"
    with pytest.raises(ConfigError, match=r"timeout.*Fix: a larger reward\.timeout_s"):
        lines_of(tmp_path, code, timeout_s=0.2)
    # A busy machine may kill the worker before it has written.
    assert (tmp_path / "mine.py.calls").read_text() in ("", "x\n")


def test_a_function_that_fails_at_times_is_a_warning(tmp_path: Path) -> None:
    (line,) = lines_of(tmp_path, "def f(solution_str): return len(solution_str.split()[0])")
    assert "3 of 18 calls of a trial fail" in line and "IndexError" in line


def test_millraces_own_scorers_are_not_tried() -> None:
    reward = RunReward(RewardConfig(function="exact"))
    asyncio.run(try_functions(reward.parts.values(), PROMPTS, lambda text: [], pytest.fail))
    assert not next(iter(reward.parts.values())).workers  # type: ignore[union-attr]


@pytest.mark.parametrize("truth", [None, {"a": 1}])
def test_a_truth_that_is_no_text_gets_made_up_answers_alone(truth: Any) -> None:
    assert answers_to(truth) == answers_to(None)
    assert answers_to(["7", "8"])[3] == "7" and len(answers_to("7")) == 6
