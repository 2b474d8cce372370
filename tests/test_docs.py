"""The pages agree with the code.

They explain every name that a user can write or read. Every link and every recipe works.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from docs.algorithm_rows import completed
from millrace import config
from millrace.algorithms.correction_plan import RULES
from millrace.algorithms.estimators import ESTIMATORS
from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.policy_loss import AggMode
from millrace.config import Config, GuardConfig, OptimConfig, recipe
from millrace.config.layers import is_native
from millrace.errors import ConfigError
from millrace.extras.verl.absent import ABSENT
from millrace.extras.verl.mapped import MAPPED
from millrace.extras.verl.translate import entry
from millrace.observe.guard import CAUSES, Guard
from millrace.observe.metrics import RunCounts
from millrace.ports import TrainBatch
from millrace.rollout.dynamic_sampling import DynamicSampling
from millrace.runtime.placement import choose
from millrace.train.fsdp import engine as fsdp_train
from tests.decode.helpers import folder
from tests.docs import pages
from tests.observe import test_metrics
from tests.pipeline.simulated import RUNS, schedule_of, simulate
from tests.train.samples import random_samples

ROOT = Path(__file__).parent.parent
ALGORITHMS = completed((ROOT / "docs" / "algorithms.md").read_text())
"""The page as the site has it."""
METRICS = (ROOT / "docs" / "metrics.md").read_text()
QUICKSTART = ROOT / "millrace" / "recipes" / "quickstart.yaml"
RECIPES = sorted((ROOT / "millrace" / "recipes").rglob("*.yaml"))

# -- names that a user writes

NAMES = {
    "estimators": tuple(ESTIMATORS),
    "policy losses": tuple(POLICY_LOSSES),
    "KL types": get_args(config.KlType),
    "KL types of the reward": get_args(
        config.AlgorithmConfig.model_fields["kl_penalty"].annotation
    ),
    "aggregations": get_args(AggMode),
    "rejection rules": RULES,
    "alarms": tuple(CAUSES),
    "recipes": tuple(path.stem for path in RECIPES if path.parent.name == "algorithms"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_is_explained(kind: str) -> None:
    explained = re.findall(r"^\|(.+?)\|", ALGORITHMS, re.MULTILINE)
    first_cells = set(re.findall(r"`([^`]+)`|\[(\w+)\]", "\n".join(explained)))
    found = {code or link for code, link in first_cells}
    assert len(NAMES[kind]) > 3 and not set(NAMES[kind]) - found


def keys_of(text: str) -> set[str]:
    """Return the dotted keys in a page, without their values."""
    sections = "|".join(Config.model_fields)
    return {
        match[0]
        for match in re.finditer(
            rf"(?<![\w./-])(?:{sections})\.(?!md|py|yaml|json)[a-z_.]+[a-z]", text
        )
    }


@pytest.mark.parametrize(
    "page", [*pages.GUIDES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"], ids=pages.name
)
def test_every_key_on_a_page_exists(page: Path) -> None:
    known = {key for key, _ in recipe.all_keys()}
    found = keys_of(page.read_text()) - known
    unknown = {key for key in found if entry(key, is_native) is None and not is_native(key)}
    assert not unknown - {key.rpartition(".")[0] for table in (MAPPED, ABSENT) for key in table}


def test_limits_of_alarms_are_the_defaults() -> None:
    said = dict(re.findall(r"`guard\.(\w+)=([\d.]+)`", ALGORITHMS))
    defaults = GuardConfig().model_dump(
        exclude={"enable", "min_grad_rows", "on_gap", "max_log_prob_gap"}
    )
    assert {name: float(value) for name, value in said.items()} == defaults


def presets() -> dict[str, list[str]]:
    """Return verl's presets, and the overrides that the page gives for them."""
    rows = re.findall(r"^\| `(\w+)` \| `(\{bypass_mode.+?\})` \| (.*)\|$", ALGORITHMS, re.MULTILINE)
    return {
        name: [f"algorithm.rollout_correction={keys}", *re.findall(r"`(\w[\w.]*=[^`]+)`", rest)]
        for name, keys, rest in rows
    }


