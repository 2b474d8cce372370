"""Kinds of public reward files: small files of our own that stand for 99 functions of 73 files.

A kind has the signature, the imports and the result of the functions that it stands for. Each goes
the way of a run: its worker loads it, and the trial calls it. `benchmarks/results/cases.md` has the
table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.config import RewardConfig
from millrace.errors import ConfigError
from millrace.rewards.mix import RunReward
from millrace.rewards.trial import try_functions
from millrace.types import Prompt, tokens_of

SCORE = "verl.utils.reward_score"
LATE = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    from "
EQUAL = "float(str(ground_truth) in solution_str)"


@dataclass(frozen=True)
class Kind:
    name: str
    functions: int
    code: str
    """The file with the function f, at `where`."""
    said: Sequence[str] = ()
    """Parts of the error. Empty: the function runs. FOLDER stands for the folder of all files."""
    where: str = "reward.py"
    files: dict[str, str] = field(default_factory=dict)
    """Other files, by path."""
    truth: Any = "4"


RUN = [
    Kind("two arguments and options", 11, f"def f(solution_str, ground_truth, method='strict', format_score=0.1, score=1.0): return {EQUAL}"),
    Kind("a truth that is a mapping", 2, "def f(solution_str: str, ground_truth: dict, answer_reward: float = 1.0): return ground_truth['a'] == len(solution_str)", truth={"a": 0}),
    Kind("a dict with acc, pred and others", 4, f"def f(solution_str, ground_truth, extra_info=None, **kwargs): return {{'score': {EQUAL}, 'acc': True, 'pred': None, 'format': 0.5}}"),
    Kind("its own choice by data source", 3, f"def f(data_source, solution_str, ground_truth, extra_info, step=0):\n    if data_source != 'sums': raise NotImplementedError\n    return {EQUAL}"),
    Kind("verl's scorers", 4, f"from {SCORE} import default_compute_score\nfrom {SCORE}.math_dapo import verify\ndef f(data_source, solution_str, ground_truth, extra_info=None, **kwargs): return float(verify(solution_str, ground_truth)[0])"),
    Kind("verl's scorers, async", 3, f"from {SCORE}.math_reward import compute_score\nfrom verl.utils.ray_utils import get_event_loop\nasync def f(data_source, solution_str, ground_truth, extra_info, **kwargs): return {{'score': await get_event_loop().run_in_executor(None, lambda: compute_score(solution_str, ground_truth)), 'split': extra_info['split']}}"),
    Kind("verl's scorers, imported in the call", 2, f"{LATE}{SCORE} import gsm8k\n    return gsm8k.compute_score(solution_str, ground_truth)"),
    Kind("a relative import in the call, in __init__.py", 3, f"from verl.utils.import_utils import deprecated\n{LATE}. import four\n    return four.score(solution_str)", where="verl/scorers/__init__.py", files={"verl/__init__.py": "import tensordict", "verl/scorers/four.py": "def score(text): return float('4' in text)"}),
    Kind("verl's batch", 2, "from .four import right\ndef f(data_sources, solution_strs, ground_truths, extra_infos): return [right(*pair) for pair in zip(solution_strs, ground_truths)]", where="verl/scorers/batch.py", files={"verl/__init__.py": "import tensordict", "verl/scorers/__init__.py": "", "verl/scorers/four.py": "def right(text, truth): return {'score': float(truth in text), 'acc': 1}"}),
    Kind("TRL, with a column and math-verify", 2, "from math_verify import parse, verify\ndef f(completions: list, solution: list[str], log_extra=None, **kwargs): return [float(verify(gold, parse(c))) if (gold := parse(f'${s}$')) else None for c, s in zip(completions, solution)]"),
    Kind("TRL, the form alone", 1, "import re\ndef f(completions, **kwargs): return [1.0 if re.search('</think>', c) else 0.0 for c in completions]"),
]  # fmt: skip
OWN = "which is this file's own project"
REFUSED = [
    Kind("its own project, which a folder above has", 2, f"from own.globals import MARK\ndef f(solution_str, ground_truth, enable_llm=False): return {EQUAL}", ["PYTHONPATH=FOLDER, which has own"], where="src/mix/reward.py", files={"own/globals.py": "MARK = ''"}),
    Kind("a package that is not installed", 24, f"from mathruler_x.grader import grade\ndef f(solution_str, ground_truth): return {EQUAL}", ["No module named 'mathruler_x'", "Fix: pip install mathruler_x, or PYTHONPATH="]),
    Kind("trl, through its own package", 9, "from .utils.ioi import x\ndef f(completions, **kwargs): return [0.0]", ["No module named 'trl'", "Fix: pip install trl, or PYTHONPATH="], where="src/own/rewards.py", files={"src/own/__init__.py": "", "src/own/utils/__init__.py": "import trl"}),
    Kind("a fork of verl around it", 4, f"from {SCORE}.livecode import prepare\ndef f(solution_str, ground_truth): return {EQUAL}", [f"No module named '{SCORE}.livecode'", "Fix: PYTHONPATH=FOLDER, which has verl"], where="verl/utils/reward_score/livecode.py", files={"verl/__init__.py": ""}),
    Kind("the fork of verl around it, in the call", 1, f"{LATE}{SCORE}.livecode import prepare\n    return 0", ["every call of a trial fails", f"No module named '{SCORE}.livecode'", "It needs PYTHONPATH=FOLDER, which has verl"], where="verl/utils/reward_score/__init__.py", files={"verl/__init__.py": ""}),
    Kind("its own project, by a name that no folder has", 4, "from recipe_x.collab.utils import parse\nasync def f(data_source, solution_str, ground_truth, extra_info, **kwargs): return 0", ["No module named 'recipe_x'", f"Fix: PYTHONPATH=the folder that has recipe_x, {OWN}"], where="collab/metrics/accuracy.py"),
    Kind("other modules of verl", 2, f"from verl.tools.base_tool import Tool\nfrom {SCORE} import math_dapo\ndef f(data_source, solution_str, ground_truth, extra_info, **kwargs): return 0", ["No module named 'verl.tools'", "Fix: pip install verl, or PYTHONPATH="]),
    Kind("another signature", 10, "def f(model_output, ground_truth, timeout_score=0): return 0", ["takes (model_output, ground_truth, timeout_score)", "Fix: the signature f(data_source, solution_str"]),
    Kind("arguments of verl's reward server", 1, "async def f(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer): return 0", ["needs reward_model_tokenizer, reward_router_address", "Fix: give them defaults"]),
    Kind("TRL, with arguments that no row has", 5, "def f(completions, answer, step, max_possible_reward, **kwargs): return [0.0]", ["no_column", "the function takes answer, max_possible_reward, step, and the row has no such column"]),
]  # fmt: skip
"""The first kind runs once its error is followed."""


def trial_of(kind: Kind, folder: Path) -> list[str]:
    """Load the function of a kind in a worker, and return the lines of its trial."""
    for name, text in {**kind.files, kind.where: kind.code}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    info, columns = {"split": "train"}, {"solution": "4"}
    prompts = [Prompt(i, tokens_of([1]), "2+2?", "sums", kind.truth, info, columns) for i in (0, 1)]

    async def run() -> list[str]:
        lines: list[str] = []
        reward = RunReward(RewardConfig(function=f"{folder / kind.where}:f", num_workers=1))
        try:
            await reward.start()
            tried = reward.parts.values()
            await try_functions(tried, prompts, lambda text: range(len(text)), lines.append)
        finally:
            await reward.close()
        return lines

    return asyncio.run(run())


@pytest.mark.parametrize("kind", RUN, ids=lambda kind: kind.name)
def test_a_kind_that_runs(kind: Kind, tmp_path: Path) -> None:
    assert not [line for line in trial_of(kind, tmp_path) if "warning" in line]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_a_kind_that_does_not_run_says_what_it_needs(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trial_of(kind, tmp_path)
    text = str(caught.value)
    assert text.startswith("reward.function = ") and "Fix: " in text
    for part in kind.said:
        assert part.replace("FOLDER", str(tmp_path)) in text


def test_a_kind_whose_error_is_followed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert not [line for line in trial_of(REFUSED[0], tmp_path) if "warning" in line]


def test_the_kinds_stand_for_all_functions() -> None:
    """39 of 99 run, two of them once the error is followed. 24 ran at first."""
    assert sum(kind.functions for kind in RUN) + REFUSED[0].functions == 39
    assert sum(kind.functions for kind in [*RUN, *REFUSED]) == 99
