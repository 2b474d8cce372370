"""The start of a run: its files are those of transformers, its parts are timed, its waits are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, GenerationConfig, Qwen2Config

from millrace.config import ModelShape
from millrace.models.shape import write_shape
from millrace.run.starts import lines, seconds_of, waiting_for
from millrace.waits.answer import ProcessStatus, Waited
from millrace.waits.registry import Start
from tests.e2e import runs


def test_a_new_models_folder_is_what_transformers_writes(tmp_path: Path) -> None:
    shape = ModelShape(hidden_size=48, num_hidden_layers=2, tie_word_embeddings=False)
    write_shape(tmp_path, shape, vocab_size=19, eos_token_id=1, pad_token_id=0, dtype="bfloat16")
    expected = Qwen2Config(
        **shape.model_dump(exclude={"num_experts", "num_experts_per_tok"}) | {"vocab_size": 19},
        max_position_embeddings=32768,
        initializer_range=0.5 / 48**0.5,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    expected.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        AutoConfig.from_pretrained(folder).to_dict()
        | {"_name_or_path": "", "transformers_version": ""}
        for folder in (tmp_path, tmp_path / "theirs")
    )
    assert ours == theirs
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert (generation.eos_token_id, generation.pad_token_id) == (1, 0)


def test_the_driver_of_a_new_model_imports_no_torch(tmp_path: Path) -> None:
    """The import takes longer than all of its other work."""
    program = f"""
import sys
from pathlib import Path
from millrace.config import recipe
from millrace.run import problems
config = recipe.load("quickstart", [])
problems.prepare(config, problems.load(config), Path({str(tmp_path / "model")!r}))
import millrace.run.train
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"USE_TORCH": "1"})
    assert done.returncode == 0


def test_lines_show_the_driver_and_the_slowest_of_each_kind() -> None:
    parts = {
        "driver": [Start("imports", 0.0, 1.0), Start("warm-up", 9.0, 19.0)],
        "trainer-0": [Start("model", 2.0, 3.0)],
        "trainer-1": [Start("model", 2.0, 7.0)],
        "rollout-0": [Start("engine", 2.0, 9.0)],
        "rollout-0-core-0": [Start("graphs", 5.0, 8.5)],
    }
    driver, *others = lines(parts)
    assert driver.split()[0] == "driver" and "imports 0.0-1.0" in driver
    assert [line.split()[0] for line in others] == ["rollout-0", "rollout-0-core-0", "trainer-1"]
    assert seconds_of(parts) == 9.0, "the warm-up is no start"


def test_a_wait_names_each_worker_and_its_newest_work() -> None:
    def working(name: str, *works: tuple[str, float]) -> ProcessStatus:
        waits = [Waited("", "", what, seconds, work=True) for what, seconds in works]
        return ProcessStatus(name, 1, waits=[*waits, Waited("", "disk", "a file", 1.0)])

    driver = working("driver", ("workers", 4.0))
    assert waiting_for([driver]) == "driver: workers since 4 s"
    worker = working("rollout-0", ("engine", 9.0), ("compile", 3.0))
    assert waiting_for([driver, worker, working("trainer-0")]) == "rollout-0: compile since 3 s"


def test_a_run_writes_where_its_start_went(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ("train", str(runs.RECIPE), *runs.SMALL, f"trainer.run_dir={folder}", "--json")
    done = runs.command(*words)
    assert done.returncode == 0, done.stderr
    (line,) = (folder / "start.jsonl").read_text().splitlines()
    start = json.loads(line)
    assert start["version"] == 0 and start["seconds"] > 0
    assert json.loads(done.stdout)["timings"]["start"] == start["seconds"]
    named = {name: {what for what, _, _ in parts} for name, parts in start["parts"].items()}
    assert {"imports", "workers", "prompts"} <= named["driver"]
    assert "imports" in named["trainer-0"] and "imports" in named["rollout-0"]
    for parts in start["parts"].values():
        assert all(0 <= begin < end for _, begin, end in parts)
    assert any('"started' in trace.read_text() for trace in folder.glob("trace/*"))
