"""Code of users by `path.py:name` or `module:name`: the check, the import and its errors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.codec import sendable
from millrace.data.spec import nearest
from millrace.errors import bad_value


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


def load(key: str, spec: str, *, kind: str = "function") -> Callable[..., Any]:
    """Import and return what `spec` names, which must be callable. `kind` is its word in errors.

    Raise ConfigError if there is no such file, module or name, or if the import fails.
    """
    check_name(key, spec)
    where, _, name = spec.rpartition(":")
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
    sys.path.insert(0, str(path.parent))
    name = path.stem if _is_free(path) else f"millrace_user_{path.stem}"
    loaded = importlib.util.spec_from_file_location(name, path)
    if loaded is None or loaded.loader is None:
        raise bad_value(key, spec, "is not a Python file", "path.py:name")
    module = importlib.util.module_from_spec(loaded)
    sys.modules[name] = module
    run = loaded.loader.exec_module

    def imported() -> ModuleType:
        try:
            run(module)
        except ImportError as error:
            if "no known parent package" not in str(error) or not _in_package(path):
                raise
            return importlib.import_module(_package_name(path))
        return module

    return _import(key, spec, imported)


def _is_free(path: Path) -> bool:
    """Return whether `import` finds this file by its own name, and no other module."""
    if not path.stem.isidentifier() or path.stem in sys.stdlib_module_names:
        return False
    known = sys.modules.get(path.stem)
    if known is not None:
        return getattr(known, "__file__", None) == str(path)
    importlib.invalidate_caches()
    found = importlib.util.find_spec(path.stem)
    return found is not None and found.origin == str(path)


def _in_package(path: Path) -> bool:
    return (path.parent / "__init__.py").is_file()


def _package_name(path: Path) -> str:
    """Return the name of a package's module. The folder of the package is then on the path."""
    parts = [path.stem]
    while _in_package(path):
        path = path.parent
        parts.insert(0, path.name)
    sys.path.insert(0, str(path.parent))
    return ".".join(parts)


def _import(key: str, spec: str, run: Callable[[], ModuleType]) -> ModuleType:
    try:
        return run()
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError)
        fix = (
            "a module that can be imported from here, or path.py:name"
            if missing
            else "correct it; try it with python -c"
        )
        raise bad_value(key, spec, f"importing it raised {failure(error)}", fix) from error


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
