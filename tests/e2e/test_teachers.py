"""On-policy distillation: real runs with teachers in the trainer."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import AutoModelForCausalLM

from millrace.api import Run
from tests.e2e import runs
from tests.e2e.runs import millrace

pytestmark = pytest.mark.xdist_group("teachers")  # The tests share one teacher.


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after a clean warm-up: it sorts better than the policies here."""
    folder = tmp_path_factory.mktemp("teacher")

    async def main() -> None:
        async with runs.session(folder, "sft.steps=150", "sft.messiness=0") as s:
            await s.engines.train.export(str(folder / "model"))

    asyncio.run(main())
    return folder / "model"


def column(folder: Path, name: str) -> list[float]:
    return [row[name] for row in runs.rows(folder) if name in row]


@pytest.mark.slow
async def test_zero_staleness_is_synchronous_distillation_bit_for_bit(
    tmp_path: Path, teacher: Path
) -> None:
    keys = [f"teachers.sorter.path={teacher}", "distillation.use_task_rewards=false"]
    fixed = ("trainer.deterministic=true", "mode=on_policy_pipeline")
    async with runs.session(tmp_path, *fixed, *keys) as s:
        found = {}
        for mode in ("on_policy_pipeline", "colocate_sync"):
            own = [*keys, f"mode={mode}", "async_training.trigger_parameter_sync_step=1"]
            assert (await runs.run(s, tmp_path / mode, *own)).complete
            found[mode] = await runs.weights(s, tmp_path / f"{mode}-weights")
        first, second = found.values()
        assert all((second[name] == tensor).all() for name, tensor in first.items())
    for name in ("distillation/sorter/kl", "actor/distillation_loss", "actor/grad_norm"):
        ours, theirs = (column(tmp_path / mode, name) for mode in found)
        assert ours == theirs and len(ours) == 8
    kl = column(tmp_path / "colocate_sync", "distillation/sorter/kl")
    assert kl[-1] < 0.9 * kl[0]
    assert all(s > 0 for s in column(tmp_path / "colocate_sync", "timing_s/teacher"))


@pytest.mark.parametrize(
    "mode", ["forward_kl_topk", pytest.param("reverse_kl_topk", marks=pytest.mark.slow)]
)
async def test_whole_distributions_teach_in_an_asynchronous_run_of_two_ranks(
    mode: str, tmp_path: Path, teacher: Path
) -> None:
    keys = [
        *(f"teachers.sorter.path={teacher}", f"distillation.loss_mode={mode}"),
        *("distillation.topk=14", "distillation.use_task_rewards=false", "rollout.n=1"),
        *("mode=async_partial", "trainer.n_gpus_per_node=2", "actor.optim.lr=1e-3"),
    ]
    async with runs.session(tmp_path, *keys) as s:
        assert (await runs.run(s, tmp_path / "run", *keys)).complete
    losses = column(tmp_path / "run", "actor/distillation_loss")
    assert min(losses) > 0 and losses[-1] < 0.8 * losses[0]
    assert set(column(tmp_path / "run", "actor/pg_loss")) == {0.0}


def test_a_warm_up_learns_a_teachers_distributions(tmp_path: Path, teacher: Path) -> None:
    keys = [f"teachers.a.path={teacher}", "sft.teacher=a", "sft.steps=30"]
    done = millrace("train", "quickstart", *KEYS, *keys)
    assert (
        done.code == 2 and "sft.teacher_topk = 32: the vocabulary has 14 tokens" in done.printed
    ), done.printed
    losses = {}
    for coef in (0.5, 1.0):
        own = [
            f"sft.teacher_coef={coef}",
            "sft.teacher_topk=14",
            f"trainer.run_dir={tmp_path}/{coef}",
        ]
        done = millrace("sft", "quickstart", *KEYS[1:], *keys, *own)
        assert done.code == 0, done.printed
        losses[coef] = float(done.printed.rpartition("loss ")[2].split()[0])
    # The KL to a teacher may reach 0, and the loss of messy demonstrations may not.
    assert losses[1.0] < losses[0.5] < 2.6


def rows_for(path: Path, *teachers: Any) -> Path:
    lines = []
    for i, named in enumerate(teachers):
        digits = f"{90210 + i * 731}"
        row = {"prompt": f"{digits}>", "answer": "".join(sorted(digits))}
        row["data_source"] = "even" if i % 2 == 0 else "odd"
        lines.append(json.dumps(row | ({"extra_info": {"teachers": named}} if named else {})))
    path.write_text("\n".join(lines) + "\n")
    return path


KEYS = [
    *("sft.steps=1", "rollout.n=2", "actor.ppo_mini_batch_size=2", "report.enable=false"),
    *("rollout.total_rollout_steps=4", "trainer.val_before_train=false", "data.val_max_samples=2"),
    *("reward.function=exact", "data.shuffle=false", "mode=colocate_sync"),
    "async_training.trigger_parameter_sync_step=1",
]


