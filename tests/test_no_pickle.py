"""No file of millrace can run what it reads: no pickle, no eval, no YAML with types."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "millrace"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve"}
GUARDED = {"train/state_reader.py": {"pickle"}}
"""Its unpickler admits the classes of a train state alone: tests/train/test_state_reader.py."""
RUN = {"eval", "exec", "marshal.load", "marshal.loads"} | {
    f"yaml.{name}" for name in ("load", "unsafe_load", "full_load")
}


def dangers(source: str) -> set[str]:
    """Return what a source could run from the data that it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.add(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in RUN:
                found.add(name)
            if options.get("allow_pickle") == "True" or options.get("weights_only") == "False":
                found.add(name)
            if name == "torch.load" and "weights_only" not in options:
                found.add(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    assert dangers(path.read_text()) == GUARDED.get(str(path.relative_to(PACKAGE)), set())


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from dill import loads", "eval(text)", "yaml.load(text)"),
        *("torch.load(path)", "torch.load(path, weights_only=False)"),
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_a_danger_is_found(source: str) -> None:
    assert dangers(source)
