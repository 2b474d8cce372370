"""Imports point down: each package imports only the layers under it, and the loops import neither torch nor Ray."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.schedule.modes import MODES

PACKAGE = Path(__file__).parent.parent / "millrace"

GROUND = {"types", "errors", "codec"}
"""What everything may import."""

ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "beside": set(),
    "ownership": set(),
    "codec": set(),
    "ports": set(),
    "schedule": set(),
    "algorithms": set(),
    "config": {"schedule", "algorithms"},
    "data": {"config"},
    "rewards": {"ports", "config", "data"},
    "environments": {"ports"},
    "rollout": {"ports", "schedule", "algorithms"},
    "observe": {"ports", "config"},
    "pipeline": {"ports", "schedule", "rollout", "observe"},
    "simulate": {"ports"},
    "engines": {"ports", "config", "algorithms", "beside"},
    "sync": {"ports", "config", "beside"},
    "worker": {"config", "engines", "sync"},
    "runtime": {"ports", "config", "worker"},
    "model_checks": set(),
    "problems": {"config", "data", "engines", "model_checks"},
    "resume_checks": {"config"},
    "run_dir": {"config", "pipeline", "resume_checks"},
    "exporting": {"config", "pipeline", "engines", "problems"},
    "assemble": {"config", "pipeline", "ports", "problems", "rollout", "run_dir", "runtime"},
    "launch": {
        *(
            "assemble",
            "beside",
            "config",
            "problems",
            "run_dir",
            "pipeline",
            "rollout",
            "rewards",
            "environments",
            "observe",
            "schedule",
        ),
    },
    "summary": {"launch", "observe", "pipeline"},
    "console": {"config", "observe", "problems"},
    "bench": {
        "config",
        "console",
        "engines",
        "launch",
        "observe",
        "rollout",
        "run_dir",
        "schedule",
    },
    "checkup": set(),
    "testing": {"ports"},
    "cli": {
        "config",
        "console",
        "launch",
        "summary",
        "bench",
        "observe",
        "pipeline",
        "exporting",
        "checkup",
    },
    "__main__": {"cli"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "millrace"
        ):
            parts = node.module.split(".")
            found |= (
                {parts[1]}
                if len(parts) > 1
                else {a.name for a in node.names if a.name != "__version__"}
            )
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("millrace.")}
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_point_down(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return
    above = imports(path) - GROUND - ALLOWED[layer] - {layer}
    assert not above, f"{path.relative_to(PACKAGE)} imports {sorted(above)}"


def test_the_arrows_of_the_architecture_are_imports() -> None:
    """Every layer at the head of an arrow is imported by one at its tail."""
    _, _, text = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("Imports point down")
    arrows = [line for line in text.splitlines() if line.startswith("    ") and " -> " in line]
    lines = [line.strip().partition("    ")[0] for line in arrows]
    assert lines
    for line in lines:
        groups = [[name.strip() for name in group.split(",")] for group in line.split(" -> ")]
        for tails, heads in itertools.pairwise(groups):
            used: set[str] = set()
            for path in PACKAGE.rglob("*.py"):
                used |= imports(path) if layer_of(path) in tails else set()
            assert set(heads) <= used, f"{line}: nothing in {tails} imports {set(heads) - used}"


def test_the_layers_have_no_cycle() -> None:
    done: set[str] = set()
    left = dict(ALLOWED)
    while left:
        free = [name for name, needs in left.items() if needs <= done]
        assert free, f"a cycle among {sorted(left)}"
        done |= set(free)
        left = {k: v for k, v in left.items() if k not in done}


def modules_of(path: Path) -> set[str]:
    """The modules of the package that a file imports, at its head or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millrace"):
            found |= {str(node.module), *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found


def test_the_files_of_the_configuration_have_no_cycle() -> None:
    """Keys know no check, checks know no recipe: no import inside a function hides a circle."""
    files = {f"millrace.config.{p.stem}": p for p in (PACKAGE / "config").glob("*.py")}
    del files["millrace.config.__init__"]
    left = {name: modules_of(path) & files.keys() - {name} for name, path in files.items()}
    assert not [name for name, path in files.items() if "millrace.config" in modules_of(path)]
    while left:
        free = [name for name, needs in left.items() if not needs & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        left = {k: v for k, v in left.items() if k not in free}


@pytest.mark.parametrize("name", MODES)
def test_no_file_of_the_configuration_names_a_mode(name: str) -> None:
    """The table of modes is a value: code asks it, and compares no names."""
    for path in (PACKAGE / "config").glob("*.py"):
        strings = {
            n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
        }
        assert name not in strings, f"{path.name} names {name}"


@pytest.mark.parametrize(
    "module",
    [
        "millrace.pipeline.trainer",
        "millrace.config",
        "millrace.config.recipe",
        "millrace.schedule.ledger",
        "millrace.cli",
    ],
)
def test_the_loops_bring_in_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_algorithms_need_torch_alone() -> None:
    code = (
        "import sys, millrace.algorithms.advantages, millrace.algorithms.losses, millrace.algorithms.kl, millrace.algorithms.correction;"
        "print(sorted({'transformers', 'ray', 'pydantic', 'msgspec', 'numpy.random._never'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PURE = {"asyncio", "time", "random", "logging", "torch", "socket", "uuid"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "schedule").glob("*.py")), ids=lambda p: p.name)
def test_the_schedule_is_pure(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {
        a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    names |= {
        n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module
    }
    assert not names & PURE
    assert not any(isinstance(n, ast.AsyncFunctionDef | ast.Await) for n in ast.walk(tree))


def test_files_are_short() -> None:
    """Past 400 lines a file says why in its head."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if text.count("\n") > 400:
            assert "400 lines" in (ast.get_docstring(ast.parse(text)) or ""), (
                f"{path.relative_to(PACKAGE)} has {text.count(chr(10))} lines"
            )


def test_ray_appears_in_one_file() -> None:
    users = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if "ray" in {
        a.name.split(".")[0] for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.Import) for a in n.names}}  # fmt: skip
    assert users == {"runtime/ray.py"}
