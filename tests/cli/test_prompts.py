"""`millrace train --dry-run` on rows that a chat model would read otherwise than they seem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.config import recipe
from millrace.models.model import write_shape
from tests.data.test_strings_as_chat import tokenizer
from tests.data.test_tokenizer import CHATML

ASK = [{"role": "user", "content": "What?"}]
SHORT = [{"role": "system", "content": "Be brief."}, *ASK]
CALLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture
def dry(run: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Dry-run one row with a model folder that has this chat template."""

    def dry(row: dict[str, Any], template: str = CHATML) -> Any:
        made = tokenizer(template)
        made.save_pretrained(tmp_path / "m")
        shape = recipe.load("quickstart").model.shape
        write_shape(tmp_path / "m", shape, vocab_size=len(made), max_position_embeddings=256)
        (tmp_path / "m" / "pytorch_model.bin").touch()
        (tmp_path / "t.jsonl").write_text(json.dumps({"answer": "2", **row}) + "\n")
        keys = "data.train_files=t.jsonl", "data.val_files=[]", "reward.function=exact"
        lengths = "rollout.max_prompt_length=200", "rollout.max_response_length=8"
        code, out, err = run("train", "quickstart", "model.path=m", *keys, *lengths, "--dry-run")
        return code, " ".join((out + err).split())

    return dry


@pytest.mark.parametrize(
    ("row", "template", "parts"),
    [
        ({"prompt": SHORT}, CHATML.replace("messages %}", "messages[1:] %}"), "Be brief."),
        ({"prompt": ASK}, "hello", "What?"),
        ({"prompt": "<|START_OF_TURN_TOKEN|>What?"}, CHATML, "<|START_OF_TURN_TOKEN|>"),
        ({"prompt": "array([{'content': 'x', 'role': 'user'}], dtype=object)"}, CHATML, "array("),
        ({"prompt": json.dumps(json.dumps(ASK))}, CHATML, "user"),
    ],
)
def test_words_that_the_policy_would_not_see_are_refused(
    dry: Callable[..., Any], row: dict[str, Any], template: str, parts: str
) -> None:
    code, said = dry(row, template)
    assert code == 2 and "t.jsonl row 1" in said and parts in said and "Fix: " in said, said


def test_a_switch_of_the_template_is_no_lost_word(dry: Callable[..., Any]) -> None:
    """SmolLM3's template takes /no_think out of the system's words."""
    thinks = CHATML.replace("m['content']", "m['content'] | replace('/no_think', '')")
    code, said = dry(
        {"prompt": [{"role": "system", "content": "Be brief. /no_think"}, *ASK]}, thinks
    )
    assert code == 0 and "Be brief." in said, said


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", CALLS), ("agent_name", "tool_agent"), ("tools_kwargs", {"add": {}})],
)
def test_a_column_for_agents_is_said_to_be_ignored(
    dry: Callable[..., Any], name: str, value: Any
) -> None:
    code, said = dry({"prompt": ASK, name: value})
    assert code == 0 and f"the column {name} = " in said and "key of agents" in said, said
    code, said = dry({"prompt": ASK, "extra_info": {"agent_name": "single_turn_agent"}})
    assert code == 0 and "the column" not in said, said


def test_a_prompt_that_ends_a_message_is_a_warning(dry: Callable[..., Any]) -> None:
    closed = CHATML.partition("{% if add_generation_prompt")[0]
    ends = closed.replace("<|im_end|>", "{{ eos_token }}")
    code, said = dry({"prompt": ASK}, ends)
    assert code == 0 and "add_generation_prompt" in said, said
    code, said = dry({"prompt": ASK})
    assert code == 0 and "add_generation_prompt" not in said, said
