"""`millrace.Rollouts`: draws and scores of a recipe, a checkpoint and a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.run.export import export
from tests.api.small import SMALL, length

KEYS = {**SMALL, "trainer": {"threads": 1}}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))


def test_a_recipe_draws_texts_messages_and_rows() -> None:
    row = {"prompt": "4321", "answer": "1234", "data_source": "sort_digits"}
    with millrace.Rollouts("quickstart", n=3, max_tokens=5, **KEYS) as policy:
        texts = policy.draw(["3512", [{"role": "user", "content": "9041"}]])
        (rows,) = policy.draw([row], n=2)
        again = policy.draw(["3512"])
        for wrong in (None, [3]):
            with pytest.raises((ConfigError, DataError), match=r"list|must be a string"):
                policy.draw(wrong)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="does not know: 'w'"):
            policy.draw(["what?"])
        with pytest.raises(DataError, match="no built-in scorer"):
            policy.draw([row | {"data_source": "unknown"}])
        with pytest.raises(ConfigError, match="a list"):
            policy.draw("3512")
        with pytest.raises(ConfigError, match="n = 0"):
            policy.draw(["3512"], n=0)
        with pytest.raises(MillraceError, match="another run"):
            millrace.train("quickstart")
    assert [r.prompt for responses in texts for r in responses] == ["3512"] * 3 + ["9041"] * 3
    assert all(r.score is None and not r.error for responses in texts for r in responses)
    assert all(
        len(r.tokens) == len(r.log_probs) <= 5 and max(r.log_probs) <= 0 and r.versions == (0,)
        for responses in texts
        for r in responses
    )
    assert len(rows) == 2 and {r.score for r in rows} <= {0.0, 1.0} and rows[0].ground_truth
    assert [r.tokens for r in again[0]] != [r.tokens for r in texts[0]]
    with pytest.raises(MillraceError, match="closed"):
        policy.draw(["3512"])


def test_a_run_and_its_exported_model_draw_the_same_at_temperature_0(tmp_path: Path) -> None:
    run = millrace.train("quickstart", progress=False, val=[], **SMALL)
    assert run.checkpoint is not None
    export(run.folder, tmp_path / "model", "float32")
    drawn = []
    for model in (run, run.checkpoint, tmp_path / "model"):
        keys: dict[str, Any] = {"rollout.max_response_length": 8, "rollout.max_prompt_length": 8}
        with millrace.Rollouts(
            model, reward=length, temperature=0.0, **keys, **{"trainer.threads": 1}
        ) as policy:
            drawn.append([r for (r,) in policy.draw(["3512", "97010"])])
    texts = [[r.text for r in responses] for responses in drawn]
    assert texts[0] == texts[1] == texts[2]
    assert all(r.score == len(r.text) for responses in drawn for r in responses)
    assert drawn[0][0].versions == (4,) and drawn[2][0].versions == (0,)


def test_a_reward_that_raises_is_an_error_and_no_score() -> None:
    def fails(solution_str: str, **columns: Any) -> float:
        raise ValueError("no")

    with millrace.Rollouts("quickstart", reward=fails, n=2, **KEYS) as policy:
        (responses,) = policy.draw(["3512"])
    assert all(r.score is None and r.error.startswith("exception: ValueError") for r in responses)


def test_wrong_keys_are_refused_before_engines_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.nn"):
        millrace.Rollouts("quickstart", **{"rollout.nn": 3})
    with pytest.raises(ConfigError, match="n = 0"):
        millrace.Rollouts("quickstart", n=0)
    with pytest.raises(ConfigError, match="no such folder"), millrace.Rollouts("./nothing"):
        pass
    assert not [*tmp_path.glob("runs/*")]
