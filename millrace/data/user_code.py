"""Code of users by `path.py:name` or `module:name`: the check, the import and its errors."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.codec import sendable
from millrace.data.spec import nearest
from millrace.errors import INSTALL, bad_value

_sources: dict[str, bytes] = {}
"""The source of each file of a user that ran, by its module's name."""

_stand_ins: dict[str, dict[str, Any]] = {}
"""The names in the modules of packages that are not installed, by the modules' names."""


IN_DRIVER = "millrace.driver"
"""The module of functions that exist only in this process, in names such as millrace.driver:score."""

_in_driver: dict[str, Callable[..., Any]] = {}
_importing: list[Path] = []
"""The files of users that are being imported, the innermost last."""


class _StandIns(MetaPathFinder, Loader):
    """Finds modules of packages that user code imports and that may be absent."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name not in _stand_ins:
            return None
        installed = PathFinder.find_spec(name.partition(".")[0])
        if installed is not None and installed.origin is not None:  # a folder alone has none
            return None
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_stand_ins[module.__name__])


def stand_in(modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Let user code import these names where their package is not installed."""
    if not _stand_ins:
        sys.meta_path.insert(0, _StandIns())
    for name, content in modules.items():
        parts = name.split(".")
        for n in range(1, len(parts)):
            _stand_ins.setdefault(".".join(parts[:n]), {})
        _stand_ins.setdefault(name, {}).update(content)


def check_name(key: str, spec: str) -> None:
    """Raise ConfigError if `spec` is not path.py:name or module:name, or names no file.

    This imports nothing, so a module and the name in a file may still be missing.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        is_file = spec.rstrip(":").endswith(".py")
        fix = f"{spec.rstrip(':')}:NAME of the function" if is_file else "one of these forms"
        raise bad_value(key, spec, "must be path.py:name or module:name", fix)
    if "/" in where and not where.endswith(".py"):
        is_file = Path(f"{where}.py").expanduser().is_file()
        fix = f"{where}.py:{name}" if is_file else "a path that ends with .py"
        raise bad_value(key, spec, "must be path.py:name or module:name", fix)
    check_file(key, spec, where, f":{name}")


def check_file(key: str, spec: str, where: str, after: str = "") -> None:
    """Raise ConfigError if `where` is a path of a Python file that does not exist."""
    path = Path(where).expanduser()
    if where.endswith(".py") and not path.is_file():
        there = [f"{p}{after}" for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        fix = (
            nearest(f"{path}{after}", there) if there else f"a path from {Path.cwd()}, or absolute"
        )
        raise bad_value(key, spec, f"no such file (from {Path.cwd()})", fix)


def is_in_driver(spec: str) -> bool:
    """Return whether `spec` names a function that exists only in the driver."""
    return spec.startswith(f"{IN_DRIVER}:")


@contextmanager
def kept(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let `load` find these functions by their names while the body runs."""
    before = dict(_in_driver)
    _in_driver.update(functions)
    try:
        yield
    finally:
        _in_driver.clear()
        _in_driver.update(before)


def being_imported() -> Path | None:
    """Return the file of the user that is being imported, if any."""
    return _importing[-1] if _importing else None