PRESETS = presets()


def test_the_page_has_all_of_verls_presets() -> None:
    assert len(PRESETS) == 19


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_name_says(name: str) -> None:
    c = recipe.load(QUICKSTART, PRESETS[name])
    correction = c.algorithm.rollout_correction
    assert c.async_training.use_rollout_log_probs == name.startswith("bypass")
    assert (c.actor.policy_loss.loss_mode == "reinforce") == name.startswith("bypass_pg")
    weights = {"token": "token_is|icepop|token_tis", "sequence": "seq_is|seq_tis|bypass_pg_is"}
    assert correction.rollout_is == next(
        (level for level, names in weights.items() if re.search(names, name)), None
    )
    rules = {"seq_mean_k1": "geo_rs", "seq_mean_k3": "k3_rs", "seq_sum_k1": "seq_is_rs"}
    assert correction.rollout_rs == next(
        (rule for rule, part in rules.items() if part in name), None
    )
    assert isinstance(correction.rollout_is_threshold, str) == ("icepop" in name)


# -- names that a user reads


def braces(name: str) -> list[str]:
    """Return `a_{b,c}` as a_b and a_c."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def documented() -> list[re.Pattern[str]]:
    """Return patterns of the names in the first column of the page.

    Words in capitals stand for anything.
    """
    cells = re.findall(r"^\| (`.+?`) \|", METRICS, re.MULTILINE)
    names = [name for code in re.findall(r"`([^`]+)`", "\n".join(cells)) for name in braces(code)]
    return [re.compile(re.sub(r"[A-Z]+", "[^/]+", re.escape(name))) for name in names]


def undocumented(names: set[str]) -> set[str]:
    patterns = documented()
    return {name for name in names if not any(p.fullmatch(name) for p in patterns)}


CORRECTION = {
    "rollout_is": "token",
    "rollout_is_threshold": "0.5_5.0",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": ["0.01_100.0", 100.0],
    "rollout_token_veto_threshold": 1e-6,
    "m2_threshold": 10.0,
    "off_policy_mask_threshold": 0.1,
    "max_token_age": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "everything": {
        "actor": {"use_kl_loss": True, "entropy_coeff": 0.1},
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "rollout_correction": CORRECTION,
        },
        "async_training": {"use_rollout_log_probs": False},
    },
    "sequence weights in passing": {
        "actor": {"policy_loss": {"loss_mode": "reinforce"}},
        "algorithm": {"rollout_correction": {"rollout_is": "sequence"}},
    },
    "bypass": {},
}


def step_metrics(case: dict[str, Any], version: int) -> set[str]:
    """Return the names of all metrics that a step of a tiny train engine reports."""
    torch.set_num_threads(1)
    c = Config(
        trainer={"device": "cpu"},
        rollout={"max_prompt_length": 8, "max_response_length": 25},
        actor={"ppo_mini_batch_size": 3} | case.get("actor", {}),
        algorithm=case.get("algorithm", {}),
        async_training=case.get("async_training", {}),
    )
    engine = fsdp_train.build(c, str(folder()), rank=0, world_size=1)
    engine.restart(OptimConfig(lr=1e-3), 10)
    report = asyncio.run(engine.step(TrainBatch(random_samples(3, [4, 1, 3, 5, 2]), version)))
    return set(report.metrics) | set(report.totals)


@pytest.mark.parametrize("case", CASES)
def test_every_metric_of_a_train_step_is_documented(case: str) -> None:
    names = step_metrics(CASES[case], version=2)
    assert {"actor/pg_loss", "train/tokens"} < names
    if case == "everything":
        groups = ["critic/", "actor/kl_loss", "actor/reward_kl", "staleness/"]
        corrections = ("rollout_is", "rollout_rs", "rollout_rs_m2_", "off_policy")
        groups += [f"rollout_corr/{name}" for name in corrections]
        assert all(any(name.startswith(group) for name in names) for group in groups)
    assert not undocumented(names)


def test_every_metric_of_a_version_is_documented() -> None:
    row = set(test_metrics.EXPECTED) - {"actor/rare"} | {"checkpoint/write_s", "checkpoint/refused"}
    row |= {f"replicas/{name}" for name in ("live", "lost", "restarts", "heal_s")}
    row |= {"reward/score/mean", "reward/overlong_reward/mean", "reward/greedy/mean"}
    row |= set(Guard(GuardConfig()).as_metrics()) | set(RunCounts().add({}))
    names = ("mean@4", "best@4", "maj@4", "greedy", "reward_errors")
    row |= {f"val/task/{name}" for name in names}
    sampling = DynamicSampling("score", max_num_gen_batches=0, window=1)
    sampling.keeps(random_samples(3, [1])[0], 0)
    row |= set(sampling.row(0))
    for mode in RUNS:
        outcome = simulate(schedule_of(mode), 24, save_s=0.5, validation_s=2.0)
        row |= {name for each in outcome.record.rows for name in each} - {"version"}
    assert {"timing_s/sync_keep", "timing_s/switch", "timing_s/wait_validation"} < row
    assert not undocumented(row)
    assert undocumented({"actor/rare", "actor/pg_losses", "staleness/hist/1/2", "wait"}) == {
        "actor/rare", "actor/pg_losses", "staleness/hist/1/2", "wait"
    }  # fmt: skip


# -- files and recipes


def test_every_module_says_first_what_it_is() -> None:
    """One line, which ends, and then an empty one."""
    paths = [p for p in (ROOT / "millrace").rglob("*.py") if p.name != "__init__.py"]
    texts = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}
    first = re.compile(r".+[.:)?](\n\n|\Z)")
    assert paths and not [str(path) for path, text in texts.items() if not first.match(text)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_has_its_own_name(path: Path) -> None:
    loaded = recipe.load(path)
    assert loaded.name == path.stem
    assert path.read_text().startswith("# "), "a recipe says first what it is"
    if path.parent.name == "algorithms":
        assert path.read_text().count("\n") < 40
        assert recipe.load(path, ["mode=colocate_sync"]).schedule.lag_bound == 0


def test_a_recipe_of_an_algorithm_inherits_the_quickstart() -> None:
    for path in RECIPES:
        if path.parent.name == "algorithms":
            assert yaml.safe_load(path.read_text())["inherits"] == "quickstart"


CLUSTERS = re.findall(
    r"^\| (\d) x (\d)(?: \+ (\d) x (\d))?(.*?) \| ([\d, ]+) \| (.+) \|$",
    (ROOT / "docs" / "clusters.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", CLUSTERS, ids=lambda row: " ".join(row[:6]))
def test_the_nodes_that_the_page_on_clusters_says_are_those_that_are_taken(
    row: tuple[str, ...],
) -> None:
    assert len(CLUSTERS) > 4
    *sides, more, sizes, taken = row
    t_nodes, t_devices, r_nodes, r_devices = (int(n or sides[k % 2]) for k, n in enumerate(sides))
    in_node = re.search(r"`trainer.gpus_in_node=(\d)`", more)
    c = Config(
        trainer={
            "nnodes": t_nodes,
            "n_gpus_per_node": t_devices,
            "gpus_in_node": int(in_node[1]) if in_node else 0,
        },
        rollout={"nnodes": r_nodes, "n_gpus_per_node": r_devices},
        async_training={"placement": "colocated" if "colocated" in more else "separate"},
    )
    nodes = [int(n) for n in sizes.split(", ")]
    if refused := re.fullmatch(r"refused: needs ([\d, ]+)", taken):
        with pytest.raises(ConfigError, match=f"nodes? with {refused[1]} GPUs"):
            choose(c.sides, "GPU", nodes, nodes)
    else:
        assert (
            ", ".join(map(str, choose(c.sides, "GPU", nodes, nodes).shares))
            == taken.partition(":")[0]
        )
