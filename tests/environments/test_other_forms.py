"""The tools and environments of verl and TRL, unchanged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.agents.chat_agent import ChatAgent
from millrace.config import recipe
from millrace.environments.task_tools import TaskWithTools
from millrace.environments.trl import TrlFactory
from millrace.errors import ConfigError, DataError
from millrace.extras.environments.verl_tools import ToolConfig, load_function_tools
from millrace.run.problems import load
from millrace.types import Score
from tests.agents.scripts import agent_of, play, prompt_of
from tests.agents.test_chat_agent import add, call, results

VERL = """
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

LOG = []


class Guess(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.tries = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self.tries[instance_id] = [kwargs["create_kwargs"]["secret"], 0]
        LOG.append("create")
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        self.tries[instance_id][1] += 1
        secret, tries = self.tries[instance_id]
        right = parameters["number"] == secret
        text = f"{self.config['prefix']} {'right' if right else 'wrong'} after {tries}"
        return ToolResponse(text=text), float(right), {"tries": tries}

    async def release(self, instance_id: str, **kwargs):
        del self.tries[instance_id]
        LOG.append("release")
"""
YAML = """
tools:
  - class_name: {module}.Guess
    config: {{type: native, prefix: "it is"}}
    tool_schema:
      type: function
      function:
        name: guess
        description: Guess the number.
        parameters:
          type: object
          properties: {{number: {{type: integer, description: the number}}}}
          required: [number]
"""


@pytest.fixture
def verl_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = f"guess_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(VERL)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "tools.yaml"
    path.write_text(YAML.format(module=module))
    return path


def hermes(tools: Any) -> ChatAgent:
    return agent_of(lambda prompt: TaskWithTools(tools), None, "hermes")


def test_a_tool_of_verl_keeps_its_state_for_an_episode_and_is_released(verl_tools: Path) -> None:
    tools = ToolConfig(str(verl_tools))
    kwargs = {"tools_kwargs": {"guess": {"create_kwargs": {"secret": 7}}}}
    said = [call("guess", number=3), call("guess", number=7), "it was 7"]
    prompt = prompt_of("x", extra_info=kwargs | {"agent_name": "tool_agent"})
    done = play(hermes(tools), prompt, said)
    assert results(done) == ["it is wrong after 1", "it is right after 2"]
    assert done.counts["tools/guess/reward"] == 1 and done.counts["tools/guess/tries"] == 3
    log = next(m for n, m in sys.modules.items() if n.startswith("guess_")).LOG
    assert log[-2:] == ["create", "release"]


def test_the_columns_of_verl_choose_tools(verl_tools: Path) -> None:
    tools = ToolConfig(str(verl_tools))
    alone = prompt_of("x", columns={"agent_name": "single_turn_agent"})
    done = play(hermes(tools), alone, [call("guess", number=3)])
    assert done.counts["turns"] == 1 and done.ended == "done"
    none = prompt_of("x", extra_info={"tool_selection": []})
    assert play(hermes(tools), none, ["end"]).counts["turns"] == 1
    absent = {"tools_kwargs": {"guess": {"create_kwargs": None}, "other": None}}  # as in Parquet
    assert play(hermes(tools), prompt_of("x", extra_info=absent), ["end"]).counts["turns"] == 1
    for column, value, rule in (
        ("tool_selection", ["gess"], "must be a list of names of tools; these are guess"),
        ("agent_name", "my_agent", "the agents of rows are tool_agent, single_turn_agent"),
        ("tools_kwargs", {"gess": {}}, "names tools that .*tools.yaml lacks; it has guess"),
        ("tools_kwargs", '{"guess": {}}', "must be a dict by the names of tools"),
        ("tools_kwargs", {"guess": 3}, "guess must be a dict of dicts"),
        ("tools_kwargs", {"guess": {"create_kwargs": "ab"}}, "guess must be a dict of dicts"),
        ("tools_kwargs", {"guess": {"creat_kwargs": {}}}, "its parts are create_kwargs,"),
    ):
        with pytest.raises(DataError, match=rule):
            play(hermes(tools), prompt_of("x", extra_info={column: value}), ["end"])


def test_a_row_with_bad_options_is_refused_before_the_run_loads_anything(
    verl_tools: Path, tmp_path: Path
) -> None:
    good = {"prompt": "2>", "ground_truth": "1", "data_source": "chase"}
    given = {"guess": {"creat_kwargs": {"secret": 7}}}
    rows = [good, good | {"extra_info": {"tools_kwargs": given}}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    keys = ["agents.environment=", f"agents.tool_config_path={verl_tools}"]
    for where in ("data.train_files", "data.val_files", "sft.files"):
        config = recipe.load("agents_quickstart", [*keys, f"{where}=[{file}]"])
        with pytest.raises(DataError, match=r"rows.jsonl row 2, tools_kwargs: .*parts are create_"):
            load(config)


MADE = "tools: [{class_name: millrace.extras.environments.verl_tools.BaseTool"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("tools: []", "must have a list `tools`"),
        ("tools: [{config: {type: native}}]", r"tools\[0\] has no class_name"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "is of type mcp"),
        ("tools: [{class_name: no_such_module.B}]", "importing it raised ModuleNotFoundError"),
        ("tools: [{clas_name: a.B}]", r"tools\[0\] has no class_name"),
        ("tools: [{class_name: a.B, confg: {}}]", "has the key confg.* Fix: config"),
        ("tools: [{class_name: a.B, config: 3}]", r"tools\[0\].config must be a mapping"),
        ("tools: [", "cannot be read: while parsing"),
        (f"{MADE}}}]", r"verl_tools.BaseTool, cannot be made: AttributeError"),
        (f"{MADE}, tool_schema: x}}]", "cannot be made: AttributeError"),
        (f"{MADE}, tool_schema: {{function: {{name: 3}}}}}}]", "is a text, and not 3"),
        (
            f"{MADE}, tool_schema: &a {{function: {{name: t}}}}}}, {MADE[8:]}, tool_schema: *a}}]",
            "has two tools of one name: t, t",
        ),
    ],
)
def test_a_wrong_tool_file_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rule) as caught:
        ToolConfig(str(path))
    assert str(caught.value).startswith("agents.tool_config_path = ")


def test_the_function_tools_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl").mkdir()  # such as a clone: a folder is no package
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "tools.py"
    path.write_text(
        "from verl.tools.function_tool import function_tool\n"
        "@function_tool\n"
        "def double(n: int) -> int:\n"
        '    """Double.\n\n    Args:\n        n: a number\n    """\n'
        "    return 2 * n\n"
    )
    tools = load_function_tools(str(path))
    done = play(hermes(lambda _: tools), prompt_of("x"), [call("double", n=4), "8"])
    assert results(done) == ["8"]
    path.write_text("x = 1")
    with pytest.raises(ConfigError, match="no function of it has @function_tool"):
        load_function_tools(str(path))


class Counter:
    """An environment in TRL's form."""

    made = 0

    def __init__(self) -> None:
        Counter.made += 1
        self.value = 0

    def reset(self, start: int = 0, **kwargs: Any) -> str | None:
        self.value = start
        return f" from {start}"

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: how much
        """
        self.value += step
        return self.value

    async def read(self) -> int:
        """Read the counter."""
        return self.value

    def get_reward(self) -> float:
        return float(self.value)

    def _hidden(self) -> None:
        raise AssertionError


def test_an_environment_of_trl_has_one_instance_for_each_episode() -> None:
    before = Counter.made
    factory = TrlFactory(Counter, [add])
    agent = agent_of(factory, None, "hermes")
    prompt = prompt_of("count", columns={"start": 5})
    said = [call("increment", step=2), call("read"), call("add", a=1, b=1), call("_hidden"), "end"]
    for _ in range(2):
        done = play(agent, prompt, said)
        assert done.messages[0]["content"] == "count from 5"
        assert results(done)[:3] == ["7", "7", "2"] and "no tool" in results(done)[3]
        assert done.score == Score(7.0)
    assert Counter.made - before == 3  # one of them was asked for its methods


def test_what_is_no_environment_or_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no method reset"):
        TrlFactory(object)
    with pytest.raises(ConfigError, match=r"environment = 'Needy': it cannot be made: TypeError"):
        TrlFactory(type("Needy", (), {"__init__": lambda self, url: None}))
