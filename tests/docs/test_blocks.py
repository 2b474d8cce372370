"""Every code block works: commands run, Python runs, YAML loads as a recipe.

One small run is real. A command that would train or measure runs with --dry-run: it reads the
recipe, the overrides and the data. Without --seeds, simulations run ten seeds. A comment
`<!-- runs on: GPUs -->` above a block permits commands that this machine lacks. The millrace
commands of such a block are checked too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import Qwen3MoeConfig
from typer.testing import CliRunner

from millrace.cli import main
from millrace.cli.main import app
from millrace.config import Config, recipe
from millrace.extras.bench import command as bench
from millrace.persist.run_reader import RunReader
from millrace.report.query import query
from millrace.rewards.functions import load_function
from millrace.run import problems
from tests.docs import pages
from tests.docs.pages import Block
from tests.e2e import runs

pytestmark = pytest.mark.xdist_group("docs")

BLOCKS = [block for page in pages.GUIDES for block in pages.blocks(page)]
COMMANDS = ("millrace ", "make ", "python ", "sbatch ", "benchmarks/on")
SHELL = [b for b in BLOCKS if b.language == "sh"] + [
    b for b in BLOCKS if not b.language and b.text.startswith(COMMANDS)
]
TINY = (
    "sft.steps=1 sft.batch_size=4 rollout.total_rollout_steps=2 actor.ppo_mini_batch_size=2 "
    "async_training.trigger_parameter_sync_step=1 rollout.n=2 rollout.max_num_seqs=8 "
    "data.val_max_samples=2 trainer.val_before_train=false trainer.threads=1 trainer.logger=[]"
)
ROOT_COMMAND = typer.main.get_command(app)
_RULES = re.findall(r"^([\w -]+):", (pages.ROOT / "Makefile").read_text(), re.MULTILINE)
TARGETS = {target for targets in _RULES for target in targets.split()}
PLACEHOLDER = re.compile(r"\.\.\.|[A-Z][A-Z_]+|\[?\w*=?[A-Z]+\]?|\[.*|.*\]")
runner = CliRunner()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a folder with every file that a page shows, a finished run and its exported model."""
    folder = tmp_path_factory.mktemp("docs")
    for block in BLOCKS:
        if block.title:
            (folder / block.title).write_text(f"{block.text}\n")
    python = folder / ".venv-sglang/bin/python"  # the one that `make sglang` makes
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    before, patch = Path.cwd(), pytest.MonkeyPatch()
    os.chdir(folder)
    try:
        done = runs.millrace("train", "quickstart", *TINY.split())
        assert done.code == 0, done.err
        for module in (main, bench):
            patch.setattr(module, "run_async", lambda *_: pytest.fail("not a dry run"))
        millrace(["export", "runs/quickstart-1", "my-model"])
        make_base_model()
        yield folder
    finally:
        os.chdir(before)
        patch.undo()


def make_base_model() -> None:
    """Make ./base-model and ./mixture, folders of a user, whose tokenizer can read train.jsonl."""
    files = ["data.train_files=[train.jsonl]", "data.val_files=[val.jsonl]"]
    keys = ["model.tokenizer=bpe", "rollout.max_prompt_length=512", "reward.function=exact"]
    config = recipe.load("quickstart", [*files, *keys, "sft.steps=0"])
    problems.prepare(config, problems.load(config), Path("base-model"))
    shutil.copytree("base-model", "mixture")  # the same tokenizer
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = Qwen3MoeConfig(**sizes, num_experts=4, architectures=["Qwen3MoeForCausalLM"])
    made.save_pretrained("mixture")


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command, without comments, prompts and environment settings."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if not block.language:  # the description of a usage line
            line = re.split(r" {3,}", line)[0]
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield words