def spec_of(function: Any) -> str:
    """Return the name by which another process can import a function, or "" if it has none.

    A function has one if it is a name of a module in a file. A script that Python runs counts only
    if `if __name__ == "__main__":` guards what it does, because a worker runs the rest again.
    """
    defined = getattr(function, "function", function)  # of a loss or an estimator with facts
    name = str(getattr(function, "__qualname__", getattr(defined, "__qualname__", "")))
    module = sys.modules.get(str(getattr(defined, "__module__", "")))
    file = getattr(module, "__file__", None) or ""
    if vars(module or object).get(name) is not function or not file.endswith(".py"):
        return ""
    assert module is not None
    path = Path(file).resolve()
    if module.__name__ == "__main__":
        top = ast.parse(path.read_bytes()).body if path.is_file() else []
        tests = [ast.unparse(n.test) for n in top if isinstance(n, ast.If)]
        return f"{path}:{name}" if "__name__ == '__main__'" in tests else ""
    root = path.parents[module.__name__.count(".") + (path.stem == "__init__")]
    known = [Path.cwd(), *map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if {"site-packages", "dist-packages"} & {*path.parts} or root in [p.resolve() for p in known]:
        return f"{module.__name__}:{name}"
    return f"{path}:{name}"


def load(key: str, spec: str, *, kind: str = "function") -> Callable[..., Any]:
    """Import and return what `spec` names, which must be callable. `kind` is its word in errors.

    Raise ConfigError if there is no such file, module or name, or if the import fails.
    """
    check_name(key, spec)
    where, _, name = spec.rpartition(":")
    if where == IN_DRIVER:
        if name not in _in_driver:
            rule = "was a function of the Python process that began the run, and no file has it"
            raise bad_value(key, spec, rule, "reward= or agent=, from Python, or path.py:name")
        return _in_driver[name]
    module = load_module(key, spec, where)
    found = vars(module).get(name)
    if not callable(found):
        callables = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        known = name in vars(module)
        rule = f"{name!r} of {where} is not a {kind}" if known else f"{where} has no {name!r}"
        raise bad_value(key, spec, rule, nearest(name, callables, f"{where}:{{}}"))
    return found  # type: ignore[no-any-return]


def load_module(key: str, spec: str, where: str) -> ModuleType:
    """Import a module by its path or name. Raise ConfigError if that fails."""
    if not where.endswith(".py"):
        return _import(key, spec, lambda: importlib.import_module(where))
    path = Path(where).expanduser().resolve()
    # The file's folder is on the path, as when Python runs the file. It can import helpers there.
    # Processes that the file starts inherit the path, and find its functions by the file's name.
    if sys.path[0] != str(path.parent):
        sys.path.insert(0, str(path.parent))

    def imported() -> ModuleType:
        dots = re.findall(rb"^\s*from\s+(\.+)", path.read_bytes(), re.M)
        if not dots or not _in_package(path):
            return _run(path.stem, path)
        try:
            return _run_in_package(path, max(map(len, dots)))
        except ImportError as error:
            try:  # one form of import may stand in for the other
                return _run(path.stem, path)
            except ImportError:
                raise error from None

    return _import(key, spec, imported)


def _run(name: str, path: Path) -> ModuleType:
    """Run a file as a module, again if it changed. Its name is `name` if no other module has it.

    So all functions of a file share its state, and processes that it starts find each of them.
    """
    if not _is_free(name, path):
        name = f"millrace_user_{name}"
        while not _is_file(sys.modules.get(name), path) and name in sys.modules:
            name += "_"
    source = path.read_bytes()
    if name in sys.modules and _sources.get(name, source) == source:
        return sys.modules[name]
    loaded = importlib.util.spec_from_file_location(name, path)
    assert loaded is not None and loaded.loader is not None  # the name ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(loaded)
    _importing.append(path)
    try:
        loaded.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        _importing.pop()
    _sources[name] = source
    return sys.modules[name]


def _is_file(module: ModuleType | None, path: Path) -> bool:
    return getattr(module, "__file__", None) == str(path)


def _is_free(name: str, path: Path) -> bool:
    """Return whether `import` finds this file by `name`, and no other module."""
    if not name.isidentifier() or name in sys.stdlib_module_names:
        return False
    if name in sys.modules:
        return _is_file(sys.modules[name], path)
    importlib.invalidate_caches()
    found = importlib.util.find_spec(name)
    return found is not None and found.origin == str(path)


def _in_package(path: Path) -> bool:
    return (path.parent / "__init__.py").is_file()


def _run_in_package(path: Path, levels: int) -> ModuleType:
    """Import a file as a module of as few packages as its relative imports reach.

    An outer package may need what is not installed. Its folder is on the path, for absolute imports,
    unless it has stand-ins.
    """
    folders = [path.parent]
    while _in_package(folders[-1]):
        folders.append(folders[-1].parent)
    if folders[-1].name not in _stand_ins:
        sys.path.insert(0, str(folders[-1].parent))
    levels = min(levels, len(folders))
    sys.path.append(str(folders[levels - 1].parent))  # last: it may have names of other packages
    package = folders[levels - 1]
    names = [*path.relative_to(package).with_suffix("").parts]
    try:
        outer = _run(package.name, package / "__init__.py")
        return importlib.import_module(".".join([outer.__name__, *names]).removesuffix(".__init__"))
    except ImportError as error:  # of a neighbour that reaches further
        if "beyond top-level" not in str(error) or levels == len(folders):
            raise
        return _run_in_package(path, levels + 1)


def _import(key: str, spec: str, run: Callable[[], ModuleType]) -> ModuleType:
    try:
        return run()
    except (Exception, SystemExit) as error:
        rule = f"importing it raised {failure(error)}"
        raise bad_value(key, spec, rule, remedy(spec, error)) from error


def remedy(spec: str, error: BaseException) -> str:
    """Return what mends a failed import: a package, a path, or a correction."""
    where = spec.rpartition(":")[0] or spec
    name = error.name or "" if isinstance(error, ImportError) else ""
    root, path = name.partition(".")[0], Path(where).expanduser().resolve()
    if "relative import" in str(error):
        return f"__init__.py in {path.parent} and the folders above that it imports from"
    own = where.partition(".")[0] == root and root not in ("trl", "verl")
    if isinstance(error, ModuleNotFoundError) and own:
        return "a module that can be imported from here, or path.py:name"
    if not (isinstance(error, ModuleNotFoundError) or root in _stand_ins):
        return "correct it; try it with python -c"
    having = (p for p in path.parents if (p / root).is_dir() or (p / f"{root}.py").is_file())
    if folder := next(having, None):
        return f"PYTHONPATH={folder}, which has {root}"
    elsewhere = f"PYTHONPATH=the folder that has {root}"
    line = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    inner = re.findall(rf"\b{root}\.([\w.]+)", str(line and line.line))
    if {folder.name for folder in path.parents} & {part for n in inner for part in n.split(".")}:
        return f"{elsewhere}, which is this file's own project"
    install = INSTALL.get(root, f"pip install {_PACKAGES.get(root, root)}")
    return f"{install}, or {elsewhere}: a module that can be imported"


_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
}
"""Packages with another name than their module."""


def failure(error: BaseException) -> str:
    """Return the error's type, its message and the last line of its traceback, in one line."""
    if isinstance(
        error, SyntaxError
    ):  # its message names file and line; no frame of it is the user's
        return sendable(f"{type(error).__name__}: {error}: {(error.text or '').strip()}")
    frames = traceback.extract_tb(error.__traceback__)
    at = ""
    if frames:
        last = frames[-1]
        at = f" ({Path(last.filename).name}:{last.lineno} in {last.name}: {last.line})"
    return sendable(f"{message_of(error)}{at}")


def message_of(error: BaseException) -> str:
    """Return the error's type and its message."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the user's own __str__
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}"
