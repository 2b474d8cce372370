"""Reward files that import verl, TRL or a package of their own: they load, or the error says how."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.rewards.functions import load_function
from millrace.rewards.wire import Call

SCORE = "verl.utils.reward_score"


@pytest.fixture(autouse=True)
def _no_verl() -> Iterator[None]:
    """Forget modules of verl, which another test may have imported."""
    before = list(sys.path)

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
            del sys.modules[name]

    forget()
    yield
    forget()
    sys.path[:] = before


def value_of(folder: Path, code: str, text: str, truth: str) -> Any:
    """Return what the function `f` of a file gives."""
    path = folder / f"scorer_{abs(hash(code))}.py"
    path.write_text(code)
    call = Call(0, "", "lighteval/MATH", truth, {}, {}, [text])
    return load_function(f"{path}:f").run(call)[0]


HEAD = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    "


@pytest.mark.parametrize(
    ("imports", "expression", "text", "truth", "value"),
    [
        (f"from {SCORE} import default_compute_score as g", "g('openai/gsm8k', solution_str, ground_truth)", "#### 4", "4", 1.0),
        (f"from {SCORE} import _default_compute_score as g", "g(data_source, solution_str, ground_truth, extra_info)", r"\boxed{4}", "4", 1.0),
        (f"from {SCORE} import default_compute_score as g", "g('aime24', solution_str, ground_truth)['score']", "Answer: 5", "4", -1.0),
        (f"from {SCORE} import gsm8k", "gsm8k.compute_score(solution_str, ground_truth, format_score=0.1)", "#### 5", "4", 0.1),
        (f"from {SCORE}.gsm8k import extract_solution", "float(extract_solution(solution_str, method='flexible'))", "it is 4 .", "4", 4.0),
        (f"import {SCORE}.math_reward as m", "m.compute_score(solution_str, ground_truth)", r"\boxed{0.5}", r"\frac12", 1.0),
        (f"from {SCORE}.math import last_boxed_only_string as a, remove_boxed as b, is_equiv", "float(is_equiv(b(a(solution_str)), ground_truth))", r"\boxed{\frac12}", "1/2", 1.0),
        (f"from {SCORE} import math_dapo", "float(math_dapo.compute_score(solution_str, ground_truth)['pred'] == '[INVALID]')", "none", "4", 1.0),
        (f"from {SCORE}.math_dapo import verify", "float(verify(solution_str, ground_truth, strict_box_verify=True)[0])", r"\boxed{4}", "4", 1.0),
        (f"from {SCORE}.math_dapo import normalize_final_answer as n", "float(n(solution_str) == ground_truth)", "$4$ units", "4", 1.0),
        (f"from {SCORE} import prime_math", "float(prime_math.compute_score(solution_str, ground_truth)[0])", r"\boxed{2/4}", "1/2", 1.0),
        (f"from {SCORE}.math_verify import compute_score as g", "g(model_output=solution_str, ground_truth=ground_truth)", r"\boxed{3}", "4", 0.0),
    ],
)  # fmt: skip
def test_scorers_of_verl_are_millraces(
    tmp_path: Path, imports: str, expression: str, text: str, truth: str, value: float
) -> None:
    code = f"{imports}\n{HEAD}return {expression}\n"
    assert value_of(tmp_path, code, text, truth).value == value
    lazy = f"{HEAD}{imports}\n    return {expression}\n"
    assert value_of(tmp_path, lazy, text, truth).value == value


def test_a_source_without_a_scorer_raises_as_in_verl(tmp_path: Path) -> None:
    code = f"from {SCORE} import default_compute_score as g\n{HEAD}return g('x/y', '', '')\n"
    with pytest.raises(NotImplementedError, match="'x/y'"):
        value_of(tmp_path, code, "", "")


def test_an_installed_verl_is_the_one_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl" / "utils").mkdir(parents=True)
    for folder in ("verl", "verl/utils"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "verl" / "utils" / "reward_score.py").write_text(
        "default_compute_score = lambda *a: 7.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code = f"from {SCORE} import default_compute_score as g\n{HEAD}return g()\n"
    assert value_of(tmp_path, code, "", "").value == 7.0


@pytest.mark.parametrize(
    ("code", "name", "fix"),
    [
        ("from verl import DataProto", "DataProto", "pip install verl, or PYTHONPATH="),
        ("import verl.workers.reward_manager", "verl.workers", "pip install verl, or PYTHONPATH="),
        (f"from {SCORE}.lean import x", f"{SCORE}.lean", "pip install verl, or PYTHONPATH="),
        (f"from {SCORE} import no_such", "no_such", "pip install verl"),
        ("from no_trl.rewards import x", "no_trl", "pip install no_trl, or PYTHONPATH="),
        ("from own_pkg.helper import x", "own_pkg", "PYTHONPATH=FOLDER, which has own_pkg"),
        ("from .helper import x", "relative import", "__init__.py in FOLDER/scorers"),
        ("from json import no_such", "no_such", "correct it"),
    ],
)
def test_an_import_that_fails_names_what_mends_it(
    tmp_path: Path, code: str, name: str, fix: str
) -> None:
    (tmp_path / "own_pkg").mkdir()
    (tmp_path / "own_pkg" / "helper.py").write_text("x = 1\n")
    (tmp_path / "scorers").mkdir()
    path = tmp_path / "scorers" / "scorer.py"
    path.write_text(f"{code}\n{HEAD}return 0\n")
    with pytest.raises(ConfigError) as caught:
        load_function(f"{path}:f")
    text = str(caught.value)
    assert text.startswith("reward.function = ") and name in text
    assert f"Fix: {fix.replace('FOLDER', str(tmp_path))}" in text