def found(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the words after `millrace` name, and its arguments."""
    command: Any = ROOT_COMMAND
    rest = list(words)
    while hasattr(command, "list_commands") and rest and not rest[0].startswith("-"):
        names = rest.pop(0).split("|")
        assert set(names) <= {*command.list_commands(typer.Context(command))}, (
            f"millrace has no command {names}"
        )
        command = command.get_command(typer.Context(command), names[0])
    known = {option for p in command.params for option in p.opts} | {"--help"}
    for word in rest:
        option = word.strip("[]").partition("=")[0]
        assert not option.startswith("--") or option in known, f"{command.name} has no {option}"
    return command, rest


def is_usage(words: list[str]) -> bool:
    return any(PLACEHOLDER.fullmatch(word) for word in words)


def millrace(words: list[str]) -> str:
    """Run one command in this process, as a dry run if it would train or measure."""
    command, rest = found(words)
    if is_usage(rest):
        return ""
    words, _, target = (words, "", "") if ">" not in words else split_at(words, ">")
    takes_recipe = any("--dry-run" in p.opts for p in command.params)
    if takes_recipe and not {"--dry-run", "--help-config", "--help"} & set(rest):
        words = [*words, "--dry-run"]
    if command.name == "simulate" and "--seeds" not in rest:
        words = [*words, "--seeds", "0..9"]
    if command.name == "export":
        while Path(words[-1]).exists():
            words = [*words[:-1], f"{words[-1]}-again"]
    result = runner.invoke(app, words)
    codes = (0, 1) if command.name == "doctor" else (0,)
    assert result.exit_code in codes, f"millrace {shlex.join(words)}: {result.exception}"
    if target:
        Path(target).write_text(result.stdout)
    return result.stdout


def split_at(words: list[str], mark: str) -> tuple[list[str], str, str]:
    at = words.index(mark)
    return words[:at], mark, words[at + 1]


def make(words: list[str]) -> None:
    """Check a make target and its settings. `make run` is a dry run of its recipe."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    targets = [word for word in words if "=" not in word]
    assert set(targets) <= TARGETS, f"the Makefile lacks {set(targets) - TARGETS}"
    if "run" in targets and not is_usage(words):
        seed, more = settings.get("SEED", "0"), shlex.split(settings.get("ARGS", ""))
        if not is_usage([*more, seed]) and seed.isdigit():
            millrace(["train", "quickstart", f"trainer.seed={seed}", *more])


def check(words: list[str], block: Block) -> None:
    first, rest = words[0], words[1:]
    if first == "millrace" or first.endswith("/millrace"):
        millrace(rest)
    elif first == "make":
        make(rest)
    elif first == "sbatch":
        script = next(i for i, word in enumerate(rest) if word.endswith("millrace.sbatch"))
        millrace(rest[script + 1 :])
    elif first == "python" and rest[0].endswith(".py"):
        assert (pages.ROOT / rest[0]).is_file(), f"{block}: no file {rest[0]}"
    elif first.endswith(".sh"):
        assert (pages.ROOT / first).is_file(), f"{block}: no file {first}"
    else:
        assert block.runs_on, f"{block}: {first} is not tested: mark it <!-- runs on: ... -->"


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_command_works(block: Block, workspace: Path) -> None:
    for words in commands(block):
        check(words, block)


@pytest.mark.parametrize("page", pages.GUIDES, ids=pages.name)
def test_every_command_in_a_sentence_exists(page: Path) -> None:
    for code in pages.codes(pages.prose(page)):
        words = code.replace("'", " ").split()
        if words and words[0] in ("millrace", "make") and len(words) > 1:
            if words[0] == "millrace":
                found([word for word in words[1:] if not is_usage([word])])
            else:
                assert {w for w in words[1:] if "=" not in w and w.isalpha()} <= TARGETS, code


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_runs(block: Block, workspace: Path) -> None:
    if not block.runs_on:
        exec(compile(block.text, str(block), "exec"), {"__name__": "docs"})
    if "reward" in block.title:
        names = re.findall(r"^(?:async )?def (\w+)", block.text, re.MULTILINE)
        assert load_function(f"{block.title}:{names[-1]}").call is not None


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("yaml", "yml")], ids=str)
def test_yaml_is_a_recipe(block: Block, workspace: Path) -> None:
    tree = yaml.safe_load(block.text)
    if isinstance(tree, dict) and {str(k).partition(".")[0] for k in tree} <= {
        "inherits",
        *Config.model_fields,
    }:
        Path("block.yaml").write_text(block.text)
        recipe.load(Path("block.yaml"))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_json_is_json(block: Block) -> None:
    for line in block.text.splitlines() if block.title.endswith("l") else [block.text]:
        json.loads(line)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sql"], ids=str)
def test_sql_runs(block: Block, workspace: Path) -> None:
    for statement in block.text.split("\n\n"):
        assert query(RunReader(Path("runs/quickstart-1")).read(), statement).columns


def test_every_block_has_a_language_that_is_tested() -> None:
    known = {"sh", "sql", "python", "yaml", "yml", "json", "text", "mermaid", ""}
    assert not {str(b): b.language for b in BLOCKS if b.language not in known}
    assert len(SHELL) > 20


@pytest.mark.parametrize(
    "words",
    [["trian"], ["train", "quickstart", "--dry-runs"], ["train", "quickstart", "rollout.m=3"]],
    ids=" ".join,
)
def test_a_wrong_command_fails_here(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        millrace(words)