def test_each_data_source_and_each_row_has_its_teachers(tmp_path: Path, teacher: Path) -> None:
    data = rows_for(tmp_path / "rows.jsonl", None, None, ["a", "b"], {"b": 0.5})
    run = tmp_path / "run"
    keys = [
        *(f"teachers.a.path={teacher}", "teachers.a.data_sources=[even]"),
        *(f"teachers.b.path={teacher}", "teachers.b.data_sources=[odd]"),
        *(f"data.train_files={data}", f"trainer.run_dir={run}"),
    ]
    done = millrace("train", "quickstart", *KEYS, *keys)
    assert done.code == 0, done.printed
    # Prompts 0 and 1 have one teacher each; 2 has both, and 3 has b.
    first, second = (row for row in runs.rows(run) if "actor/lr" in row)
    assert {n for n in first if n.startswith("distillation/")} == {
        "distillation/a/kl",
        "distillation/b/kl",
    }
    assert second["distillation/a/kl"] != second["distillation/b/kl"]


def test_a_column_of_structs_names_the_teachers_of_each_row(tmp_path: Path, teacher: Path) -> None:
    """A parquet file gives each row the keys of all rows, with null for those that it lacks."""
    rows = map(json.loads, rows_for(tmp_path / "rows", {"a": 1.0}, {"b": 0.5}).open())
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), tmp_path / "rows.parquet")
    keys = [f"teachers.a.path={teacher}", f"teachers.b.path={teacher}", "--dry-run"]
    data = f"data.train_files={tmp_path / 'rows.parquet'}"
    done = millrace("train", "quickstart", *KEYS, *keys, data)
    assert done.code == 0, done.printed


def test_a_teacher_of_no_row_is_named(tmp_path: Path, teacher: Path) -> None:
    data = rows_for(tmp_path / "rows.jsonl", None, None)
    keys = [f"teachers.{name}.path={teacher}" for name in "ab"]
    keys += ["teachers.a.data_sources=[gsm8k]", f"data.train_files={data}", "--dry-run"]
    done = millrace("train", "quickstart", *KEYS, *keys)
    assert (
        done.code == 0 and "warning: teachers.a: none of the first 2 training rows" in done.printed
    )
    assert "even, odd" in done.printed and "teachers.b: none" not in done.printed


def test_rows_of_a_validation_need_no_teacher(tmp_path: Path, teacher: Path) -> None:
    keys = [
        *(f"teachers.a.path={teacher}", "teachers.a.data_sources=[even]", "--dry-run"),
        "distillation.use_task_rewards=false",
    ]
    data = f"data.train_files={rows_for(tmp_path / 'rows.jsonl', None)}"
    done = millrace("train", "quickstart", *KEYS, *keys, data)
    assert done.code == 0, done.printed


@pytest.mark.slow
def test_a_teacher_may_have_more_unused_tokens_than_the_policy(
    tmp_path: Path, teacher: Path
) -> None:
    """Models of one family and one tokenizer pad their vocabularies to unlike sizes."""
    wide = AutoModelForCausalLM.from_pretrained(teacher)
    wide.resize_token_embeddings(64, mean_resizing=False)
    shutil.copytree(teacher, tmp_path / "wide")
    wide.save_pretrained(tmp_path / "wide")
    losses = []
    for path in (teacher, tmp_path / "wide"):
        run = tmp_path / f"run-of-{path.name}"
        keys = ["distillation.loss_mode=forward_kl_topk", "distillation.topk=14"]
        keys += [f"teachers.a.path={path}", f"trainer.run_dir={run}", "trainer.deterministic=true"]
        done = millrace("train", "quickstart", *KEYS, *keys)
        assert done.code == 0, done.printed
        losses.append(column(run, "actor/distillation_loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_trains_with_no_teacher_needs_none(tmp_path: Path, teacher: Path) -> None:
    """An export, a validation and a warm-up read a run whose teacher is gone."""
    gone, run = tmp_path / "gone", tmp_path / "run"
    shutil.copytree(teacher, gone)
    keys = [f"teachers.a.path={gone}", f"trainer.run_dir={run}"]
    done = millrace("train", "quickstart", *KEYS, *keys)
    assert done.code == 0, done.printed
    shutil.rmtree(gone)
    recipe, newest = str(run / "config.yaml"), Run(run).checkpoint
    for arguments in (
        ("export", str(run), str(tmp_path / "model")),
        ("eval", recipe, f"trainer.resume={newest}", f"trainer.run_dir={tmp_path / 'eval'}"),
        ("sft", recipe, f"trainer.run_dir={tmp_path / 'warm'}"),
    ):
        done = millrace(*arguments)
        assert done.code == 0, done.printed
    again = [recipe, "trainer.resume=auto", "rollout.total_rollout_steps=6"]
    done = millrace("train", *again)
    assert done.code == 2 and "teachers.a.path" in done.printed and "no such folder" in done.printed


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        ("c", "no teacher 'c': there are a"),
        ({"a": -1}, "the weight of the teacher a must be a number over 0: -1"),
        ({"a": "1"}, "the weight of the teacher a must be a number over 0: '1'"),
        (3, "must be a name, a list of names, or a mapping of names to weights"),
    ],
)
def test_a_row_with_a_wrong_teacher_is_refused_before_a_model_loads(
    named: Any, rule: str, tmp_path: Path, teacher: Path
) -> None:
    data = rows_for(tmp_path / "rows.jsonl", None, named)
    keys = [
        f"teachers.a.path={teacher}",
        f"data.train_files={data}",
        f"trainer.run_dir={tmp_path}/r",
    ]
    done = millrace("train", "quickstart", *KEYS, *keys)
    assert (
        done.code == 2
        and f"{data.name} row 2, extra_info.teachers" in done.printed
        and rule in done.printed
    ), done.printed
    assert not (tmp_path / "r").exists()
