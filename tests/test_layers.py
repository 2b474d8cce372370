"""The architecture: the rooms, who imports whom, and the largest size of each thing.

A room is a file or a folder of the package. An import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.config.plugins import OWN
from millrace.schedule.modes import MODES

pytestmark = pytest.mark.xdist_group("layers")  # one worker parses the files once

PACKAGE = Path(__file__).parent.parent / "millrace"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


NAMES = {module_of(path): path for path in FILES}

GROUND = {"types", "errors", "codec", "waits", "process"}
"""Every room may import these. They import nothing."""

ARROWS: dict[str, set[str]] = {
    "ports": set(),
    "schedule": set(),
    "algorithms": set(),
    "environments": {"config", "data"},
    "tools": {"environments"},
    "agents": {"data", "environments", "ports"},
    "simulate": {"ports"},
    "testing": {"ports"},
    "config": {"algorithms", "data", "schedule"},
    "data": set(),
    "models": {"config"},
    "rewards": {"config", "data", "models"},
    "observe": {"config", "ports"},
    "rollout": {"ports", "schedule"},
    "persist": {"config", "observe", "schedule"},
    "replicas": {"ports", "schedule"},
    "pipeline": {"observe", "persist", "ports", "replicas", "rollout", "schedule"},
    "sync": {"ports"},
    "decode": {"config", "models", "ports", "rollout"},
    "serving": {"config", "models", "ports", "rollout", "sync"},
    "train": {"algorithms", "config", "models", "observe", "ports", "schedule", "sync"},
    "runtime": {"config", "decode", "models", "ports", "serving", "sync"},
    "report": {"config", "observe", "persist", "ports", "schedule"},
    "run": {
        *("agents", "algorithms", "config", "data", "environments", "models", "observe"),
        *("persist", "pipeline", "ports", "replicas", "report", "rewards", "rollout", "runtime"),
        *("schedule", "sync", "tools"),
    },
    "extras": {
        *("algorithms", "cli", "config", "data", "environments", "models", "observe", "persist"),
        *("pipeline", "ports", "replicas", "report", "rollout", "run", "runtime", "schedule"),
        *("serving", "simulate", "sync", "train"),
    },
    "api": {"config", "data", "observe", "persist", "pipeline", "rewards", "run"},
    "cli": {"config", "observe", "persist", "pipeline", "replicas", "report", "run"},
    "__main__": {"cli"},
}
"""The imports of each room. A room imports nothing else."""

CLAUSES = {"What", "Who", "Whoever", "Those", "Where"}
"""The first words of a relative clause, which says less than the name of a thing."""

OPTIONAL: dict[str, set[str]] = {
    "agents": {"run"},
    "api": set(),
    "tools": {"run"},
    "simulate": {"extras"},
    "testing": set(),
    "extras": set(),
    "report": {"cli", "extras", "run"},
    "serving": {"extras", "runtime"},
}
"""Rooms that training works without, and the rooms that may import them."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def modules_of(path: Path) -> list[str]:
    """Return the modules of the package that a file imports, at its head or inside a function."""
    found: list[str] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millrace"):
            found.append(str(node.module))
            found += (m for a in node.names if (m := f"{node.module}.{a.name}") in NAMES)
        elif isinstance(node, ast.Import):
            found += (a.name for a in node.names if a.name.startswith("millrace."))
    return found


def rooms_imported(path: Path) -> set[str]:
    return {m.split(".")[1] for m in modules_of(path) if "." in m} - {room_of(path)}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def circle(arrows: dict[str, set[str]]) -> set[str]:
    """Return the names that are on a circle, or that import one."""
    left = dict(arrows)
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    return set(left)


def test_every_room_is_on_the_plan() -> None:
    rooms = {room_of(p) for p in FILES} - {"__init__"}
    assert rooms == ARROWS.keys() | GROUND
    assert len(rooms - {"__main__"}) <= 32
    assert not circle(ARROWS)


@pytest.mark.parametrize("room", [*ARROWS, *sorted(GROUND)])
def test_a_room_imports_what_the_plan_says(room: str) -> None:
    found = {r for p in FILES if room_of(p) == room for r in rooms_imported(p)} - GROUND
    assert found == ARROWS.get(room, set())


def test_a_docstring_begins_with_a_thing_or_a_verb() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = (
        (path, ast.get_docstring(node) or "-")
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, kinds)
    )
    found = [f"{path}: {text}" for path, text in texts if text.split()[0] in CLAUSES]
    assert not found


def test_no_files_import_each_other_in_a_circle() -> None:
    """Packages re-export names, so an import of a package is an import of its __init__."""
    arrows = {
        name: {n for m in modules_of(p) for n in (m, f"{m}.__init__") if n in NAMES} - {name}
        for name, p in NAMES.items()
    }
    assert not circle(arrows)


@pytest.mark.parametrize("room", OPTIONAL)
def test_training_works_without_an_optional_room(room: str) -> None:
    """Only the rooms of OPTIONAL import it.

    They import it inside a function when it is needed. `cli` and extras may import it at the head of a file.
    """
    for path in FILES:
        top = tree_of(path)
        at_head = {
            str(n.module).split(".")[1]
            for n in top.body
            if isinstance(n, ast.ImportFrom) and str(n.module).startswith("millrace.")
        }
        if room_of(path) != room and room in rooms_imported(path):
            assert room_of(path) in OPTIONAL[room], f"{path} imports {room}"
            assert room not in at_head or room_of(path) in ("cli", "extras"), (
                f"{path} imports {room}"
            )


