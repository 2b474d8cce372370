"""The code of a model folder runs only if model.trust_remote_code is on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.config import Config, ModelConfig, RewardModelConfig
from millrace.data.tokenizer import make_tokenizer
from millrace.models.model import folder_eos_ids
from millrace.models.tokenizer import load_tokenizer

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast

Path({ran!r}).touch()


class Mine(PreTrainedTokenizerFast):
    pass


class Shape(PretrainedConfig):
    model_type, eos_token_id = "mine", None
"""


def shape_of(folder: Path, *, trust_remote_code: bool) -> None:
    folder_eos_ids(folder, trust_remote_code=trust_remote_code)


def test_it_is_off_unless_the_user_sets_it() -> None:
    assert not Config().model.trust_remote_code
    assert not ModelConfig().trust_remote_code and not RewardModelConfig().trust_remote_code


@pytest.mark.parametrize("load", [load_tokenizer, shape_of])
@pytest.mark.parametrize("trusted", [False, True])
def test_the_code_of_a_folder_runs_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool, load: Callable[..., object]
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder, ran = tmp_path / "model", tmp_path / "ran"
    make_tokenizer("chars", ["abc"], 0).save_pretrained(str(folder))
    (folder / "mine.py").write_text(CODE.format(ran=str(ran)))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Shape"}}
    (folder / "config.json").write_text(json.dumps(shape))
    try:
        load(folder, trust_remote_code=trusted)
    except (ValueError, OSError) as error:
        assert not trusted and "trust_remote_code" in str(error)
    assert ran.exists() is trusted
