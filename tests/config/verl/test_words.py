"""Each word of a script is mapped, needless with a reason, left out by name, or refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from millrace.config.layers import Tree, settings_of
from millrace.errors import ConfigError
from millrace.extras.verl.importing import Imported, import_layer
from millrace.extras.verl.kinds import PREFIX
from millrace.extras.verl.script import read
from millrace.extras.verl.translate import text_of

HERE = Path(__file__).parent
SHARED = HERE.parents[3] / "shared" / "verl_scripts"
"""Lists of overrides that a checkout may have beside it."""
LISTS = [
    path
    for folder in (HERE, SHARED)
    for path in sorted(folder.glob("*.txt"))
    if path.stem != "keys"
]
RUN = [
    *("data.train_files=a.parquet", "data.train_batch_size=64", "trainer.n_gpus_per_node=8"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.rollout.n=8"),
    *("algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=m"),
]
ODD = [
    *("model_engine=megatron", "data.max_prompt_length=8", "retriever.url=http://a", "max_turns=2"),
    *("actor_rollout_ref.rollout.prompt_length=8", "+actor_rollout_ref.actor.state_masking=True"),
    *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "~trainer.logger"),
    *("data.custom_cls.path=a.py", "hydra/job_logging=none", "algorithm.lam=0.9"),
    *("critic.optim.lr=1e-5", "actor_rollout_ref.actor.shuffle=True", "data.max_obs_length=500"),
    *("ray_kwargs.ray_init.runtime_env.py_executable=uv run", "trainer.nnodes=1"),
    *("actor_rollout_ref.actor.fsdp_config.grad_offload=True", "actor@actor_rollout_ref.actor=x"),
]
"""Words of all kinds."""


def values_of(tree: Tree, prefix: str = "") -> dict[str, object]:
    """Return the values of a tree by their dotted keys, also those of inner mappings."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        found[prefix + key] = value
        if isinstance(value, dict):
            found |= values_of(value, f"{prefix}{key}.")
    return found


def fate(word: str, layer: Imported) -> str:
    """Return what became of a word, or an empty text if it is lost."""
    if re.search(r"^~|^[^=]*[/@]", word):
        return (
            "left out" if any(item.startswith(word.split("=")[0]) for item in layer.absent) else ""
        )
    settings = settings_of([word])
    theirs = [text_of(key, value) for key, value in settings]
    parts = {
        "needless": layer.needless,
        "left out": layer.absent,
        "unknown": layer.unknown,
        "mapped": [*layer.comments.values()],
    }
    for name, items in parts.items():
        if all(any(text in item for item in items) for text in theirs):
            return name
    own = values_of(layer.tree)
    return "kept" if all(own.get(key.removeprefix(PREFIX)) == v for key, v in settings) else ""


def key_of(word: str) -> str:
    return word.lstrip("+").split("=")[0]


def words_of(path: Path) -> list[str]:
    """Return the words of a list. Values of variables are those of the list's copy here."""
    lines = path.read_text().splitlines()
    here = {key_of(line): line for line in (HERE / path.name).read_text().splitlines()}
    return [here.get(key_of(line), line) if "$" in line else line for line in lines]


@pytest.mark.parametrize("path", LISTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_word_of_a_list_has_a_fate(path: Path) -> None:
    words = words_of(path)
    script = read("\n".join(words), {})
    assert len(script.overrides) == len([word for word in words if word[:2] != "--"])
    base = "fully_async" if path.stem.startswith("fully_async") else "one_step_off"
    engine = ["model_engine=megatron"] if "megatron" in path.stem else []
    layer = import_layer(f"verl/{base}_ppo_trainer", [*engine, *script.overrides], drop=True)
    last = {key_of(word): word for word in script.overrides}
    assert len(last) > 40 and [word for word in last.values() if not fate(word, layer)] == []


def test_words_of_all_kinds_have_the_fate_that_is_theirs() -> None:
    layer = import_layer("verl/ppo_trainer", [*RUN, *ODD], drop=True)
    fates = {key_of(word): fate(word, layer) for word in [*RUN, *ODD]}
    assert "" not in fates.values()
    assert {key for key, found in fates.items() if found == "unknown"} == {
        *("retriever.url", "max_turns", "data.max_obs_length"),
        "actor_rollout_ref.actor.state_masking",
    }
    assert {key for key, found in fates.items() if found == "left out"} == {
        *("~trainer.logger", "hydra/job_logging", "actor@actor_rollout_ref.actor"),
        *("data.custom_cls.path", "actor_rollout_ref.actor.shuffle"),
    }
    assert fates["model_engine"] == "mapped" and layer.tree["trainer"]["engine"] == "megatron"
    assert layer.tree["trainer"]["megatron"]["tensor_model_parallel_size"] == 2
    assert fates["data.max_prompt_length"] == fates["actor_rollout_ref.rollout.prompt_length"]
    assert fates["ray_kwargs.ray_init.runtime_env.py_executable"] == "needless"


def refusal(words: Sequence[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        import_layer("verl/ppo_trainer", [*RUN, *words], drop=False)
    return str(caught.value).splitlines()


def test_without_drop_each_such_word_has_an_error_of_its_own() -> None:
    lines = refusal(ODD)
    for key in (
        *("retriever.url", "max_turns", "data.max_obs_length", "~trainer.logger"),
        *("actor_rollout_ref.actor.state_masking", "hydra/job_logging", "data.custom_cls.path"),
        *("actor@actor_rollout_ref.actor", "actor_rollout_ref.actor.shuffle"),
    ):
        (line,) = [line for line in lines if line.startswith(f"{key} = ")]
        assert "Fix: " in line and "{" not in line.partition(": ")[0]


@pytest.mark.parametrize(
    ("word", "parts", "others"),
    [
        ("data.max_obs_length=500", ["data.max_obs_length = 500"], ["reward.model"]),
        ("data.max_prompt_lenght=8", ["Fix: data.max_prompt_length"], []),
        (
            "actor_rollout_ref.rollout.temperatur=1",
            ["Fix: actor_rollout_ref.rollout.temperature"],
            ["val_kwargs"],
        ),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=16",
            ["actor_rollout_ref.rollout.tensor_model_parallel_size = 16", "must be on one node"],
            [],
        ),
        (
            "actor_rollout_ref.actor.clip_ratio_low=-1",
            ["actor_rollout_ref.actor.clip_ratio_low = -1"],
            [],
        ),
        (
            "data.train_batch_size=16",
            ["Fix: actor_rollout_ref.actor.ppo_mini_batch_size=16"],
            ["train_batch_size=256"],
        ),
        ("data.train_batch_size=100", ["Fix: data.train_batch_size=96"], []),
    ],
)
def test_an_error_has_the_spelling_of_the_script(
    word: str, parts: list[str], others: list[str]
) -> None:
    text = "\n".join(refusal([word]))
    assert all(part in text for part in parts) and not any(part in text for part in others), text


def test_the_engine_of_a_script_arrives_with_its_sizes() -> None:
    script = read(
        "python3 -m verl.trainer.main_ppo model_engine=megatron "
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2\n",
        {},
    )
    layer = import_layer(script.base, [*RUN, *script.overrides], drop=False)
    assert layer.tree["trainer"]["engine"] == "megatron"
    assert layer.tree["trainer"]["megatron"] == {"pipeline_model_parallel_size": 2}
    assert "veomni" in refusal(["model_engine=veomni"])[0]
