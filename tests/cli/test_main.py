"""The command line: help, output for programs, and exit codes."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from millrace import __version__
from millrace.cli import doctor as checkup
from millrace.config import recipe
from millrace.errors import first_cause
from millrace.pipeline.validation import Result, Transcript
from millrace.run import export as exporting
from millrace.run import summary
from millrace.run.train import Outcome

QUICKSTART = str(Path(__file__).parents[2] / "millrace" / "recipes" / "quickstart.yaml")
SMALL = [
    "data.train_files=['task:copy?size=100']",
    "data.val_files=[]",
    "model.shape.hidden_size=16",
]


def test_version(run: Callable[..., Any]) -> None:
    assert run("--version") == (0, f"millrace {__version__}\n", "")


def test_a_file_of_the_current_folder_hides_no_module_of_python(tmp_path: Path) -> None:
    """A reward in math.py is no rare name, and `python -m` puts the current folder first."""
    for name in ("math", "json", "logging"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError\n")
    (tmp_path / "mine.py").write_text("def score(solution_str, ground_truth):\n    return 1.0\n")
    command = [sys.executable, "-m", "millrace", "train", QUICKSTART, *SMALL, "--dry-run"]
    done = subprocess.run(
        [*command, "reward.function=mine:score"], capture_output=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "millrace"
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"millrace {__version__}\n", "")


def test_help_teaches_the_first_command_the_keys_and_the_exit_codes(
    run: Callable[..., Any],
) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for part in (
        "millrace train quickstart",
        "key=value",
        "--help-config",
        "130 or 143",
    ):
        assert part in out
    for command in ("train", "sft", "eval", "export", "ledger", "doctor"):
        assert f" {command} " in out
    assert out.index(" train ") < out.index(" doctor ") < out.index(" bench ")


@pytest.mark.parametrize("command", ["train", "sft", "eval", "export", "ledger", "doctor"])
def test_every_command_has_help(run: Callable[..., Any], command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0 and f"millrace {command}" in out and "--json" in out
    assert run(command, "-h") == (0, out, "")


def test_the_terminal_wraps_the_paragraphs_of_a_help(run: Callable[..., Any]) -> None:
    assert "The kernel says what is known of a process" in run("why", "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mode", "async_swap"], "--mode = 'async_swap': is no option; a setting has no dashes"),
        (["--rollout.n=8"], "Fix: rollout.n=8."),
        (["--num-generations", "8"], "Fix: rollout.n=8."),
        (["--learning_rate", "--dry-run"], "Fix: actor.optim.lr=VALUE."),
    ],
)
def test_a_key_as_an_option_is_refused_with_its_setting(
    run: Callable[..., Any], arguments: list[str], said: str
) -> None:
    code, out, err = run("train", "quickstart", *arguments)
    assert code == 2 and not out and said in err


def test_help_config_prints_every_key(run: Callable[..., Any]) -> None:
    code, out, _ = run("train", "--help-config")
    shown = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert code == 0 and {key for key, _ in recipe.all_keys()} <= shown
    code, out, _ = run("train", "--help-config", "--json")
    keys = json.loads(out)
    plain = [key for key in keys if ".NAME." not in key]
    assert code == 0 and plain == [key for key, _ in recipe.all_keys()]
    assert all(
        set(value) == {"type", "default", "meaning"} and value["meaning"] for value in keys.values()
    )


def test_a_dry_run_prints_the_configuration_and_every_derived_number(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, err = run(
        "train", QUICKSTART, *SMALL, "trainer.total_epochs=3", "--dry-run", "--json"
    )
    assert code == 0 and re.fullmatch(r"note: task:copy\S* row 1 as the policy reads it.*\n", err)
    printed = json.loads(out.splitlines()[-1])
    assert set(printed) == {
        *("config", "derived", "memory", "memory_assumes", "translated", "limits", "agents"),
    }
    assert printed["config"] == recipe.load(
        QUICKSTART, [*SMALL, "trainer.total_epochs=3"]
    ).model_dump(mode="json")
    assert printed["derived"] == {
        "window": 64,
        "capacity": 96,
        "lag_bound": 2,
        "lookahead": 64,
        "versions": 5,
        "optimizer_steps": 10,
        "lr_horizon": 10,
        "lr_warmup_steps": 5,
        "samples": 300,
        "trajectories": 2400,
        "nodes_needed": 1,
    }
    limits = {"rollout.total_rollout_steps": 5120, "trainer.total_epochs": 300}
    assert printed["limits"] == limits
    assert not list(tmp_path.iterdir())


def test_a_dry_run_counts_the_tokens_of_each_prompt_without_a_model_too(
    run: Callable[..., Any],
) -> None:
    code, _, err = run("train", QUICKSTART, *SMALL, "rollout.max_prompt_length=2", "--dry-run")
    assert code == 2 and "row 1: " in err and "rollout.max_prompt_length is 2" in err, err


def test_a_dry_run_for_people_is_a_recipe_with_the_numbers_under_it(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, _ = run("train", QUICKSTART, *SMALL, "--dry-run")
    lines = out.splitlines()
    title = next(n for n, line in enumerate(lines) if line.strip() == "derived")
    (tmp_path / "again.yaml").write_text("\n".join(lines[:title]))
    assert code == 0 and recipe.load(tmp_path / "again.yaml") == recipe.load(QUICKSTART, SMALL)
    said = [line.split() for line in lines[title:]]
    assert ["capacity", "96"] in said
    key = "rollout.total_rollout_steps"
    assert ["samples", "by", key, "5,120", "(ends", "the", "run)"] in said


def test_a_dry_run_counts_the_prompts_that_a_run_would_have(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"prompt": "1" * n, "ground_truth": "1"} for n in (4, 5, 60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = [f"data.train_files=[{tmp_path / 'rows.jsonl'}]", "data.filter_overlong_prompts=true"]
    size = ["rollout.max_prompt_length=16", "trainer.total_epochs=2", "reward.function=exact"]
    code, out, err = run("train", QUICKSTART, *SMALL, *said, *size, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["limits"]["trainer.total_epochs"] == 2 * 2


def test_a_dry_run_checks_the_data_too(run: Callable[..., Any]) -> None:
    code, out, err = run("train", QUICKSTART, "data.train_files=[nowhere.jsonl]", "--dry-run")
    assert (code, out) == (2, "") and err.startswith(
        "error: data.train_files = 'nowhere.jsonl': no such file"
    )


def test_a_command_without_arguments_says_what_is_missing(run: Callable[..., Any]) -> None:
    code, _, err = run("train")
    assert code == 2 and "RECIPE is missing, for example quickstart" in err
    assert run("ledger")[0] == 2
    assert run("no-such-command")[0] == 2
    assert run("train", QUICKSTART, "--no-such-option")[0] == 2


def test_sft_without_steps_is_refused(run: Callable[..., Any]) -> None:
    code, _, err = run("sft", QUICKSTART, "sft.steps=0")
    assert (
        code == 2 and err == "error: sft.steps = 0: the warm-up has no steps. Fix: sft.steps=200.\n"
    )


def test_a_ledger_of_what_is_no_run_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    rules = {
        "nowhere": "no such folder (from ",
        ".": "is not a run folder, because it has no history.jsonl. Fix: ",
    }
    for folder, rule in rules.items():
        code, out, err = run("ledger", folder)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: RUN = {folder!r}: {rule}")
    (tmp_path / ".millrace-run").touch()
    assert "the run has not trained yet" in run("ledger", str(tmp_path))[2]


def write_history(folder: Path, *trained: list[int], held: tuple[int, ...] = ()) -> None:
    lines: list[dict] = [{"event": "start", "attempt": 1, "version": 0}]
    for version, samples in enumerate(trained, 1):
        admitted = sum(map(len, trained[:version])) + len(held)
        lines.append(
            {
                "event": "version",
                "attempt": 1,
                "version": version,
                "admitted": admitted,
                "trained": samples,
            }
        )
    lines.append({**lines[-1], "event": "end", "trained": [], "held": list(held), "complete": True})
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_ledger_that_adds_up_exits_with_0_and_one_that_does_not_with_1(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    write_history(tmp_path, [0, 1], [2, 3])
    code, out, _ = run("ledger", ".", "--json")
    found = json.loads(out)
    assert code == 0 and (
        found["admitted"],
        found["trained"],
        found["lost"],
        found["trained_twice"],
    ) == (4, 4, 0, 0)
    write_history(tmp_path, [0, 1], [1, 3])
    code, out, _ = run("ledger", ".", "--json")
    found = json.loads(out)
    assert code == 1 and found["trained_twice"] == 1


def test_the_doctor_reports_as_json_and_as_a_table(run: Callable[..., Any]) -> None:
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    names = {check["name"] for check in report["checks"]}
    assert {"Python", "torch", "transformers", "pydantic"} <= names
    assert all(set(check) == {"name", "state", "found", "fix"} for check in report["checks"])
    assert all(check["fix"] for check in report["checks"] if check["state"] == "bad")
    assert (
        report["complete"]
        == all(check["state"] != "bad" for check in report["checks"])
        == (code == 0)
    )
    again, table, _ = run("doctor")
    assert again == code and "Python" in table


def test_a_crash_has_a_traceback_a_last_line_and_exit_code_1(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(recipe, "load", broken)
    code, _, err = run("train", QUICKSTART)
    assert (
        code == 1 and "Traceback" in err and err.endswith("\nerror: RuntimeError: no such luck\n")
    )


def test_a_run_of_somebody_else_is_an_error_without_a_traceback(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from millrace.report.page import write

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "runs/x/accounts.jsonl")

    monkeypatch.setattr(write, "load", denied)
    code, _, err = run("report", str(tmp_path))
    assert code == 2 and err.startswith("error: RUN: runs/x/accounts.jsonl: Permission denied. Fix")


def test_the_first_cause_of_a_group_is_no_mere_cancellation() -> None:
    import asyncio

    cause = ValueError("it")
    inner = BaseExceptionGroup("inner", [asyncio.CancelledError(), cause])
    assert first_cause(BaseExceptionGroup("outer", [asyncio.CancelledError(), inner])) is cause
    assert first_cause(cause) is cause


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_an_address_runs_on_that_ray_cluster(run: Callable[..., Any], command: str) -> None:
    code, out, _ = run(
        command, QUICKSTART, *SMALL, "--address", "10.0.0.1:6379", "--dry-run", "--json"
    )
    trainer = json.loads(out)["config"]["trainer"]
    assert code == 0 and (trainer["runtime"], trainer["ray_address"]) == ("ray", "10.0.0.1:6379")


@pytest.mark.parametrize("command", ["sync", "modes"])
def test_benchmarks_take_an_address_too(run: Callable[..., Any], command: str) -> None:
    code, _, err = run("bench", command, QUICKSTART, *SMALL, "--address", "ray://head:10001")
    assert code == 2 and "trainer.ray_address = 'ray://head:10001'" in err


def test_help_config_of_a_key_or_a_section(run: Callable[..., Any]) -> None:
    _, out, err = run(
        "train", "quickstart", "--help-config", "--json", "rollout.n=3", "critic.optim"
    )
    keys = list(json.loads(out))
    assert {key.rpartition(".")[0] for key in keys} == {"critic", "critic.optim", "rollout"}
    assert "'quickstart': it is ignored" in err


def test_help_config_of_a_key_under_a_free_name(run: Callable[..., Any]) -> None:
    words = ["teachers.math.path=x", "reward.mix.style.weight", "rollout.engine_kwargs.swap_space"]
    _, out, err = run("train", "--help-config", "--json", *words)
    assert [*json.loads(out)] == ["rollout.engine_kwargs", "reward.mix", "teachers.NAME.path"]
    assert "ignored" not in err


def test_defaults_are_those_of_their_own_section_and_written_as_a_recipe_wants_them(
    run: Callable[..., Any],
) -> None:
    _, out, _ = run("train", "--help-config")
    lines = [line.strip() for line in out.splitlines()]
    assert "critic.optim.lr <float> = 1e-05" in lines and "actor.optim.lr <float> = 1e-06" in lines
    assert "actor.optim.betas <[float, float]> = [0.9, 0.999]" in lines
    assert any(
        line.startswith("actor.loss_agg_mode <") and line.endswith("= null") for line in lines
    )


def test_with_json_a_failure_is_an_object_too(run: Callable[..., Any]) -> None:
    code, out, err = run("train", QUICKSTART, "rollout.n=0", "--json")
    told = json.loads(out)
    assert (code, told["complete"], told["exit_code"]) == (2, False, 2)
    assert err == f"error: {told['error']}\n" and told["error"].startswith("rollout.n = 0:")


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("trainer.nonsense=mine", "no such key. Fix: trainer.nnodes"),
        ("actor_rollout_ref.rollout.name=sglang", "no sglang engine"),
        ("~rollout.n", "Fix: rollout.n=VALUE"),
        ("rollout.n", "Fix: for example rollout.n=8"),
        ("mode", "Fix: for example mode=VALUE"),
        ("trainer.megatron.tp=2", "no such key. Fix: `millrace train --help-config`"),
        ("--address=--json", "trainer.ray_address = '--json': must be HOST:PORT or auto"),
        ("actor.optim.betas=[2,0.9]", "actor.optim.betas.0 = 2: must be less than 1"),
        ("trainer.seed=99999999999999999999", "trainer.seed = 99999999999999999999"),
    ],
)
def test_what_users_of_other_systems_write_is_refused_with_a_fix_that_is_one(
    run: Callable[..., Any], said: Any, fix: Any
) -> None:
    code, _, err = run("train", QUICKSTART, said, "--dry-run")
    assert code == 2 and fix in err, err


@pytest.mark.parametrize("command", ["modes", "sync", "train"])
def test_measuring_commands_have_a_dry_run_that_needs_no_devices(
    run: Callable[..., Any], command: str
) -> None:
    shape = str(Path(QUICKSTART).parent / "shapes" / "qwen2_7b.yaml")
    code, out, err = run("bench", command, shape, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["derived"]["nodes_needed"] == 1
    assert not err or err.startswith("note: this machine cannot run it: rollout.engine=vllm")


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ("fsdp", "actor.ulysses_sequence_parallel_size"),
        ("megatron", "trainer.megatron.tensor_model_parallel_size"),
    ],
)
def test_a_dry_run_refuses_sizes_that_do_not_divide_the_model(
    run: Callable[..., Any], engine: str, key: str
) -> None:
    sizes = [f"trainer.engine={engine}", "trainer.n_gpus_per_node=3", f"{key}=3"]
    code, _, err = run("train", QUICKSTART, *sizes, "--dry-run")
    assert code == 2 and f"{key} = 3: must divide the heads" in err


def test_the_warm_up_alone_needs_no_scorer(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    files = [f"data.{name}_files=['{tmp_path}/mine.jsonl']" for name in ("train", "val")]
    code, _, err = run("train", QUICKSTART, *files, "--dry-run")
    assert code == 2 and "mine.jsonl row 1, data_source" in err
    assert run("sft", QUICKSTART, *files, "sft.steps=5", "--dry-run")[0] == 0


def test_what_models_and_folders_are_called_is_no_markup() -> None:
    """A run whose model or folder has [/b] in its name ends like any other run."""
    odd = "[/b] \\[x = 0\\] [red]"
    failed = Transcript("p", "r", "a", math.nan, "d", "t")
    transcripts = (Transcript(odd, odd, odd, 1.0, odd, odd), failed)
    result = Result(1, {f"val/{odd}/mean@1": 0.5}, transcripts)
    console = Console(file=io.StringIO(), width=300)
    summary.show(console, Outcome(Path(odd), "m", 1, 1, 1, 1.0, result, result, True, Path(odd)))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "r  (answer a, no score)" in printed
    assert printed.count(odd) == 8 and f"run         {odd}\n" in printed


def test_the_doctor_prints_commands_as_they_are_typed(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checkup,
        "run",
        lambda _: [checkup.Check("x", "absent", "missing [a]", "pip install 'y[z]'")],
    )
    _, out, _ = run("doctor")
    assert "missing [a]" in out and "pip install 'y[z]'" in out


def test_an_export_to_where_nothing_can_be_written_is_refused(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_whole", lambda path: (path, 0))
    code, _, err = run("export", str(tmp_path), "/proc/x")
    assert code == 2 and "FOLDER = '/proc/x': cannot be written" in err


def test_an_export_says_what_it_does_not_copy(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(*_: Any) -> int:
        return 1

    monkeypatch.setattr(exporting, "_whole", lambda path: (path.resolve(), 0))
    monkeypatch.setattr(exporting, "_write", write)
    for folder in ("found/model", "here/start/images", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "found" / "config.yaml").write_text("model: {path: start}\n")
    (tmp_path / "found" / "model" / "config.json").write_text("{}")
    (tmp_path / "here" / "start" / "LICENSE").write_text("terms")
    monkeypatch.chdir(tmp_path / "here")
    code, _, err = run("export", "../found", "new")
    assert code == 0 and "note: folders of start" in err and "images" in err, err
    assert Path("new/LICENSE").read_text() == "terms"
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = run("export", "../found", "new")
    assert code == 0 and "note: model.path = 'start'" in err and "license" in err, err


def test_an_export_has_a_dtype_that_a_train_engine_has(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    code, _, err = run("export", str(tmp_path), str(tmp_path / "new"), "--dtype", "fp16")
    assert code == 2 and "--dtype = 'fp16': must be one of float32, bfloat16. Fix: bfloat16" in err


def test_a_run_that_validates_alone_needs_problems_to_validate_on(run: Callable[..., Any]) -> None:
    code, _, err = run("train", QUICKSTART, "trainer.val_only=true", "data.val_files=[]")
    assert code == 2 and err.startswith("error: data.val_files = []"), err
