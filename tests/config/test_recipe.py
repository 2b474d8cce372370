"""Recipes: layers of plain data become one configuration, and later layers win."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.config import Config, layers, recipe
from millrace.config.explain import all_keys, default_of, section_of
from millrace.config.packaged import model_folder
from millrace.errors import ConfigError
from millrace.schedule.modes import MODES

QUICKSTART = Path(__file__).parents[2] / "millrace" / "recipes" / "quickstart.yaml"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def schedule_of(config: Config) -> dict:
    return config.async_training.model_dump(mode="json")


# -- modes

TABLE = {
    "colocate_sync": (
        "colocated",
        "drain",
        lambda trigger, staleness: trigger >= 1 and staleness == 0,
    ),
    "on_policy_pipeline": (
        "separate",
        "drain",
        lambda trigger, staleness: trigger == 1 and staleness == 0,
    ),
    "one_step_off": (
        "separate",
        "drain",
        lambda trigger, staleness: trigger == 1 and staleness == 1,
    ),
    "stream_off_policy": (
        "separate",
        "drain",
        lambda trigger, staleness: trigger > 1 and staleness == 0,
    ),
    "async_staleness": (
        "separate",
        "drain",
        lambda trigger, staleness: trigger >= 1 and staleness > 0,
    ),
    "async_partial": (
        "separate",
        "interrupt",
        lambda trigger, staleness: trigger >= 1 and staleness > 0,
    ),
    "async_swap": ("separate", "swap", lambda trigger, staleness: trigger >= 1 and staleness > 0),
    "colocate_partial": (
        "colocated",
        "interrupt",
        lambda trigger, staleness: trigger >= 1 and staleness > 0,
    ),
}
"""The table of modes: placement, on_sync, and a rule for (trigger, staleness)."""


def test_the_table_has_every_mode() -> None:
    assert set(TABLE) == set(MODES)


@pytest.mark.parametrize("mode", TABLE)
@pytest.mark.parametrize(
    "before",
    ["name: r", *(f"mode: {mode}" for mode in TABLE), "async_training: {partial_rollout: true}"],
)
def test_a_mode_is_the_tables_row_whatever_the_recipe_said_before(
    write: Callable[..., Any], before: Any, mode: str
) -> None:
    config = recipe.load(write(before), [f"mode={mode}"])
    placement, on_sync, fits = TABLE[mode]
    schedule = config.async_training
    assert (config.mode, schedule.placement.value, schedule.on_sync.value) == (
        mode,
        placement,
        on_sync,
    )
    assert fits(schedule.trigger_parameter_sync_step, schedule.staleness_threshold)
    assert not schedule.partial_rollout


def test_one_step_off_trains_each_sample_one_version_later(write: Callable[..., Any]) -> None:
    schedule = recipe.load(write("mode: one_step_off")).schedule
    assert schedule.lookahead == 1 and schedule.lag_bound == 1


OTHER = {
    "placement": "colocated",
    "trigger_parameter_sync_step": 7,
    "staleness_threshold": 0.25,
    "on_sync": "swap",
    "lookahead": 3,
    "require_batches": 2,
}


@pytest.mark.parametrize("mode", TABLE)
@pytest.mark.parametrize("key", OTHER)
@pytest.mark.parametrize("where", ["recipe", "command line"])
def test_every_key_of_a_mode_can_be_overridden_beside_it(
    write: Callable[..., Any], mode: str, key: str, where: str
) -> None:
    beside = (
        f"mode: {mode}\nasync_training: {{{key}: {OTHER[key]}}}" if where == "recipe" else "name: r"
    )
    overrides = [] if where == "recipe" else [f"mode={mode}", f"async_training.{key}={OTHER[key]}"]
    changed = schedule_of(recipe.load(write(beside), overrides))
    plain = schedule_of(recipe.load(write(f"mode: {mode}")))
    assert changed[key] == OTHER[key]
    assert {k: v for k, v in changed.items() if k != key} == {
        k: v for k, v in plain.items() if k != key
    }


def test_a_mode_keeps_what_it_says_nothing_of(write: Callable[..., Any]) -> None:
    text = "mode: async_partial\nasync_training: {trigger_parameter_sync_step: 3, staleness_threshold: 0.75, require_batches: 2}"
    schedule = recipe.load(write(text), ["mode=async_swap"]).async_training
    assert (
        schedule.trigger_parameter_sync_step,
        schedule.staleness_threshold,
        schedule.require_batches,
    ) == (3, 0.75, 2)
    assert recipe.load(write(text), ["mode=on_policy_pipeline"]).schedule.capacity == 64


def test_partial_rollout_means_interrupt(write: Callable[..., Any]) -> None:
    for spelled in ("true", "false"):
        config = recipe.load(
            write("mode: async_staleness"), [f"async_training.partial_rollout={spelled}"]
        )
        assert config.async_training.on_sync.value == (
            "interrupt" if spelled == "true" else "drain"
        )
    partial = write("async_training: {partial_rollout: true}")
    assert recipe.load(partial).async_training.on_sync.value == "interrupt"
    assert (
        recipe.load(partial, ["async_training.on_sync=swap"]).async_training.on_sync.value == "swap"
    )


@pytest.mark.parametrize("mode", ["colocate_sync", "one_step_off"])
def test_the_train_batch_sets_the_trigger(write: Callable[..., Any], mode: str) -> None:
    text = "actor: {ppo_mini_batch_size: 8}\nasync_training: {require_batches: 2, trigger_parameter_sync_step: 5}"
    config = recipe.load(write(text), [f"mode={mode}", "data.train_batch_size=64"])
    assert config.async_training.trigger_parameter_sync_step == 4
    assert config.schedule.window == 64


# -- layers


def test_later_layers_win_key_by_key(write: Callable[..., Any]) -> None:
    write("name: parent\nrollout: {n: 2, temperature: 0.5}\nsft: {steps: 1}", "parent.yaml")
    write("inherits: parent.yaml\nrollout: {n: 3}", "child.yaml")
    config = recipe.load(
        write("inherits: child.yaml\nsft: {steps: 2}", "grandchild.yaml"),
        ["rollout.n=4", "rollout.n=5"],
    )
    assert (config.name, config.rollout.n, config.rollout.temperature, config.sft.steps) == (
        "parent",
        5,
        0.5,
        2,
    )


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([], ["a", "b"]),
        (["reward.mix={}"], []),
        (["reward.mix={}", "reward.mix.c.function=math"], ["c"]),
        (["reward.mix.c.function=math", "reward.mix={}"], []),
        (["reward.mix.c.function=math"], ["a", "b", "c"]),
    ],
)
def test_an_empty_mapping_of_free_names_replaces_the_inherited_one(
    write: Callable[..., Any], overrides: list[str], parts: list[str]
) -> None:
    path = write("inherits: quickstart\nreward: {mix: {a: {function: exact}, b: {weight: 2}}}")
    assert list(recipe.load(path, overrides).reward.mix) == parts
    child = write(f"inherits: {path}\nreward: {{mix: {{}}}}", "child.yaml")
    assert not recipe.load(child).reward.mix
    kept = recipe.load(path, overrides, ["reward.mix.d.function=gsm8k"])
    assert list(kept.reward.mix) == [*parts, "d"]


def test_a_key_of_a_section_leaves_the_defaults_of_the_others(write: Callable[..., Any]) -> None:
    critic = recipe.load(write("name: x"), ["critic.optim.weight_decay=0.5"]).critic.optim
    assert (critic.lr, critic.weight_decay) == (Config().critic.optim.lr, 0.5)
    sections = [default_of(key) for key, field in all_keys() if section_of(field.annotation)]
    assert sections and all(section == type(section)() for section in sections)


def test_inherits_is_a_path_from_the_recipe(write: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write("rollout: {n: 3}", "parent.yaml")
    assert recipe.load(write("inherits: ../parent.yaml", "sub/child.yaml")).rollout.n == 3


def test_the_file_names_the_run_where_the_recipe_does_not(write: Callable[..., Any]) -> None:
    assert recipe.load(write("mode: async_swap", "my run (2).yaml")).name == "my-run-2-"
    assert recipe.load(QUICKSTART).name == "quickstart"


def test_an_empty_section_is_no_section(write: Callable[..., Any]) -> None:
    assert recipe.load(write("data:\nrollout:\n  n: 3\n")).rollout.n == 3


@pytest.mark.parametrize(
    "key",
    [
        "rollout.n",
        "actor.ppo_mini_batch_size",
        "actor.optim.lr",
        "model.path",
        "algorithm.adv_estimator",
    ],
)
def test_the_prefix_of_verl_is_stripped(write: Callable[..., Any], key: str) -> None:
    value = {"actor.optim.lr": "0.5", "model.path": "here", "algorithm.adv_estimator": "grpo"}.get(
        key, "6"
    )
    assert recipe.load(write("name: r"), [f"actor_rollout_ref.{key}={value}"]) == recipe.load(
        write("name: r"), [f"{key}={value}"]
    )
    nested = yaml.safe_dump({"actor_rollout_ref": {key: yaml.safe_load(value)}})
    assert recipe.load(write(f"name: r\n{nested}")) == recipe.load(
        write("name: r"), [f"{key}={value}"]
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("2.e-3", 2e-3),
        ("+3e-5", 3e-5),
        ("1e3", 1000.0),
        ("0.5", 0.5),
        ("1", 1.0),
    ],
)
def test_numbers_are_numbers_however_they_are_spelled(
    write: Callable[..., Any], text: Any, value: Any
) -> None:
    assert recipe.load(write("name: r"), [f"actor.optim.lr={text}"]).actor.optim.lr == value
    assert recipe.load(write(f"actor: {{optim: {{lr: {text}}}}}")).actor.optim.lr == value


@pytest.mark.parametrize(
    ("item", "read"),
    [
        (
            "data.train_files=[a.jsonl,b.jsonl]",
            lambda c: c.data.train_files == ("a.jsonl", "b.jsonl"),
        ),
        (
            'data.train_files=["task:copy?size=3"]',
            lambda c: c.data.train_files == ("task:copy?size=3",),
        ),
        (  # as a shell passes it, without the quotes
            "data.train_files=[task:copy?size=3&min_digits=2, a.jsonl,]",
            lambda c: c.data.train_files == ("task:copy?size=3&min_digits=2", "a.jsonl"),
        ),
        ('rollout.stop=["\\n\\n"]', lambda c: c.rollout.stop == ("\n\n",)),
        ("trainer.run_dir=", lambda c: c.trainer.run_dir == ""),
        ("trainer.run_dir=~/mine", lambda c: c.trainer.run_dir == str(Path.home() / "mine")),
        ("+rollout.n=5", lambda c: c.rollout.n == 5),
        (
            "model.shape={hidden_size: 32}",
            lambda c: c.model.shape.hidden_size == 32 and c.model.shape.num_hidden_layers == 3,
        ),
        (
            "model.path=${model:smollm2}",
            lambda c: c.model.path == str(model_folder("smollm2")),
        ),
        ("reward.function=a.py:f=g", lambda c: c.reward.function == "a.py:f=g"),
    ],
)
def test_overrides_are_read_as_yaml(write: Callable[..., Any], item: Any, read: Any) -> None:
    assert read(recipe.load(write("name: r"), [item]))


def test_the_python_of_replicas_may_be_in_the_users_home(
    write: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "python").symlink_to(sys.executable)
    config = recipe.load(write("name: r"), ["rollout.engine=sglang", "rollout.python=~/python"])
    assert config.rollout.python == str(tmp_path / "python")


# -- dump

trees = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(sorted(MODES)),
        "rollout.n": st.integers(2, 64),
        "rollout.temperature": st.floats(0.01, 10),
        "rollout.max_prompt_length": st.integers(1, 4096),
        "rollout.stop": st.lists(st.text(max_size=5), max_size=3),
        "actor.optim.lr": st.floats(1e-12, 1, exclude_min=True),
        "actor.optim.betas": st.tuples(
            st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)
        ).map(list),
        "actor.loss_agg_mode": st.sampled_from(["token-mean", "seq-mean-token-sum-norm"]),
        "async_training.staleness_threshold": st.floats(0, 8),
        "async_training.trigger_parameter_sync_step": st.integers(1, 32),
        "async_training.require_batches": st.integers(1, 4),
        "async_training.partial_rollout": st.booleans(),
        "data.train_files": st.lists(st.text(min_size=1, max_size=20), max_size=3),
        "trainer.deterministic": st.just(False),
        "trainer.run_dir": st.text(max_size=20),
        "model.trust_remote_code": st.booleans(),
    },
)


@settings(max_examples=15)
@given(trees)
@example({"trainer.run_dir": "0E0"})
@example({"trainer.run_dir": "${\\I", "data.train_files": ["${trainer.seed}", "\\\\${a", "$\\{"]})
@example({"trainer.run_dir": "+1_0e5", "data.train_files": [".5e1", "", "-", "1:30.5"]})
def test_a_dumped_configuration_makes_the_same_run(
    tmp_path_factory: pytest.TempPathFactory, chosen: Any
) -> None:
    layer: dict = {}
    for key, value in chosen.items():
        section, _, name = key.rpartition(".")
        where = layer
        for part in filter(None, section.split(".")):
            where = where.setdefault(part, {})
        where[name] = value
    config = recipe.parse(recipe.resolve([layer]))
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(recipe.dump(config))
    assert (loaded := recipe.load(path)) == config
    assert recipe.dump(loaded) == path.read_text()


def test_the_quickstart_dumps_to_itself(write: Callable[..., Any]) -> None:
    assert recipe.load(write(recipe.dump(c := recipe.load(QUICKSTART)))) == c


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Rate it # of 3. SCORE: <n>", "Rate it # of 3. SCORE: <n>"),
        ("exp #3", "exp #3"),
        ("'exp: #3'", "exp: #3"),
        ("20251103", "20251103"),
        ("010", "010"),
        ("1.10", "1.10"),
        ("null", "null"),
        ("^x", "^x"),
        ("", ""),
    ],
)
def test_an_override_of_a_text_is_that_text(text: str, value: str) -> None:
    for key in ("name", "trainer.project_name"):
        assert layers.settings_of([f"{key}={text}"]) == [(key, value)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[a,20251103]", ["a", "20251103"]),
        ('["a # b",010,1.10]', ["a # b", "010", "1.10"]),
        ("[null, true, 1:30]", ["null", "true", "1:30"]),
    ],
)
def test_an_element_of_a_list_of_texts_is_that_text(text: str, value: list[str]) -> None:
    for key in ("rollout.stop", "data.train_files"):
        assert layers.settings_of([f"{key}={text}"]) == [(key, value)]


@pytest.mark.parametrize("text", ["010", "008", "-01", "00.5", "1:30"])
def test_a_number_that_yaml_changes_is_refused(text: str, write: Callable[..., Any]) -> None:
    """YAML 1.1 reads 010 as 8, and 1:30 as 90. 008 was 8."""
    for key in ("trainer.seed", "rollout.stall_s", "actor.optim.lr"):
        with pytest.raises(ConfigError, match=rf"^{key} = '{text}': .*Fix: {key}="):
            recipe.load(QUICKSTART, [f"{key}={text}"])
    if text != "008":  # not octal, so YAML reads it as text, which the key refuses
        with pytest.raises(ConfigError, match=rf"line 2: '{text}': YAML reads it as .*in quotes"):
            recipe.load(write(f"inherits: quickstart\ntrainer: {{seed: {text}}}"))


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("rollout.stop=</s>", r"'rollout\.stop=\[</s>\]'.*in quotes"),
        ("trainer.logger=console,wandb", r"'trainer\.logger=\[console,wandb\]'"),
        ("rollout.stop=###", r"'rollout\.stop=\[###\]'"),
        ("rollout.stop=['\\n']", r"'rollout\.stop=\[\"\\n\"\]'"),
        ("rollout.stop=[\\n\\n]", r"'rollout\.stop=\[\"\\n\\n\"\]'"),
    ],
)
def test_the_fix_of_a_list_is_what_to_type(override: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"Fix: {fix}"):
        recipe.load(QUICKSTART, [override])


def test_a_number_for_a_text_of_a_recipe_is_shown_in_quotes(write: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r'trainer\.project_name: "20251103".*quotes'):
        recipe.load(write("inherits: quickstart\ntrainer: {project_name: 20251103}"))


def test_no_override_has_a_comment() -> None:
    assert layers.settings_of(["data.train_files=a b #3.jsonl"]) == [
        ("data.train_files", "a b #3.jsonl")
    ]
    assert layers.settings_of(["rollout.stop=[#x, y]"]) == [("rollout.stop", ["#x", "y"])]


def test_an_override_is_resolved_as_a_recipe_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/data")
    assert layers.settings_of(["trainer.run_dir=${oc.env:PLACE}/x"]) == [
        ("trainer.run_dir", "/data/x")
    ]
    assert layers.settings_of(["trainer.run_dir=\\${a}"]) == [("trainer.run_dir", "${a}")]
    for bad in ("trainer.run_dir=out/${name}", "trainer.run_dir=${oc.env:NOT_SET_AT_ALL}"):
        with pytest.raises(ConfigError, match=r"cannot be resolved.*Fix: the value itself"):
            layers.settings_of([bad])


# -- errors without a folder in tests/bad_inputs

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 70)
    | st.floats(allow_nan=True)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
keys = [key for key, _ in recipe.all_keys()]


@example({"reward.judge.template": None})
@given(st.dictionaries(st.sampled_from(keys), junk, max_size=4))
def test_whatever_is_written_under_a_key_is_taken_or_refused_by_name(chosen: Any) -> None:
    """No input crashes: it gives a Config, or a ConfigError in the form of all ConfigErrors."""
    try:
        layer: dict = {}
        for key, value in chosen.items():
            layers.merge(layer, *layers.expand([[(key, value)]])[0])
        config = recipe.parse(recipe.resolve([layer]))
    except ConfigError as error:
        for line in str(error).split("\n"):
            assert " = " in line and ". Fix: " in line and line.endswith("."), line
        return
    assert config.derived(100).window >= 1


def test_a_default_of_several_lines_is_shown_in_one() -> None:
    with pytest.raises(ConfigError, match=r'for example "Grade the .*\\n') as caught:
        recipe.parse({"reward": {"judge": {"template": None}}})
    assert "\n" not in str(caught.value)


def test_a_key_that_breaks_a_line_is_shown_escaped() -> None:
    with pytest.raises(ConfigError, match=re.escape(r"'actor.policy_loss.\n' = None: no such key")):
        recipe.parse({"actor": {"policy_loss": {"\n": None}}})


@given(st.text(max_size=80))
def test_any_text_is_a_recipe_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(recipe.load(path), Config)
    except ConfigError as error:
        assert "Fix: " in str(error)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], ""),
        (["mode=async_swap", "async_training.staleness_threshold=1"], ""),
        (
            ["mode=colocate_sync", "async_training.staleness_threshold=0.5"],
            "mode=colocate_sync has staleness_threshold=0.5 and not 0.0: "
            "custom (from colocate_sync)",
        ),
        (
            ["mode=one_step_off", "async_training.staleness_threshold=0.5"],
            "mode=one_step_off has staleness_threshold=0.5 and not 1.0: async_staleness",
        ),
    ],
)
def test_a_number_that_overrides_its_mode_is_said(given: list[str], told: str) -> None:
    assert recipe.load(QUICKSTART, given).mode_note == told
    assert (told in recipe.load(QUICKSTART, given).notes) is bool(told)
