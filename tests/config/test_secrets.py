"""No key of the configuration may have a secret, and the refusal does not show it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from millrace.config import recipe
from millrace.config.layers import check_secrets
from millrace.errors import ConfigError, RewardError, redact

RECIPES = Path(recipe.__file__).parent.parent / "recipes"
SECRET = "sk-canary/1+2"

SETTINGS = {
    "an address with a password": "trainer.mirror=s3://user:sk-canary@host/place",
    "a judge with a password": "reward.judge.base_url=http://user:sk-canary@host/v1",
    "a judge with a parameter": "reward.judge.base_url=http://host/v1?api_key=sk-canary",
    "a number for a judge": "reward.judge.extra_body={api_key: 123456789}",
    "a value in an address": "reward.judge.base_url=http://host/v1/sk-canary%2F1%2B2",
    "a value as a name": "reward.judge.extra_body={sk-canary/1+2: 1}",
    "a field for a judge": "reward.judge.extra_body={api_key: sk-canary}",
    "a header for a judge": "reward.judge.extra_body={headers: {Authorization: Bearer sk-canary}}",
    "an option of vLLM": "rollout.engine_kwargs={hf_token: sk-canary}",
    "an argument of a program": "agents.command=python agent.py --api-key sk-canary",
    "a signed address": "data.train_files=['https://host/a?X-Amz-Signature=sk-canary']",
    "a value of the environment": f"trainer.project_name={SECRET}",
    "a name that does not exist": "reward.judge.api_key=sk-canary",
}


FIX = r"'\*\*\*'.*Fix: (the secret in the environment|an address alone, with the key in)"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_secret_is_refused_and_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with pytest.raises(ConfigError, match=FIX) as error:
        recipe.load("quickstart", [SETTINGS[name]])
    assert "canary" not in str(error.value)


def test_a_reference_to_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml would have the value."""
    monkeypatch.setenv("MY_JUDGE_KEY", SECRET)
    text = "inherits: quickstart\nreward: {judge: {extra_body: {user: '${oc.env:MY_JUDGE_KEY}'}}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="has the value of MY_JUDGE_KEY") as error:
        recipe.load(tmp_path / "mine.yaml")
    assert "canary" not in str(error.value)


def test_no_key_of_millrace_has_the_name_of_a_secret() -> None:
    check_secrets(dict.fromkeys(dict(recipe.all_keys()), "text"))


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda p: p.stem)
def test_no_packaged_recipe_is_refused(path: Path) -> None:
    check_secrets(recipe.load(path).model_dump(mode="json"))


@pytest.mark.parametrize(
    "text",
    ["http://host:8000/v1", "s3://bucket/a@b", "python agent.py --max-tokens 5 --key-frames=2", ""],
)
def test_an_ordinary_value_is_no_secret(text: str) -> None:
    check_secrets({"agents": {"command": text}, "model": {"override_config": {"pad_token": text}}})


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("HF_TOKEN", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "A_KEY_2")),
        *((name, True) for name in ("MY_SECRET", "my_credentials", "DB_PASSWD", "API_KEY1")),
        *((name, False) for name in ("TOKENIZERS_PARALLELISM", "KEYBOARD", "HOME", "SECRET_PLACE")),
    ],
)
def test_a_variable_is_a_secret_by_its_name_and_length(
    name: str, secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRET)
    assert redact(f"at {SECRET}") == ("at ***" if secret else f"at {SECRET}")
    monkeypatch.setenv(name, "seven77")
    assert redact("at seven77") == "at seven77"


def test_the_texts_of_errors_have_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD_2", SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    error = RewardError("exception", f"at {SECRET}", f"in {SECRET}")
    assert str(error) == "exception: at ***" and error.trace == "in ***"
    assert redact("http://host?k=sk-canary%2F1%2B2&n=1234567") == "http://host?k=***&n=1234567"


def test_a_secret_that_is_no_text_breaks_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FILE_KEY", os.fsdecode(b"\xff\xfecanary"))
    monkeypatch.setenv("LINE_KEY", "a-canary-line\n")
    assert str(RewardError("exception", "at row 3")) == "exception: at row 3"
    assert redact("http://host?k=%FF%FEcanary&l=a-canary-line") == "http://host?k=***&l=***"


def test_a_secret_is_found_as_python_or_json_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'a-canary\\"\u00e9\u0001'
    monkeypatch.setenv("DB_PASSWORD", secret)
    assert redact(f"{{'x': {secret!r}}}") == "{'x': '***'}"
    assert redact(json.dumps({"x": secret})) == '{"x": "***"}'
