"""What `millrace.train` refuses before a model loads, and how functions and rows become keys."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

import millrace
from millrace.algorithms.policy_loss import policy_loss
from millrace.api.inputs import setup
from millrace.config import recipe
from millrace.data.user_code import kept, load, spec_of
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.train.optim import lr_at
from tests.api.small import ROWS, SMALL
from tests.e2e.runs import ROOT


def score(solution_str: str, **columns: Any) -> float:
    return float(len(solution_str))


async def watch(version: millrace.LiveVersion) -> None: ...


def closure() -> Callable[..., float]:
    weight = 2.0
    return lambda solution_str, **columns: weight * len(solution_str)


def some_loss() -> Callable[..., Any]:
    @policy_loss()
    def my_loss(inputs: Any, options: Any) -> Any:
        return -inputs.advantages * inputs.log_probs

    return my_loss


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"rollout": {"nn": 8}}, "rollout.nn"),
    "unknown section": ({"rolout": {"n": 8}}, "rollout"),
    "key with a dash": ({"rollout-n": 8}, "key = 'rollout-n'"),
    "wrong value": ({"rollout.n": "many"}, "rollout.n = 'many'"),
    "no recipe of the name": ({"recipe": "quickstrt"}, "quickstart"),
    "recipe is a number": ({"recipe": 3}, "recipe = 3"),
    "reward is a number": ({"reward": 5}, "reward = 5"),
    "several rewards": ({"reward": [score, score]}, 'reward={"mix": {"a":'),
    "reward is a class": ({"reward": dict}, "is a class"),
    "reward without a signature": ({"reward": lambda x: x}, "without solution_str"),
    "reward twice": ({"reward": score, "reward.function": "exact"}, "one of them"),
    "a closure in a sandbox": (
        {"reward": {"function": closure(), "sandbox": True}},
        "reward.sandbox = True: limits a process",
    ),
    "a closure with a limit": (
        {"reward": {"function": closure(), "memory_mb": 99}},
        "reward.memory_mb = 99",
    ),
    "a loss that no file has": (
        {"actor": {"policy_loss": {"loss_mode": some_loss()}}},
        "some_loss.<locals>.my_loss': exists only in this process, and workers import it",
    ),
    "agent is no function": ({"agent": 3}, "agent = 3"),
    "agent is not async": (
        {"recipe": "agents_quickstart", "agent": score, "agents.environment": ""},
        "must be `async def`",
    ),
    "rows without the column": ({"train": [{"text": "12", "answer": "12"}]}, "no column 'prompt'"),
    "rows of no dicts": ({"train": [{"prompt": "1"}, 3]}, "row 2 is a int"),
    "no rows": ({"train": datasets.Dataset.from_list([])}, "has no rows"),
    "rows without a length": ({"train": iter(ROWS)}, "list(train)"),
    "all splits": ({"train": {"train": ROWS}}, "one of its splits"),
    "a callback is no function": ({"callbacks": [3]}, "callbacks"),
    "an async callback": ({"callbacks": [watch]}, "'watch': is async, and nothing awaits"),
    "a callback of nothing": ({"callbacks": [lambda: None]}, "does not take one version"),
    "rows twice": (
        {"train": ROWS, "data": {"train_files": ["x"]}},
        "train = 'a list': data.train_files is given too",
    ),
    "only a validation": ({"trainer.val_only": True}, "trainer.val_only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_and_leaves_no_folder(name: str, tmp_path: Path) -> None:
    keys, text = REFUSED[name]
    with pytest.raises((ConfigError, DataError)) as raised:
        millrace.train(**{"recipe": "quickstart"} | keys)
    assert text in str(raised.value), raised.value
    assert not [*tmp_path.glob("runs/*")]


def test_a_refusal_inside_a_running_loop_is_the_same() -> None:
    async def notebook() -> None:
        millrace.train("quickstart", train=[{"text": "12"}])

    with pytest.raises(DataError, match="no column 'prompt'"):
        asyncio.run(notebook())


def test_keys_are_those_of_the_command() -> None:
    keys = {"rollout": {"n": 4}, "mode": "async_swap", "trainer.seed": 3, "data": {"val_files": []}}
    made = setup("quickstart", keys).config
    given = ["rollout.n=4", "mode=async_swap", "trainer.seed=3", "data.val_files=[]"]
    assert made == recipe.load("quickstart", given)
    whole = setup({"inherits": "quickstart", **keys, "name": "quickstart"}, {}).config
    assert whole == made
    assert setup(made, {"rollout.n": 8}).config.rollout.n == 8


def test_a_function_of_a_module_has_a_path_and_a_closure_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    assert spec_of(score) == f"{Path(__file__)}:score"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert spec_of(score) == f"{__name__}:score"
    assert spec_of(json.dumps) == f"{json.__file__}:dumps"
    assert spec_of(closure()) == "" == spec_of(len)
    first, second = closure(), closure()
    mix = {"a": {"function": first}, "b": {"function": second}, "c": {"function": first}}
    made = setup("quickstart", {"reward": {"mix": mix}})
    names = [part.function for part in made.config.reward.mix.values()]
    assert names == ["millrace.driver:lambda", "millrace.driver:lambda_2", names[0]]
    with kept(made.functions):
        assert load("reward.function", names[1]) is second
    with pytest.raises(ConfigError, match="no file has it"):
        load("reward.function", names[1])


@pytest.mark.parametrize("guarded", [True, False])
def test_workers_import_a_script_only_with_a_guard(guarded: bool, tmp_path: Path) -> None:
    body = "from millrace.data.user_code import spec_of\nprint(spec_of(f) or 'none')\n"
    guard = "if __name__ == '__main__':\n    "
    text = "def f(solution_str): return 1.0\n" + (guard if guarded else "")
    script = tmp_path / "script.py"
    script.write_text(text + body.replace("\n", "\n    ", 1 if guarded else 0))
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (f"{script}:f" if guarded else "none")


def test_a_script_that_trains_when_it_is_imported_is_named(tmp_path: Path) -> None:
    script = tmp_path / "trains.py"
    script.write_text("import millrace\nmillrace.train('quickstart')\ndef f(solution_str): ...\n")
    with pytest.raises(ConfigError, match=r"trains\.py: importing it begins a run.*__main__"):
        load("reward.function", f"{script}:f")


def test_rows_keep_their_file_and_their_types(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    frame = table.to_pandas()
    sources = [
        setup("quickstart", {}, train=rows).config.data.train_files for rows in (ROWS, table, frame)
    ]
    assert sources[0] == sources[1] == sources[2]
    lines = Path(sources[0][0]).read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS
    assert setup("quickstart", {}, val=["a.jsonl"]).config.data.val_files == ("a.jsonl",)


def test_one_run_at_a_time() -> None:
    def inner(version: Any) -> None:
        millrace.train("quickstart")

    with pytest.raises(MillraceError, match="another run of this process"):
        millrace.train("quickstart", callbacks=[inner], progress=False, **SMALL)


def test_the_package_is_light_and_its_room_can_be_called() -> None:
    code = (
        "import sys, millrace; print(sorted({'torch', 'pydantic', 'yaml'} & set(sys.modules)));"
        "import millrace.train; print(callable(millrace.train), 'Rollouts' in dir(millrace))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True True"]
    assert callable(lr_at)  # the room is imported here, and is still the function
    with pytest.raises(ConfigError, match="quickstart"):
        millrace.train("quickstrt")


async def play(client: Any, task: dict[str, Any]) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("path", "spec"), [("", "millrace.driver:play"), (ROOT, f"{__name__}:play")]
)
def test_the_module_of_an_agent_is_not_imported_a_second_time(
    path: object, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(path))
    made = setup("agents_quickstart", {"agents.environment": ""}, agent=play)
    assert made.config.agents.program == spec
    with kept(made.functions):
        assert load("agents.program", spec) is play
