"""verl's 92 example scripts that start a trainer, as lists of arguments: each word has a fate.

`examples.table` has the lists. Variables and branches of scripts are the subject of
`test_script.py`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from millrace.cli.console import configuration
from millrace.errors import ConfigError
from millrace.extras.verl.command import import_verl
from millrace.extras.verl.importing import import_layer
from millrace.extras.verl.script import read

from .test_words import fate, key_of

pytestmark = pytest.mark.xdist_group("verl_examples")  # one worker imports each list once

TABLE = Path(__file__).parent / "examples.table"
CHOICES = {
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "8",
    "trainer.device": "cuda",
}
"""Answers where the fix leaves a choice. The others are the first key=value of a fix."""


def numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def lists() -> dict[str, list[str]]:
    """Return the program and the arguments of each script, by its name."""
    rows = [shlex.split(line) for line in TABLE.read_text().splitlines() if line[0] != "#"]
    own = {int(first): rest for first, *rest in rows if first.isdigit()}
    for key, *cells in (row for row in rows if not row[0].isdigit()):
        for scripts, value in zip(cells[::2], cells[1::2], strict=True):
            for number in numbers(scripts):
                own[number].append(f"{key}={value}")
    return {
        name: words if words[0].startswith("verl.") else ["verl.trainer.main_ppo", *words]
        for name, *words in own.values()
    }


LISTS = lists()


def errors_of(words: Sequence[str], answers: Sequence[str] = (), drop: bool = False) -> list[str]:
    """Return the errors of `millrace import-verl` on a command."""
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "run.sh"
        path.write_text(shlex.join(["python3", "-m", *words]))
        try:
            import_verl(path, list(answers), drop=drop)
        except ConfigError as error:
            return [line for line in str(error).splitlines() if " = " in line]
    return []


def answer_of(line: str) -> str:
    """Return the answer to --set that an error advises, or an empty text."""
    key = key_of(line).rstrip()
    found = re.search(r"Fix: ([\w.]+=[\w-]+)", line)
    return f"{key}={CHOICES[key]}" if key in CHOICES else found[1] if found else ""


@functools.cache
def outcome(name: str) -> tuple[str, list[str], list[str]]:
    """Return how a list is imported, the answers that it needs, and the last errors."""
    answers: list[str] = []
    errors, drop = errors_of(LISTS[name]), False
    while errors:
        lines = [line for line in errors if "millrace does not have" not in line]
        new = [answer for line in lines if (answer := answer_of(line)) and answer not in answers]
        if new and len(answers) < 2:
            answers.append(new[0])
        elif not drop:
            drop = True
        else:
            return "refused", answers, errors
        errors = errors_of(LISTS[name], answers, drop)
    return "--drop" if drop else "--set" if answers else "as it is", answers, []


@functools.cache
def fates(name: str) -> Counter[str]:
    """Return how many words have each fate. A word that stops the import is refused by name."""
    program, *words = LISTS[name]
    script = read(shlex.join(["python3", "-m", program, *words]), {})
    options = [word for word in words if word.startswith("--config-")]
    assert script.overrides == [word for word in words if word not in options]
    base, more = configuration(script.config) or (script.base, [])
    assert len(options) == bool(script.config) + bool(script.folder)
    left = {key_of(word): word for word in script.overrides}
    counts = Counter(option=len(options), repeated=len(script.overrides) - len(left))
    for _ in range(9):
        try:
            layer = import_layer(base, [*more, *left.values()], drop=True)
        except ConfigError as error:
            for line in str(error).splitlines():
                if left.pop(key_of(line).rstrip(), None):
                    counts["refused"] += 1
                else:  # a value that is missing
                    more = [*more, answer_of(line)]
        else:
            break
    return counts + Counter(fate(word, layer) or f"lost: {word}" for word in left.values())


@pytest.mark.parametrize("name", LISTS)
def test_no_word_is_lost(name: str) -> None:
    counts = fates(name)
    assert counts.total() == len(LISTS[name]) - 1
    assert not [kind for kind in counts if kind.startswith("lost")]


def test_the_counts_of_all_lists() -> None:
    """A change that imports fewer of them says so here, and in benchmarks/results/cases.md."""
    found = {name: outcome(name) for name in LISTS}
    assert Counter(how for how, _, _ in found.values()) == {
        "as it is": 38,
        "--set": 4,
        "--drop": 40,
        "refused": 10,
    }
    reasons = Counter(line.partition(": ")[0] for _, _, lines in found.values() for line in lines)
    assert reasons == {
        "model_engine = 'veomni'": 8,
        "actor_rollout_ref.actor.strategy = 'fsdp_turbo'": 2,
    }
    nodes = found["grpo_trainer/run_qwen3_235b_a22b_megatron"][1]
    assert nodes == ["trainer.nnodes=16"]  # 128 ranks are not GPUs of one node
    assert sum((fates(name) for name in LISTS), Counter[str]()) == {
        "kept": 2410,
        "mapped": 937,
        "needless": 1823,
        "left out": 141,
        "unknown": 29,
        "refused": 45,
        "option": 16,
        "repeated": 2,
    }
