"""Reward functions.

Both signatures work, and every wrong signature is refused. Only a number becomes a score.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.data.user_code import failure
from millrace.errors import ConfigError, RewardError
from millrace.process.channel import Frames
from millrace.rewards.functions import load_function, to_score
from millrace.rewards.wire import Call, calls_decoder, frame
from millrace.types import Score


def call(*completions: Any, **changes: Any) -> Call:
    given = {
        "prompt": "p",
        "data_source": "d",
        "ground_truth": "4",
        "extra_info": {"index": 1},
        "columns": {"level": 3},
    }
    return Call(id=1, completions=list(completions), **given | changes)


def function(tmp_path: Path, code: Any, name: str = "f") -> Any:
    (tmp_path / "reward.py").write_text(code)
    return load_function(f"{tmp_path}/reward.py:{name}")


def test_verls_signature(tmp_path: Path) -> None:
    f = function(
        tmp_path,
        "def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return {'score': solution_str == ground_truth, 'length': len(solution_str), 'pred': solution_str}",
    )
    assert f.run(call("4", "55")) == [
        Score(1.0, {"length": 1.0}, answer="4"),
        Score(0.0, {"length": 2.0}, answer="55"),
    ]
    short = function(tmp_path, "def f(solution_str, ground_truth): return 0.5")
    assert short.run(call("4")) == [Score(0.5)]


def test_trls_signature_gets_columns_as_lists(tmp_path: Path) -> None:
    code = (
        "def f(prompts, completions, level, ground_truth, **kwargs):\n"
        "    assert prompts == ['p', 'p'] and level == [3, 3] and kwargs['index'] == [1, 1]\n"
        "    return [float(c == t) for c, t in zip(completions, ground_truth)]"
    )
    assert function(tmp_path, code).run(call("4", "5")) == [Score(1.0), Score(0.0)]


def test_trls_signature_gets_messages_where_the_prompt_is_messages(tmp_path: Path) -> None:
    code = "def f(completions, prompts): return [len(c[0]['content']) + len(p) for c, p in zip(completions, prompts)]"
    messages = [{"role": "user", "content": "p"}]
    assert function(tmp_path, code).run(call("abc", columns={"prompt": messages})) == [Score(4.0)]


def test_coroutine_functions_of_both_signatures(tmp_path: Path) -> None:
    verl = function(
        tmp_path, "async def f(data_source, solution_str, ground_truth, extra_info): return 1"
    )
    assert verl.is_async
    assert asyncio.run(verl.run_async(call("a", "b"))) == [Score(1.0)] * 2
    trl = function(tmp_path, "async def f(completions, **columns): return [1] * len(completions)")
    assert asyncio.run(trl.run_async(call("a", "b"))) == [Score(1.0)] * 2


def test_a_function_without_pred_has_the_answers_that_its_responses_mark(tmp_path: Path) -> None:
    """Without a mark, the whole response is the answer. An empty answer is none."""
    texts = ("so \\boxed{4}", "#### 1,000", "Answer: $x$", "<answer> 7 </answer>", "4")
    answers = ["4", "1000", "x", "7", None]
    verl = function(tmp_path, "def f(solution_str): return 1")
    trl = function(tmp_path, "def f(completions): return [1] * len(completions)")
    assert [s.answer for s in verl.run(call(*texts))] == answers
    assert [s.answer for s in trl.run(call(*texts))] == answers
    named = function(tmp_path, "def f(solution_str): return {'score': 1, 'pred': None}")
    assert [s.answer for s in named.run(call(*texts))] == [""] * 5
    number = function(tmp_path, "def f(solution_str): return {'score': 1, 'pred': 4}")
    assert number.run(call("4")) == [Score(1.0, answer="4")]


GROUP = """
def f(completions, **columns):
    shortest = min(map(len, completions))
    return [float(len(c) == shortest) for c in completions]