def test_an_extra_imports_no_other() -> None:
    for path in (p for p in FILES if room_of(p) == "extras"):
        own = path.relative_to(PACKAGE).parts[1]
        found = {m.split(".")[2] for m in modules_of(path) if m.startswith("millrace.extras.")}
        assert found <= {own}, f"{path} imports {found - {own}}"


def test_the_parts_of_the_package_are_there() -> None:
    """A folder of extras that no part names would never be found."""
    values = [value for parts in OWN.values() for value in parts.values()]
    for module, _, name in (value.partition(":") for value in values):
        text = NAMES[module].read_text()
        assert not name or re.search(rf"^(def|class) {name}\b|^{name} = ", text, re.M), module
    extras = {p.name for p in (PACKAGE / "extras").iterdir() if (p / "__init__.py").is_file()}
    assert extras == {v.split(".")[2] for v in values if v.startswith("millrace.extras.")}


def test_the_arrows_of_the_architecture_are_imports() -> None:
    """Each layer at the head of an arrow is imported by a layer at its tail."""
    _, _, text = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("Imports point down")
    arrows = [line for line in text.splitlines() if line.startswith("    ") and " -> " in line]
    lines = [line.strip().partition("    ")[0] for line in arrows]
    assert lines
    for line in lines:
        groups = [[name.strip() for name in group.split(",")] for group in line.split(" -> ")]
        for tails, heads in itertools.pairwise(groups):
            used: set[str] = set()
            for path in PACKAGE.rglob("*.py"):
                used |= rooms_imported(path) if room_of(path) in tails else set()
            assert set(heads) <= used, f"{line}: nothing in {tails} imports {set(heads) - used}"


def test_no_file_of_the_configuration_names_a_mode() -> None:
    """The table of modes is data: code reads it, and compares no names."""
    for path in (PACKAGE / "config").glob("*.py"):
        strings = {n.value for n in ast.walk(tree_of(path)) if isinstance(n, ast.Constant)}
        assert not strings & {*MODES}, path.name


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "pipeline.trainer config config.recipe schedule.ledger cli.main",
            "torch ray transformers aiohttp fastapi starlette uvicorn openai",
        ),
        (
            "algorithms.estimators algorithms.losses algorithms.kl algorithms.correction",
            "transformers ray msgspec",
        ),
    ],
    ids=["loops", "algorithms"],
)
def test_some_modules_bring_in_no_large_package(modules: str, absent: str) -> None:
    names = ", ".join(f"millrace.{name}" for name in modules.split())
    code = f"import sys, {names}; print(sorted({set(absent.split())} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PURE = {"asyncio", "time", "random", "logging", "torch", "socket", "uuid"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "schedule").glob("*.py")), ids=lambda p: p.name)
def test_the_schedule_is_pure(path: Path) -> None:
    nodes = [*ast.walk(tree_of(path))]
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    assert not {name.split(".")[0] for name in names} & PURE
    assert not any(isinstance(n, ast.AsyncFunctionDef | ast.Await) for n in nodes)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


BUDGETS = {
    "agents": 4310,
    "algorithms": 3370,
    "api": 751,
    "cli": 1900,
    "config": 4840,
    "data": 3200,
    "decode": 1600,
    "environments": 975,
    "errors": 250,
    "extras": 11780,
    "models": 730,
    "observe": 2350,
    "persist": 750,
    "pipeline": 3620,
    "ports": 450,
    "process": 660,
    "replicas": 1850,
    "report": 4910,
    "rewards": 3500,
    "rollout": 1420,
    "run": 5690,
    "runtime": 2100,
    "schedule": 830,
    "simulate": 560,
    "sync": 2210,
    "testing": 750,
    "tools": 950,
    "train": 5050,
    "types": 400,
    "serving": 2080,
    "waits": 1470,
    "other files": 160,
}
"""The lines of each room. A change that needs more says so here; one that needs less lowers it."""


def test_rooms_keep_their_budgets() -> None:
    """A file has one subject, whatever its length. A room that grows by a tenth is discussed."""
    lines = Counter[str]()
    for path in FILES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        lines[room if room in BUDGETS else "other files"] += path.read_text().count("\n")
    over = {room: n for room, n in lines.items() if n > 1.1 * BUDGETS[room]}
    assert not over, f"lines over the budget of a room: {over}"


def test_few_functions_take_the_whole_configuration() -> None:
    """`run/` takes a Config apart: 5 functions below it take a whole one, and 29 in all.

    The 5 are `build` of both train engines, the options of a train engine, and two readers of a
    run's Config in `report/`.
    """

    def takes_config(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        arguments = [*function.args.args, *function.args.kwonlyargs]
        return any(a.annotation and ast.unparse(a.annotation) == "Config" for a in arguments)

    taking = [
        (room_of(p), f"{p}: {f.name}") for p in FILES for f in functions(p) if takes_config(f)
    ]
    below = [name for room, name in taking if room not in ("run", "config", "cli")]
    assert len(below) <= 5, below
    assert len(taking) <= 29, taking


def test_nobody_knows_a_train_engine() -> None:
    """It is found by its name, and all engines share the rest of `train/`.

    The FLOPs count an engine's adapters.
    """
    users = {
        str(p.relative_to(PACKAGE))
        for p in FILES
        if p.parent.name != "fsdp" and any("train.fsdp" in m for m in modules_of(p))
    }
    assert users == {"extras/bench/engines.py"}


def test_ray_appears_in_four_files() -> None:
    users = {
        str(p.relative_to(PACKAGE))
        for p in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(import|from) ray\b", p.read_text(), re.MULTILINE)
    }
    assert users == {f"runtime/ray{part}.py" for part in ("", "_host", "_places", "_token")}