"""


@pytest.mark.parametrize("result", ["[1, 0]", "numpy.array([1, 0])", "(n for n in (1, 0))"])
def test_a_trl_function_returns_any_sequence_of_numbers(tmp_path: Path, result: str) -> None:
    trl = function(tmp_path, f"import numpy\ndef f(completions, **columns): return {result}")
    assert [s.value for s in trl.run(call("a", "b"))] == [1.0, 0.0]


@pytest.mark.parametrize(
    "result", ["numpy.array(1.0)", "numpy.array([[1], [0]])", "[1]", "iter('')"]
)
def test_a_trl_function_returns_one_number_for_each_completion(tmp_path: Path, result: str) -> None:
    trl = function(tmp_path, f"import numpy\ndef f(completions, **columns): return {result}")
    with pytest.raises(RewardError):
        trl.run(call("a", "b"))


def test_a_trl_function_gets_whole_groups_unless_it_declines(tmp_path: Path) -> None:
    asks = function(tmp_path, GROUP)
    assert asks.whole_group and asks.run(call("aa", "b", "c")) == [
        Score(0.0),
        Score(1.0),
        Score(1.0),
    ]
    assert not function(tmp_path, f"{GROUP}f.whole_group = False").whole_group
    with pytest.raises(ConfigError, match=r"whole_group = True\).*Fix: the signature f\(prompts"):
        function(tmp_path, "def f(solution_str): return 1\nf.whole_group = True")


def test_options_reach_the_built_in_functions_that_have_some() -> None:
    options = {"format": {"pattern": "a+"}}
    assert load_function("format", options).run(call("aa", "ab")) == [Score(1.0), Score(0.0)]
    assert load_function("exact", options).run(call("4", "ab")) == [Score(1.0), Score(0.0)]


def test_a_task_of_millrace_is_an_exact_match_whose_answer_is_the_whole_response() -> None:
    """A packaged recipe has no component and no other answer in its metrics."""
    found = load_function("").run(call("123", "132", data_source="sort_digits", ground_truth="123"))
    assert found == [Score(1.0), Score(0.0)]


@pytest.mark.parametrize(
    "value",
    [
        None,
        math.nan,
        math.inf,
        "1",
        [1.0],
        {"reward": 1},
        {"score": None},
        b"0",
        numpy.str_("0"),
        numpy.bytes_(b"0"),
        numpy.complex64(1j),
        numpy.timedelta64(0),
        numpy.array([0.0, 1.0]),
        torch.zeros(2),
        torch.zeros((), dtype=torch.complex64) + 1j,
        Decimal("NaN"),
        Decimal("sNaN"),
        10**400,
        -1e308,
        asyncio,
    ],
)
def test_what_is_no_number_is_an_error_never_a_zero(value: Any) -> None:
    with pytest.raises(RewardError, match=r"not_a_number|not_finite|no_score|too_large"):
        to_score(value)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, numpy.array([0.0, 1.0]), 1e300])
def test_a_component_that_is_no_number_is_counted_and_leaves_the_score(
    tmp_path: Path, bad: Any
) -> None:
    code = "def f(solution_str): return {'score': 1, 'x': BAD, 'ok': 2, 'word': 'a'}"
    made = function(tmp_path, code)
    made.call.__globals__["BAD"] = bad
    (score,) = made.run(call("a"))
    assert (score.value, score.extra) == (1.0, {"ok": 2.0})
    assert made.take_figures() == {"no_number/x": 1.0} and made.take_figures() == {}


def test_none_for_a_whole_sample_is_for_another_reward(tmp_path: Path) -> None:
    made = function(tmp_path, "def f(completions): return [None] * len(completions)")
    with pytest.raises(RewardError, match="not_for_the_task"):
        made.run(call("a", "b"))


def test_numbers_of_every_kind_are_scores() -> None:
    scalars = (numpy.float32(1), numpy.int64(1), numpy.bool_(True), numpy.array(1.0))
    others = (torch.ones(()), torch.ones(1, dtype=torch.bfloat16), Decimal(1), Fraction(1))
    for value in (1, True, 1.0, {"score": True}, *scalars, *others):
        assert to_score(value) == Score(1.0)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[1.0]", "wrong_length"),
        ("1.0", "not_a_list"),
        ("b'01'", "not_a_list"),
        ("memoryview(b'01')", "not_a_list"),
        ("[1.0, None]", "not_a_number"),
    ],
)
def test_a_bad_list_is_an_error(tmp_path: Path, body: Any, reason: Any) -> None:
    with pytest.raises(RewardError) as caught:
        function(tmp_path, f"def f(completions, **columns): return {body}").run(call("a", "b"))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        ("def compute_score(solution_str): pass", "compute_scores", "Fix: .*:compute_score."),
        ("f = 3", "f", "is not a function"),
        ("def f(a, b): pass", "f", "without solution_str"),
        ("class f:\n    def __call__(self, solution_str): pass", "f", "is a class.*Fix: an inst"),
        ("def f(solution_str, tokenizer): pass", "f", "needs tokenizer"),
        ("def f(solution_str, /): pass", "f", "by name"),
        ("import no_such_module", "f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:", "f", "SyntaxError"),
        ("raise SystemExit(3)", "f", "SystemExit: 3"),
    ],
)
def test_a_bad_function_is_a_config_error(tmp_path: Path, code: Any, name: str, said: Any) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        function(tmp_path, code, name)
    assert str(caught.value).startswith("reward.function = ")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("maths", "Fix: math"),
        ("no.such.module:f", "No module named"),
        ("trl.no_such_module:f", "Fix: pip install trl, or PYTHONPATH="),
        (":f", "must be"),
        ("my.py", r"Fix: my\.py:NAME"),
        ("/nowhere/my.py:f", "Fix: a path from"),
    ],
)
def test_a_bad_spec_is_a_config_error(spec: Any, said: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        load_function(spec)


def test_a_column_that_the_row_lacks_is_named(tmp_path: Path) -> None:
    f = function(tmp_path, "def f(completions, target, level, other=1): return [0.0]")
    with pytest.raises(RewardError, match=r"takes target, .* It has .*level") as caught:
        f.run(call("a"))
    assert caught.value.reason == "no_column"


def test_a_missing_file_names_the_one_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("")
    with pytest.raises(ConfigError, match=r"no such file.*Fix: .*/reward\.py:f"):
        load_function(f"{tmp_path}/rewards.py:f")


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]))), st.integers(1, 40))
def test_frames_survive_any_cutting(texts: Any, size: Any) -> None:
    sent = [call(text) for text in texts]
    data, frames, got = b"".join(frame([c]) for c in sent), Frames(), []
    for at in range(0, len(data), size):
        got += [
            c
            for payload in frames.feed(data[at : at + size])
            for c in calls_decoder.decode(payload)
        ]
    assert got == sent


def test_an_error_whose_message_fails_is_still_described() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert failure(Broken()) == "Broken: its message cannot be read"


def test_processes_of_a_users_file_find_its_functions(tmp_path: Path) -> None:
    """A pool that spawns imports the file by its name."""
    (tmp_path / "halves_of.py").write_text(
        "import multiprocessing\n"
        "def half(x): return x / 2\n"
        "def f(solution_str):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return pool.map(half, [1.0])[0]\n"
    )
    scorer = load_function(f"{tmp_path}/halves_of.py:f")
    assert scorer.run(call("a"))[0].value == 0.5


@pytest.mark.parametrize("name", ["json", "numpy", "not-a-name"])
def test_a_users_file_takes_the_place_of_no_other_module(tmp_path: Path, name: str) -> None:
    known = sys.modules.get(name)
    (tmp_path / f"{name}.py").write_text("def f(solution_str): return 1")
    assert load_function(f"{tmp_path}/{name}.py:f").run(call("a"))[0].value == 1.0
    assert sys.modules.get(name) is known


def test_a_file_of_a_package_may_import_its_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "my_scorers" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package.parent / "helper.py").write_text("HALF = 0.5")
    (package / "score.py").write_text("from ..helper import HALF\ndef f(solution_str): return HALF")
    assert load_function(f"{package}/score.py:f").run(call("a"))[0].value == 0.5
    lone = tmp_path / "lone.py"
    lone.write_text("from .helper import HALF\ndef f(solution_str): return HALF")
    with pytest.raises(ConfigError, match="no known parent package"):
        load_function(f"{lone}:f")


def test_all_functions_of_a_file_are_of_one_module(tmp_path: Path) -> None:
    file = tmp_path / "two_scorers.py"
    file.write_text(
        "seen = []\n"
        "def f(solution_str): return len(seen)\n"
        "def g(solution_str): seen.append(solution_str); return 0\n"
    )
    f, g = (load_function(f"{file}:{name}") for name in "fg")
    g.run(call("a"))
    assert f.run(call("a"))[0].value == 1
    assert pickle.loads(pickle.dumps(f.call)) is f.call
    file.write_text("def f(solution_str): return 25 + 25\n")  # a changed file runs again
    assert load_function(f"{file}:f").run(call("a"))[0].value == 50


def test_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"def f(solution_str): return {ord(name)}")
    functions = [load_function(f"{tmp_path}/{name}/same_name.py:f") for name in "abc"]
    assert [pickle.loads(pickle.dumps(f.call))("") for f in functions] == [97, 98, 99]


def test_a_neighbour_may_reach_further_than_the_file(tmp_path: Path) -> None:
    inner = tmp_path / "far_scorers" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "half.py").write_text("HALF = 0.5")
    (inner / "near.py").write_text("from ..half import HALF")
    (inner / "score.py").write_text("from .near import HALF\ndef f(solution_str): return HALF")
    assert load_function(f"{inner}/score.py:f").run(call("a"))[0].value == 0.5


def test_a_file_may_have_both_forms_of_an_import(tmp_path: Path) -> None:
    """Its package cannot be imported, as in a checkout of which a part is installed."""
    (tmp_path / "__init__.py").write_text("import no_such_package")
    (tmp_path / "near_half.py").write_text("HALF = 0.5")
    forms = (
        "try:\n    from .near_half import HALF\nexcept ImportError:\n    from near_half import HALF"
    )
    (tmp_path / "both.py").write_text(f"{forms}\ndef f(solution_str): return HALF")
    assert load_function(f"{tmp_path}/both.py:f").run(call("a"))[0].value == 0.5


def test_verls_batch_gets_lists_and_returns_one(tmp_path: Path) -> None:
    code = "def f(solution_strs, extra_infos, weight=1): return [{'score': len(s)} for s in solution_strs]"
    (tmp_path / "batch_score.py").write_text(f"{code}\ndef g(solution_strs, tools): return []")
    function = load_function(f"{tmp_path}/batch_score.py:f")
    assert function.whole_group and [s.value for s in function.run(call("a", "bb"))] == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"needs tools.*Fix: "):
        load_function(f"{tmp_path}/batch_score.py:g")


def test_a_package_may_have_the_name_of_another(tmp_path: Path) -> None:
    package = tmp_path / "msgspec"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("HALF = 0.5")
    (package / "score.py").write_text("from .helper import HALF\ndef f(solution_str): return HALF")
    before = sys.modules["msgspec"]
    assert load_function(f"{package}/score.py:f").run(call("a"))[0].value == 0.5
    assert sys.modules["msgspec"] is before


def test_a_file_that_fails_leaves_no_module(tmp_path: Path) -> None:
    (tmp_path / "half_scorer.py").write_text("x = 1\nraise ValueError('no')")
    with pytest.raises(ConfigError, match="ValueError: no"):
        load_function(f"{tmp_path}/half_scorer.py:f")
    assert "half_scorer" not in sys.modules


def test_trls_arguments_beside_the_columns(tmp_path: Path) -> None:
    """A form without `completions` is TRL's too, as in its documentation."""
    ids = function(
        tmp_path, "def f(completion_ids, **kwargs): return [len(i) for i in completion_ids]"
    )
    assert ids.takes_tokens and not ids.columns
    assert [s.value for s in ids.run(call("a", "b", completion_ids=[[5], [6, 7]]))] == [1.0, 2.0]
    plain = function(tmp_path, "def f(completions, level): return [1.0]")
    assert not plain.takes_tokens and plain.columns == ["level"]
    code = """
async def f(completions, level, log_metric=None, log_extra=None, other=1, **kwargs):
    log_metric("accuracy", 0.25)
    return [{"score": 1.0, "own": 2.0}, 0.0]
"""
    logs = function(tmp_path, code)
    assert logs.columns == ["level"]
    assert [note for note in logs.notes if "log_extra is not passed" in note] == logs.notes
    first, second = asyncio.run(logs.run_async(call("a", "b")))
    assert first.extra == {"accuracy": 0.25, "own": 2.0} and second.extra == {"accuracy": 0.25}


@pytest.mark.parametrize("name", ["trainer_state", "log_extra", "environments"])
def test_an_argument_of_trl_that_does_not_exist_here_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward\.function = .*needs {name}.*Fix: .*default"):
        function(tmp_path, f"def f(completions, {name}, **columns): return [1.0]")
    code = f"def f(completions, **kwargs): return [kwargs['{name}']]"
    assert name in function(tmp_path, code).notes[0]


def test_a_metric_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    code = "def f(completions, log_metric): log_metric('a', 'b'); return [1.0]"
    with pytest.raises(RewardError, match="log_metric of a"):
        function(tmp_path, code).run(call("x"))


def test_a_metric_that_is_nan_is_counted_and_left_out_as_a_component_is(tmp_path: Path) -> None:
    code = "def f(completions, log_metric): log_metric('a', float('nan')); return [1.0]"
    logs = function(tmp_path, code)
    assert [(s.value, s.extra) for s in logs.run(call("x"))] == [(1.0, {})]
    assert logs.take_figures() == {"no_number/a": 1.0}
